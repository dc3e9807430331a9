"""Adapters of the libraries that `triptych bench --against` measures, found by the entry points `triptych.peers`.

An adapter is a `Side` of a few lines.  It reads the same file and does the same work as ours, in the fastest way that
its library documents.  They are installed with the package and import their library when they are made.
"""
