"""A training step of this package beside one of transformers, same shape, in one run: `python bench/train.py`.

Same config, same tokens, same optimizer (fused AdamW), same precision; the losses on the same weights are compared
before anything is timed.  Steps of ours, of transformers, of transformers compiled (`--compiled`), and the products of
the linear layers alone, forward and backward, run in turn; medians of n turns are printed.  `--equal N` times nothing:
it compares the losses of N steps, also those of transformers with one and the other attention, which differ by rounding
alone.  `--packed MODEL` measures in place of these a step of an adapter (LoRA of rank 8) over packed weights, beside
the same tokens read as prompts.  `TRIPTYCH_KERNELS=none` measures the same step without our C functions.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

import triptych
from triptych import native, nn
from triptych.checkpoints import write_directory
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.families import read_config
from triptych.nn.linear import Linear
from triptych.train import CausalText, Optimizer, OptimizerSettings, RunSettings, Schedule, Trainer
from triptych.train.data import Data, MaskedText, Pairs
from triptych.train.objectives import Example, TokenMasking
from triptych.train.precision import autocast

PEERS = {
    "gpt2": transformers.AutoModelForCausalLM, "llama": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM,
}  # fmt: skip
IGNORED = -100


def config(family: str, options: argparse.Namespace) -> dict[str, object]:
    width, layers, heads, vocab, length = options.width, options.layers, options.heads, options.vocab, options.length
    ends = {"bos_token_id": None, "eos_token_id": None}
    if family == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length, "vocab_size": vocab}
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **drop, **ends}
    if family == "t5":
        return {
            "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": width, "d_ff": 4 * width,
            "d_kv": width // heads, "num_heads": heads, "num_layers": layers // 2, "num_decoder_layers": layers // 2,
            "vocab_size": vocab, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip
    if family == "bert":
        return {
            "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": width,
            "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width,
            "vocab_size": vocab, "max_position_embeddings": length, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "intermediate_size": width * 8 // 3, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": options.groups, "vocab_size": vocab, "max_position_embeddings": length,
        "tie_word_embeddings": True, **ends,
    }  # fmt: skip


def data_of(family: str, options: argparse.Namespace) -> Data:
    """Bytes of this repository's documentation, in the rows that the family learns from."""
    files = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = np.concatenate([np.frombuffer(file.read_bytes(), dtype=np.uint8) for file in files]).astype(np.int32)
    text %= options.vocab
    if family == "t5":
        whole = text[: len(text) // options.length * options.length].reshape(-1, options.length)
        return Pairs.of([(row, np.roll(row, 1)) for row in whole], 0, options.length)
    if family == "bert":
        return MaskedText.of([text], options.length, TokenMasking(0, options.vocab, frozenset([0])), [], [])
    return CausalText.of([text], options.length)


def ours(module: nn.Transformer, data: Data, options: argparse.Namespace) -> Trainer:
    optimizer = Optimizer(module, OptimizerSettings(name="adamw", lr=3e-4, clip=1.0, weight_decay=0.0))
    run = RunSettings(
        rows=options.rows, length=options.length, steps=1000, precision=options.precision, compile=options.compile
    )
    return Trainer(module.train(), data, optimizer, Schedule(shape="constant", warmup=0.0), run)


def theirs(model: torch.nn.Module, data: Data, options: argparse.Namespace, compiled: bool) -> Callable[[int], float]:
    """The usual step: mean loss, gradient clipping, fused AdamW."""
    model = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(number: int) -> float:
        inputs, labels = tensors(data.draw(0, number, options.rows), options.device)
        with autocast(options.precision, torch.device(options.device)):
            logits = model(**inputs).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def tensors(rows: Sequence[Example], device: str) -> tuple[dict[str, Tensor], Tensor]:
    """What transformers reads, and the labels."""

    def together(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays).astype(np.int64)).to(device)

    ids = together([row.ids for row in rows])
    labels = together([np.where(row.trained, row.targets, IGNORED) for row in rows])
    sources = [row.source for row in rows if row.source is not None]
    return {"input_ids": together(sources), "decoder_input_ids": ids} if sources else {"input_ids": ids}, labels


def products(trainer: Trainer, bf16: bool) -> Callable[[], None]:
    """The products of the linear layers and the head of one step, forward and backward, and nothing else."""
    shapes: list[tuple[int, int, int]] = []
    batch = trainer.next_batches()[0]
    handles = [
        part.register_forward_hook(
            lambda part, inputs, _: shapes.append((inputs[0].shape[0], inputs[0].shape[1], part.weight.shape[0]))
        )
        for part in trainer.module.modules()
        if isinstance(part, Linear)
    ]
    with torch.no_grad():
        batch.nats(trainer.module, 1 << 40, None)
    for handle in handles:
        handle.remove()
    vocab, width = trainer.module.spec.vocab, next(iter(trainer.module.spec.stacks.values())).width
    shapes.append((batch.trained, width, vocab))
    kind = torch.bfloat16 if bf16 else torch.float32
    each = {shape: [torch.randn(a, b).to(trainer.device, kind) for a, b in _sides(*shape)] for shape in set(shapes)}

    def run() -> None:
        for shape in shapes:
            x, weight, gradient = each[shape]
            torch.nn.functional.linear(x, weight)
            gradient @ weight
            gradient.mT @ x

    return run


def _sides(tokens: int, inputs: int, outputs: int) -> tuple[tuple[int, int], ...]:
    return (tokens, inputs), (outputs, inputs), (tokens, outputs)


def place(device: str) -> str:
    """What computes."""
    return f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"width": 384, "layers": 6, "heads": 6, "groups": 2, "length": 256, "rows": 8, "repeats": 15,
                          "vocab": 256, "equal": 0}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", choices=sorted(PEERS), default="gpt2")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa", help="the attention of transformers")
    parser.add_argument("--compile", action="store_true", help="compile our blocks")
    parser.add_argument("--compiled", action="store_true", help="transformers compiled as well")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--packed", metavar="MODEL", help="a GGUF file, over whose weights an adapter is trained")
    return parser.parse_args()


def timed(turns: dict[str, Callable[[int], object]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """The medians of the seconds of each, and of its seconds of processor time; a first turn is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in turns}
    processor: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(1, repeats + 2):
        for name, call in turns.items():
            began, used = time.perf_counter(), time.process_time()
            call(number)
            wall[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - used)
    middle = {name: statistics.median(seconds[1:]) for name, seconds in wall.items()}
    return middle, {name: statistics.median(seconds[1:]) for name, seconds in processor.items()}


def print_differences(losses: np.ndarray, names: Sequence[str]) -> None:
    """How far the losses [steps, 3] of three trainings are apart, two by two."""
    for a, b in ((0, 1), (0, 2), (1, 2)):
        largest = abs(losses[:, a] - losses[:, b]).max()
        last = abs(losses[-10:, a].mean() - losses[-10:, b].mean())
        print(f"{names[a]} and {names[b]}: largest difference {largest:.1e}, of the means of the last ten {last:.1e}")


def adapter_over_packed(options: argparse.Namespace) -> None:
    """A training step of an adapter beside a prefill of its tokens by the same model."""
    model, reader = triptych.load(options.packed), triptych.load(options.packed)
    assert model.module.has_packed_weights, f"{options.packed} has no packed weights"
    model.add_adapter(rank=8, alpha=16)
    texts = [file.read_text("utf-8") for file in sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))]
    data = CausalText.of([model.tokenizer.encode(text) for text in texts], options.length)
    trainer = ours(model.module, data, options)
    prompts = [row.ids.tolist() for row in data.draw(0, 0, options.rows)]
    wall, processor = timed(
        {"step": lambda number: trainer.step(), "prompts": lambda number: reader.generate(prompts, max_new_tokens=1)},
        options.repeats,
    )
    for name, seconds in wall.items():
        print(f"{name:8} {sum(map(len, prompts)) / seconds:8,.0f} tokens/s")
    print(
        f"an adapter's step runs at {wall['prompts'] / wall['step']:.2f} of the rate of prompts, of processor time "
        f"{processor['prompts'] / processor['step']:.2f}; {place('cpu')}, torch {torch.__version__}; "
        f"{native.describe()}"
    )


def main() -> None:
    options = arguments()
    if options.packed:
        adapter_over_packed(options)
        return
    hf = config(options.family, options)
    module = nn.new(read_config(hf), seed=1).to(options.device)
    data = data_of(options.family, options)
    trainer = ours(module, data, options)
    peers: dict[str, Callable[[int], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_directory(Path(folder) / "model", *to_checkpoint(module, hf))
        other = "eager" if options.attention == "sdpa" else "sdpa"
        wanted = {"transformers": options.attention}
        wanted |= {other: other} if options.equal else {"compiled": options.attention} if options.compiled else {}
        for name, attention in wanted.items():
            peer = PEERS[options.family].from_pretrained(Path(folder) / "model", attn_implementation=attention)
            peers[name] = theirs(peer.train().to(options.device), data, options, name == "compiled")
    first = trainer.step()[0], *(step(0) for step in peers.values())
    assert max(first) - min(first) < 2e-2, first
    if options.equal:
        steps = [(trainer.step()[0], *(step(n) for step in peers.values())) for n in range(1, options.equal)]
        print_differences(
            np.array(steps), ["triptych", *(f"transformers ({attention})" for attention in wanted.values())]
        )
        return
    bf16 = isinstance(autocast(options.precision, torch.device(options.device)), torch.autocast)
    alone = products(trainer, bf16)
    turns: dict[str, Callable[[int], object]] = {
        "triptych": lambda number: trainer.step(), **peers, "products alone": lambda number: alone(),
    }  # fmt: skip
    wall, processor = timed(turns, options.repeats)
    print(
        f"{options.family}, {sum(p.numel() for p in module.parameters()):,} parameters, "
        f"{options.rows} x {options.length} tokens, {'bf16 autocast' if bf16 else 'fp32'}"
        f"{', ours compiled' if options.compile else ''}, "
        f"{place(options.device)}, torch {torch.__version__}, transformers {transformers.__version__} "
        f"({options.attention}), python {platform.python_version()}, {platform.machine()}, median of {options.repeats}"
    )
    print(f"our C functions: {native.describe()}")
    tokens = options.rows * options.length
    for name in turns:
        print(
            f"{name:15} {tokens / wall[name]:8,.0f} tokens/s; its time over ours: {wall[name] / wall['triptych']:.2f}, "
            f"of processor time {processor[name] / processor['triptych']:.2f}"
        )


if __name__ == "__main__":
    main()
