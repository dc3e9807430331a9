"""Looking inside and changing things while a model runs."""

from triptych.probe.plan import Edit, Plan, Read, Where, add, put, zero
from triptych.probe.sites import Site, sites
from triptych.probe.taps import Session
from triptych.probe.trace import Trace

__all__ = ["Edit", "Plan", "Read", "Session", "Site", "Trace", "Where", "add", "put", "sites", "zero"]
