"""Training from Python: the loss of texts for a loop of one's own, and whole runs by a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.checkpoints.load_weights import DTYPES, compute_dtype, usable_device
from triptych.errors import ConfigError, InputError, shown
from triptych.tasks import Texts
from .logits_and_traces import ModelInside

if TYPE_CHECKING:  # what trains needs a tenth of a second to import, which other commands do not wait for
    from triptych.train import Event, Recipe


M = TypeVar("M", bound="ModelTraining")


class ModelTraining(ModelInside):
    """A model with its loss, its parameters, and the names that a training loop of PyTorch uses."""

    def loss(
        self,
        rows: Texts,
        target: Texts | None = None,
        *,
        labels: Sequence[Sequence[int]] | Tensor | None = None,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """The mean cross-entropy in nats per trained token of texts or rows of ids, of any lengths: a scalar in fp32 or
        better, from which `.backward()` computes the gradients.

        A decoder predicts each token from those before it.  An encoder predicts hidden tokens: 15% of each row, 80% of
        them replaced by the mask token, 10% by others (Devlin et al. 2019), drawn from `seed` or torch's random
        numbers.  An encoder-decoder predicts each `target` from its row by teacher forcing; a target of ids ends in
        EOS and has no start token.  `labels`, for the first two, are ids for each token of each row, -100 where none
        counts, as transformers takes them: the label of a token is what should stand there, and an encoder's rows then
        have their tokens hidden already.  `mask` and `target_mask` are those of padded `[B, T]` tensors.

        A row without a token to predict, as an empty line is for a decoder, adds nothing to the mean.

        Dropout is active after `.train()`.  Raises InputError for a model without a head that predicts tokens, where no
        row has a token to predict, for a row that is too long, and for labels that do not fit.
        """
        from triptych.train import row_loss

        self._check_target(target, target_mask)
        if seed is not None and self.spec.layout != "encoder":
            raise InputError("seed is for an encoder, whose hidden tokens are drawn; leave it out here")
        if target is not None:
            if labels is not None:
                raise InputError("an encoder-decoder is trained on all of its target; give no labels beside it")
            sources, targets = self.source(rows, mask), self.ids(target, target_mask, target=True)
            return row_loss.mean_loss(self.module, row_loss.encoder_decoder_batch(self.module, sources, targets))
        self.check_words("a loss")
        ids = self.ids(rows, mask)
        if labels is not None and not isinstance(labels, Sequence):
            labels = self.inputs.unpadded(labels, mask, "labels")
        if self.spec.layout == "decoder":
            return row_loss.mean_loss(self.module, row_loss.decoder_batch(self.module, ids, labels))
        tokenizer = self.tokenizer
        hides = None if tokenizer is None else tokenizer.mask_id
        ids_of_specials = () if tokenizer is None else vars(tokenizer).values()
        special = frozenset(i for i in ids_of_specials if isinstance(i, int))
        drawn = row_loss.drawn_seed() if seed is None else integer("seed", seed, 0)
        batch = row_loss.encoder_batch(self.module, ids, labels, hides, special, drawn)
        return row_loss.mean_loss(self.module, batch)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the module, for an optimizer of PyTorch; with an adapter, those of the frozen model too
        (`requires_grad` tells them apart)."""
        return self.module.parameters()

    def train(self: M, mode: bool = True) -> M:
        """Switch to training mode, in which dropout is active; returns the model.

        Raises InputError for packed weights, which are not trained, unless only an adapter is.
        """
        if mode:
            from triptych.train.optimizer import check_trainable

            check_trainable(self.module)
        self.module.train(mode)
        return self

    def eval(self: M) -> M:
        """Switch to evaluation mode, in which a loaded model is; returns the model."""
        return self.train(False)

    def to(
        self: M, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | str | None = None
    ) -> M:
        """Move the weights to a device, convert them to a dtype, or both; returns the model.

        `to("cuda")`, `to("bf16")` and `to("cuda", "bf16")` are possible.

        Raises InputError for a device or dtype that cannot be used.
        """
        if isinstance(device, torch.dtype) or (isinstance(device, str) and device.removeprefix("torch.") in DTYPES):
            if dtype is not None:
                raise InputError(f"to() takes one dtype: {shown(device)} and {shown(dtype)} are two")
            device, dtype = None, device
        where, kind = None if device is None else usable_device(device), compute_dtype(dtype)
        self.module.to(device=where, dtype=kind)
        return self

    @classmethod
    def trained(
        cls: type[M],
        recipe: Recipe | Mapping[str, Any] | Path | str,
        *,
        changes: Sequence[str] = (),
        out: Path | str | None = None,
        resume: bool = False,
        force: bool = False,
        on_step: Callable[[Event], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> M:
        """Train the model that a recipe describes and return it, as `triptych train RECIPE` does; `triptych.train` is
        this function.

        `recipe` is a .toml file; the name of one that comes with the library ("decoder", "encoder", "encoder-decoder");
        its tables as dicts; or a `Recipe`.  docs/concepts/recipes.md lists the keys.  `changes` replace values of it,
        as "run.seconds=90" does, and `out` is the run directory in place of `run.out`.  Where that holds a run,
        `resume` continues it and `force` deletes it; else it is an error.  `on_step` is called after each step,
        `on_note` with lines about the run.

        Raises ConfigError, TextError or InputError for what does not fit together, before the first step.
        """
        from triptych import train

        values: dict[str, object] = {} if out is None else {"run.out": os.fspath(out)}
        if isinstance(recipe, train.Recipe):
            recipe = recipe.model_dump(exclude_none=True)
        if isinstance(recipe, Mapping):
            checked = train.check_recipe(recipe, changes, values=values)
        elif isinstance(recipe, str | os.PathLike):
            checked = train.read_recipe(recipe, changes, values)
        else:
            raise ConfigError(
                f"a recipe is a file, a dict of its tables or a Recipe, not {type(recipe).__name__}; "
                "a loop of your own has its loss from model.loss(rows)"
            )
        if resume and checked.run.out is None:
            raise ConfigError("resume needs to know which run: give out=DIR, or run.out in the recipe")
        if not resume:
            train.check_start(checked, force=force)
        job = train.resume(checked.run.out or "", changes) if resume else train.prepare(checked)
        for table, kept in job.recipe.model_dump(exclude={"run", "optimizer", "schedule", "parallel"}).items():
            if resume and kept != checked.model_dump()[table]:
                if job.lock is not None:
                    job.lock.release()
                problem = f"{table} of the recipe is not that of the run under {checked.run.out}"
                raise ConfigError(f"{problem}, which resume continues; give its recipe, or another out")
        job.run(on_step, on_note=on_note, force=force)
        saved = job.model if job.model is not None and job.model.exists() else None
        return cls(job.trainer.module.whole().eval(), job.words, job.hf, saved)
