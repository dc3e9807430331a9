"""`lab bank`, `head-roles`, `not-explanation` and `redundancy` on SmolLM2: each passes, and fails when what it claims
is broken."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
import triptych
from lab_results import failed, passes
from triptych.attention import reference
from triptych.errors import InputError
from triptych.model import Model
from triptych.nn import attention
from triptych.text import byte_tokenizer
from triptych_lectures.labs import bank, head_roles, not_explanation, other_patterns, redundancy, run
from triptych_lectures.labs.generated_tasks import ShuffledTask
from triptych_lectures.labs.lab import Setup, Size
from triptych_lectures.labs.small_models import attention_layers

LABS = (bank, head_roles, not_explanation, redundancy)


@pytest.fixture
def loaded(smollm2: Model, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    """One copy for all."""
    for lab in LABS:
        monkeypatch.setattr(lab, "decoder", lambda setup: smollm2)


def ignore_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits of scores and patterns are called, and their results not used."""
    finish = reference.finish

    def unedited(request: Any, scores: Tensor, v: Tensor, sinks: Tensor | None, hook: Any = None) -> Tensor:
        if hook is not None:
            hook("pattern", reference.pattern_of(hook("scores", scores), sinks))
        return finish(request, scores, v, sinks)

    monkeypatch.setattr(reference, "finish", unedited)


def test_bank_passes(loaded: None, smollm2: Model) -> None:
    """Head 4.2 was found on these sentences; with other words in the place of "river" it does not stand out."""
    text = passes(run("bank", Setup(seed=77))).meaning  # which quotes a command that has no seed
    link = smollm2.link("She sat by the river bank", "bank", "river")
    [own] = [row for row in link.rows if (row.layer, row.head) == (4, 2)]
    assert not own.above
    assert f"gives {own.null:.2f}, and finds 0 of 270 heads beyond chance, this one not among them (p" in text


def test_what_bank_says_of_chance_follows_the_test(smollm2: Model) -> None:
    link = smollm2.link("She sat by the river bank", "bank", "river")
    rows = tuple(
        replace(row, p=0.001, weight=0.9, threshold=0.5) if (row.layer, row.head) == (4, 2) else row
        for row in link.rows
    )
    clause = bank.BankLab()._content(bank.Content((4, 2), 0.8, 0.1), replace(link, rows=rows))
    assert "finds 1 of 270 heads beyond chance, this one among them (p 0.001)" in clause.text


def test_bank_fails_when_senses_are_mixed(loaded: None) -> None:
    """Shuffled labels: each group has sentences of both senses."""
    mixed = ["|".join([*bank.SHORES[i : i + 2], *bank.LENDERS[i : i + 2]]) for i in (0, 2)]
    result = run("bank", Setup(sizes={"one_sense": mixed[0], "other_sense": mixed[1]}))
    assert "cosine within a sense, less that between senses" in failed(result)
    assert "The vectors do not tell the two senses apart" in result.meaning


def test_bank_names_the_head_of_l0_5(smollm2: Model) -> None:
    pair = bank.SentencePair(smollm2, "bank", ("She sat by the", "river"), ("She went to the", "money"))
    content = pair.content()
    assert content.head == (4, 2)
    river, money = pair.weights[4, :, 2].tolist()
    assert (river, money, content.elsewhere) == pytest.approx((0.93, 0.69, 0.10), abs=0.005)


def test_bank_fails_when_attention_adds_nothing(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = attention.Attention.forward
    monkeypatch.setattr(attention.Attention, "forward", lambda self, *inputs: 0 * forward(self, *inputs))
    result = run("bank")
    assert "lowest cosine in a later layer" in failed(result)
    assert "It is not this link that separates the two vectors" in result.meaning


def test_bank_fails_when_edits_are_ignored(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_edits(monkeypatch)
    assert failed(run("bank")) == {
        "share of the separation left when 'bank' cannot see 'river' or 'money'",
        "separation left if the sentences differ in no other word",
        "share of the separation left without the 12 strongest readers of the first third of the layers",
    }


def test_bank_fails_when_later_heads_do_it_too(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the early readers in the place of the later ones it does not pass."""
    readers = bank.SentencePair.readers
    monkeypatch.setattr(bank.SentencePair, "readers", lambda pair, count: (readers(pair, count)[0],) * 2)
    assert failed(run("bank")) == {
        "control: share of the separation left without the 12 strongest readers of the other layers"
    }


def test_head_roles_passes(loaded: None) -> None:
    result = passes(run("head-roles"))
    roles, unread, _ = (section for section in result.sections)
    scores = {role: (int(layer), int(head), float(score)) for role, layer, head, score, *_ in roles.rows}
    assert scores["the token before"] == (16, 0, pytest.approx(0.67, abs=0.02))
    assert scores["punctuation"] == (1, 1, pytest.approx(0.61, abs=0.02))
    assert scores["the first token"] == (18, 8, pytest.approx(1.0, abs=0.01))
    [[layer, head, distance]] = unread.rows
    assert (int(layer), int(head), float(distance)) == (7, 6, pytest.approx(0.74, abs=0.02))


def test_head_roles_fails_on_random_weights(smollm2: Model, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    """The best of 270 heads that have learned nothing is no head with a role."""
    untrained = Model(triptych.nn.new(smollm2.spec, 3), smollm2.tokenizer)
    monkeypatch.setattr(head_roles, "decoder", lambda setup: untrained)
    roles = ("the token before", "punctuation", "the first token", "the token itself")
    claims = failed(run("head-roles"))
    assert all(any(claim.startswith(role) for claim in claims) for role in roles)


# Of the classifier beside the decoder, whose tests are below.
SMALL: dict[str, Size] = {"searched": 4, "trained": 2, "search_steps": 2, "tested": 4}
ALTERNATIVE = "decoder: output change under the alternative in all layers"


def next_word() -> set[str]:
    """What fails of the decoder."""
    result = run("not-explanation", Setup(full=True, sizes=SMALL))
    return {claim for claim in failed(result) if claim.startswith("decoder")}


def test_not_explanation_passes_on_smollm2(loaded: None) -> None:
    assert next_word() == set()


def test_not_explanation_fails_when_edits_are_ignored(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(  # a search without edits finds no gradient
        other_patterns,
        "search",
        lambda last, *rest, **sizes: (other_patterns.Replacement(last.patterns, 0.7, 0.0), []),
    )
    monkeypatch.setattr(not_explanation.NotExplanationLab, "_of_classifier", lambda *given: ((), ()))
    ignore_edits(monkeypatch)
    assert "decoder, control: output change under the shuffled patterns in all layers" in next_word()


def test_not_explanation_fails_when_the_alternative_is_a_shuffle(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that are as far away, and were not searched, change the output."""
    monkeypatch.setattr(other_patterns, "search", unsearched)
    assert next_word() == {ALTERNATIVE}


def unsearched(answers: Any, random: torch.Generator, **sizes: Any) -> Any:
    return other_patterns.shuffled(answers, 0.6, random), []


TASK: dict[str, Size] = {"kinds": 4, "length": 8, "trained": 150, "searched": 12, "tested": 60, "search_steps": 30}


@pytest.mark.heavy
def test_not_explanation_passes_on_a_classifier() -> None:
    passes(run("not-explanation", Setup(sizes=TASK)))


@pytest.mark.heavy
def test_not_explanation_fails_on_a_classifier_whose_edits_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lambda answers, *rest, **sizes: (other_patterns.Replacement(answers.patterns, 0.7, 0.0), [])  # noqa: E731
    monkeypatch.setattr(other_patterns, "search", found)
    ignore_edits(monkeypatch)
    claims = failed(run("not-explanation", Setup(sizes=TASK)))
    assert "control: output change under the shuffled patterns in all layers" in claims
    assert "output change when the deciding token is hidden" in claims


@pytest.mark.heavy
def test_not_explanation_fails_on_a_classifier_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_patterns, "search", unsearched)
    claims = failed(run("not-explanation", Setup(sizes=TASK)))
    assert "output change under the alternative in all layers (0 to 1)" in claims


@pytest.mark.heavy
def test_not_explanation_fails_on_shuffled_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier that learned nothing does not need the token, and any pattern gives its output."""
    trained = not_explanation._trained
    monkeypatch.setattr(
        not_explanation, "_trained", lambda sizes, task, seed: trained(sizes, ShuffledTask(sizes.task), seed)
    )
    claims = failed(run("not-explanation", Setup(sizes=TASK)))
    assert {"classifier: right on new rows", "output change when the deciding token is hidden"} <= claims


# Of the 270 heads of SmolLM2.
FEW: dict[str, Size] = {"shares": (0.05, 0.25, 0.4)}


def test_redundancy_passes(loaded: None) -> None:
    passes(run("redundancy", Setup(sizes=FEW)))


def test_redundancy_fails_when_heads_that_are_out_go_on(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = redundancy.ScoredHeads.loss
    monkeypatch.setattr(redundancy.ScoredHeads, "loss", lambda heads, rows, out: loss(heads, rows, []))
    result = run("redundancy", Setup(sizes=FEW))
    assert {f"share of the heads that can go, {redundancy.REVERSE}"} <= failed(result)
    assert "The heads with the highest score are not needed" in result.meaning


def test_redundancy_fails_when_scores_are_shuffled(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = redundancy.ScoredHeads.__init__

    def shuffled(self: redundancy.ScoredHeads, model: Model, rows: list[list[int]]) -> None:
        made(self, model, rows)
        random.Random(3).shuffle(self.order)

    monkeypatch.setattr(redundancy.ScoredHeads, "__init__", shuffled)
    result = run("redundancy", Setup(sizes=FEW))
    assert "A random order does about as well as the score" in result.meaning


def test_heads_spared_end_where_the_loss_first_rises_too_far() -> None:
    out = redundancy.Removal((0, 1, 2, 3, 4), {"a": [1.0, 1.1, 1.3, 1.0, 2.0], "b": [1.0, 1.2, 1.0, 1.0, 2.0]}, 0.15)
    assert [out.spared("a"), out.spared("b")] == [1, 0]
    assert out.mean_rise("a") == pytest.approx(0.4 / 3)


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("bank", {"word": "river side"}, "size word: 'river side' must be one word"),
        ("bank", {"start": " "}, "size start: an empty text"),
        ("bank", {"ambiguous": "spring"}, "does not end in 'spring'"),
        ("bank", {"one_sense": "A bank|B bank"}, "give four or more sentences of each"),
        ("head-roles", {"text": ""}, "size text: an empty text"),
        ("head-roles", {"other_text": "no marks here"}, "size other_text: no comma"),
        ("redundancy", {"held_out": "a | "}, "size held_out: '"),
        ("not-explanation", {"text": "a"}, "size text: 'a' is"),
    ],
)
def test_a_text_that_cannot_be_is_one_line(
    name: str, sizes: dict[str, Size], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    model = Model(attention_layers(2, tokenizer.vocab_size, 8, 2, seed=0), tokenizer)
    for lab in LABS:
        monkeypatch.setattr(lab, "decoder", lambda setup: model)
    monkeypatch.setattr(not_explanation.NotExplanationLab, "_of_classifier", lambda *given: ((), ()))
    with pytest.raises(InputError) as refused:
        run(name, Setup(full=name == "not-explanation", sizes=sizes))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["bank", "head-roles", "not-explanation", "redundancy"])
def test_an_encoder_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for lab in LABS:
        monkeypatch.setattr(lab, "decoder", lambda setup: Model(tiny.encoder(), byte_tokenizer()))
    monkeypatch.setattr(not_explanation.NotExplanationLab, "_of_classifier", lambda *given: ((), ()))
    with pytest.raises(InputError, match="decoder"):
        run(name, Setup(full=True))


def test_ideal_patterns_read_what_they_are_named_after() -> None:
    ideals = head_roles._ideals(torch.tensor([False, False, True, False]))
    assert ideals["the token before"].argmax(-1).tolist() == [0, 0, 1, 2]
    assert ideals["punctuation"].argmax(-1).tolist() == [0, 0, 2, 2]
    assert ideals["the first token"].argmax(-1).tolist() == [0, 0, 0, 0]
    assert ideals["the token itself"].argmax(-1).tolist() == [0, 1, 2, 3]
    assert ideals[head_roles.EVEN][2].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["bank", "head-roles", "not-explanation", "redundancy"])
def test_passes_at_full_size(name: str, seed: int, smollm2_gguf: Path, unchecked: None) -> None:
    passes(run(name, Setup(seed=seed, model=str(smollm2_gguf), full=True)))
