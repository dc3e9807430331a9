"""A recipe prepared as a job, run, and resumed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triptych import nn
from triptych.errors import CheckpointError, ConfigError, InputError, TriptychError, nearest
from triptych.families import read_config
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec
from triptych.text import (
    DECODER,
    ENCODER,
    SEQ2SEQ,
    SpecialsLayout,
    Tokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
    from_directory,
    word_tokenizer,
)
from triptych.train import sources
from triptych.train.adapters import with_new_adapter, with_saved_adapter
from triptych.train.base_model import Base, BaseSettings, read_base
from triptych.train.checkpoints import Checkpoints, read_files, read_model, read_optimizer, read_progress
from triptych.train.data import CausalText, Data, MaskedText, Pairs, check
from triptych.train.disk_space import DiskSpace
from triptych.train.evaluate import HeldOut
from triptych.train.loop import Event, Progress, Trainer
from triptych.train.objectives import TokenMasking
from triptych.train.optim import Optimizer
from triptych.train.recipe import Objective, Recipe, check_recipe
from triptych.train.run_lock import RunLock
from triptych.train.sources import Pair
from triptych.train.stop import Interrupted, on_signal
from triptych.train.task import ObjectiveTask
from triptych.train.tasks import read_task
from triptych.train.translations import with_translations

PROMPT_TOKENS = 16  # of a sample that an existing model writes
Text = str | Pair  # a document, or source and target
_LAYOUT: dict[Objective, str] = {
    "causal": "decoder", "chat": "decoder", "seq2seq": "encoder-decoder", "corruption": "encoder-decoder",
    "masked": "encoder", "labels": "encoder", "tags": "encoder", "spans": "encoder", "contrastive": "encoder",
    "replaced": "encoder",
}  # fmt: skip
_SPECIAL_TOKENS: dict[str, SpecialsLayout] = {"decoder": DECODER, "encoder": ENCODER, "encoder-decoder": SEQ2SEQ}


@dataclass(eq=False)
class Job:
    """Everything of one run.  `files` are what its checkpoints hold beside weights, config and tokenizer, `origin` the
    checkpoint it was resumed from, `skipped` the newer ones that are not valid, with the reason, and `lock` the lock on
    `run.out`, which a resumed job holds until it has run."""

    recipe: Recipe
    trainer: Trainer
    tokenizer: Tokenizer
    hf: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    origin: Path | None = None
    skipped: tuple[str, ...] = ()
    lock: RunLock | None = field(default=None, repr=False)

    @property
    def model(self) -> Path | None:
        """The directory of the finished model, or of the newest one of a run that goes on; None without `run.out`."""
        return None if self.recipe.run.out is None else Checkpoints(self.recipe.run.out).model

    @property
    def sample_prompt(self) -> list[int]:
        """What a decoder writes on from, to be judged during the run: BOS (else EOS) with a new model, the first tokens
        of the held-out data with an existing one."""
        first = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if self.recipe.base is None or self.trainer.held is None:
            return _ids(first)
        batch = self.trainer.held.batches[0]
        count = min(PROMPT_TOKENS, max(1, batch.rows.lengths[0] // 2))
        return [int(i) for i in batch.ids[:count]]

    def run(
        self,
        on_step: Callable[[Event], None] | None = None,
        on_sample: Callable[[Trainer], None] | None = None,
        until: int | None = None,
        on_note: Callable[[str], None] | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Train to the end of the budget, or to step `until`, with checkpoints under `run.out` if it is set.

        With `run.out`, the first SIGINT (Ctrl-C) or SIGTERM finishes the present step, saves a checkpoint and raises
        Interrupted, a KeyboardInterrupt.  A run that begins deletes the checkpoints of another one in `run.out` with
        `force`, before it writes its first; without it, that is a ConfigError.

        Raises DivergedError for a loss that is not finite, CheckpointError when a checkpoint cannot be written,
        ConfigError when another process uses `run.out`.
        """
        trainer, out = self.trainer, self.recipe.run.out
        trainer.on_step, trainer.on_sample = on_step or trainer.on_step, on_sample or trainer.on_sample
        trainer.on_note = on_note or trainer.on_note
        if out is None:
            trainer.run(until)
            return
        self.lock = self.lock or RunLock(_created(Path(out)))
        with self.lock:
            checkpoints = Checkpoints(out)
            self._check_directory(checkpoints, force)

            def save(trainer: Trainer) -> None:
                checkpoints.save(trainer, self.hf, self.tokenizer, self.recipe.model_dump(), self.files)

            trainer.on_save = save
            with on_signal(trainer.stop) as received:
                trainer.run(until)
                if received.number is not None:
                    save(trainer)
            if received.number is not None:
                raise Interrupted(received.number, trainer.at.step, Path(out))

    def _check_directory(self, checkpoints: Checkpoints, force: bool) -> None:
        """Raises ConfigError if the directory holds another run, which `force` deletes, or this one further on, and
        CheckpointError if its disk cannot hold the checkpoints, whose size is a note."""
        out, step = checkpoints.directory, self.trainer.at.step
        if Checkpoints(out / "checkpoints").exist():
            raise ConfigError(f"{out} holds a run of `triptych quickstart`; give another --out")
        begins = self.origin is None and step == 0
        if begins and checkpoints.exist() and not force:
            raise ConfigError(
                f"{out} already holds a run; continue it with --resume, delete it and start over with --force, or "
                "give another --out"
            )
        if begins and checkpoints.model.exists() and not checkpoints.exist():
            raise ConfigError(f"{checkpoints.model} is not of a run, which would replace it; give another --out")
        space = DiskSpace.of(self.trainer, out, checkpoints.keep, checkpoints.nbytes)
        space.check()
        self.trainer.on_note(str(space))
        if begins and checkpoints.exist():
            checkpoints.remove()
        later = checkpoints.later(step)
        if later is not None:
            raise ConfigError(f"{out} has a checkpoint of step {later}, this run is at step {step}; resume it again")


def prepare(recipe: Recipe) -> Job:
    """Texts, tokenizer, model and data of a recipe, checked, before the first step.

    Raises ConfigError where parts of the recipe do not fit together, TextError and InputError for the data.
    """
    task = read_task(recipe)
    train, held = _texts(recipe) if task is None else (task.texts, [])
    if recipe.base is not None:
        base = _base(recipe, recipe.base, task)
        job = _job(recipe, base.module, base.tokenizer, base.hf, train, held, Progress(), task)
        job.files = base.files
        return job
    tokenizer = _tokenizer(recipe, train) if task is None else task.completed(_tokenizer(recipe, train))
    hf = _completed(recipe.model, tokenizer, recipe.objective.name)
    if task is None:
        module = nn.new(read_config(hf, where="model"), recipe.run.seed)
    else:
        module, hf = task.new(hf)
    return _job(recipe, module, tokenizer, hf, train, held, Progress(), task)


def _base(recipe: Recipe, settings: BaseSettings, task: ObjectiveTask | None) -> Base:
    """The existing model that is trained further, with the head that the objective trains and the recipe's adapter.

    Raises ConfigError for an adapter beside a head that the model does not have: its file holds no head.
    """
    if recipe.adapter is None:
        base = read_base(settings)
        return base if task is None else base.with_model(*task.adapted(base.module, base.hf))
    if task is not None and task.head is not None:
        raise ConfigError(
            f"objective {recipe.objective.name} trains a head, which the file of an adapter does not hold; leave "
            "adapter out, or train the head first"
        )
    return with_new_adapter(settings, recipe.adapter, recipe.run.seed)


def resume(out: Path | str, changes: Sequence[str] = ()) -> Job:
    """The run under `out` from its newest valid checkpoint, by the recipe stored in it, with `changes` made to that.

    With a budget of steps it continues bit for bit as if it had not been stopped; with a budget of seconds it has
    those left that it had not used.  Raises CheckpointError when no checkpoint is valid, ConfigError while another
    process uses `out`.
    """
    lock = RunLock(out)
    lock.acquire()
    try:
        saved = Checkpoints(out).newest()
        progress, tables = read_progress(saved.path)
        recipe = check_recipe(tables, changes, str(saved.path), {"run.out": str(out)})
        task = read_task(recipe)
        if recipe.adapter is not None and recipe.base is not None:
            base = with_saved_adapter(recipe.base, recipe.adapter, saved.path)
            module, tokenizer, hf, files = base.module, base.tokenizer, base.hf, base.files
        else:
            (module, tokenizer, hf), files = read_model(saved.path), read_files(saved.path)
        if task is not None:
            task.check_labels(module, hf)
        texts = _texts(recipe) if task is None else (task.texts, [])
        job = _job(recipe, module, tokenizer, hf, *texts, progress, task)
        job.trainer.optimizer.restore(read_optimizer(saved.path))
    except BaseException:
        lock.release()
        raise
    job.files = files
    job.origin, job.skipped, job.lock = saved.path, saved.skipped, lock
    return job


def verify_resume(recipe: Recipe, steps: int) -> None:
    """Train `steps` steps at once, and half of them, a checkpoint, and the other half: the weights must be bit-equal.

    Raises TriptychError naming the first parameter that differs.
    """
    with tempfile.TemporaryDirectory() as out:
        settings = recipe.run.model_copy(update={"steps": steps, "seconds": None, "out": None})
        whole = prepare(recipe.model_copy(update={"run": settings}))
        whole.run()
        half = prepare(recipe.model_copy(update={"run": settings.model_copy(update={"out": out})}))
        half.run(until=steps // 2)
        Checkpoints(out).save(half.trainer, half.hf, half.tokenizer, half.recipe.model_dump())
        resumed = resume(out)
        resumed.run()
        for name, parameter in whole.trainer.module.named_parameters():
            if not torch.equal(parameter, resumed.trainer.module.get_parameter(name)):
                raise TriptychError(
                    f"cannot resume: {name} differs from the run that was not interrupted (stopped after "
                    f"{steps // 2} of {steps} steps)"
                )


def _created(directory: Path) -> Path:
    """The directory, created if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}") from None
    return directory


def _job(
    recipe: Recipe,
    module: nn.Transformer,
    tokenizer: Tokenizer,
    hf: dict[str, Any],
    train: Sequence[Text],
    held: Sequence[Text],
    at: Progress,
    task: ObjectiveTask | None = None,
) -> Job:
    _check_fit(recipe, module, tokenizer, None if task is None else task.head)
    module = module.to(recipe.run.device)
    tokens = max(recipe.run.length, recipe.run.rows * recipe.run.length // recipe.run.accumulate)
    if task is not None:
        data, evaluation = task.data(module, tokenizer, tokens)
        optimizer = Optimizer(module, recipe.optimizer)
        return Job(recipe, Trainer(module, data, optimizer, recipe.schedule, recipe.run, evaluation, at), tokenizer, hf)
    masking = _masking(recipe, tokenizer, train) if recipe.objective.name == "masked" else None
    data, held_data = (_data(recipe, module, tokenizer, side, masking) for side in (train, held))
    _check_length(data, recipe.run.length)
    seq2seq = recipe.objective.name == "seq2seq"
    check(data, tokenizer.eos_id, ends=seq2seq or (recipe.objective.name == "causal" and len(train) > 1))
    text = "".join(_documents(held)) if recipe.objective.name == "causal" else None
    evaluation = HeldOut.of(held_data, data, tokens, text=text, device=recipe.run.device)
    evaluation = with_translations(evaluation, recipe, tokenizer, _pairs(held))
    optimizer = Optimizer(module, recipe.optimizer)
    return Job(recipe, Trainer(module, data, optimizer, recipe.schedule, recipe.run, evaluation, at), tokenizer, hf)


def _texts(recipe: Recipe) -> tuple[Sequence[Text], Sequence[Text]]:
    """Training and held-out texts: pairs for seq2seq, otherwise documents."""
    return sources.pairs(recipe.data) if recipe.objective.name == "seq2seq" else sources.texts(recipe.data)


def _documents(texts: Sequence[Text]) -> list[str]:
    return [text for text in texts if isinstance(text, str)]


def _pairs(texts: Sequence[Text]) -> list[Pair]:
    return [text for text in texts if not isinstance(text, str)]


def _tokenizer(recipe: Recipe, train: Sequence[Text]) -> Tokenizer:
    """The tokenizer a recipe names, trained on the training texts where it has a vocabulary of its own."""
    name, _, size = (recipe.tokenizer or "").partition(":")
    layout = _SPECIAL_TOKENS[_LAYOUT[recipe.objective.name]]
    texts = [*_documents(train), *(side for pair in _pairs(train) for side in pair)]
    if name == "byte":
        return byte_tokenizer(layout)
    if name == "characters":
        return character_tokenizer("".join(texts), layout)
    if name in ("bpe", "words") and size.isdecimal():
        return (bpe_tokenizer if name == "bpe" else word_tokenizer)(texts, int(size), layout)
    if Path(recipe.tokenizer or "").is_dir():
        return from_directory(recipe.tokenizer or "")
    known = ("byte", "characters", "bpe:4096", "words:4096")
    raise ConfigError(
        f"tokenizer = {recipe.tokenizer!r} is not a directory and not one of {', '.join(known)}{nearest(name, known)}"
    )


def _completed(model: dict[str, Any], tokenizer: Tokenizer, objective: Objective) -> dict[str, Any]:
    """The config, with the vocabulary and the special tokens of the tokenizer where it does not set them."""
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "decoder_start_token_id": tokenizer.pad_id if _LAYOUT[objective] == "encoder-decoder" else None,
    }
    defaults = {"vocab_size": tokenizer.vocab_size} | {key: value for key, value in ids.items() if value is not None}
    return defaults | model


def _check_fit(recipe: Recipe, module: nn.Transformer, tokenizer: Tokenizer, own: type | None) -> None:
    """Raises ConfigError unless the model has the layout and the head of the objective (`own`, where a task names it),
    and enough positions and tokens."""
    spec, objective = module.spec, recipe.objective.name
    if spec.layout != _LAYOUT[objective]:
        fitting = next(name for name, layout in _LAYOUT.items() if layout == spec.layout)
        raise ConfigError(
            f"objective {objective} needs the layout {_LAYOUT[objective]}; {spec.family} is of layout {spec.layout}, "
            f"whose objective is {fitting}"
        )
    head = own or (MaskedLMHeadSpec if objective == "masked" else LMHeadSpec)
    if not isinstance(spec.head, head) and recipe.base is not None:
        raise ConfigError(
            f"objective {objective} predicts tokens, and {recipe.base.path} has no head that does; take a checkpoint "
            "that has one"
        )
    if not isinstance(spec.head, head):
        raise ConfigError(f"objective {objective} needs a {head.__name__}; name the class in model.architectures")
    if tokenizer.vocab_size > spec.vocab:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {spec.vocab}")
    if spec.context is not None and recipe.run.length > spec.context:
        raise ConfigError(f"run.length = {recipe.run.length} is more than the {spec.context} positions of the model")
    if objective == "masked" and tokenizer.mask_id is None:
        raise ConfigError("objective masked needs a tokenizer with a mask token")
    if spec.layout == "encoder-decoder" and spec.ids.start is None:
        raise ConfigError(f"objective {objective} needs model.decoder_start_token_id")


def _check_length(data: Data, length: int) -> None:
    """Raises InputError if the whole training text is shorter than one row: every row would then be the same text."""
    tokens = length
    if isinstance(data, CausalText):
        tokens = len(data.shifted)
    elif isinstance(data, MaskedText):
        tokens, length = len(data.plain), data.inner
    if tokens < length:
        raise InputError(
            f"the training text has {tokens} tokens, fewer than one row of {length}; give more text or lower run.length"
        )


def _masking(recipe: Recipe, tokenizer: Tokenizer, train: Sequence[Text]) -> TokenMasking:
    """Masking of every token but the special ones, or of the commonest tokens only."""
    assert tokenizer.mask_id is not None
    special = frozenset(i for i in vars(tokenizer).values() if isinstance(i, int))
    if recipe.objective.commonest is not None:
        documents, size = _documents(train), tokenizer.vocab_size
        counts = sum(np.bincount(tokenizer.encode_corpus(text), minlength=size) for text in documents)
        order = [int(i) for i in np.argsort(-np.asarray(counts), kind="stable") if int(i) not in special]
        special |= frozenset(order[recipe.objective.commonest :])
    return TokenMasking(tokenizer.mask_id, tokenizer.vocab_size, special, recipe.objective.rate)


def _data(
    recipe: Recipe, module: nn.Transformer, tokenizer: Tokenizer, texts: Sequence[Text], masking: TokenMasking | None
) -> Data:
    """Rows for the objective from documents, or from pairs of texts."""
    length, start = recipe.run.length, module.spec.ids.start
    if recipe.objective.name == "seq2seq":
        assert start is not None
        rows = [(tokenizer.encode(source), tokenizer.encode(target)) for source, target in _pairs(texts)]
        if recipe.data.drop_longer:
            rows = [row for row in rows if max(map(len, row)) <= length]
        return Pairs.of(rows, start, length)
    documents = [tokenizer.encode_corpus(document).tolist() for document in _documents(texts)]
    if masking is not None:
        before, after = _ids(tokenizer.cls_id), _ids(tokenizer.sep_id)
        return MaskedText.of(documents, length, masking, before, after)
    before, after = _ids(tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id), _ids(tokenizer.eos_id)
    if recipe.base is not None and tokenizer.leading_bos is None:  # as the texts that this model was trained on
        before = []
    return CausalText.of([[*before, *document, *after] for document in documents], length)


def _ids(special: int | None) -> list[int]:
    """The id of a special token as a sequence, empty if the tokenizer lacks it."""
    return [] if special is None else [special]
