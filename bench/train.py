"""A training step of this package beside one of transformers, same shape, in one run: `python bench/train.py`.

Same config, same tokens, same optimizer (fused AdamW), same precision; the losses on the same weights are compared
before anything is timed.  Steps of the two alternate, and the medians of n steps are printed.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from triptych import nn
from triptych.checkpoints import write_directory
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.families import read_config
from triptych.train import CausalText, Optimizer, OptimizerSettings, RunSettings, Schedule, Trainer
from triptych.train.precision import autocast


def config(family: str, options: argparse.Namespace) -> dict[str, object]:
    width, layers, heads, vocab = options.width, options.layers, options.heads, options.vocab
    if family == "gpt2":
        sizes = {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": options.length,
            "vocab_size": vocab,
        }
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": None, "eos_token_id": None}
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **drop, **ends}
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "intermediate_size": width * 8 // 3, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocab, "max_position_embeddings": options.length, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def ours(module: nn.Transformer, data: CausalText, options: argparse.Namespace) -> Trainer:
    optimizer = Optimizer(module, OptimizerSettings(name="adamw", lr=3e-4, clip=1.0))
    run = RunSettings(
        rows=options.rows, length=options.length, steps=1000, precision=options.precision, compile=options.compile
    )
    return Trainer(module.train(), data, optimizer, Schedule(), run)


def theirs(model: torch.nn.Module, data: CausalText, options: argparse.Namespace) -> Callable[[int], float]:
    """The usual step: mean loss, gradient clipping, fused AdamW."""
    model = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step(number: int) -> float:
        rows = data.draw(0, number, options.rows)
        ids, targets = (
            torch.from_numpy(np.stack(side).astype(np.int64)).to(options.device)
            for side in zip(*sides(rows), strict=True)
        )
        with autocast(options.precision, torch.device(options.device)):
            logits = model(ids).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def sides(rows: list[object]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(row.ids, row.targets) for row in rows]  # type: ignore[attr-defined]


def place(device: str) -> str:
    """What computes."""
    return f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"width": 384, "layers": 6, "heads": 6, "length": 256, "rows": 8, "repeats": 15,
                          "vocab": 256}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa", help="the attention of transformers")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    hf = config(options.family, options)
    module = nn.new(read_config(hf), seed=1).to(options.device)
    with tempfile.TemporaryDirectory() as folder:
        write_directory(Path(folder) / "model", *to_checkpoint(module, hf))
        peer = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", attn_implementation=options.attention
        ).train().to(options.device)  # fmt: skip
    text = np.random.default_rng(0).integers(0, options.vocab, 1 << 16, dtype=np.int32)
    data = CausalText.of([text], options.length)
    trainer, step = ours(module, data, options), theirs(peer, data, options)
    first = trainer.step()[0], step(0)
    assert abs(first[0] - first[1]) < 2e-2, first
    times: dict[str, list[float]] = {"triptych": [], "transformers": []}
    for number in range(1, options.repeats + 2):
        for name, call in (("triptych", trainer.step), ("transformers", lambda n=number: step(n))):
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    bf16 = isinstance(autocast(options.precision, torch.device(options.device)), torch.autocast)
    print(
        f"{options.family}, {sum(p.numel() for p in module.parameters()):,} parameters, "
        f"{options.rows} x {options.length} tokens, {'bf16 autocast' if bf16 else 'fp32'}"
        f"{', compiled' if options.compile else ''}, "
        f"{place(options.device)}, torch {torch.__version__}, transformers {transformers.__version__} "
        f"({options.attention}), python {platform.python_version()}, {platform.machine()}, median of {options.repeats}"
    )
    tokens = options.rows * options.length
    speeds = {name: tokens / statistics.median(seconds[1:]) for name, seconds in times.items()}
    for name, speed in speeds.items():
        print(f"{name:13} {speed:8,.0f} tokens/s")
    print(f"ratio         {speeds['triptych'] / speeds['transformers']:8.2f}")


if __name__ == "__main__":
    main()
