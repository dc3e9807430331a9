"""How results show themselves in a notebook: as the page that the command line writes, inside a frame."""

from triptych import hooks


class Displayed:
    """What a notebook shows as a page: attention, tables and grids that can be pointed at, offline."""

    def _repr_html_(self) -> str:
        return hooks.html_of(self)
