"""Triptych: one transformer, three panels."""
