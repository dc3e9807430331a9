"""Programs of this repository outside the package, loaded as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def program(file: str) -> ModuleType:
    """The module of a file such as `tools/operations.py`."""
    spec = importlib.util.spec_from_file_location(f"program_{Path(file).stem}", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
