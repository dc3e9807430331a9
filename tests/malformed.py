"""Checkpoints broken on purpose, each from a sound one by one change, for every test that must see them refused.

`CASES` are refused, `CONTROLS` are the sound originals.  `case.write(directory)` puts the files there and gives
the path to open.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUGE = 2**63


@dataclass(frozen=True)
class Case:
    """Files by name; `opens` is the one to open, or "" for the directory."""

    name: str
    opens: str
    build: Callable[[], Mapping[str, bytes]]

    def write(self, directory: Path) -> Path:
        for name, content in self.build().items():
            (directory / name).write_bytes(content)
        return directory / self.opens if self.opens else directory

    def __str__(self) -> str:
        return self.name


# --- safetensors: "a" [3, 5] F32 in bytes 0..60, "b" [7] I16 in 60..74 ---

ST_DATA = bytes(range(74))
ST_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
    "b": {"dtype": "I16", "shape": [7], "data_offsets": [60, 74]},
}


def safetensors(header: Any = ST_HEADER, data: bytes = ST_DATA, length: int | None = None) -> bytes:
    """A safetensors file; `header` may be raw bytes and `length` may lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def changed(**entries: Mapping[str, Any] | None) -> dict[str, Any]:
    """`ST_HEADER` with fields of its tensors replaced, or whole tensors added or (None) dropped."""
    header = {name: dict(entry) for name, entry in ST_HEADER.items()}
    for name, entry in entries.items():
        if entry is None:
            del header[name]
        else:
            header[name] = {**header.get(name, {}), **entry}
    return header


NOT_UTF8 = json.dumps(ST_HEADER).encode().replace(b'"a"', b'"\xff"')
NOTHING_LARGE = {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [74, 74]}
TWICE = json.dumps(ST_HEADER).replace('"b"', '"a"').encode()
DTYPE_TWICE = json.dumps(ST_HEADER).replace('"dtype": "I16"', '"dtype": "I16", "dtype": "I16"').encode()

SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "seven bytes": lambda: b"\x02\0\0\0\0\0\0",
    "not safetensors": lambda: b"PK\x03\x04" + bytes(200),
    "header length past the end": lambda: safetensors(length=5_000),
    "header length 2^63": lambda: safetensors(length=HUGE),
    "header length 2^64-1": lambda: safetensors(length=2**64 - 1),
    "header length one short": lambda: safetensors(length=len(json.dumps(ST_HEADER)) - 1),
    "header length zero": lambda: safetensors(length=0),
    "truncated header": lambda: safetensors()[:40],
    "truncated data": lambda: safetensors()[:-9],
    "trailing bytes": lambda: safetensors(data=ST_DATA + b"!"),
    "header a list": lambda: safetensors([ST_HEADER]),
    "header a number": lambda: safetensors(b"{17"),
    "header not JSON": lambda: safetensors(b"{'a': 1}"),
    "header not UTF-8": lambda: safetensors(NOT_UTF8),
    "header holds NaN": lambda: safetensors(b'{"__metadata__": {}, "a": NaN}'),
    "header nested bomb": lambda: safetensors(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "shape nested bomb": lambda: safetensors(changed(a={"shape": json.loads("[" * 500 + "]" * 500)})),
    "header number of 5000 digits": lambda: safetensors(b'{"a": ' + b"9" * 5_000 + b"}"),
    "lone surrogate in a name": lambda: safetensors(json.dumps(ST_HEADER).replace('"a"', '"\\ud800"').encode()),
    "tensor twice": lambda: safetensors(TWICE),
    "field twice": lambda: safetensors(DTYPE_TWICE),
    "entry a string": lambda: safetensors({**ST_HEADER, "b": "I16"}),
    "entry lacks its shape": lambda: safetensors({**ST_HEADER, "b": {"dtype": "I16", "data_offsets": [60, 74]}}),
    "entry with an unknown field": lambda: safetensors(changed(b={"code": "os.system"})),
    "metadata not strings": lambda: safetensors(changed(__metadata__={"epoch": 3})),
    "metadata a list": lambda: safetensors({**ST_HEADER, "__metadata__": ["pt"]}),
    "unknown dtype": lambda: safetensors(changed(a={"dtype": "F33"})),
    "dtype a number": lambda: safetensors(changed(a={"dtype": 32})),
    "negative size": lambda: safetensors(changed(a={"shape": [-3, -5]})),
    "size a float": lambda: safetensors(changed(a={"shape": [3.0, 5]})),
    "size a truth value": lambda: safetensors(changed(b={"shape": [7, True]})),
    "shape an object": lambda: safetensors(changed(a={"shape": {"0": 15}})),
    "shape overflows to its size": lambda: safetensors(changed(a={"shape": [2**62, 4, 15]})),
    "shape overflows beside a zero": lambda: safetensors(changed(c=NOTHING_LARGE)),
    "forty dimensions": lambda: safetensors(changed(a={"shape": [15] + [1] * 39})),
    "span is not the shape's": lambda: safetensors(changed(a={"shape": [3, 4]})),
    "span of the wrong dtype": lambda: safetensors(changed(b={"dtype": "I32"})),
    "offsets overlap": lambda: safetensors(changed(b={"data_offsets": [58, 72]}), ST_DATA[:72]),
    "offsets overlap as much as they leave out": lambda: safetensors(changed(b={"data_offsets": [56, 70]})),
    "offsets leave a hole": lambda: safetensors(changed(b={"data_offsets": [62, 76]}), ST_DATA + b"\0\0"),
    "offsets do not start at zero": lambda: safetensors(changed(a=None)),
    "offsets reversed": lambda: safetensors(changed(b={"data_offsets": [74, 60]})),
    "offsets negative": lambda: safetensors(changed(a={"data_offsets": [-60, 0]})),
    "offsets past the end": lambda: safetensors(changed(b={"data_offsets": [HUGE, HUGE + 14]})),
    "offsets a triple": lambda: safetensors(changed(b={"data_offsets": [60, 74, 74]})),
    "offsets floats": lambda: safetensors(changed(b={"data_offsets": [60.0, 74.0]})),
    "one tensor inside another": lambda: safetensors(changed(c={"dtype": "U8", "shape": [4], "data_offsets": [8, 12]})),
}  # fmt: skip

# --- sharded: "a" in the first shard, "b" in the second ---

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {
    FIRST: safetensors(changed(b=None), ST_DATA[:60]),
    SECOND: safetensors({"b": {"dtype": "I16", "shape": [7], "data_offsets": [0, 14]}}, ST_DATA[60:]),
}
INDEX = "model.safetensors.index.json"


def sharded(weight_map: Any, **shards: bytes | None) -> dict[str, bytes]:
    """The two shards (each replaced or, by None, left out through `first=`, `second=`) and an index."""
    files = SHARDS | {FIRST if which == "first" else SECOND: content for which, content in shards.items()}
    index = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
    return {name: content for name, content in files.items() if content is not None} | {INDEX: index}


WHERE = {"a": FIRST, "b": SECOND}
SHARDED: dict[str, Callable[[], Mapping[str, bytes]]] = {
    "index points to ../x": lambda: sharded({"a": FIRST, "b": "../model-00002-of-00002.safetensors"}),
    "index points to an absolute path": lambda: sharded({"a": FIRST, "b": "/etc/passwd"}),
    "index points into a backslash path": lambda: sharded({"a": FIRST, "b": "..\\x.safetensors"}),
    "index points to a pickle": lambda: sharded({"a": FIRST, "b": "pytorch_model.bin"}),
    "index points to a number": lambda: sharded({"a": FIRST, "b": 2}),
    "index points to a NUL": lambda: sharded({"a": FIRST, "b": "\0.safetensors"}),
    "index without a weight_map": lambda: sharded(b'{"metadata": {}}'),
    "index with an empty weight_map": lambda: sharded({}),
    "index a list": lambda: sharded(b"[]"),
    "index empty": lambda: sharded(b""),
    "index names a tensor twice": lambda: sharded(json.dumps({"weight_map": WHERE}).replace('"b"', '"a"').encode()),
    "index names a tensor nobody holds": lambda: sharded(WHERE | {"c": SECOND}),
    "index names the wrong shard": lambda: sharded({"a": SECOND, "b": FIRST}),
    "index leaves a tensor out": lambda: sharded({"b": SECOND}, second=safetensors()),
    "tensor in both shards": lambda: sharded(WHERE, second=safetensors()),
    "shard missing": lambda: sharded(WHERE, second=None),
    "shard truncated": lambda: sharded(WHERE, second=SHARDS[SECOND][:-1]),
}  # fmt: skip

# --- GGUF: "t" F32 dims (3, 5) at 0, "q" Q4_K dims (256, 2) at 64, "u" F16 dims (7,) at 352 ---

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def entry(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, rank: int | None = None) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims) if rank is None else rank, *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))
PAIRS = (
    ARCHITECTURE,
    pair("llama.block_count", U32, struct.pack("<I", 3)),
    pair("some.flags", ARRAY, array(BOOL, 2, b"\1\0")),
    pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("é") + text(""))),
)
ENTRIES = (entry("t", (3, 5), 0, 0), entry("q", (256, 2), 12, 64), entry("u", (7,), 1, 352))
GGUF_DATA = bytes(k % 60 for k in range(352 + 14))


def gguf(
    pairs: tuple[bytes, ...] = PAIRS,
    entries: tuple[bytes, ...] = ENTRIES,
    data: bytes = GGUF_DATA,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensors: int | None = None,
    count: int | None = None,
) -> bytes:
    """A GGUF file with alignment 32; the counts may lie."""
    counts = (len(entries) if tensors is None else tensors, len(pairs) if count is None else count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % 32) + data


def with_pair(*extra: bytes) -> bytes:
    return gguf((*PAIRS, *extra))


def with_entry(number: int, raw: bytes) -> bytes:
    return gguf(entries=(*ENTRIES[:number], raw, *ENTRIES[number + 1 :]))


GGUF: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "three bytes": lambda: b"GGU",
    "wrong magic": lambda: gguf(magic=b"GGML"),
    "version 1": lambda: gguf(version=1),
    "version 4": lambda: gguf(version=4),
    "big-endian": lambda: gguf(version=3 << 24),
    "truncated in the counts": lambda: gguf()[:20],
    "truncated in a key": lambda: gguf()[:40],
    "truncated in the strings": lambda: gguf()[: 24 + sum(map(len, PAIRS)) - 9],
    "truncated in the tensor entries": lambda: gguf()[: 24 + sum(map(len, PAIRS)) + 30],
    "truncated in the data": lambda: gguf()[:-1],
    "2^63 pairs": lambda: gguf(count=HUGE),
    "2^63 tensors": lambda: gguf(tensors=HUGE),
    "60000 pairs": lambda: gguf(count=60_000),
    "60000 tensors": lambda: gguf(tensors=60_000),
    "one pair too few": lambda: gguf(count=len(PAIRS) - 1),
    "one tensor too many": lambda: gguf(tensors=len(ENTRIES) + 1, data=b"\xff" * len(GGUF_DATA)),
    "key of 2^62 bytes": lambda: gguf((struct.pack("<Q", 2**62) + b"key", *PAIRS)),
    "key not UTF-8": lambda: with_pair(pair(b"k\xff", U8, b"\0")),
    "key twice": lambda: with_pair(PAIRS[1]),
    "string of 2^64-1 bytes": lambda: with_pair(pair("s", STRING, struct.pack("<Q", 2**64 - 1))),
    "string not UTF-8": lambda: with_pair(pair("s", STRING, text(b"\xc3\x28"))),
    "unknown value type": lambda: with_pair(pair("v", 13, bytes(8))),
    "array of unknown type": lambda: with_pair(pair("v", ARRAY, array(99, 1, bytes(8)))),
    "array of arrays": lambda: with_pair(pair("v", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0")))),
    "array of 2^60 numbers": lambda: with_pair(pair("v", ARRAY, array(U64, 2**60, bytes(8)))),
    "array of 16 million numbers": lambda: with_pair(pair("v", ARRAY, array(U64, 2**24, bytes(8)))),
    "array of 2^61 strings": lambda: with_pair(pair("v", ARRAY, array(STRING, 2**61, text("x")))),
    "array string of 2^63 bytes": lambda: with_pair(pair("v", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE)))),
    "array string not UTF-8": lambda: with_pair(pair("v", ARRAY, array(STRING, 1, text(b"\x80")))),
    "truth value 2": lambda: with_pair(pair("v", BOOL, b"\2")),
    "truth value 2 in an array": lambda: with_pair(pair("v", ARRAY, array(BOOL, 2, b"\1\2"))),
    "no architecture": lambda: gguf(PAIRS[1:]),
    "architecture a number": lambda: gguf((pair("general.architecture", U32, bytes(4)), *PAIRS[1:])),
    "alignment 3": lambda: with_pair(pair("general.alignment", U32, struct.pack("<I", 3))),
    "alignment 0": lambda: with_pair(pair("general.alignment", U32, struct.pack("<I", 0))),
    "alignment 2^31": lambda: with_pair(pair("general.alignment", U32, struct.pack("<I", 2**31))),
    "alignment a string": lambda: with_pair(pair("general.alignment", STRING, text("32"))),
    "alignment a float": lambda: with_pair(pair("general.alignment", F32, struct.pack("<f", 32))),
    "one of three parts": lambda: with_pair(pair("split.count", U32, struct.pack("<I", 3))),
    "tensor twice": lambda: with_entry(2, entry("t", (7,), 1, 352)),
    "tensor name not UTF-8": lambda: with_entry(2, entry(b"\xfe", (7,), 1, 352)),
    "tensor name of 2^63 bytes": lambda: with_entry(2, struct.pack("<Q", HUGE) + ENTRIES[2]),
    "no dimensions": lambda: with_entry(2, entry("u", (), 1, 352)),
    "five dimensions": lambda: with_entry(2, entry("u", (7, 1, 1, 1, 1), 1, 352)),
    "2^32-1 dimensions": lambda: with_entry(2, entry("u", (7,), 1, 352, rank=2**32 - 1)),
    "a dimension of zero": lambda: with_entry(2, entry("u", (7, 0), 1, 352)),
    "elements overflow to a few": lambda: with_entry(0, entry("t", (2**32, 2**32, 3, 5), 0, 0)),
    "2^252 elements": lambda: with_entry(0, entry("t", (HUGE,) * 4, 0, 0)),
    "unknown tensor type": lambda: with_entry(0, entry("t", (3, 5), 77, 0)),
    "removed tensor type": lambda: with_entry(0, entry("t", (3, 5), 4, 0)),
    "Q4_K row of 100": lambda: with_entry(1, entry("q", (100, 2), 12, 64)),
    "offset past the end": lambda: with_entry(1, entry("q", (256, 2), 12, 1 << 20)),
    "offset 2^63": lambda: with_entry(1, entry("q", (256, 2), 12, HUGE)),
    "offset wraps around": lambda: with_entry(1, entry("q", (256, 2), 12, 2**64 - 32)),
    "offset unaligned": lambda: with_entry(2, entry("u", (3,), 1, 357)),
    "tensors overlap": lambda: with_entry(1, entry("q", (256, 2), 12, 32)),
    "tensors share their bytes": lambda: with_entry(2, entry("u", (7,), 1, 0)),
}  # fmt: skip


def _single(suffix: str, builders: Mapping[str, Callable[[], bytes]]) -> tuple[Case, ...]:
    file = f"model.{suffix}"
    return tuple(
        Case(f"{suffix}: {name}", file, lambda build=build: {file: build()}) for name, build in builders.items()
    )


CASES = (
    *_single("safetensors", SAFETENSORS),
    *(Case(f"sharded: {name}", "", build) for name, build in SHARDED.items()),
    *_single("gguf", GGUF),
)
CONTROLS = (
    *_single("safetensors", {"sound": safetensors}),
    Case("sharded: sound", "", lambda: sharded(WHERE)),
    *_single("gguf", {"sound": gguf, "version 2": lambda: gguf(version=2)}),
)
