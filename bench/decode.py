"""This checkout beside an older one, in one run: decoding, a training step, and the price of a trace.

`git worktree add ../old 133d396`, then `python bench/decode.py --old ../old --smollm2 FILE.gguf` on a quiet machine.

Each checkout runs in a process of its own, with the same environment; the two take turns, old, new, old, new, and one
waits while the other measures.  Measured are

- one greedy step of SmolLM2 in fp32 and in bf16, one row, after a short prompt; and the calls of `F.linear` that such a
  step makes, recorded with their inputs and repeated alone.  The difference is the time outside the matmuls;
- one training step of the quickstart's decoder (forward, backward, optimizer);
- a plain forward of 256 tokens of SmolLM2 in fp32, a trace of `attn.out` at all layers, and one of `attn.pattern`;
- a step, and a prompt of 512 tokens with its first token, of SmolLM2 as the file packs it;
- with `--encoder`, 64 texts of 5 to 60 words embedded by that encoder, as stored and in int8.

Printed are medians, and the median of the ratios of the pairs (old and new of one round, or trace and plain of one
round), which moves less than the ratio of the medians when the machine is not quiet.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPT = [504, 3575, 282, 4649, 314, 260, 1178, 30]  # eight ordinary tokens
TRACED = 256  # tokens of a traced forward
PREFILLED = 512  # tokens of a packed prompt
QUICKSTART = ("run.steps=1000000", "run.seconds=1e12", "run.evaluate_every=0", "run.sample_every=0", "run.save_every=0")
Call = Callable[[], object]


# ---------------------------------------------------------------- in the process of one checkout


def decode(smollm2: str, dtype: str, steps: int) -> dict[str, Call]:
    """A step of the engine, and the `F.linear` calls of one step alone."""
    import torch
    from frames import stepper

    import triptych

    model = triptych.load(smollm2, dequantize=True, dtype=getattr(torch, dtype))
    step = stepper(model, PROMPT, steps)
    step()  # the prompt
    calls = linear_calls(step)
    print(f"{len(calls)} calls of F.linear in a step in {dtype}", file=sys.stderr)

    def linears() -> None:
        with torch.inference_mode():
            for arguments in calls:
                torch.nn.functional.linear(*arguments)

    return {f"{dtype} step": step, f"{dtype} linears": linears}


def linear_calls(step: Call) -> list[tuple[Any, ...]]:
    """The arguments of every `F.linear` that `step` makes, whatever module calls it."""
    import torch
    from torch.overrides import TorchFunctionMode

    calls: list[tuple[Any, ...]] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.linear:
                x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
                calls.append((x.clone(), weight, bias))
            return function(*args, **(kwargs or {}))

    with Recorder():
        step()
    return calls


def training(data: str) -> dict[str, Call]:
    """A step of the quickstart's decoder."""
    from triptych.train import prepare, read_recipe

    trainer = prepare(read_recipe("decoder", [f"data.path={json.dumps(data)}", *QUICKSTART])).trainer
    trainer.module.train()
    return {"training step": trainer.step}


def traces(smollm2: str) -> dict[str, Call]:
    """A plain forward and two traces of the same row."""
    import triptych

    model = triptych.load(smollm2, dequantize=True)
    row = [[1 + (i * 7919) % (model.spec.vocab - 1) for i in range(TRACED)]]
    return {
        "plain forward": lambda: model.logits(row),
        "trace of out": lambda: model.trace(row, read=["blocks.*.attn.out"]),
        "trace of pattern": lambda: model.trace(row, read=["blocks.*.attn.pattern"]),
    }


def packed(smollm2: str, steps: int) -> dict[str, Call]:
    """A step, and a prompt of `PREFILLED` tokens with its first token, of the packed weights."""
    from frames import stepper

    import triptych

    model = triptych.load(smollm2)
    row = [1 + (i * 7919) % (model.spec.vocab - 1) for i in range(PREFILLED)]
    step = stepper(model, PROMPT, steps)
    step()  # the prompt
    return {"packed step": step, "packed prompt": lambda: stepper(model, row, 1)()}


def encoding(encoder: str) -> dict[str, Call]:
    """64 texts of several lengths, embedded by the encoder as stored and in int8."""
    import triptych

    sentence = "a river bank where people talk about the price of bread and the weather of the last week"
    words = sentence.split()
    texts = [" ".join(words[(i * 5 + j) % len(words)] for j in range(5 + i * 37 % 56)) for i in range(64)]
    models = {"encode": triptych.load(encoder), "encode int8": triptych.load(encoder, quantize="int8")}
    return {name: partial(model.encode, texts) for name, model in models.items()}


def serve(arguments: argparse.Namespace) -> None:
    """Make the calls, say what they are, then time the one that each line of standard input names."""
    import torch

    import triptych

    sys.path.insert(0, str(HERE))
    torch.set_num_threads(arguments.threads)
    calls: dict[str, Call] = {}
    steps = arguments.pairs * arguments.steps + 8
    for dtype in ("float32", "bfloat16"):
        calls |= decode(arguments.smollm2, dtype, steps)
    calls |= training(arguments.data) | traces(arguments.smollm2) | packed(arguments.smollm2, steps)
    if arguments.encoder:
        calls |= encoding(arguments.encoder)
    for call in calls.values():
        call()  # kernels and memory are set up
    facts = {"package": str(Path(triptych.__file__).parent), "torch": torch.__version__, "calls": list(calls)}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        name, times = json.loads(line)
        begin = time.perf_counter()
        for _ in range(times):
            calls[name]()
        print(json.dumps((time.perf_counter() - begin) / times), flush=True)


# ---------------------------------------------------------------- beside each other


class Checkout:
    """The process that runs one checkout."""

    def __init__(self, root: Path, arguments: list[str]) -> None:
        if not (root / "src" / "triptych").is_dir():
            raise SystemExit(f"{root} is no checkout of this repository: it has no src/triptych")
        # Idle OpenMP threads of one process must not spin while the other measures.
        environment = os.environ | {"PYTHONPATH": str(root / "src"), "GOMP_SPINCOUNT": "10000"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        )
        self.facts = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a checkout ended with exit status {self.process.wait()}")
        return json.loads(line)

    def seconds(self, name: str, times: int) -> float:
        """Mean wall time of `times` calls."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps((name, times)) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


Times = dict[str, list[float]]


def measure(old: Checkout, new: Checkout, pairs: int, steps: int) -> tuple[Times, Times]:
    """`pairs` rounds; in a round every call is timed once in each checkout, and the two take turns."""
    times: tuple[Times, Times] = ({}, {})
    for _ in range(pairs):
        for name in old.facts["calls"]:
            repeats = steps if name.startswith(("float32", "bfloat16", "packed step")) else 1
            for checkout, kept in zip((old, new), times, strict=True):
                kept.setdefault(name, []).append(checkout.seconds(name, repeats))
    for kept in times:
        for dtype in ("float32", "bfloat16"):
            sides = zip(kept[f"{dtype} step"], kept[f"{dtype} linears"], strict=True)
            kept[f"{dtype} outside the matmuls"] = [step - linears for step, linears in sides]
    return times


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of pairs."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def report(old: Times, new: Times) -> None:
    print(f"{'':30} {'old':>10} {'new':>10}   old / new")
    for name in sorted(old):
        a, b = (statistics.median(times[name]) * 1e3 for times in (old, new))
        print(f"{name:30} {a:7.2f} ms {b:7.2f} ms   {ratio(old[name], new[name]):9.2f}")
    for name in ("trace of out", "trace of pattern"):
        a, b = (ratio(times[name], times["plain forward"]) for times in (old, new))
        print(f"{name + ' / plain forward':30} {a:10.2f} {b:10.2f}")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--old", type=Path, help="a worktree of the older commit")
    options.add_argument("--smollm2", required=True, help="SmolLM2-135M-Instruct as a .gguf file")
    options.add_argument("--encoder", default="", help="the directory of an encoder")
    options.add_argument("--data", default="shakespeare", help="text of the training step: a file, or shakespeare")
    options.add_argument("--pairs", type=int, default=21, help="rounds")
    options.add_argument("--steps", type=int, default=4, help="decoding steps timed together in a round")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    if arguments.old is None:
        options.error("--old is needed: a worktree of the older commit")
    passed = [
        f"--{name}={getattr(arguments, name)}" for name in ("smollm2", "encoder", "data", "pairs", "steps", "threads")
    ]
    checkouts = [Checkout(root.resolve(), passed) for root in (arguments.old, HERE.parent)]
    for name, checkout in zip(("old", "new"), checkouts, strict=True):
        print(f"{name}: {checkout.facts['package']}, torch {checkout.facts['torch']}")
    print(
        f"python {platform.python_version()}, {processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{arguments.threads} threads, SmolLM2 in fp32 and bf16, one row, training in the recipe's precision, "
        f"{arguments.pairs} pairs"
    )
    report(*measure(*checkouts, arguments.pairs, arguments.steps))
    for checkout in checkouts:
        checkout.close()


if __name__ == "__main__":
    main()
