"""This library beside transformers on one GPU, in one run: `python bench/gpu.py`.

Random weights in the shapes of SmolLM2-135M and of a 1.1B Llama, in bf16, made on the GPU; the peer gets the same
numbers.  Measured are greedy decoding of one request after 8 and after 512 tokens and of 8 requests at once, prompts of
512 and 4,096 tokens, and vectors of 512 ragged sentences in the shape of MiniLM.  Our steps run as modules, as CUDA
graphs (`static`) and compiled; transformers runs eagerly with its growing cache, and with `--compile` also with its
static cache under `torch.compile(mode="reduce-overhead")`.  `bench/train.py --device cuda` measures training.

Figures are medians of `--repeat` runs, in which the sides take turns; every run ends with a synchronization.  The limit
of decoding is the bandwidth measured in the same run over the bytes that a step reads.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers
from triptych_peers.on_torch import by_length

import triptych
from triptych import nn
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.families import read_config
from triptych.generate import Engine, Executor, Request
from triptych.measure.jobs import ids
from triptych.measure.limits import Costs, measure_rates, step_bytes
from triptych.model import Model

CONTEXT, VOCAB = 8192, 49152
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True, "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": None,
         "rope_theta": 10000.0, "hidden_act": "silu"}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                             "num_attention_heads": 9, "num_key_value_heads": 3},
    "Llama-1.1B": LLAMA | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                           "num_attention_heads": 32, "num_key_value_heads": 4},
}  # fmt: skip
MINILM = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30522, "hidden_size": 384,
          "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 512,
          "type_vocab_size": 2}  # fmt: skip
Call = Callable[[], object]


@dataclass
class Job:
    """What several sides do: `amount` things of a unit a run.  A side is what comes before the clock, and what is
    timed."""

    name: str
    amount: int
    unit: str
    sides: dict[str, tuple[Call, Call]]
    limit: float | None = None

    def run(self, repeat: int) -> str:
        """Every side once without its time, then `repeat` rounds -> a line of the table."""
        seconds: dict[str, list[float]] = {}
        for name in list(self.sides):
            try:
                first = self.once(name)
            except Exception as error:  # of a peer or of a compiler: the others go on
                print(f"{self.name}: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                del self.sides[name]
                continue
            if first > 5:
                print(f"{self.name}: {name}: {first:.0f} s for the first run", flush=True)
        for turn in range(repeat):
            for name in self.sides if turn % 2 == 0 else reversed(self.sides):
                seconds.setdefault(name, []).append(self.once(name))
        speeds = {name: self.amount / statistics.median(times) for name, times in seconds.items()}
        theirs = [speed for name, speed in speeds.items() if name.startswith("transformers")]
        ours = max(speed for name, speed in speeds.items() if not name.startswith("transformers"))
        cells = [f"{speeds[name]:,.0f}" if name in speeds else "" for name in SIDES]
        cells.append(f"{ours / max(theirs):.1f}" if theirs else "")
        cells.append("" if self.limit is None else f"{ours / self.limit:.0%}")
        limit = "" if self.limit is None else f"{self.limit:,.0f}"
        return f"| {self.name}, {self.unit} | {limit} | {' | '.join(cells)} |"

    def once(self, name: str) -> float:
        """The seconds of one run of a side."""
        before, timed = self.sides[name]
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        timed()
        torch.cuda.synchronize()
        return time.perf_counter() - begin


SIDES = ("modules", "static", "compiled", "transformers", "transformers compiled")
HEADER = f"| work | limit | {' | '.join(SIDES)} | ours / theirs | of the limit |\n| --- |{' ---: |' * (len(SIDES) + 3)}"


# -- decoders ---------------------------------------------------------------------------------------------------------


def decoder(hf: dict[str, Any]) -> tuple[Model, Any]:
    """Ours and theirs, with the same numbers."""
    module = nn.new(read_config(hf), seed=0, dtype=torch.bfloat16).cuda()
    module.requires_grad_(False)
    config = transformers.LlamaConfig(**{key: value for key, value in hf.items() if key != "architectures"})
    with torch.device("cuda"):
        peer = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    stored, _ = to_checkpoint(module, hf)
    missing, unexpected = peer.load_state_dict(dict(stored), strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in name or "inv_freq" in name for name in missing), missing
    model = Model(module, None, hf)
    _compare(model, peer)
    return model, peer


def _compare(model: Model, peer: Any) -> None:
    """Both must say nearly the same before anything is timed."""
    row = ids(VOCAB, 64)
    with torch.inference_mode():
        ours = model.logits([row])[0].float().log_softmax(-1)
        theirs = peer(torch.tensor([row], device="cuda")).logits[0].float().log_softmax(-1)
    gap = float((ours - theirs).abs().max())
    print(f"largest difference of log-probabilities to transformers, bf16: {gap:.3f}", flush=True)
    assert gap < 0.5, gap


class Ours:
    """An engine that keeps its cache, and so its graphs, from run to run."""

    def __init__(self, model: Model, executor: Executor, rows: int, length: int) -> None:
        self.engine = Engine(model.module, executor=executor)
        cache = self.engine.cache
        cache.free(cache.add(rows))
        cache.ensure_capacity(length)

    def start(self, prompts: Sequence[list[int]], new: int) -> None:
        self.engine.free(self.engine.rows)
        live = self.engine.add(*(Request(prompt=p, max_new_tokens=new + 2, number=i) for i, p in enumerate(prompts)))
        while not all(row.new for row in live):
            self.engine.step()

    def decode(self, new: int) -> None:
        for _ in range(new):
            self.engine.guard.only_own_code = True
            self.engine.step()


class Theirs:
    """The model's forward with its cache, one token a call; the chosen ids reach the host at every step, as ours do."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    @torch.inference_mode()
    def start(self, prompts: Sequence[list[int]], new: int) -> None:
        out = self.peer(torch.tensor(prompts, device="cuda"), use_cache=True, logits_to_keep=1)
        self.past, self.chosen = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def decode(self, new: int) -> None:
        for _ in range(new):
            out = self.peer(self.chosen, past_key_values=self.past, use_cache=True, logits_to_keep=1)
            self.past, self.chosen = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            self.chosen.tolist()


class TheirsCompiled(Theirs):
    """The same with their static cache, the step compiled and replayed as a CUDA graph."""

    def __init__(self, peer: Any, length: int) -> None:
        super().__init__(peer)
        self.past = transformers.StaticCache(config=peer.config, max_cache_len=length)
        self.step = torch.compile(self._step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def _step(self, chosen: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        out = self.peer(
            chosen, past_key_values=self.past, use_cache=True, position_ids=at[None], cache_position=at,
            logits_to_keep=1,
        )  # fmt: skip
        return out.logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def start(self, prompts: Sequence[list[int]], new: int) -> None:
        self.past.reset()
        self.at = torch.arange(len(prompts[0]), device="cuda")
        self.chosen = self._step(torch.tensor(prompts, device="cuda"), self.at)

    @torch.inference_mode()
    def decode(self, new: int) -> None:
        at = self.at[-1:]
        for _ in range(new):
            at = at + 1
            torch.compiler.cudagraph_mark_step_begin()
            self.chosen = self.step(self.chosen.clone(), at)
            self.chosen.tolist()


def decoding(name: str, model: Model, peer: Any, options: argparse.Namespace, read: float) -> Iterator[Job]:
    """One request after 8 and after 512 tokens, and several at once: the time of the tokens without the prompt."""
    for rows, context, new in ((1, 8, 48), (1, 512, 64), (8, 8, 48)):
        prompts, length = [ids(VOCAB, context, seed) for seed in range(rows)], 64 if context == 8 else 1024
        made: dict[str, Any] = {
            executor: Ours(model, executor, rows, length)
            for executor in ("modules", "static", *(("compiled",) if options.compile else ()))
        }
        made["transformers"] = Theirs(peer)
        if options.compile:
            made["transformers compiled"] = TheirsCompiled(peer, length)
        bound = Costs(step_bytes(model.module), 2)
        keys = sum(store.place_bytes for store in made["modules"].engine.cache.stores)
        limit = rows * read / (bound.step + rows * keys * (context + new / 2))
        label = f"{name}, decode at {context}" if rows == 1 else f"{name}, {rows} requests at once"
        sides = {
            name: (partial(side.start, prompts, new), partial(side.decode, new)) for name, side in made.items()
        }  # fmt: skip
        yield Job(label, rows * new, "tokens/s", sides, limit)


def prompts(name: str, model: Model, peer: Any) -> Iterator[Job]:
    """Reading a prompt to its first token."""
    for length in (512, 4096):
        row = [ids(VOCAB, length)]
        ours, theirs = Ours(model, "modules", 1, CONTEXT), Theirs(peer)
        sides = {
            "modules": (nothing, partial(ours.start, row, 1)),
            "transformers": (nothing, partial(theirs.start, row, 1)),
        }
        yield Job(f"{name}, prompt of {length}", length, "tokens/s", sides)


def nothing() -> None:
    """A job without preparation."""


# -- sentences --------------------------------------------------------------------------------------------------------


def sentences(dtype: torch.dtype) -> Job:
    """512 ragged rows of ids to unit vectors: theirs sorted by length in padded batches of 32."""
    module = nn.new(read_config(MINILM), seed=0, dtype=dtype).cuda()
    model = Model(module, None, MINILM)
    config = transformers.BertConfig(**{key: value for key, value in MINILM.items() if key != "architectures"})
    peer: Any = transformers.BertModel(config).to("cuda", dtype).eval()
    stored, _ = to_checkpoint(module, MINILM)
    _, unexpected = peer.load_state_dict(dict(stored), strict=False)
    assert not unexpected, unexpected
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(18), 0.7, 512).round().astype(int), 4, 200)
    rows = [ids(30522, int(n), seed) for seed, n in enumerate(lengths)]

    def ours() -> torch.Tensor:
        return model.encode(rows, pooling="mean", normalize=True, batch_tokens=1 << 14).float().cpu()

    @torch.inference_mode()
    def theirs() -> torch.Tensor:
        out = torch.empty(len(rows), 384)
        for group in by_length(rows):
            longest = max(len(rows[i]) for i in group)
            inputs = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in group], device="cuda")
            mask = torch.tensor([[1] * len(rows[i]) + [0] * (longest - len(rows[i])) for i in group], device="cuda")
            hidden = peer(input_ids=inputs, attention_mask=mask).last_hidden_state.float()
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            out[group] = torch.nn.functional.normalize(pooled).cpu()
        return out

    cosine = float((ours() * theirs()).sum(-1).min())
    print(f"sentences in {dtype}: least cosine to transformers {cosine:.5f}, {lengths.mean():.0f} tokens on average")
    name = f"MiniLM, 512 sentences, {str(dtype).removeprefix('torch.')}"
    return Job(name, len(rows), "sentences/s", {"modules": (nothing, ours), "transformers": (nothing, theirs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, with commas between them")
    parser.add_argument("--jobs", default="", help="those alone whose name contains this, such as 'requests'")
    parser.add_argument("--compile", action="store_true", help="also the compiled sides; minutes for each shape")
    options = parser.parse_args()
    torch.manual_seed(0)
    rates = measure_rates("cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, triptych "
        f"{triptych.__version__}; reads {rates.read / 1e9:,.0f} GB/s, bf16 matmuls {rates.bf16 / 1e12:,.0f} TFLOP/s; "
        f"medians of {options.repeat}",
        flush=True,
    )
    lines = [HEADER]
    for name in options.shapes.split(","):
        model, peer = decoder(SHAPES[name])
        for job in chain(decoding(name, model, peer, options, rates.read), prompts(name, model, peer)):
            if options.jobs in job.name:
                lines.append(job.run(options.repeat))
                print(lines[-1], flush=True)
        del model, peer, job
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    for dtype in (torch.bfloat16, torch.float32) if options.jobs in "sentences" else ():
        lines.append(sentences(dtype).run(options.repeat))
        print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
