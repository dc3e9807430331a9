"""Prompts as the interventions and lenses read them, and the edited runs of a prompt as rows of one flat batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych import nn
from triptych.arguments import as_index, integer
from triptych.attention import Rows
from triptych.errors import InputError, ProbeError, shown
from triptych.nn import InputRow, Taps
from triptych.spec import BlockSpec, ClassHeadSpec, PoolingSpec, RopeSpec
from triptych.spec.masks import And, Causal, Mask, Or
from triptych.spec.model import ModelSpec
from triptych.spec.parts import StackSpec
from triptych.spec.positions import LongRope
from triptych.text import Tokenizer
from .apply_plan import Session
from .reads_and_edits import Edit, Edits, Plan, Reads, Where
from .sites import Site, matrix
from .trace import Trace
from .trace_size import check_size, limit_of, trace_size

BATCH_TOKENS = 4096  # tokens of one forward over many runs
Change = Callable[[Tensor], Tensor]  # what one row has at a site, [T, ...] or [H, T, S], to what it goes on with
PromptInput = Any  # a text, a rendered prompt, token ids; frames or pixels where the model reads these


@runtime_checkable
class ProbedModel(Protocol):
    """The part of a `triptych.Model` that the analyses need."""

    module: nn.Transformer
    tokenizer: Tokenizer | None

    @property
    def spec(self) -> ModelSpec: ...
    def ids(self, texts: Any, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]: ...
    def source(self, rows: Any, mask: Tensor | None = None) -> Sequence[InputRow]: ...
    def check_words(self, what: str) -> None: ...
    def generate(self, prompts: Any, *, max_new_tokens: int = 64) -> Sequence[Any]: ...
    def trace(
        self, rows: Any, target: Any = None, *, read: Reads = (), edit: Edits = (), max_bytes: int | None = None,
        allow_null: bool = False,
    ) -> Trace: ...  # fmt: skip


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row: what the model reads, and beside an encoder the ids that its decoder reads."""

    source: InputRow
    target: list[int] | None
    lengths: tuple[int, int]  # positions of the source and of the target (0 without one)

    def positions(self, source: bool) -> int:
        """The number of positions of the source, or the target."""
        return self.lengths[0 if source else 1]

    def length(self, site: Site, spec: ModelSpec) -> int:
        """The number of positions of the row at a site."""
        return self.positions(of_source(site, spec))

    @property
    def decoded(self) -> int:
        """The number of positions of the logits."""
        return self.lengths[1] or self.lengths[0]

    def ids(self, source: bool) -> list[int] | None:
        """The token ids of the source or the target; None for frames and pixels."""
        row = self.source if source else self.target
        return None if row is None or isinstance(row, Tensor) else list(row)


def same_prompts(a: Prompt, b: Prompt) -> bool:
    """Whether both hold the same ids, frames or pixels."""
    if isinstance(a.source, Tensor) and isinstance(b.source, Tensor):
        return a.source.shape == b.source.shape and torch.equal(a.source, b.source) and a.target == b.target
    return a.ids(True) == b.ids(True) and a.target == b.target


def of_source(site: Site, spec: ModelSpec) -> bool:
    """Whether the positions of a site are those of the row the model reads first."""
    return spec.layout != "encoder-decoder" or site.name.startswith("encoder.") or site.of_source


def resized(model: ProbedModel, prompt: Prompt, lengths: Sequence[int]) -> Prompt:
    """The prompt with as many tokens in the decoder as one of these lengths, cut or with further ones at its end, where
    that changes nothing at the positions it has in both: where no position sees a later one."""
    both, decoder = prompt.target is not None, model.spec.decoder
    ids, length = prompt.ids(not both), lengths[1 if both else 0]
    if ids is None or len(ids) == length or decoder is None or not looks_back(decoder):
        return prompt
    ids = ids[:length] + ids[-1:] * (length - len(ids))
    if both:
        return replace(prompt, target=ids, lengths=(prompt.lengths[0], length))
    return replace(prompt, source=ids, lengths=(length, 0))


def looks_back(stack: StackSpec) -> bool:
    """Whether what a position has depends on those before it alone, and not on how long the row is."""
    kinds = stack.kinds.values()
    turned = [kind.position.scaling for kind in kinds if isinstance(kind.position, RopeSpec)]
    convolved = any(isinstance(block, BlockSpec) and block.branch is not None for block in stack.blocks)
    return (
        not convolved
        and not any(isinstance(one, LongRope) for one in turned)
        and all(_backwards(kind.mask) for kind in kinds)
    )


def _backwards(mask: Mask) -> bool:
    """Whether a mask certainly hides every key behind the query."""
    if isinstance(mask, And):
        return any(map(_backwards, mask.parts))
    return isinstance(mask, Causal) or (isinstance(mask, Or) and all(map(_backwards, mask.parts)))


def prompt_of(model: ProbedModel, text: PromptInput, target: PromptInput = None) -> Prompt:
    """The prompt of one text (or ids, frames, pixels).  `target` is what the decoder beside an encoder reads: a text,
    which is put after the start token, or all its ids; the start token alone by default.

    Raises InputError for a row that is empty, longer than the context, or that the model cannot read.
    """
    spec, both = model.spec, model.spec.layout == "encoder-decoder"
    if target is not None and not both:
        raise InputError(f"a target is for encoder-decoders; this is a {spec.layout}")
    (source,) = model.source([text])
    length = model.module.length(source)
    ids = _target_ids(model, target) if both else None
    limits = [(length, spec.longest_row if spec.encoder is None else spec.source_context, "text")]
    limits += [(len(ids), spec.longest_row, "target")] if ids is not None else []
    for count, limit, what in limits:
        if count == 0:
            raise InputError(f"the {what} is empty; give at least one token")
        if limit is not None and count > limit:
            raise InputError(f"the {what} has {count} tokens and the model reads {limit}; shorten it")
    return Prompt(source, ids, (length, 0 if ids is None else len(ids)))


def _target_ids(model: ProbedModel, target: PromptInput) -> list[int]:
    if not isinstance(target, str) and target is not None:
        return model.ids([target], target=True)[0]
    start = model.spec.start_id()
    if target is None:
        return [start]
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer; give the target as token ids")
    return model.ids([[start, *model.tokenizer.encode(target, special=False)]], target=True)[0]


def two_prompts(
    model: ProbedModel, clean: PromptInput, corrupt: PromptInput, target: PromptInput, corrupt_target: PromptInput
) -> tuple[Prompt, Prompt]:
    """The prompts of a patching, whose decoders read the same unless there is a `corrupt_target`.

    Raises InputError where they are equal.
    """
    intact = prompt_of(model, clean, target)
    broken = prompt_of(model, corrupt, target if corrupt_target is None else corrupt_target)
    if same_prompts(intact, broken):
        raise InputError("the clean and the corrupt prompt are the same; there is nothing to patch")
    return intact, broken


def measured_at(model: ProbedModel, prompt: Prompt, at: int | None) -> int | None:
    """The position whose logits are measured: `at`, else the last one of a decoder and the mask of an encoder.  None
    where a head gives one vector a row.

    Raises InputError for a position out of range, and for an encoder's row that does not have exactly one mask.
    """
    head = model.spec.head
    if head is None or isinstance(head, PoolingSpec):
        raise InputError(
            f"this {model.spec.family} model has no head that gives logits, so there is nothing to measure"
        )
    if isinstance(head, ClassHeadSpec):
        return None
    if at is not None:
        return check_position(at, prompt.decoded, "at")
    if model.spec.layout != "encoder":
        return prompt.decoded - 1
    mask = None if model.tokenizer is None else model.tokenizer.mask_id
    places = [i for i, token in enumerate(prompt.ids(True) or ()) if token == mask]
    if len(places) != 1:
        raise InputError(f"the text has {len(places)} mask tokens; give at=, the position that is measured")
    return places[0]


def check_position(at: object, length: int, what: str) -> int:
    """`at` as a position of a row of so many tokens.  Raises InputError for anything else."""
    position = index_below(length, at)
    if position is None:
        raise InputError(f"{what}={shown(at)}: the row has positions 0 to {length - 1}, counted from its first token")
    return position


def check_positions(positions: Sequence[object] | None, length: int) -> list[int]:
    """A list of positions of a row of so many tokens; None is all of them."""
    if positions is None:
        return list(range(length))
    check_list(positions, "positions")
    return [check_position(position, length, "positions") for position in positions]


def index_below(count: int, value: object) -> int | None:
    """`value` as an integer from 0 to `count` - 1, NumPy's included; None for anything else."""
    number = as_index(value)
    return number if number is not None and 0 <= number < count else None


def indices_below(count: int, values: Sequence[object], what: str) -> list[int]:
    """`values` as integers from 0 to `count` - 1.  Raises ProbeError, with what a site has, for anything else."""
    chosen = []
    for value in values:
        number = index_below(count, value)
        if number is None:
            raise ProbeError(f"{what} 0..{count - 1}, not {shown(value)}")
        chosen.append(number)
    return chosen


def check_list(values: object, what: str) -> None:
    """Raise InputError for anything but a list with something in it."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise InputError(f"{what}={shown(values)} must be a list of at least one")


def token_names(model: ProbedModel, prompt: Prompt, source: bool) -> list[str]:
    """A name for each position of the source or of the target."""
    ids = prompt.ids(source)
    if ids is None:
        return [str(i) for i in range(prompt.lengths[0])]
    return name_tokens(model, ids)


def name_tokens(model: ProbedModel, ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)


# ---------------------------------------------------------------- edited runs


@dataclass(frozen=True, eq=False)
class EditedRun:
    """One forward of a prompt with changes at sites of its own; `at` is the position whose logits are wanted."""

    prompt: Prompt
    at: int | None
    changes: Mapping[str, Change] = field(default_factory=dict)


@dataclass(eq=False)
class Forwarded:
    """Of some runs the logits [R, V] at their positions, what was read, and whether a change changed a value [R]."""

    logits: Tensor
    trace: Trace
    fired: list[bool]


def values_at(
    model: ProbedModel, prompts: Sequence[Prompt], names: Sequence[str], max_bytes: int,
    batch_tokens: int = BATCH_TOKENS,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """What each prompt has at these sites, read from forwards of at most `batch_tokens` tokens, one prompt at least.
    Raises ProbeError where that is more than `max_bytes`, InputError for NaN."""
    check_values(model, prompts, names, max_bytes)
    integer("batch_tokens", batch_tokens, 1)
    batches: list[list[EditedRun]] = []
    tokens = 0
    for prompt in prompts:
        if not batches or tokens + sum(prompt.lengths) > batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(EditedRun(prompt, 0))
        tokens += sum(prompt.lengths)
    traces = [forward(model, runs, names).trace for runs in batches]
    for trace in traces:
        for name in names:
            check_numbers(name, trace[name])
    rows = (row for trace in traces for row in zip(*(trace[name] for name in names), strict=True))
    return [dict(zip(names, row, strict=True)) for row in rows]


def check_numbers(site: str, rows: Iterable[Tensor]) -> None:
    """Raise InputError where one of a site's values is NaN."""
    if any(bool(row.isnan().any()) for row in rows):
        raise InputError(f"{site} is NaN in this model; its weights hold NaN, or its dtype is too small: load another")


def check_values(model: ProbedModel, prompts: Sequence[Prompt], names: Sequence[str], max_bytes: int) -> None:
    """Raise ProbeError where what the prompts have at these sites is more than `max_bytes`."""
    sources = [prompt.lengths[0] for prompt in prompts if prompt.lengths[1]]
    size = trace_size(Plan.of(model.spec, names), [prompt.decoded for prompt in prompts], sources)
    check_size(size, limit_of(max_bytes), max_bytes)


def forward(
    model: ProbedModel, runs: Sequence[EditedRun], read: Reads = (), wrap: Callable[[Taps], Taps] = lambda taps: taps,
    *, touched: Collection[str] = (), margin: float = 0.0,
) -> Forwarded:  # fmt: skip
    """All runs as the rows of one flat batch, each row with its own changes; `wrap` may put other taps around.

    The values at `touched` sites are put together from those of the rows as if there were changes, so that forwards
    with changes at any of these sites compute alike.  `margin` is that of `differ`.  A graph is kept only where a read
    wants gradients.  The logits are computed at the wanted positions alone.
    """
    module, spec = model.module, model.spec
    by_site: dict[str, dict[int, Change]] = {site: {} for site in sorted(touched)}
    for row, run in enumerate(runs):
        for site, change in run.changes.items():
            by_site.setdefault(site, {})[row] = change
    fired = [False] * len(runs)
    edits = [
        Edit(site, _ByRow(changes, fired, margin), items=list(changes) or [0]) for site, changes in by_site.items()
    ]
    plan = Plan.of(spec, read, edits)
    session = Session(plan, allow_null=True)
    targets = [run.prompt.target or [] for run in runs] if spec.layout == "encoder-decoder" else None
    batch = module.batch([run.prompt.source for run in runs], targets, wrap(session.taps))
    rows = batch.rows
    with torch.set_grad_enabled(plan.wants_grad):
        hidden = module(batch)
        if any(run.at is None for run in runs):  # a head that pools each row
            logits = module.unembed(hidden, rows)
        else:
            places = [start + (run.at or 0) for start, run in zip(rows.starts, runs, strict=True)]
            logits = module.unembed(hidden[places], Rows((1,) * len(runs)))
    return Forwarded(logits.float(), session.close(), fired)


def differ(new: Tensor, old: Tensor, margin: float) -> Tensor:
    """True where two tensors of one shape differ, by more than the `margin` times the largest number in both."""
    other = new != old
    if margin and bool(other.any()):
        largest = torch.stack([new, old]).abs().nan_to_num(posinf=0.0).max()
        other &= ~((new - old).abs() <= margin * largest)
    return other


class _ByRow:
    """The function of one edit: each row's own change, noting which of them changed something."""

    def __init__(self, changes: Mapping[int, Change], fired: list[bool], margin: float) -> None:
        self.changes, self.fired, self.margin = changes, fired, margin

    def __call__(self, value: Tensor, where: Where) -> Tensor:
        if where.item not in self.changes:
            return value
        new = self.changes[where.item](value)
        if new is not value and bool(differ(new, value, self.margin).any()):
            self.fired[where.item] = True
        return new


@dataclass(frozen=True)
class Place:
    """Part of what a row has at a site: some positions, heads and units of the last dimension; None is all."""

    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None

    def index(self, site: str, value: Tensor) -> tuple[Tensor, ...]:
        """The index of the place in `value`, [T, ...] or [H, T, S], one tensor for each dimension."""
        over_keys = matrix(site)
        axes: list[Sequence[int]] = [range(size) for size in value.shape]
        for axis, chosen in ((int(over_keys), self.positions), (int(not over_keys), self.heads), (-1, self.units)):
            if chosen is not None:
                axes[axis] = chosen
        each = [torch.tensor(list(chosen), device=value.device) for chosen in axes]
        return tuple(one.view([-1 if i == axis else 1 for i in range(len(each))]) for axis, one in enumerate(each))

    def part(self, site: str, value: Tensor) -> Tensor:
        """The part of the value at this place."""
        return value[self.index(site, value)]

    def put(self, site: str, new: Tensor | float) -> Change:
        """The change that puts `new`, which broadcasts to the part, at this place."""

        def change(value: Tensor) -> Tensor:
            index, changed = self.index(site, value), value.clone()
            there = torch.as_tensor(new, dtype=value.dtype, device=value.device)
            changed[index] = there
            return changed

        return change
