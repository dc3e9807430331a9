"""Triptych: one transformer, three panels."""

__version__ = "0.1.0"
