"""The result of a check: comparisons with their limits, and where a peer departs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
class Layer:
    """How far one site is from the peer's: max |Δ| over max |theirs|.  `first_position` is the lowest position of any
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
    layers: tuple[Layer, ...] = ()
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
    def first_layer(self) -> Layer | None:
        """That site with its difference, and the position it begins at."""
        return next((layer for layer in self.layers if not layer.difference <= self.threshold), None)

    def to_dict(self) -> dict[str, Any]:
        findings = [asdict(finding) | {"passed": finding.passed} for finding in self.findings]
        more = {"passed": self.passed, "first_difference": self.first_difference}
        return asdict(self) | {"findings": findings} | more
