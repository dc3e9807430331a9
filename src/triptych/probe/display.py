"""How results show themselves in a notebook: as the page that the command line writes, inside a frame."""

from __future__ import annotations

from importlib import import_module


class Displayed:
    """What a notebook shows as a page: attention, tables and grids that can be pointed at, offline."""

    def _repr_html_(self) -> str:
        # Pages stand above what they show, so that the module is named here and imported when a notebook asks.
        html: str = import_module("triptych.page.notebook").display(self)
        return html
