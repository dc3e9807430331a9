"""The libraries that can be measured beside this one: the entry points `triptych.peers`, each the class of a `Side`."""

from importlib.metadata import entry_points

from triptych.errors import InputError, nearest
from .side import Side

OURS = "triptych"


def side(name: str) -> type[Side]:
    """The class of a side.  Raises InputError for an unknown name."""
    if name == OURS:
        from .triptych_side import Ours

        return Ours
    known = entry_points(group="triptych.peers")
    if name not in known.names:
        raise InputError(f"there is no peer {name!r}{nearest(name, known.names)}; known are {', '.join(known.names)}")
    adapter: type[Side] = known[name].load()
    return adapter


def check(name: str, dtype: str | None, device: str) -> None:
    """Raise InputError where a peer cannot be measured: it is not installed, or has no such dtype or device."""
    peer = side(name)
    if missing := peer.missing():
        raise InputError(f"{name} cannot be measured: {' and '.join(missing)} not installed; {peer.install}")
    if dtype is not None and dtype not in peer.dtypes:
        have = f"{name} takes {' or '.join(peer.dtypes)}" if peer.dtypes else f"{name} computes with what the file has"
        raise InputError(f"{have}, not {dtype}")
    if device.partition(":")[0] not in peer.devices:
        raise InputError(f"{name} is measured on the CPU alone, not on {device}")
