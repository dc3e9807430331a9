"""How fast a model runs here, beside what the machine allows and beside other libraries: `bench`."""

from triptych.measure.figures import BenchReport, Figure, Rates
from triptych.measure.jobs import Settings
from triptych.measure.rounds import bench

__all__ = ["BenchReport", "Figure", "Rates", "Settings", "bench"]
