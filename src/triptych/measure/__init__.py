"""Measures how fast a model runs, beside what the machine allows and beside other libraries (`bench`)."""

from .bench_results import BenchReport, Rates
from .bench_run import bench
from .jobs import Settings

__all__ = ["BenchReport", "Rates", "Settings", "bench"]
