"""The table of issue 9: this library beside others, measured in one run: `python bench/peers.py --smollm2 FILE.gguf`.

Needs `pip install -e '.[bench]'` and, for the rows of ik_llama.cpp, its build; a peer that is not installed is left
out and named.  `--minilm DIR` is all-MiniLM-L6-v2.  Other models are made once in `--models`: SmolLM2 as Q8_0, Q4_0,
fp32 and bf16, a 1.1B Llama in Q4_0, a T5-small and a Whisper-tiny, the last three with random weights (`shapes.py`).

`--rows NAME,...` runs some of the rows (`--list` names them); results are kept in `--results`, so that rows can be run
one by one and again, and the printed table has all that are there.  A row takes a minute or two on a quiet machine with
two cores.  Ratios are medians over pairs of runs, ours to the peer's: how many times as fast.

Where llama.cpp ends in a segmentation fault on a processor with AMX, build it without: `CMAKE_ARGS="-DGGML_NATIVE=ON
-DCMAKE_C_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"`, and CMAKE_CXX_FLAGS likewise.

On a GPU (`--device cuda --executor static`) the rows run that compare plain weights with transformers and
sentence-transformers.

Perplexity and the divergence of packed weights are not speed: `triptych check` prints them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import shapes  # noqa: E402

from triptych.errors import InputError, TriptychError  # noqa: E402
from triptych.measure import BenchReport, Rates, Settings, bench  # noqa: E402
from triptych.measure import peers as libraries  # noqa: E402
from triptych.measure.limits import measure_rates  # noqa: E402

FAST_MEMORY = 50e9  # bytes in a second; above it some targets are higher
LONG = 512
DEFAULT = Settings(prompt_tokens=(LONG,))


@dataclass(frozen=True)
class Row:
    """A line or more of the table.

    model    a name of `MODELS`.
    against  peers as `bench` takes them -> the ratio wanted for each figure, or two: the second where memory is fast.
    figures  of the report, by the beginnings of their names.
    ours     our weights: arguments of `bench`.
    """

    what: str
    model: str
    kinds: tuple[str, ...]
    figures: tuple[str, ...]
    against: dict[str, float | tuple[float, float] | None]
    ours: dict[str, Any] = field(default_factory=dict)
    settings: Settings = DEFAULT
    reached: float | None = None


FILE = {"quantize": "file"}
decode, prefill = (partial(Row, kinds=(kind,), figures=(kind,), ours=FILE) for kind in ("decode", "prefill"))
LISTED = {  # decoders at both lengths, encoders in one piece
    "decode": decode("decode, SmolLM2 Q4_1", "q4_1", against={"llama.cpp": (2.2, 3.0), "ik_llama.cpp": (1.6, 2.0)}),
    "decode-transformers": decode("decode, SmolLM2 Q4_1", "q4_1", against={"transformers:bf16": 12}),
    "decode-q8_0": decode("decode, SmolLM2 Q8_0", "q8_0", against={"llama.cpp": (1.8, 2.5)}),
    "decode-q4_0": decode("decode, SmolLM2 Q4_0", "q4_0", against={"llama.cpp": (1.8, 2.5)}),
    "decode-1b": decode(
        "1.1B Llama Q4_0", "1b", against={"llama.cpp": 1.0}, reached=0.9,
        settings=Settings(new_tokens=32, prompt_tokens=(LONG,), repeat=3),
    ),
    "prefill-1b": prefill(
        "1.1B Llama Q4_0", "1b", against={"ik_llama.cpp": 1.0},
        settings=Settings(prompt_tokens=(LONG,), new_tokens=4, repeat=3),
    ),
    "decode-fp32": decode("decode, SmolLM2 fp32", "fp32", against={"transformers:fp32": 2.0}, ours={}),
    "decode-bf16": decode("decode, SmolLM2 bf16", "bf16", against={"transformers:bf16": 3.0}, ours={}),
    "prefill": prefill("SmolLM2 Q4_1", "q4_1", against={"llama.cpp": 4.0, "ik_llama.cpp": 1.2}),
    "prefill-transformers": prefill("SmolLM2 Q4_1", "q4_1", against={"transformers:bf16": 1.5}),
    "requests": Row(
        "SmolLM2 Q4_1", "q4_1", ("decode", "together"), ("decode at 8", "8 requests"), {"llama.cpp": 2.0}, FILE,
        Settings(prompt_tokens=(LONG,), contexts=(8,)),
    ),
    "encode": Row(
        "MiniLM", "minilm", ("encode",), ("encode",),
        {"sentence-transformers:fp32": 2.8, "onnxruntime:fp32": 2.4, "ctranslate2:fp32": 2.0}, {"matmul": "bf16"},
        Settings(repeat=3),
    ),
    "encode-int8": Row(
        "MiniLM int8", "minilm", ("encode",), ("encode",),
        {"onnxruntime:int8": 2.0, "ctranslate2:int8": 1.9, "sentence-transformers:fp32": None}, {"quantize": "int8"},
        Settings(repeat=3),
    ),
    "beam": Row(
        "T5-small shape, 4 × 64", "t5", ("write",), ("beam 4",), {"transformers:fp32": 4.0, "ctranslate2:int8": 1.2},
        {"quantize": "int8"}, Settings(),
    ),
    "whisper": Row(
        "Whisper-tiny shape, 30 s", "whisper", ("encoder", "write"), ("encoder", "greedy, seconds"),
        {"transformers:fp32": 3.0, "ctranslate2:int8": 1.0}, {"quantize": "int8"}, Settings(repeat=3),
    ),
    "load": Row(
        "SmolLM2 Q4_1", "q4_1", ("first",), ("load to first",), {"transformers:bf16": 20}, FILE,
        Settings(prompt_tokens=(8,), contexts=(8,), new_tokens=4, repeat=3),
    ),
    "busy": decode("beside one busy process, SmolLM2 Q4_1", "q4_1", against={}),
}  # fmt: skip


def models(arguments: argparse.Namespace) -> dict[str, Callable[[], Path]]:
    """How to get each model."""
    folder: Path = arguments.models

    def needed(path: Path | None, option: str) -> Path:
        if path is None:
            raise InputError(f"{option} is needed for this row")
        return path

    def converted(name: str, dtype: str) -> Path:
        from triptych.checkpoints.convert import convert

        target = folder / name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            convert(needed(arguments.smollm2, "--smollm2"), target, dtype=dtype)
        return target

    return {
        "q4_1": lambda: needed(arguments.smollm2, "--smollm2"),
        "q8_0": lambda: converted("smollm2-q8_0.gguf", "q8_0"),
        "q4_0": lambda: converted("smollm2-q4_0.gguf", "q4_0"),
        "fp32": lambda: converted("smollm2-fp32", "f32"),
        "bf16": lambda: converted("smollm2-bf16", "bf16"),
        "1b": lambda: shapes.llama_1b(folder, needed(arguments.smollm2, "--smollm2")),
        "minilm": lambda: needed(arguments.minilm, "--minilm"),
        "t5": lambda: shapes.t5_small(folder),
        "whisper": lambda: shapes.whisper_tiny(folder),
    }


def run(name: str, arguments: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    """Measure a row -> its lines."""
    row = LISTED[name]
    model = models(arguments)[row.model]()
    sides = {peer: libraries.side(peer.partition(":")[0]) for peer in row.against}
    present = [peer for peer, side in sides.items() if not side.missing()]
    for peer in row.against.keys() - present:
        print(f"{name}: {peer} is not installed; {sides[peer].install}", file=sys.stderr)
    settings = row.settings if arguments.repeat is None else replace(row.settings, repeat=arguments.repeat)
    ours = dict(row.ours)
    if arguments.ours is not None:
        ours = {} if arguments.ours == "stored" else dict([arguments.ours.split("=", 1)])

    def measured(peers: list[str]) -> BenchReport:
        return bench(
            model, against=peers, settings=settings, kinds=row.kinds, threads=arguments.threads, rates=rates,
            device=arguments.device, executor=arguments.executor,
            progress=lambda stage: print(f"{name}: {stage}", file=sys.stderr), **ours,
        )  # fmt: skip

    report = measured(present)
    lines = [
        line for figure in report.figures if figure.name.startswith(row.figures) for line in _lines(row, report, figure)
    ]
    if name == "requests":
        lines.append(
            _over_itself(report.figure("8 requests at once"), report.figure("decode at 8"), "one request", 2.5)
        )
    if name == "busy":
        with busy_process():
            beside = measured([])
        lines = [_over_itself(one, report.figure(one.name), "quiet", 0.4) for one in beside.figures]
    print("\n".join(report.notes), file=sys.stderr)
    return lines


def _lines(row: Row, report: BenchReport, figure: Any) -> Iterator[dict[str, Any]]:
    """A line for each peer, or one without."""
    limit = figure.limit
    common = {
        "what": row.what, "figure": figure.name, "unit": figure.unit, "ours": figure.value,
        "form": report.sides[0].dtype, "limit": None if limit is None else limit.value, "reached": figure.reached,
        "wanted_reached": row.reached, "busy": report.busy,
    }  # fmt: skip
    versions = {side.name: side.versions | {"dtype": side.dtype} for side in report.sides}
    for peer, wanted in row.against.items():
        if peer not in figure.peers:
            continue
        theirs = figure.peers[peer]
        if isinstance(wanted, tuple):
            wanted = wanted[report.rates.read >= FAST_MEMORY]
        cosine = report.agreement.get(peer)
        yield common | {
            "peer": peer, "theirs": theirs.value, "ratio": figure.ratio(peer), "wanted": wanted, "note": theirs.note,
            "cosine": cosine, "versions": versions[peer],
        }  # fmt: skip
    if not figure.peers:
        yield common


def _over_itself(above: Any, below: Any, peer: str, wanted: float) -> dict[str, Any]:
    """A figure over another one of ours."""
    return {
        "what": "ours", "figure": above.name, "unit": above.unit, "ours": above.value, "peer": f"ours, {peer}",
        "theirs": below.value, "ratio": above.value / below.value, "wanted": wanted,
    }  # fmt: skip


@contextmanager
def busy_process() -> Iterator[None]:
    """Another process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- the table


def table(kept: dict[str, Any]) -> str:
    """Markdown, in the order of `LISTED`."""
    lines = [
        "| work | figure | ours | limit | reached | peer | theirs | ours / theirs | wanted | |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for name in LISTED:
        lines += [_markdown(line) for line in kept["rows"].get(name, [])]
    return "\n".join(lines)


def _markdown(line: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    ratio, wanted, reached, floor = (line.get(key) for key in ("ratio", "wanted", "reached", "wanted_reached"))
    met = ratio is not None and wanted is not None and ratio >= wanted and (floor is None or (reached or 0) >= floor)
    verdict = "" if wanted is None or ratio is None else "met" if met else "missed"
    cosine = line.get("cosine")
    remarks = [verdict, line.get("note") or "", f"cosine ≥ {cosine[0]:.5f}, mean {cosine[1]:.5f}" if cosine else ""]
    cells = [
        f"{line['what']}{', ' + line['form'] if line.get('form') else ''}", f"{line['figure']}, {line['unit']}",
        number(line["ours"]), number(line.get("limit")), "" if reached is None else f"{reached:.0%}",
        line.get("peer", ""), number(line.get("theirs")), "" if ratio is None else f"{ratio:.2f}", number(wanted),
        "; ".join(filter(None, remarks)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct as a Q4_1 .gguf file")
    parser.add_argument("--minilm", type=Path, help="the directory of all-MiniLM-L6-v2")
    parser.add_argument("--models", type=Path, default=Path("runs/bench-models"), help="where models are made")
    parser.add_argument("--results", type=Path, default=Path("runs/peers.json"), help="where results are kept")
    parser.add_argument("--rows", default=",".join(LISTED), help="names of rows, with commas between them")
    parser.add_argument("--ours", metavar="FORM", help="ours here: dtype=bf16, matmul=bf16, quantize=int8 or stored")
    parser.add_argument("--repeat", type=int, help="runs of each job; by default 3 or 5")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--executor", default="auto", help="of our steps: auto, modules, static or compiled")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(LISTED))
        return
    names = arguments.rows.split(",")
    if unknown := [name for name in names if name not in LISTED]:
        parser.error(f"no row {unknown[0]}; they are {', '.join(LISTED)}")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as this package has it
    kept = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"rows": {}}
    try:
        measure(names, arguments, kept)
    except TriptychError as error:
        raise SystemExit(f"error: {error}") from None
    print(table(kept))


def measure(names: list[str], arguments: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Run rows and keep each as soon as it is done; one that fails is named and the others go on."""
    import torch

    from triptych import machine

    machine.device(arguments.device)
    torch.set_num_threads(arguments.threads or machine.threads())
    rates, look = measure_rates(arguments.device), machine.look()
    kept["machine"] = (
        f"{look.processor}, {look.cores.usable} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"reads {rates.read / 1e9:.1f} GB/s, matmuls {rates.fp32 / 1e9:.0f} (fp32) and {rates.bf16 / 1e9:.0f} (bf16) "
        "GFLOP/s"
    )
    print(kept["machine"])
    for name in names:
        row = LISTED[name]
        plain = (
            all(peer.startswith(("transformers", "sentence-")) for peer in row.against) and "quantize" not in row.ours
        )
        if arguments.device != "cpu" and not plain:
            print(f"{name}: runs on the CPU alone, not on {arguments.device}", file=sys.stderr)
            continue
        begin = time.perf_counter()
        try:
            kept["rows"][name] = run(name, arguments, rates)
        except TriptychError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
