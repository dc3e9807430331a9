"""The process of one side: `python -m triptych.measure NAME OPTIONS`, as `process.SeparateProcess` starts it."""

import sys

from triptych.measure.process import serve

if __name__ == "__main__":
    serve(*sys.argv[1:])
