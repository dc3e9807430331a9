"""What a model is made of, and what reads and changes values inside it; `Model` adds generation and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from triptych import nn, tasks
from triptych.checkpoints import LoadReport
from triptych.checkpoints.adapters import AdapterSettings, add_adapter, save_adapter
from triptych.draw import Drawing, draw
from triptych.errors import InputError
from triptych.nn import Row
from triptych.other_libraries import NamesOfOthers, answers_arguments, of_model
from triptych.probe import Edits, Plan, Reads, Session, Trace, ablate, attribute_logit, lens, patch, path_patch, steer
from triptych.probe.display import Displayed
from triptych.probe.sites import Selection
from triptych.probe.size import TraceSize, check_fires, check_size, limit_of, shared_sites, trace_size
from triptych.quantize.merging import MergedForm, merge
from triptych.spec import ClassHeadSpec, FramesSpec, PoolingSpec
from triptych.spec import ModelSpec as Spec
from triptych.tasks.model_inputs import ModelInputs, Texts
from triptych.text import Tokenizer


class ModelInside(Displayed, metaclass=NamesOfOthers):
    """A module with its tokenizer and config; its logits, traces, statistics, patching and lenses."""

    def __init__(
        self,
        module: nn.Transformer,
        tokenizer: Tokenizer | None = None,
        hf: dict[str, Any] | None = None,
        path: Path | None = None,
        report: LoadReport | None = None,
    ) -> None:
        self.module, self.tokenizer, self.hf = module, tokenizer, hf
        self.path, self.report = path, report

    @property
    def spec(self) -> Spec:
        return self.module.spec

    @property
    def device(self) -> torch.device:
        return self.module.device

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.module.parameters())
        dtype = str(self.module.dtype).removeprefix("torch.")
        return (
            f"Model({self.spec.family} {self.spec.layout}, {size:,} parameters, {dtype}, from {self.path or 'memory'})"
        )

    if not TYPE_CHECKING:  # mypy is to find unknown names by itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"Model has no {name!r}{of_model(name, dir(type(self)))}")

        def __call__(self, *rows: object, **options: object) -> NoReturn:
            raise TypeError(f"a Model is not called{of_model('forward')}")

    @property
    def inputs(self) -> ModelInputs:
        """Converts texts, audio and images to the rows this model reads."""
        return ModelInputs(self.spec, self.tokenizer, self.path)

    def ids(self, texts: Texts, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]:
        """Token ids of each row: texts through the tokenizer, lists as they are, `[B, T]` tensors by their mask.

        `target` rows are for the decoder beside an encoder.  Raises InputError for a rectangular tensor that holds the
        pad id and comes without a mask.
        """
        return self.inputs.ids(texts, mask, target=target)

    def source(self, rows: Texts, mask: Tensor | None = None) -> Sequence[Row]:
        """The rows the model reads: the ids of texts; or frames and pixels, of files or as they are."""
        return self.inputs.rows(rows, mask)

    def check_words(self, what: str) -> None:
        """Raise InputError where the model reads sound or images and `what` needs text."""
        if not self.inputs.reads_text:
            slot = "sound" if isinstance(self.spec.reads.embed, FramesSpec) else "images"
            raise InputError(f"{what} needs a model that reads text; this {self.spec.family} model reads {slot}")

    @answers_arguments
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
        """One uncached pass: `[T_i, V]` a row.  Encoder-decoders take the source, then the decoder's rows.

        The result carries no graph.  Raises ProbeError for edits as `trace`.
        """
        plan, first, second = Plan.of(self.spec, (), edit), *self._both(rows, target, mask, target_mask)
        check_fires(plan, *self._lengths(first, second), allow_null=allow_null)
        session = Session(plan, allow_null=allow_null)
        logits = self._forward(first, second, None, None, session.taps)
        session.close()
        return logits

    @answers_arguments
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
        """One uncached pass that keeps what `read` names and applies `edit`; the logits are in `.logits`.

        With `grad` every read keeps its place in the autograd graph, as `Read(grad=True)`.  `trace_size` says before
        how many bytes the reads will keep; more than `max_bytes`, by default half of the free memory, are refused.

        Raises ProbeError for unknown sites, reads of more than that, reads that never fired and, unless `allow_null`,
        edits that changed nothing.
        """
        plan, first, second = Plan.of(self.spec, read, edit, grad=grad), *self._both(rows, target)
        limit = limit_of(max_bytes)
        check_fires(plan, *self._lengths(first, second), allow_null=allow_null)
        check_size(self._size(plan, first, second, limit), limit, max_bytes)
        session = Session(plan, allow_null=allow_null)
        session.trace.read_rows(rows, first, second)
        session.trace.tokenizer = self.tokenizer
        with torch.set_grad_enabled(plan.wants_grad):
            session.trace.logits = self._forward(first, second, None, None, session.taps)
        return session.close()

    def trace_size(
        self, rows: Texts, target: Texts | None = None, *, read: Reads, new_tokens: int | None = None
    ) -> TraceSize:
        """The bytes that `trace` will keep, by site and in all, without running anything: `print` shows them.

        With `new_tokens` those of `generate`, which keeps at most as many.  Raises ProbeError as `trace`.
        """
        plan, first, second = Plan.of(self.spec, read), *self._both(rows, target)
        return self._size(plan, first, second, -1, new_tokens)

    def statistics(
        self,
        rows: Texts,
        target: Texts | None = None,
        *,
        site: str = "*.pattern",
        layers: Selection = None,
        heads: Selection = None,
        at: Selection = None,
        items: Selection = None,
        top: int = 4,
        delimiters: Sequence[str | int] | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        edit: Edits = (),
        max_bytes: int | None = None,
    ) -> Trace:
        """Statistics of each head and query in memory that grows with the length alone: `.statistics(site)` of the
        result gives, for each row, entropy, effective keys, mean distance, the weight on the first and the previous
        token, the `top` keys, and what each key received (`triptych.attention.AttentionStatistics`).

        `delimiters` are tokens, as ids or as text (spaces around it do not count), whose weight is summed, and
        `documents` a label of each token of each row, for the weight on tokens of the query's own; a model with both
        stacks takes neither labels for its source nor for cross-attention.  Raises ProbeError as `trace`.
        """
        reads = tasks.statistics_reads(
            self.inputs, site, layers, self._both(rows, target), top=top, delimiters=delimiters, documents=documents
        )
        reads = [replace(read, items=items, at=at, heads=heads) for read in reads]
        return self.trace(rows, target, read=reads, edit=edit, max_bytes=max_bytes)

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
    ) -> nn.Adapter:
        """Add LoRA (Hu et al. 2021) to the linear maps that `targets` names, and freeze everything else.

        A map `W x` becomes `W x + alpha / rank * B A x` with A [rank, inputs] and B [outputs, rank], which alone are
        trained; W may be packed.  B begins as 0, so that the model computes what it did.  A target is the end of a
        slot's name (`q`, `attn.out`, `decoder.blocks.3.mlp.up`) or of a module's in transformers (`q_proj`, `c_attn`);
        `all-linear` is every linear map of the blocks.  `dropout` acts on what enters A in training; A is drawn from
        `seed`.

        Raises InputError for settings out of range, a target that names nothing or would not be trained, and a second
        adapter.
        """
        return add_adapter(self.module, AdapterSettings(rank, alpha, targets, dropout, seed))

    def remove_adapter(self) -> None:
        """Take the adapter off: the model computes what it did before.  Raises InputError where there is none."""
        nn.detach(self.module)

    def merge_adapter(self, packed: MergedForm = "requantize") -> tuple[str, ...]:
        """Add the adapter to the matrices and take it off; the model computes the same, without its cost.

        A packed matrix is rounded again to its type, or becomes plain numbers with `packed="dense"` and where its type
        cannot be written.  Returns a line for each of the two that says how many.  Raises InputError where there is no
        adapter.
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

    def _forward(
        self, rows: Texts, target: Texts | None, mask: Tensor | None, target_mask: Tensor | None, taps: nn.Taps
    ) -> list[Tensor]:
        both = self.spec.layout == "encoder-decoder"
        if both != (target is not None):
            wants = "a source and a target" if both else "rows only"
            raise InputError(f"this {self.spec.layout} model takes {wants}")
        inputs, where = self.module.flat(self.source(rows, mask))
        if target is None:
            out = self.module.logits(nn.Batch(inputs=inputs, rows=where, taps=taps))
        else:
            ids, where_target = nn.flat(self.ids(target, target_mask, target=True), self.device)
            out = self.module.logits(nn.Batch(inputs=ids, rows=where_target, source=(inputs, where), taps=taps))
            where = where_target
        return list(out) if isinstance(self.spec.head, ClassHeadSpec | PoolingSpec) else where.split(out)

    def _both(
        self, rows: Texts, target: Texts | None, mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> tuple[Sequence[Row], list[list[int]] | None]:
        """What the model reads, and the decoder's rows beside a source."""
        return self.source(rows, mask), None if target is None else self.ids(target, target_mask, target=True)

    def _lengths(self, first: Sequence[Row], second: list[list[int]] | None) -> tuple[list[int], list[int]]:
        """The lengths of the decoder's (or only) rows, and of the source's beside them."""
        read_from = [self.module.length(row) for row in first]
        return (read_from, []) if second is None else ([len(row) for row in second], read_from)

    def _size(
        self, plan: Plan, first: Sequence[Row], second: list[list[int]] | None, limit: int, new: int | None = None
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
