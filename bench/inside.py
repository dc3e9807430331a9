"""What looking inside costs, in one run: `python bench/inside.py MODEL` (published: SmolLM2).

Each line is a ratio to the same work without reading, measured in alternation (median of the pairs); memory is the
growth of the resident set's peak.  The limits are those of the project.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import triptych
from triptych import machine, native
from triptych.attention import statistics as streamed
from triptych.probe import Read

TEXT = "It was the best of times, it was the worst of times; she sat by the river bank and counted the money. "
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
MATRICES = ("scores", "pattern", "k_ctx", "v_ctx")


def peak() -> int:
    """Bytes of the largest resident set since the last `reset_peak`; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def reset_peak() -> int:
    """Let the peak begin anew -> the resident set now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak()


def compare(name: str, limit: float, plain: Callable[[], Any], reading: Callable[[], Any], pairs: int) -> None:
    """Print the median ratio of two calls in alternation, and the memory of the second beyond that of the first."""
    ratios, base, extra = [], [], []
    plain()
    for _ in range(pairs):
        before = reset_peak()
        begin = time.perf_counter()
        plain()
        middle = time.perf_counter()
        plain_peak, now = peak() - before, reset_peak()
        again = time.perf_counter()
        kept = reading()
        end = time.perf_counter()
        trace = getattr(kept, "nbytes", 0)
        extra.append(peak() - now - plain_peak - trace)
        del kept
        base.append(middle - begin)
        ratios.append((end - again) / (middle - begin))
    verdict = "ok" if statistics.median(ratios) <= limit else "OVER"
    print(
        f"{name:58} {statistics.median(base):8.2f} s  x {statistics.median(ratios):5.2f} (limit {limit:.2f}, {verdict})"
        f"  {statistics.median(extra) / 1e6:7.0f} MB beyond the plain pass and the results",
        flush=True,
    )


def long_text(model: triptych.Model, length: int, pairs: int) -> None:
    rows = [(model.ids([TEXT])[0] * (length // 8))[:length]]
    plain = lambda: model.logits(rows)  # noqa: E731
    kernels = streamed.library
    if kernels() is not None:
        compare(f"statistics of all heads, native, T {length}", 1.5, plain, lambda: model.statistics(rows), pairs)
    streamed.library = lambda: None
    compare(f"statistics of all heads, torch, T {length}", 4.0, plain, lambda: model.statistics(rows), pairs)
    streamed.library = kernels
    middle = len(model.spec.decoder.blocks) // 2
    one = Read("*.pattern", layers=middle)
    compare(f"one layer's pattern, T {length}", 1.1, plain, lambda: model.trace(rows, read=one), pairs)


def generating(model: triptych.Model, name: str, new: int, pairs: int) -> None:
    from triptych.probe import sites

    every = [site for site in sites(model.spec) if not site.endswith(MATRICES)]
    rows = model.ids([TEXT])

    def write(read: Any = ()) -> None:
        model.generate(rows, max_new_tokens=new, read=read, seed=0)

    for executor in ("auto", "modules"):
        model.executor = executor
        label = f"{name}, {new} tokens, plain by {'the native step' if executor == 'auto' else 'modules'}"
        compare(f"every site, {label}", 1.15, write, lambda: write(every), pairs)
        compare(f"one site, {label}", 1.05, write, lambda: write("blocks.3.resid_post"), pairs)
    model.executor = "auto"


def everything(pairs: int) -> None:
    model, rows = triptych.create(GPT2), [torch.randint(0, 50257, (256,)).tolist()]
    compare(
        "everything, GPT-2 shape, 256 tokens",
        1.15,
        lambda: model.logits(rows),
        lambda: model.trace(rows, read="*"),
        pairs,
    )
    try:
        import transformer_lens  # type: ignore[import-not-found]
    except ImportError:
        print("TransformerLens is not installed: not compared")
        return
    config = transformer_lens.HookedTransformerConfig(
        n_layers=12, d_model=768, n_ctx=1024, d_head=64, n_heads=12, d_vocab=50257, act_fn="gelu_new", d_mlp=3072
    )
    theirs, ids = transformer_lens.HookedTransformer(config), torch.tensor(rows)
    with torch.no_grad():
        compare(
            f"everything by both (limit 1 / 1.2), TransformerLens {transformer_lens.__version__}", 1 / 1.2,
            lambda: theirs.run_with_cache(ids), reading, pairs,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=["long", "generating", "everything"])
    options = parser.parse_args()
    machine.use_threads()
    kernels = f"no: {native.why_not()}" if native.why_not() else "yes"
    print(
        f"triptych {triptych.__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads, fp32, native kernels {kernels}"
    )
    torch.manual_seed(0)
    if options.only in (None, "long", "generating"):
        model = triptych.load(options.model, dequantize=True, dtype=torch.float32)
    if options.only in (None, "long"):
        long_text(model, options.length, options.pairs)
    if options.only in (None, "generating"):
        generating(model, "fp32", options.new, options.pairs)
        generating(triptych.load(options.model), "packed", options.new, options.pairs)
    if options.only in (None, "everything"):
        everything(options.pairs)


if __name__ == "__main__":
    main()
