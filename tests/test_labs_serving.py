"""`lab paged-cache`, `speculation` and `linear-state` at small sizes: each passes, and fails where its mechanism is
broken."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from lab_results import passes
from triptych.attention import Cache
from triptych.attention.cache_steps import SumStep
from triptych.errors import InputError
from triptych.generate import engine as engine_module
from triptych.generate.prefixes import Prefixes
from triptych.generate.speculation import Speculation
from triptych.page import TableSection
from triptych.spec import StackSpec
from triptych_lectures.labs import paged_cache, run, serving
from triptych_lectures.labs.lab import Setup

SMALL: dict[str, dict[str, Any]] = {
    "paged-cache": {"rows": 3, "shared": 19, "own": 3, "new": 9, "page": 4},
    "speculation": {"rows": 4, "new": 24, "noise": (0.05, 0.5)},
    "linear-state": {"lengths": (64, 128, 256), "width": 16, "new": 6},
}


def failed(name: str, seed: int = 0) -> set[str]:
    return {check.claim for check in run(name, Setup(seed=seed, sizes=SMALL[name])).checks if not check.passed}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_passes(name: str, seed: int) -> None:
    passes(run(name, Setup(seed=seed, sizes=SMALL[name])))


# ---------------------------------------------------------------- pages


def test_tokens_that_differ_are_counted_once_and_not_called_unshared() -> None:
    """3 prompts of 19 shared tokens and 3 of their own, which write up to 3, 6 and 9: the 19 count once."""
    result = run("paged-cache", Setup(sizes=SMALL["paged-cache"]))
    (at,) = [section for section in result.sections if isinstance(section, TableSection)]
    plain, reuse, apart = ([int(n.replace(",", "")) for n in row[1:]] for row in at.rows)
    held, differ = reuse[1:3]
    assert (held, differ) == (plain[1], held - 2 * 19)
    assert apart[2] == held
    assert f"for {differ} tokens, the shared ones counted once" in result.meaning
    assert "not shared" not in " ".join([result.meaning, *at.header])


def test_pages_fail_when_nothing_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefixes, "_takes", lambda self, row: False)
    claims = failed("paged-cache")
    assert "prompt tokens computed with reuse, over those that differ" in claims
    assert "tokens that differ with reuse" not in claims


def test_pages_fail_when_another_beginning_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Cache.share_prefix

    def shifted(self: Cache, source: int, target: int, length: int) -> None:
        share(self, source, target, length)
        self.pages._grow(len(self.pages.tables[target]))
        for at in range(len(self.pages.tables[target])):
            self.pages._copy(self.pages.tables[target], at, self.pages.size)
        for page in self.pages.tables[target]:
            for store in self.stores:
                store.pages(page, page + 1)[0].copy_(store.pages(page, page + 1)[0].flip(1))

    monkeypatch.setattr(Cache, "share_prefix", shifted)
    assert {"tokens that differ with reuse", "keys that differ when read through the pages"} & failed("paged-cache")


def test_pages_fail_when_a_shared_page_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    made = paged_cache.KeyPages.__init__
    monkeypatch.setattr(
        paged_cache.KeyPages, "__init__", lambda self, size, copying=True, *rest: made(self, size, False, *rest)
    )
    assert {"keys that differ when read through the pages", "pages copied before a write"} <= failed("paged-cache")


def test_pages_fail_when_pages_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(self: paged_cache.KeyPages, row: Any, source: Any, length: int) -> None:
        for position, keys in enumerate(self.read(source, length)):
            self.write(row, position, keys)

    monkeypatch.setattr(paged_cache.KeyPages, "share", copied)
    assert "pages copied before a write" in failed("paged-cache")


def test_one_row_is_refused() -> None:
    with pytest.raises(InputError, match="size rows: 1 must be 2 or more"):
        run("paged-cache", Setup(sizes={"rows": 1}))


# ---------------------------------------------------------------- guesses


def test_speculation_fails_when_every_guess_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_right(row: Any, token: int) -> bool:
        return 0 <= len(row.ids) - row.cached + len(row.draft) < len(row.draft)

    monkeypatch.setattr(engine_module, "accepts", all_right)
    assert {"tokens that differ from those without guesses", "guesses accepted, always wrong"} <= failed("speculation")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_guess_after_a_wrong_one_is_no_try(seed: int) -> None:
    """The formula's chance is that of a guess after right ones: with it no draft does better than expected by more than
    what its few texts leave to luck, and one that is right once in a while not as badly as its rate would have it."""
    (table,) = (of for of in run("speculation", Setup(seed=seed)).sections if isinstance(of, TableSection))
    fewer, expected = (next(i for i, of in enumerate(table.header) if of.startswith(x)) for x in ("times", "expected"))
    for row in table.rows:
        if row[0].startswith("draft: noise"):
            assert float(row[fewer]) == pytest.approx(float(row[expected]), rel=0.15), row[0]


def test_speculation_fails_when_no_guess_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    write = serving.SpeculationLab.write
    monkeypatch.setattr(
        serving.SpeculationLab, "write", lambda lab, module, requests, _: write(lab, module, requests, None)
    )
    assert "guesses made, the draft with the fewest" in failed("speculation")


def test_speculation_fails_when_no_guess_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "accepts", lambda row, token: False)
    claims = failed("speculation")
    assert "forwards without guesses over those of draft: itself" in claims
    assert "tokens that differ from those without guesses" not in claims


def test_speculation_fails_when_wrong_guesses_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(self: Speculation, row: Any, cache: Cache) -> None:
        """The cache keeps the keys of the guess, at the places of the right tokens."""
        row.cached = cache.lengths[row.slot] = min(row.cached, len(row.ids) - 1)
        row.drafted += len(row.draft)
        page, place = divmod(row.cached - 1, cache.pages.size)
        page = cache.pages.tables[row.slot][page]
        for store in cache.stores:
            store.pages(page, page + 1)[0][:, place] *= -1
        row.draft = ()

    monkeypatch.setattr(Speculation, "forget_wrong_guesses", stays)
    assert "tokens that differ from those without guesses" in failed("speculation")


def test_speculation_fails_when_the_draft_has_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control with shuffled data: the guesses of each row go to another."""
    guess = serving.DraftModel.guess

    def shuffled(self: Any, rows: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        guesses = guess(self, rows, counts)
        return [one[:count] for one, count in zip([*guesses[1:], *guesses[:1]], counts, strict=True)]

    monkeypatch.setattr(serving.DraftModel, "guess", shuffled)
    claims = failed("speculation")
    assert "share of guesses accepted, draft: itself" in claims
    assert "tokens that differ from those without guesses" not in claims


# ---------------------------------------------------------------- sums


def test_linear_state_fails_when_keys_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackSpec, "keeps_sums", lambda self, attn: False)
    claims = failed("linear-state")
    assert "linear attention: bytes of a row at 256 tokens over those at 64" in claims
    assert "tokens that differ from those without a cache" not in claims


def test_linear_state_fails_when_sums_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = SumStep.extend

    def decayed(self: SumStep, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = extend(self, layer, k, v)
        self.after[layer] *= 0.9
        return out

    monkeypatch.setattr(SumStep, "extend", decayed)
    assert "largest difference of a log-probability" in failed("linear-state")


def test_linear_state_needs_lengths() -> None:
    with pytest.raises(InputError, match="size"):
        run("linear-state", Setup(sizes={"lengths": (64,)}))
