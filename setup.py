"""Builds the native kernels, plain C that needs neither Python's nor torch's headers; all else is in pyproject.toml.

Without a compiler, or with one that lacks OpenMP, the installation succeeds and torch does the work instead.
`python setup.py build_ext --inplace` builds the library in the source tree.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/triptych/native")

setup(
    ext_modules=[
        Extension(
            "triptych.native._kernels",
            sources=sorted(str(path) for path in NATIVE.glob("*.c")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            # Products and sums are fused where the code says fma and nowhere else: all kernels then give equal bits.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-g0",
                "-fopenmp",
                "-ffp-contract=off",
                "-Wall",
                "-Wextra",
                "-Wno-psabi",
            ],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,
        )
    ]
)
