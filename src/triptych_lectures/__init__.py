"""The lectures on top of the library: labs, exercises, the data they make, and programs in NumPy alone.

It uses `triptych`, which never imports it: the command line finds `triptych lab` and `triptych exercise` by the entry
points that pyproject.toml declares.
"""
