"""A model on a few short rows, in fp32: what every comparison runs, how two outcomes are compared, and the result."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from triptych.model import Model
from triptych.nn import NO_TAPS, InputRow, Taps
from triptych.spec import (
    ClassHeadSpec,
    EmbedSpec,
    FramesSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    MoESpec,
    PatchesSpec,
    PoolingSpec,
)

LONGEST = 32  # tokens of a row
TEXTS = (
    "The old mill stands where the river bends, and its wheel has not turned since the war.",
    "Three ships came in on the evening tide, heavy with salt.",
    "She counted the stairs twice: there were thirty-nine of them, and the last one was broken.",
)


@dataclass(frozen=True)
class Finding:
    """One comparison.  `limit` is what `difference` may reach, None where it is reported without a limit."""

    name: str
    difference: float
    limit: float | None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        return None if self.limit is None else self.difference <= self.limit  # NaN does not pass


@dataclass(frozen=True)
class SiteDifference:
    """One site's distance from the peer's: max |Δ| over max |theirs|.  `first_position` is the lowest position of any
    row that is further than the threshold, None where none is."""

    site: str
    difference: float
    first_position: int | None = None


@dataclass(frozen=True)
class Quality:
    """One form of a model on a text.  `kl` is the mean divergence of its predictions from those of the first form, in
    nats a token; None for the first itself."""

    form: str
    perplexity: float
    kl: float | None
    tokens: int  # that were predicted


@dataclass(frozen=True)
class Report:
    """The result of `check`.  `layers` go from the embedding up, empty without a peer; `quality` has a line for each
    form of the weights and of the cache, empty where there is only one."""

    model: str
    threshold: float
    findings: tuple[Finding, ...]
    layers: tuple[SiteDifference, ...] = ()
    skipped: tuple[str, ...] = ()
    quality: tuple[Quality, ...] = ()

    @property
    def passed(self) -> bool:
        return all(finding.passed is not False for finding in self.findings)

    @property
    def first_difference(self) -> str | None:
        """The lowest site that is further from the peer's than the threshold."""
        return None if (layer := self.first_layer) is None else layer.site

    @property
    def first_layer(self) -> SiteDifference | None:
        """That site with its difference, and the position it begins at."""
        return next((layer for layer in self.layers if not layer.difference <= self.threshold), None)

    def to_dict(self) -> dict[str, Any]:
        findings = [asdict(finding) | {"passed": finding.passed} for finding in self.findings]
        more = {"passed": self.passed, "first_difference": self.first_difference}
        return asdict(self) | {"findings": findings} | more


@dataclass
class Case:
    """The model and the rows it is tried on; `threshold` is that of `check(threshold=1e-4)`, `targets` the decoder's
    rows beside an encoder, `ignore` what was ignored on loading it."""

    model: Model
    rows: Sequence[InputRow]
    targets: list[list[int]] | None
    threshold: float
    ignore: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    layers: list[SiteDifference] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def decoded(self) -> list[list[int]]:
        """The rows whose tokens are predicted."""
        return [list(map(int, row)) for row in self.rows] if self.targets is None else self.targets

    def run(self, items: slice = slice(None), taps: Taps = NO_TAPS) -> list[Tensor]:
        targets = None if self.targets is None else self.targets[items]
        return run(self.model, self.rows[items], targets, taps)

    def record(self, name: str, difference: float, limit: float | None, note: str = "") -> None:
        self.findings.append(Finding(name, difference, limit, note))


def case_of(model: Model, threshold: float) -> Case:
    """Rows of three different lengths: real text where there is a tokenizer, else ids from a fixed seed.

    Frames and pixels are noise, as long as the model was made for: transformers takes no other length.
    """
    read = [n for n in (model.spec.vocab, model.spec.source_vocab) if n]
    if not read:
        return Case(model, _noise(model), None, threshold)
    vocab, most = min(read), min(LONGEST, model.spec.context or LONGEST)
    if model.tokenizer is not None:
        rows = [ids[: most - 2 * i] for i, ids in enumerate(model.ids(TEXTS))]
    else:
        random = torch.Generator().manual_seed(0)
        special = {model.spec.ids.pad, model.spec.ids.bos, model.spec.ids.start, *model.spec.ids.eos}
        plain = torch.tensor([i for i in range(vocab) if i not in special])
        rows = [plain[torch.randint(len(plain), (most - 2 * i,), generator=random)].tolist() for i in range(3)]
    if model.spec.layout != "encoder-decoder":
        return Case(model, rows, None, threshold)
    start = model.spec.start_id()
    source = rows if isinstance(model.spec.reads.embed, EmbedSpec) else _noise(model)
    return Case(model, source, [[start, *row[: most // 2]] for row in (*rows[1:], rows[0])], threshold)


def _noise(model: Model) -> list[Tensor]:
    slot, random = model.spec.reads.embed, torch.Generator().manual_seed(0)
    if isinstance(slot, FramesSpec):
        shape: tuple[int, ...] = (slot.stride * slot.position.length, slot.conv1.inputs)
    else:
        assert isinstance(slot, PatchesSpec)
        shape = (slot.channels, *slot.image)
    return [torch.randn(shape, generator=random) for _ in TEXTS]


def run(model: Model, rows: Sequence[InputRow], targets: list[list[int]] | None, taps: Taps = NO_TAPS) -> list[Tensor]:
    """One uncached forward: each row's log-probabilities [T, V], other outputs of a head, or hidden states [T, D]."""
    with torch.inference_mode():
        batch = model.module.batch(rows, targets, taps)
        x = model.module(batch)
        if not headless(model):
            x = measured(model, model.module.unembed(x, batch.rows, taps))
    return list(x) if isinstance(model.spec.head, ClassHeadSpec) else batch.rows.split(x)


def max_abs_diff(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """max |Δ| over rows of equal shapes; two -inf at one place do not differ."""
    return max(
        float(torch.where(a == b, 0.0, (a.double() - b.double()).abs()).max()) if a.numel() else 0.0
        for a, b in zip(ours, theirs, strict=True)
    )


def measured(model: Model, logits: Tensor) -> Tensor:
    """The part of a head's output that is compared: of words their log-probabilities, of labels and ends the scores."""
    return (
        torch.log_softmax(logits.double(), -1) if isinstance(model.spec.head, LMHeadSpec | MaskedLMHeadSpec) else logits
    )


def headless(model: Model) -> bool:
    """Whether what is compared is hidden states: there is no head, or one that pools them."""
    return model.spec.head is None or isinstance(model.spec.head, PoolingSpec)


def mixture(model: Model) -> bool:
    """Whether any of its MLPs is a mixture of experts."""
    return any(isinstance(part, MoESpec) for _, part in model.spec.walk())
