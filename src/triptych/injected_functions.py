"""Functions of higher packages that lower ones offer to users; `triptych` itself sets them when it is imported.

An import here would run upwards: pages stand above the results that they show, and models above their training.
"""

from collections.abc import Callable
from typing import Any

#: A result -> the page that a notebook shows of it, in a frame.
html_of: Callable[[object], str]
#: A recipe and the options of `Model.trained` -> the trained model.
train: Callable[..., Any]
