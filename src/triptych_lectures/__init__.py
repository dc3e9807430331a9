"""The lectures on top of the library: labs, exercises, a story in ten programs, the data they make, and
programs in NumPy alone.

It uses `triptych`, which never imports it: the command line finds `triptych lab`, `triptych exercise` and `triptych
story` by the entry points that pyproject.toml declares.
"""
