"""Adapters of other libraries, installed with the package: peers of `triptych bench`, references of `triptych check`.

Both are found by entry points, `triptych.peers` and `triptych.references`, and import their library when they are made.
The adapter of a peer is a `Side` of a few lines.  It reads the same file and does the same work as ours, in the fastest
way that its library documents.
"""
