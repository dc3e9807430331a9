"""How fast a model runs here, beside what the machine allows and beside other libraries: `bench`."""

from triptych.measure.jobs import Settings
from triptych.measure.report import Figure, Rates, Report
from triptych.measure.rounds import bench

__all__ = ["Figure", "Rates", "Report", "Settings", "bench"]
