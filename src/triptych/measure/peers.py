"""The peers that can be measured beside this library: what each needs, and its adapter.

An adapter is a `Side` of a few lines.  It reads the same file and does the same work as ours, in the fastest way that
its library documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from triptych.errors import InputError, nearest
from triptych.measure.sides import Options, Side

OURS = "triptych"
EXTRA = "pip install triptych[bench]"


@dataclass(frozen=True)
class Peer:
    """A library to measure.

    adapter   module and class of its `Side`.
    needs     modules that it imports.
    install   how to get it.
    dtypes    forms of the weights that it can be asked for; none where the file alone decides.
    """

    adapter: str
    needs: tuple[str, ...]
    install: str = EXTRA
    dtypes: tuple[str, ...] = ("fp32", "bf16")

    def missing(self) -> list[str]:
        """Those of its modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


_IK = "build it with bench/build_ik_llama.sh VENV"
PEERS: dict[str, Peer] = {
    "transformers": Peer("peers_torch:Transformers", ("transformers",)),
    "sentence-transformers": Peer("peers_torch:SentenceTransformers", ("sentence_transformers",)),
    "llama.cpp": Peer(
        "peers_llama:LlamaCpp", ("llama_cpp",), 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python', ()
    ),
    "ik_llama.cpp": Peer("peers_llama:IkLlamaCpp", ("ik_llama_cpp",), _IK, ()),
    "onnxruntime": Peer("peers_runtimes:OnnxRuntime", ("onnxruntime", "onnx", "transformers"), EXTRA, ("fp32", "int8")),
    "ctranslate2": Peer("peers_runtimes:CTranslate2", ("ctranslate2", "transformers"), EXTRA, ("fp32", "int8")),
}


def maker(name: str, peers: Mapping[str, Peer] = PEERS) -> Callable[[Options], Side]:
    """The class of a side.  Raises InputError for an unknown name."""
    if name == OURS:
        module, cls = "ours", "Ours"
    else:
        module, _, cls = known(name, peers).adapter.partition(":")
    side: Callable[[Options], Side] = getattr(import_module(f"triptych.measure.{module}"), cls)
    return side


def known(name: str, peers: Mapping[str, Peer] = PEERS) -> Peer:
    """The peer of that name.  Raises InputError for an unknown one."""
    if name not in peers:
        raise InputError(f"there is no peer {name!r}{nearest(name, peers)}; known are {', '.join(peers)}")
    return peers[name]


def check(name: str, dtype: str | None, device: str) -> None:
    """Raise InputError where a peer cannot be measured: it is not installed, or has no such dtype or device."""
    peer = known(name)
    if missing := peer.missing():
        raise InputError(f"{name} cannot be measured: {' and '.join(missing)} not installed; {peer.install}")
    if dtype is not None and dtype not in peer.dtypes:
        have = f"{name} takes {' or '.join(peer.dtypes)}" if peer.dtypes else f"{name} computes with what the file has"
        raise InputError(f"{have}, not {dtype}")
    if device != "cpu" and name not in ("transformers", "sentence-transformers"):
        raise InputError(f"{name} is measured on the CPU alone, not on {device}")
