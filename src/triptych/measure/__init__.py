"""Measures how fast a model runs, beside what the machine allows and beside other libraries (`bench`)."""

from triptych.measure.bench_results import BenchReport, Rates
from triptych.measure.bench_run import bench
from triptych.measure.jobs import Settings

__all__ = ["BenchReport", "Rates", "Settings", "bench"]
