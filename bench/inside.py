"""What looking inside costs, in one run: `python bench/inside.py MODEL` (published: SmolLM2).

Each line is a ratio to the same work without reading, measured in alternation (median of the pairs); memory is the
growth of the resident set's peak.  The limits are those of the project.
"""

import argparse
import contextlib
import ctypes
import gc
import platform
import statistics
import tempfile
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


def give_back() -> None:
    """Free what nobody has, and return free memory to the system, so that the peak grows by what a call takes."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def held_now(trace: triptych.Trace) -> int:
    """Bytes of the tensors in a trace, without those that are computed when somebody looks at them."""
    records = [record for rows in trace.records.values() for record in rows.values()]
    return sum({x.data_ptr(): x.nbytes for record in records for x in record.pieces}.values())


def compare(name: str, limit: float, plain: Callable[[], Any], reading: Callable[[], Any], pairs: int) -> None:
    """Print the median ratio of two calls in alternation, and the memory of the second beyond that of the first."""
    ratios, base, extra = [], [], []
    for _ in range(pairs):
        before = reset_peak()
        begin = time.perf_counter()
        plain()
        middle = time.perf_counter()
        plain_peak, now = peak() - before, reset_peak()
        again = time.perf_counter()
        kept = reading()
        end = time.perf_counter()
        grown = peak() - now - plain_peak
        extra.append(grown - getattr(kept, "nbytes", 0))
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
    plain()
    kernels = streamed.library
    if kernels() is not None:
        compare(f"statistics of all heads, native, T {length}", 1.5, plain, lambda: model.statistics(rows), pairs)
    streamed.library = lambda: None
    compare(f"statistics of all heads, torch, T {length}", 4.0, plain, lambda: model.statistics(rows), 1)
    streamed.library = kernels
    middle = len(model.spec.decoder.blocks) // 2
    one = Read("*.pattern", layers=middle)
    compare(f"one layer's pattern, T {length}", 1.1, plain, lambda: model.trace(rows, read=one), max(1, pairs - 1))


def generating(model: triptych.Model, name: str, new: int, pairs: int) -> None:
    from triptych.probe import sites

    every = [site for site in sites(model.spec) if not site.endswith(MATRICES)]
    rows = model.ids([TEXT])

    def write(read: Any = ()) -> Any:
        return model.generate(rows, max_new_tokens=new, read=read, seed=0)[0].trace

    for executor in ("auto", "modules"):
        model.executor = executor
        write()
        write(every)
        label = f"{name}, {new} tokens, plain by {'the native step' if executor == 'auto' else 'modules'}"
        compare(f"every site, {label}", 1.15, write, lambda: write(every), pairs)
        compare(f"one site, {label}", 1.05, write, lambda: write("blocks.3.resid_post"), pairs)
    model.executor = "auto"


def everything(pairs: int) -> None:
    model, rows = triptych.create(GPT2), [torch.randint(0, 50257, (256,)).tolist()]
    model.logits(rows)
    read = lambda: model.trace(rows, read="*")  # noqa: E731
    compare("everything, GPT-2 shape, 256 tokens", 1.15, lambda: model.logits(rows), read, pairs)
    try:
        against_transformer_lens(pairs)
    except ImportError as reason:
        print(f"TransformerLens is not installed: not compared ({reason})")


#: Hook of TransformerLens -> site, where both have the same tensor without folded weights.
HOOKS = {
    "hook_resid_pre": "resid_pre", "ln1.hook_out": "attn.in", "attn.hook_q": "attn.q", "attn.hook_k": "attn.k",
    "attn.hook_v": "attn.v", "attn.hook_attn_scores": "attn.scores", "attn.hook_pattern": "attn.pattern",
    "attn.hook_z": "attn.z", "hook_attn_out": "attn.out", "hook_resid_mid": "resid_mid", "ln2.hook_out": "mlp.in",
    "mlp.hook_pre": "mlp.up", "mlp.hook_post": "mlp.act", "hook_mlp_out": "mlp.out", "hook_resid_post": "resid_post",
}  # fmt: skip


def against_transformer_lens(pairs: int) -> None:
    """The same random weights in both, everything kept by both; run it where TransformerLens 4 is installed."""
    from importlib.metadata import version

    from tokenizers import Tokenizer, models  # type: ignore[import-not-found]
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        hf = GPT2LMHeadModel(GPT2Config()).eval()
        hf.save_pretrained(folder)
        model = triptych.load(folder, dtype=torch.float32)  # text is not read: the tokenizer is theirs alone
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="a", eos_token="b", pad_token="b").save_pretrained(
            folder
        )
        theirs = TransformerBridge.boot_transformers(folder, hf_model=hf, device="cpu")
    rows = [torch.randint(0, 50257, (256,)).tolist()]
    ids = torch.tensor(rows)
    seconds, kept, held, grown = [[], []], [0, 0], 0, [[], []]
    with torch.no_grad():
        runs = lambda: theirs.run_with_cache(ids), lambda: model.trace(rows, read="*")
        for turn in range(pairs + 1):  # the first one warms up
            for i, run in enumerate(runs):
                give_back()
                before, begin = reset_peak(), time.perf_counter()
                result = run()
                if turn:
                    seconds[i].append(time.perf_counter() - begin)
                    grown[i].append(peak() - before)
                if i:
                    held = held_now(result)
                tensors = [*result[1].values()] if i == 0 else [x for site in result for x in result[site]]
                kept[i] = sum({x.data_ptr(): x.nbytes for x in tensors}.values())
                del result, tensors
        (_, cache), trace = (run() for run in runs)
    worst = 0.0
    for hook, site in HOOKS.items():
        for i in range(12):
            a, b = cache[f"blocks.{i}.{hook}"][0], trace[f"blocks.{i}.{site}"][0]
            seen = (b > -1e9) & (a > -1e9)  # hidden scores are -inf here, and a very small number there
            worst = max(worst, float((a - b)[seen].abs().max()))
    faster = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    peaks = statistics.median(b / max(a, 1) for a, b in zip(*grown, strict=True))
    print(
        f"everything by both, TransformerLens {version('transformer-lens')}: {statistics.median(seconds[0]):.2f} s "
        f"there, here {faster:.2f} times faster (at least 1.2); the peak grows by {peaks:.0%} of theirs (at most 60%), "
        f"the tensors kept are {held / kept[0]:.0%}, {kept[1] / kept[0]:.0%} once all were looked at; largest "
        f"difference by the name table {worst:.1e} (at most 1e-4)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=3, help="of long texts; twice as many of the others")
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
        generating(model, "fp32", options.new, 2 * options.pairs)
        generating(triptych.load(options.model), "packed", options.new, 2 * options.pairs)
    if options.only in (None, "everything"):
        everything(2 * options.pairs)


if __name__ == "__main__":
    main()
