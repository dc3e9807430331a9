"""The cases that processes of `parallel_processes` run, and one process alone for comparison (`ALONE`)."""

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from live_bytes import LiveBytes
from recorded_collectives import RecordedCollectives
from triptych import nn
from triptych.checkpoints import open_source, write_directory
from triptych.checkpoints.adapters import AdapterSettings, add_adapter
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.errors import TriptychError
from triptych.families import read_config
from triptych.nn.packed_weight import own_part
from triptych.train import (
    Checkpoints,
    Example,
    Optimizer,
    OptimizerSettings,
    RunSettings,
    Schedule,
    Trainer,
    causal,
    check_recipe,
    checkpoint_content,
    prepare,
    resume,
    seq2seq,
    teacher_store,
)
from triptych.train.base_model import unfilled
from triptych.train.objectives import TokenMasking, TrainingBatch
from triptych.train.parallel.mesh import MeshRanks
from triptych.train.parallel.settings import ParallelSettings
from triptych.train.parallel.start import check_agreement
from triptych.train.preference import PreferenceLoss, PreferencePair
from triptych.train.ranks import Ranks, SharedError

V = 44
SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V,
    "max_position_embeddings": 64,
}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "model_type": "gpt2", "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": V,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
LLAMA = SIZES | {"model_type": "llama", "num_key_value_heads": 2}
MIXTRAL = SIZES | {
    "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip
BERT = SIZES | QUIET | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
T5 = {
    "model_type": "t5", "d_model": 24, "d_ff": 40, "d_kv": 6, "num_heads": 4, "num_layers": 2, "vocab_size": V,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 6}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 64}
CONFIGS = {"qwen3": QWEN3, "gemma2": GEMMA2, "gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "bert": BERT, "t5": T5}


@cache
def ranks_of(mesh: tuple[int, int, int]) -> MeshRanks:
    replicate, shard, tensor = mesh
    settings = ParallelSettings(replicate=replicate, shard=shard, tensor=tensor)
    return MeshRanks(settings, torch.device("cpu"), clocked=False)


@dataclass(frozen=True, eq=False)
class FixedRows:
    """Data that give the same number of rows in each step, other ones in each."""

    examples: Sequence[Example]

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return [self.examples[(step * rows + i) % len(self.examples)] for i in range(rows)]

    def held_out_rows(self) -> Iterator[Example]:
        return iter(self.examples)

    def targets(self) -> Any:
        return np.concatenate([one.targets for one in self.examples])


def rows_of(kind: str, lengths: Sequence[int], untrained: Sequence[int] = ()) -> list[Example]:
    """Rows of these lengths for a model of `kind`; those numbered in `untrained` have no trained token."""
    random = np.random.default_rng(7)
    masking = TokenMasking(mask=4, vocab=V, special=frozenset(range(5)), rate=0.3)

    def row(length: int) -> Example:
        ids = random.integers(5, V, length + 1, dtype=np.int32)
        if kind == "t5":
            return seq2seq(ids, ids[::-1][: length // 2 + 1], 0)
        return masking(ids, random) if kind == "bert" else causal(ids)

    rows = [row(length) for length in lengths]
    return [replace(one, trained=np.zeros_like(one.trained)) if i in untrained else one for i, one in enumerate(rows)]


def module_of(
    kind: str, dtype: torch.dtype = torch.float64, noise: float = 0.1, changes: dict[str, Any] | None = None
) -> nn.Transformer:
    module = nn.new(read_config(CONFIGS[kind] | (changes or {})), 3)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():  # no gradient is small because a weight is
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=noise)
    return module.to(dtype).train()


def whole(tensor: Tensor) -> np.ndarray:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().numpy().copy()


def trainer_of(ranks: Ranks, module: nn.Transformer, examples: Sequence[Example], **options: Any) -> Trainer:
    ranks.distribute(module)
    settings = OptimizerSettings(**{"name": "adamw", "lr": 0.01, "clip": 0.5} | options.pop("optimizer", {}))
    run = RunSettings(**{"steps": 3, "rows": len(examples), "length": 64, "precision": "fp32"} | options)
    return Trainer(
        module, FixedRows(examples), Optimizer(module, settings, ranks), Schedule(warmup=0.0), run, ranks=ranks
    )


def first_step(trainer: Trainer) -> dict[str, Any]:
    """Loss, norm and gradients of the first step, before they are clipped, and the weights after it."""
    seen: dict[str, Any] = {}
    clip = trainer.optimizer.clip

    def capture() -> float:
        for name, parameter in trainer.optimizer.parameters.items():
            if parameter.grad is not None:
                seen[name] = whole(parameter.grad)
        return clip()

    trainer.optimizer.clip = capture  # type: ignore[method-assign]
    loss, norm, _ = trainer.step()
    weights = {name: whole(p) for name, p in trainer.optimizer.parameters.items()}
    return {"loss": loss, "norm": norm, "gradients": seen, "weights": weights}


def gradients(
    ranks: Ranks, kind: str, lengths: Sequence[int], untrained: Sequence[int] = (), dtype: str = "float64",
    changes: dict[str, Any] | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    module = module_of(kind, getattr(torch, dtype), changes=changes)
    return first_step(trainer_of(ranks, module, rows_of(kind, lengths, untrained), **options))


def gradients_in_parts(ranks: Ranks, kind: str, lengths: Sequence[int], **options: Any) -> dict[str, Any]:
    """`gradients`, with the logits of three tokens in memory at a time."""
    nats = TrainingBatch.nats
    few = patch.object(TrainingBatch, "nats", lambda batch, module, _, random: nats(batch, module, 3 * V, random))
    with few:
        return gradients(ranks, kind, lengths, **options)


def losses(ranks: Ranks, kind: str, lengths: Sequence[int], steps: int, rows: int, **options: Any) -> list[float]:
    """The losses of so many steps in fp32."""
    examples = rows_of(kind, lengths)
    module = module_of(kind, torch.float32, noise=0.0)
    trainer = trainer_of(ranks, module, examples, **options | {"rows": rows, "steps": steps})
    return [trainer.step()[0] for _ in range(steps)]


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of named tensors over the largest number of the second."""
    assert one.keys() == other.keys()
    scale = max(float(np.abs(value).max()) for value in other.values())
    return max(float(np.abs(one[name] - value).max()) for name, value in other.items()) / scale


def of_rows(ranks: Ranks, pickled: bytes, dtype: str) -> dict[str, Any]:
    """The first step of a module on rows.  It comes pickled, for the reference library, which made it, waits for the
    other processes where there is a process group."""
    module, examples = pickle.loads(pickled)
    module = module.to(getattr(torch, dtype)).train().requires_grad_(True)
    return first_step(trainer_of(ranks, module, examples))


def with_own_weights(ranks: MeshRanks, **arguments: Any) -> dict[str, Any]:
    """`gradients` with losses divided by the rank's own tokens: wrong wherever ranks have unequal numbers of them."""
    before = MeshRanks.sums
    MeshRanks.sums = lambda self, *values: tuple(values)  # type: ignore[method-assign]
    try:
        return gradients(ranks, **arguments)
    finally:
        MeshRanks.sums = before  # type: ignore[method-assign]


def adapter_gradients(
    ranks: Ranks, kind: str, lengths: Sequence[int], *, dora: bool = False, pairs: bool = False, **options: Any
) -> dict[str, Any]:
    """The first step of an adapter whose `up` is not 0; with `pairs` each row is preferred to its own beginning."""
    module = module_of(kind)
    add_adapter(module, AdapterSettings(3, 5.0, "all-linear", 0.0, 1, dora))
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    rows, off = rows_of(kind, lengths), PreferenceLoss(0.5)
    if pairs:
        halves = [
            Example(*(each[: -(-len(one.ids) // 2)] for each in (one.ids, one.targets, one.trained))) for one in rows
        ]
        rows = [
            PreferencePair(one.ids, one.targets, one.trained, rejected=half, loss=off)
            for one, half in zip(rows, halves, strict=True)
        ]
    return first_step(trainer_of(ranks, module.double(), rows, **options))


def rows_read(ranks: Ranks, kind: str, lengths: Sequence[int], accumulate: int) -> list[list[int]]:
    """The numbers of the rows that all processes read in two steps, by micro-batch."""
    trainer = trainer_of(ranks, module_of(kind), rows_of(kind, lengths), accumulate=accumulate)
    read = []
    for _ in range(2):
        for batch in trainer.next_batches():
            texts = ranks.texts(" ".join(map(str, batch.ids.tolist())))
            read.append([int(token) for text in dict.fromkeys(texts) for token in text.split()])
        trainer.at.step += 1
    return read


def disagreement(ranks: Ranks, recipe: dict[str, Any], facts: dict[str, Any], rank: int) -> str:
    """The error where `rank` has another recipe or other facts."""
    if ranks.index == rank:
        recipe, facts = recipe | {"run": {"seed": 1}}, facts
    try:
        check_agreement(ranks, recipe, facts)
    except SharedError as error:
        return str(error)
    return ""


Case = Callable[..., Any]
ALONE = Ranks()
EXACT = Ranks()  # as with a table parallel of one process
EXACT.exact_muon = True


def tables(data: str, out: str | None, mesh: tuple[int, int, int] | None, **changes: Any) -> dict[str, Any]:
    """A recipe of a small decoder on the text in the file `data`."""
    model = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    run = {"rows": 4, "length": 24, "steps": 6, "precision": "fp32", "save_every": 0.34, "evaluate_every": 0.5}
    recipe: dict[str, Any] = {
        "model": model, "tokenizer": "byte", "data": {"path": data}, "objective": {"name": "causal"},
        "run": run | ({} if out is None else {"out": out}), "optimizer": {"lr": 0.003, "muon_lr": 0.003},
    }  # fmt: skip
    for key, value in changes.items():
        recipe[key] = recipe.get(key, {}) | value
    if mesh is not None:
        recipe["parallel"] = dict(zip(("replicate", "shard", "tensor"), mesh, strict=True))
    return recipe


def trained(
    ranks: Ranks, recipe: dict[str, Any], until: int | None = None, resumed: bool = False
) -> tuple[dict[str, np.ndarray], list[float]]:
    """The weights and losses of a run of `recipe` after step `until`, or to its end.

    One that is resumed has the recipe of its checkpoint, but for the table `parallel`.
    """
    out, mesh = recipe["run"].get("out"), recipe.get("parallel", {})
    if resumed:
        job = resume(out, [f"parallel.{name}={mesh.get(name, 1)}" for name in ("replicate", "shard", "tensor")])
    else:
        job = prepare(check_recipe(recipe))
    job.run(until=until)
    if until is not None and out is not None:
        Checkpoints(out).save(job.trainer, job.hf, job.words, job.recipe.model_dump(), job.files)
    weights = {name: whole(p) for name, p in job.trainer.optimizer.parameters.items()}
    return weights, [record.loss for record in job.trainer.at.history]


def taught(ranks: Ranks, recipe: dict[str, Any]) -> tuple[dict[str, np.ndarray], list[float]]:
    """`trained` with a teacher whose store has many parts, of which each process writes some."""
    before, teacher_store.PART = teacher_store.PART, 100
    try:
        return trained(ranks, recipe)
    finally:
        teacher_store.PART = before


def errors_of(ranks: Ranks, recipe: dict[str, Any]) -> list[str]:
    """The error of each process where a recipe is prepared and run."""
    text = ""
    try:
        prepare(check_recipe(recipe)).run()
    except TriptychError as error:
        text = f"{type(error).__name__}: {error}"
    return ranks.texts(text)


# ---------------------------------------------------------------- weights that no process has whole


def wide(kind: str) -> dict[str, Any]:
    """A config whose weights are many times the largest of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
    gpt2 = {"n_embd": 64, "n_layer": 8}
    t5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 4}
    return CONFIGS[kind] | {"gpt2": gpt2, "t5": t5}.get(kind, sizes)


def saved_weights(path: str, kind: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The weights of a new model, which is also written to the directory `path`."""
    module = nn.new(read_config(wide(kind)), 3)
    write_directory(path, *to_checkpoint(module.to(getattr(torch, dtype)), wide(kind)))
    return {name: whole(parameter) for name, parameter in module.float().named_parameters()}


def distributed(ranks: Ranks, kind: str, path: str | None, *, at_once: bool = False) -> dict[str, Any]:
    """The weights of a new model, or of that at `path`, divided among processes; and in bytes the most that this
    process had of tensors meanwhile, its parts, and the largest weight.  With `at_once` they were whole before."""
    with LiveBytes() as live:
        if path is None:
            module = nn.empty(read_config(wide(kind)))
            weights: nn.NamedWeights | None = nn.initial_weights(module.spec, 3)
        else:
            header = read_header(path)
            module, weights = unfilled(header.spec, open_source(path))
        if at_once:
            assert weights is not None
            module, weights = nn.fill(module, weights), None
        ranks.distribute(module, weights)
    parts = sum(own_part(parameter).nbytes for parameter in module.parameters())
    largest = max(parameter.nbytes for parameter in module.parameters())
    named = {name: whole(parameter) for name, parameter in module.named_parameters()}
    texts = ranks.texts(str(live.most))
    return {"weights": named, "most": max(map(int, texts)), "parts": parts, "largest": largest}


def written(ranks: Ranks, kind: str, path: str, *, at_once: bool = False) -> dict[str, Any]:
    """A checkpoint in `path` of a model after one step; and in bytes the most that this process had of tensors beside
    its parts meanwhile, and the largest weight.  With `at_once` the weights were gathered first."""
    trainer = trainer_of(ranks, nn.new(read_config(wide(kind)), 3), rows_of(kind, [5, 7]), optimizer={"name": "adamw"})
    trainer.step()
    trainer.at.step = 1
    parts = [own_part(parameter).detach() for parameter in trainer.module.parameters()]
    with LiveBytes([*parts, *trainer.optimizer.state().values()]) as live:
        if at_once:
            trainer.module.whole()
        Checkpoints(path).save(trainer, wide(kind), None, {})
    named = {name: whole(parameter) for name, parameter in trainer.module.named_parameters()}
    largest = max(parameter.nbytes for parameter in trainer.module.parameters())
    return {"weights": named, "most": max(map(int, ranks.texts(str(live.most)))), "largest": largest}


def stopped(ranks: Ranks, recipe: dict[str, Any], until: int) -> None:
    """Run to step `until`, without another checkpoint than those of the run."""
    prepare(check_recipe(recipe)).run(until=until)


def errors_of_full_disk(ranks: Ranks, recipe: dict[str, Any], at: int) -> list[str]:
    """`errors_of` a run whose first process cannot write the checkpoint of step `at`."""
    write = checkpoint_content.write_directory

    def refused(path: Any, *arguments: Any) -> None:
        write(path, *arguments)
        if f"step-{at:08}" in str(path):
            raise OSError(28, "no space left")

    checkpoint_content.write_directory = refused
    try:
        return errors_of(ranks, recipe)
    finally:
        checkpoint_content.write_directory = write


def cost(
    ranks: Ranks, kind: str, rows: int, length: int, changes: dict[str, Any] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Of each rank: the bytes of its parameters, gradients and optimizer state, and those that it sends in its second
    step, on rows of `length` tokens."""
    module = module_of(kind, torch.float32, changes=changes)
    examples = [causal(np.arange(i, i + length + 1, dtype=np.int32) % V) for i in range(rows)]
    if kind == "t5":
        examples = [seq2seq(one.targets[: length // 2], one.ids, 0) for one in examples]
    with patch("triptych.train.precision.has_bf16", lambda _: True):  # where it is not, it is emulated
        trainer = trainer_of(ranks, module, examples, **options)
        trainer.step()
    gradients: list[Tensor] = []
    clip = trainer.optimizer.clip

    def capture() -> float:
        gradients.extend(p.grad for p in trainer.optimizer.parameters.values() if p.grad is not None)
        return clip()

    trainer.optimizer.clip = capture  # type: ignore[method-assign]
    with RecordedCollectives() as recorded, patch("triptych.train.precision.has_bf16", lambda _: True):
        trainer.step()
    local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    own = {
        "weights": sum(ranks.local(p).nbytes for p in module.parameters()),
        "gradients": sum(one.nbytes for one in local),
        "optimizer_state": sum(one.nbytes for one in trainer.optimizer.state().values() if one.dim()),
        "sent": {f"{kind} {n}": number for (kind, n), number in recorded.sent.items() if number},
    }
    return [json.loads(text) for text in ranks.texts(json.dumps(own))]
