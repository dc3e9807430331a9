"""The commands `triptych lab`, `triptych exercise` and `triptych story`."""
