"""The base of `Model`: its module, tokenizer and config, its logits, traces, interventions and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from triptych import nn, tasks
from triptych.arguments import integer
from triptych.checkpoints import LoadReport
from triptych.checkpoints.adapters import AdapterSettings, add_adapter, save_adapter
from triptych.draw import Drawing, draw
from triptych.errors import ArgumentError, InputError, MissingNameError, shown
from triptych.generate import Executor
from triptych.migration_hints import LOAD, MODEL, ConstructorOfOthers, hint
from triptych.nn import InputRow, Transformer
from triptych.probe import Edits, Plan, Reads, Session, Trace, ablate, attribute_logit, lens, patch, path_patch, steer
from triptych.probe.display import Displayed
from triptych.probe.trace_size import TraceSize, check_fires, check_size, limit_of, shared_sites, trace_size
from triptych.quantize.adapter_merging import MergedForm, merge
from triptych.spec import ClassHeadSpec, FramesSpec, PoolingSpec
from triptych.spec import ModelSpec as Spec
from triptych.tasks import ModelInputs, Texts
from triptych.text import Tokenizer


class ModelInside(Displayed):
    """A module with its tokenizer and config; its logits, traces, statistics, patching and lenses.

    executor   what computes the steps of a generation, and encodes: "auto", the native step wherever it may
               (`generate.Engine` says why not elsewhere), on a GPU "static"; or "modules", "static", "compiled".
    """

    executor: Executor = "auto"

    def __init__(
        self,
        module: Transformer,
        tokenizer: Tokenizer | None = None,
        hf: dict[str, Any] | None = None,
        path: Path | None = None,
        report: LoadReport | None = None,
    ) -> None:
        """Raises InputError for a module that is no `triptych.nn.Transformer`."""
        self.module, self.tokenizer, self.hf = module, tokenizer, hf
        self.path, self.report = path, report

    def __setattr__(self, name: str, value: object) -> None:
        """Raises InputError for a module that is no `triptych.nn.Transformer`, compiled or not, a tokenizer that is no
        `triptych.text.Tokenizer` and a config that is no dict; MissingNameError for names of other libraries."""
        if name == "module" and not isinstance(getattr(value, "_orig_mod", value), nn.Transformer):
            raise InputError(f"Model({shown(value)}) needs a triptych.nn.Transformer; write {LOAD}")
        kind = {"tokenizer": Tokenizer, "hf": dict}.get(name, object)
        if not isinstance(value, kind) and value is not None:
            raise InputError(f"model.{name} = {shown(value)} must be a {kind.__name__} or None")
        if name in MODEL:
            raise MissingNameError(f"Model has no {name!r}{hint(name, MODEL, ())}")
        super().__setattr__(name, value)

    @property
    def spec(self) -> Spec:
        """The model as data without weights: a tree of its parts."""
        return self.module.spec

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.module.device

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.module.parameters())
        dtype = str(self.module.dtype).removeprefix("torch.")
        return (
            f"Model({self.spec.family} {self.spec.layout}, {size:,} parameters, {dtype}, from {self.path or 'memory'})"
        )

    if not TYPE_CHECKING:  # mypy is to find unknown names by itself

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property that did not find its own
                raise MissingNameError(f"no {name} without the parts that load() makes; module is {shown(self.module)}")
            module = {name: f"model.module.{name}"} if hasattr(nn.Transformer, name) else {}
            raise MissingNameError(f"Model has no {name!r}{hint(name, {**module, **MODEL}, dir(type(self)))}")

        def __call__(self, *rows: object, **options: object) -> NoReturn:
            raise ArgumentError(f"a Model is not called; write {MODEL['forward']}")

    from_pretrained = ConstructorOfOthers(LOAD)
    from_config = ConstructorOfOthers("triptych.create(config)")

    @property
    def inputs(self) -> ModelInputs:
        """Converts texts, audio and images to the rows this model reads.  Raises InputError where the weights have no
        values, on the device meta."""
        if self.device.type == "meta":
            raise InputError("the weights are on the device meta, where they have no values; load the model again")
        return ModelInputs(self.spec, self.tokenizer, self.path, self.hf or {})

    @property
    def labels(self) -> list[str]:
        """The names of the classes, from the config; `LABEL_0`, `LABEL_1`, ... where it has none."""
        return tasks.label_names(self.spec, self.hf or {})

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: the config's, and the tokenizer's."""
        return tasks.end_ids(self.inputs)

    def ids(self, texts: Texts, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]:
        """Token ids of each row: texts through the tokenizer, lists as they are, `[B, T]` tensors by their mask.

        `target` rows are for the decoder of an encoder-decoder.  Raises InputError for a rectangular tensor that
        contains the pad id and comes without a mask, TextError for texts where there is no tokenizer.
        """
        return self.inputs.ids(texts, mask, target=target)

    def source(self, rows: Texts, mask: Tensor | None = None) -> Sequence[InputRow]:
        """The rows that the model reads, converted: token ids of texts; mel frames of sound or pixels of images, from
        files or as tensors.  Raises InputError for rows of another kind."""
        return self.inputs.rows(rows, mask)

    def check_words(self, what: str) -> None:
        """Raise InputError where the model reads sound or images and `what` needs text."""
        if not self.inputs.reads_text:
            slot = "sound" if isinstance(self.spec.reads.embed, FramesSpec) else "images"
            raise InputError(f"{what} needs a model that reads text; this {self.spec.family} model reads {slot}")

    @torch.no_grad()
    def logits(
        self,
        rows: Texts,
        target: Texts | None = None,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        edit: Edits = (),
        allow_null: bool = False,
    ) -> list[Tensor]:
        """The logits of each row, from one forward pass without a cache: a list of tensors `[T_i, V]`.

        An encoder-decoder takes the sources, then as `target` the rows that its decoder reads.  One with a head
        over classes gives `[labels]` for each row.  `mask` and `target_mask` mark the tokens of padded `[B, T]`
        tensors.  The result has no autograd graph: train with `loss`, differentiate with `trace(..., grad=True)`.

        Raises InputError for rows that the model cannot read, ProbeError for edits as `trace`.
        """
        self._check_target(target, target_mask)
        plan, first, second = Plan.of(self.spec, (), edit), *self._both(rows, target, mask, target_mask)
        check_fires(plan, *self._lengths(first, second), allow_null=allow_null)
        session = Session(plan, allow_null=allow_null)
        logits = self._forward(first, second, session.taps)
        session.close()
        return logits

    def trace(
        self,
        rows: Texts,
        target: Texts | None = None,
        *,
        read: Reads = (),
        edit: Edits = (),
        grad: bool = False,
        max_bytes: int | None = None,
        allow_null: bool = False,
    ) -> Trace:
        """Run one forward pass without a cache, keep the values that `read` names and apply `edit`.

        `trace(texts, read=["blocks.*.attn.pattern"])["blocks.0.attn.pattern"]` is a list with one tensor for each row,
        here `[H, T, S]`; docs/concepts/sites.md lists the names of the values (sites) with their equations and shapes.
        `read` takes names, globs and `Read`s, `edit` takes `Edit`s; the logits are in `.logits`, a list of `[T_i, V]`.

        With `grad` every read keeps its place in the autograd graph, as `Read(grad=True)`.  `trace_size` says before
        how many bytes the reads will keep; more than `max_bytes`, by default half of the free memory, are refused.

        Raises InputError for rows that the model cannot read; ProbeError for unknown sites, reads of more bytes than
        that, reads that never fired and, unless `allow_null`, edits that changed nothing.
        """
        plan, first, second = Plan.of(self.spec, read, edit, grad=grad), *self._both(rows, target)
        limit = limit_of(max_bytes)
        check_fires(plan, *self._lengths(first, second), allow_null=allow_null)
        check_size(self._size(plan, first, second, limit), limit, max_bytes)
        session = Session(plan, allow_null=allow_null)
        session.trace.read_rows(rows, first, second)
        session.trace.tokenizer = self.tokenizer
        with torch.inference_mode(False), torch.set_grad_enabled(plan.wants_grad):
            session.trace.logits = self._forward(first, second, session.taps)
        return session.close()

    def trace_size(
        self, rows: Texts, target: Texts | None = None, *, read: Reads, new_tokens: int | None = None
    ) -> TraceSize:
        """The bytes that `trace` will keep, by site and in total, without running anything; `print` shows them.

        With `new_tokens`, the most that `generate` keeps for so many new tokens.  Raises ProbeError as `trace`.
        """
        plan, first, second = Plan.of(self.spec, read), *self._both(rows, target)
        if new_tokens is not None:
            integer("new_tokens", new_tokens, 0)
        return self._size(plan, first, second, -1, new_tokens)

    statistics = tasks.statistics

    @property
    def adapter(self) -> nn.Adapter | None:
        """The adapter that the model has, or None."""
        return self.module.lora_adapter

    def add_adapter(
        self,
        rank: int = 8,
        alpha: float = 16,
        targets: str | Sequence[str] = "all-linear",
        dropout: float = 0.0,
        seed: int = 0,
        *,
        dora: bool = False,
        rank_stabilized: bool = False,
    ) -> nn.Adapter:
        """Add LoRA (Hu et al. 2021) to the linear maps that `targets` names, and freeze everything else.

        A map `W x` becomes `W x + alpha / rank * B A x` with A [rank, inputs] and B [outputs, rank], which alone are
        trained; W may be packed.  B begins as 0, so that the model computes what it did.  A target is the end of a
        slot's name (`q`, `attn.out`, `decoder.blocks.3.mlp.up`) or of a module's in transformers (`q_proj`, `c_attn`);
        `all-linear` is every linear map of the blocks.  `dropout` acts on what enters A in training; A is drawn from
        `seed`.  `dora` also trains the norm of each row of the sum (Liu et al. 2024); with `rank_stabilized` the factor
        is alpha / sqrt(rank) (Kalajdzievski 2023).

        Raises InputError for settings out of range, a target that names nothing or would not be trained, and a second
        adapter.
        """
        return add_adapter(self.module, AdapterSettings(rank, alpha, targets, dropout, seed, dora, rank_stabilized))

    def remove_adapter(self) -> None:
        """Remove the adapter, so that the model computes what it did before.  Raises InputError where there is none."""
        nn.detach(self.module)

    def merge_adapter(self, packed: MergedForm = "requantize") -> tuple[str, ...]:
        """Add the adapter to the matrices, `W + alpha / rank * B A`, and remove it: the model computes the same,
        without the adapter's cost.

        A packed matrix is rounded again to its type; it becomes plain numbers with `packed="dense"`, and where its type
        cannot be written.  Returns one line for each of the two cases, with the number of matrices.  Raises InputError
        where there is no adapter.
        """
        return merge(self.module, packed)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapter alone, as a directory that PEFT opens: `adapter_config.json` and
        `adapter_model.safetensors`.

        Raises InputError where there is none, CheckpointError for what cannot be written.
        """
        save_adapter(path, self.module, self.path)

    patch = patch
    path_patch = path_patch
    ablate = ablate
    steer = steer
    lens = lens
    attribute_logit = attribute_logit

    def draw(self) -> Drawing:
        """The model as a picture: its layout with repeated layers folded, and each kind of block with its shapes.

        A notebook shows it; `.svg` is its text and `.save("model.svg")` writes it.  It is drawn from the spec alone:
        `triptych.draw.draw(spec)` needs no weights.
        """
        return draw(self.spec)

    def _check_target(self, target: object, mask: object = None) -> None:
        """Raise InputError where an encoder-decoder has no target, and where another model has one, or its mask."""
        both = self.spec.layout == "encoder-decoder"
        if both != (target is not None) or (mask is not None and not both):
            wants = "a source and a target" if both else "rows only"
            raise InputError(f"this {self.spec.layout} model takes {wants}")

    def _forward(self, rows: Sequence[InputRow], target: list[list[int]] | None, taps: nn.Taps) -> list[Tensor]:
        self._check_target(target)
        batch = self.module.batch(rows, target, taps)
        out = self.module.logits(batch)
        return list(out) if isinstance(self.spec.head, ClassHeadSpec | PoolingSpec) else batch.rows.split(out)

    def _both(
        self, rows: Texts, target: Texts | None, mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> tuple[Sequence[InputRow], list[list[int]] | None]:
        """The rows that the model reads, and the decoder's beside a source.  Raises InputError for other numbers."""
        first, second = self.source(rows, mask), None if target is None else self.ids(target, target_mask, target=True)
        if second is not None and len(second) != len(first):
            self._check_target(target)
            raise InputError(f"sources: {len(first)}, targets: {len(second)}; give one target for each source")
        return first, second

    def _lengths(self, first: Sequence[InputRow], second: list[list[int]] | None) -> tuple[list[int], list[int]]:
        """The lengths of the decoder's (or only) rows, and of the source's beside them."""
        read_from = [self.module.length(row) for row in first]
        return (read_from, []) if second is None else ([len(row) for row in second], read_from)

    def _size(
        self, plan: Plan, first: Sequence[InputRow], second: list[list[int]] | None, limit: int, new: int | None = None
    ) -> TraceSize:  # fmt: skip
        """What the reads keep at most; where that is more than `limit`, what they keep with shared values once."""
        lengths, sources = self._lengths(first, second)
        read_from = sources or lengths
        if new is not None and second is None and self.spec.layout == "encoder-decoder":
            lengths, sources = [1] * len(read_from), read_from
        if new is not None:
            lengths = [length + new for length in lengths]
        sizes = partial(trace_size, plan, lengths, sources, self.module.dtype.itemsize, new=new)
        size = sizes()
        return size if new is not None or size.total <= limit else sizes(shared=shared_sites(self.module))
