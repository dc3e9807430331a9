"""The commands `triptych lab` and `triptych exercise`."""
