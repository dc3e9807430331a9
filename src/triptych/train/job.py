"""A recipe made ready to run, run, and gone on with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from triptych import nn
from triptych.errors import ConfigError, TriptychError, nearest
from triptych.families import read_config
from triptych.spec import LMHead, MaskedLMHead
from triptych.text import (
    DECODER,
    ENCODER,
    SEQ2SEQ,
    Layout,
    Tokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
    from_directory,
    word_tokenizer,
)
from triptych.train import sources
from triptych.train.data import CausalText, Data, MaskedText, Pairs, check
from triptych.train.evaluate import HeldOut
from triptych.train.loop import Event, Progress, Trainer
from triptych.train.objectives import Hide
from triptych.train.optim import Optimizer
from triptych.train.recipe import Recipe, check_recipe
from triptych.train.state import Checkpoints, read_model, read_optimizer, read_progress

Name = Literal["causal", "masked", "seq2seq"]
_LAYOUT = {"causal": "decoder", "masked": "encoder", "seq2seq": "encoder-decoder"}
_FRAMES: dict[Name, Layout] = {"causal": DECODER, "masked": ENCODER, "seq2seq": SEQ2SEQ}


@dataclass(eq=False)
class Job:
    """Everything of one run.  `origin` is the checkpoint it was taken up from, `skipped` those passed over, and why."""

    recipe: Recipe
    trainer: Trainer
    tokenizer: Tokenizer
    hf: dict[str, Any]
    origin: Path | None = None
    skipped: tuple[str, ...] = ()

    def run(
        self,
        on_step: Callable[[Event], None] | None = None,
        on_sample: Callable[[Trainer], None] | None = None,
        until: int | None = None,
    ) -> None:
        """Train to the end, with checkpoints under `run.out` if it is given.

        Raises DivergedError for a loss that is not finite, CheckpointError when a checkpoint cannot be written.
        """
        trainer, out = self.trainer, self.recipe.run.out
        trainer.on_step, trainer.on_sample = on_step or trainer.on_step, on_sample or trainer.on_sample
        if out is not None:
            checkpoints = Checkpoints(out)
            if self.origin is None and checkpoints.exist():
                raise ConfigError(f"{out} already holds a run; resume it, or give another run.out")

            def save(trainer: Trainer) -> None:
                checkpoints.save(trainer, self.hf, self.tokenizer, self.recipe.model_dump())

            trainer.on_save = save
        trainer.run(until)


def prepare(recipe: Recipe) -> Job:
    """Texts, tokenizer, model and data of a recipe, checked, before the first step.

    Raises ConfigError where parts of the recipe do not fit together, TextError and InputError for the data.
    """
    train, held = _texts(recipe)
    if "path" in recipe.model:
        if recipe.model.keys() != {"path"}:
            raise ConfigError("model.path takes no other keys beside it; the directory's config.json has them")
        module, tokenizer, hf = read_model(Path(recipe.model["path"]))
        module = module.float()
    else:
        tokenizer = _tokenizer(recipe, train)
        hf = _completed(recipe.model, tokenizer, recipe.objective.name)
        module = nn.new(read_config(hf, where="model"), recipe.run.seed)
    return _job(recipe, module, tokenizer, hf, train, held, Progress())


def resume(out: Path | str, changes: Sequence[str] = ()) -> Job:
    """The run under `out` from its newest valid checkpoint, by the recipe it keeps, with `changes` made to it.

    With a budget of steps it goes on bit for bit as if it had never stopped; with one of seconds it has those left
    that it had not used.  Raises CheckpointError when no checkpoint is valid.
    """
    saved = Checkpoints(out).newest()
    progress, kept = read_progress(saved.path)
    recipe = check_recipe(kept, [*changes, f'run.out="{out}"'], str(saved.path))
    module, tokenizer, hf = read_model(saved.path)
    job = _job(recipe, module, tokenizer, hf, *_texts(recipe), progress)
    job.trainer.optimizer.restore(read_optimizer(saved.path))
    job.origin, job.skipped = saved.path, saved.skipped
    return job


def verify_resume(recipe: Recipe, steps: int) -> None:
    """Train `steps` steps at once, and half of them, a checkpoint, and the other half: the weights must be bit-equal.

    Raises TriptychError naming the first parameter that is not.
    """
    with tempfile.TemporaryDirectory() as out:
        settings = recipe.run.model_copy(update={"steps": steps, "seconds": None, "out": None})
        whole = prepare(recipe.model_copy(update={"run": settings}))
        whole.run()
        half = prepare(recipe.model_copy(update={"run": settings.model_copy(update={"out": out})}))
        half.run(until=steps // 2)
        Checkpoints(out).save(half.trainer, half.hf, half.tokenizer, half.recipe.model_dump())
        again = resume(out)
        again.run()
        for name, parameter in whole.trainer.module.named_parameters():
            if not torch.equal(parameter, again.trainer.module.get_parameter(name)):
                raise TriptychError(f"resumed after {steps // 2} of {steps} steps, {name} is not what it is unbroken")


def _job(
    recipe: Recipe,
    module: nn.Transformer,
    tokenizer: Tokenizer,
    hf: dict[str, Any],
    train: list[Any],
    held: list[Any],
    at: Progress,
) -> Job:
    _check_fit(recipe, module, tokenizer)
    module = module.to(recipe.run.device)
    hide = _hide(recipe, tokenizer, train) if recipe.objective.name == "masked" else None
    data, held_data = (_data(recipe, module, tokenizer, side, hide) for side in (train, held))
    seq2seq = recipe.objective.name == "seq2seq"
    check(data, tokenizer.eos_id, ends=seq2seq or (recipe.objective.name == "causal" and len(train) > 1))
    text = "".join(held) if recipe.objective.name == "causal" else None
    tokens = max(recipe.run.length, recipe.run.rows * recipe.run.length // recipe.run.accumulate)
    evaluation = HeldOut.of(held_data, data, tokens, text=text, device=recipe.run.device)
    optimizer = Optimizer(module, recipe.optimizer)
    return Job(recipe, Trainer(module, data, optimizer, recipe.schedule, recipe.run, evaluation, at), tokenizer, hf)


def _texts(recipe: Recipe) -> tuple[list[Any], list[Any]]:
    return sources.pairs(recipe.data) if recipe.objective.name == "seq2seq" else sources.texts(recipe.data)


def _tokenizer(recipe: Recipe, train: list[Any]) -> Tokenizer:
    """The tokenizer a recipe names, made from the training texts where it has to be."""
    seq2seq = recipe.objective.name == "seq2seq"
    name, _, size = (recipe.tokenizer or "").partition(":")
    layout = _FRAMES[recipe.objective.name]
    seen = [text for pair in train for text in pair] if seq2seq else train
    if name == "byte":
        return byte_tokenizer(layout)
    if name == "characters":
        return character_tokenizer("".join(seen), layout)
    if name in ("bpe", "words") and size.isdecimal():
        return (bpe_tokenizer if name == "bpe" else word_tokenizer)(seen, int(size), layout)
    if Path(recipe.tokenizer or "").is_dir():
        return from_directory(recipe.tokenizer or "")
    known = ("byte", "characters", "bpe:4096", "words:4096")
    raise ConfigError(
        f"tokenizer = {recipe.tokenizer!r} is not a directory and not one of {', '.join(known)}{nearest(name, known)}"
    )


def _completed(model: dict[str, Any], tokenizer: Tokenizer, objective: Name) -> dict[str, Any]:
    """The config with what the tokenizer knows, unless it says otherwise."""
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "decoder_start_token_id": tokenizer.pad_id if objective == "seq2seq" else None,
    }
    found = {"vocab_size": tokenizer.vocab_size} | {key: value for key, value in ids.items() if value is not None}
    return found | model


def _check_fit(recipe: Recipe, module: nn.Transformer, tokenizer: Tokenizer) -> None:
    spec, objective = module.spec, recipe.objective.name
    if spec.layout != _LAYOUT[objective]:
        raise ConfigError(
            f"objective {objective} needs the layout {_LAYOUT[objective]}; {spec.family} is of layout {spec.layout}"
        )
    head = MaskedLMHead if objective == "masked" else LMHead
    if not isinstance(spec.head, head):
        raise ConfigError(f"objective {objective} needs a {head.__name__}; name the class in model.architectures")
    if tokenizer.vocab_size > spec.vocab:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {spec.vocab}")
    if spec.context is not None and recipe.run.length > spec.context:
        raise ConfigError(f"run.length = {recipe.run.length} is more than the {spec.context} positions of the model")
    if objective == "masked" and tokenizer.mask_id is None:
        raise ConfigError("objective masked needs a tokenizer with a mask token")
    if objective == "seq2seq" and spec.ids.start is None:
        raise ConfigError("objective seq2seq needs model.decoder_start_token_id")


def _hide(recipe: Recipe, tokenizer: Tokenizer, train: list[str]) -> Hide:
    """What may be hidden: every token but the special ones, or the commonest of them."""
    assert tokenizer.mask_id is not None
    special = frozenset(i for i in vars(tokenizer).values() if isinstance(i, int))
    if recipe.objective.commonest is not None:
        counts = sum(np.bincount(tokenizer.encode_corpus(text), minlength=tokenizer.vocab_size) for text in train)
        order = [int(i) for i in np.argsort(-np.asarray(counts), kind="stable") if int(i) not in special]
        special |= frozenset(order[recipe.objective.commonest :])
    return Hide(tokenizer.mask_id, tokenizer.vocab_size, special, recipe.objective.rate)


def _data(recipe: Recipe, module: nn.Transformer, tokenizer: Tokenizer, items: list[Any], hide: Hide | None) -> Data:
    """Rows for the objective from documents, or pairs of texts."""
    length, start = recipe.run.length, module.spec.ids.start
    if recipe.objective.name == "seq2seq":
        assert start is not None
        rows = [(tokenizer.encode(source), tokenizer.encode(target)) for source, target in items]
        if recipe.data.drop_longer:
            rows = [row for row in rows if max(map(len, row)) <= length]
        return Pairs.of(rows, start, length)
    documents = [tokenizer.encode_corpus(document).tolist() for document in items]
    if hide is not None:
        frame = [[i for i in (side,) if i is not None] for side in (tokenizer.cls_id, tokenizer.sep_id)]
        return MaskedText.of(documents, length, hide, *frame)
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    frame = [[i for i in (side,) if i is not None] for side in (begin, tokenizer.eos_id)]
    return CausalText.of([[*frame[0], *document, *frame[1]] for document in documents], length)
