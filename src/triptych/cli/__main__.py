"""`python -m triptych.cli`."""

from __future__ import annotations

import sys

from triptych.cli import main

sys.exit(main())
