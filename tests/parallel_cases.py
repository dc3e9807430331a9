"""The cases that processes of `parallel_processes` run, and one process alone for comparison (`ALONE`)."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from triptych import nn
from triptych.checkpoints.adapters import AdapterSettings, add_adapter
from triptych.errors import TriptychError
from triptych.families import read_config
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
    prepare,
    resume,
    seq2seq,
    teacher_store,
)
from triptych.train.objectives import TokenMasking
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
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "bert": BERT, "t5": T5}


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
