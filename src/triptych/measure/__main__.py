"""The process of one side: `python -m triptych.measure NAME OPTIONS`, as `process.SeparateProcess` starts it."""

from __future__ import annotations

import json
import sys

from triptych.measure.peers import side
from triptych.measure.process import serve
from triptych.measure.sides import Options


def main() -> None:
    name, fields = sys.argv[1], json.loads(sys.argv[2])
    serve(side(name), Options(**{**fields, "ignore": tuple(fields["ignore"])}))


if __name__ == "__main__":
    main()
