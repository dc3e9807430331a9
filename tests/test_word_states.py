"""The stored states of one word in thirty sentences (`tools/word_states.py`), which the live page shows."""

import json
from importlib.resources import files
from typing import Any

import pytest
import torch

from programs import ROOT, program
from triptych.model import Model

FILE = files("triptych.page") / "word_states.json"
STATES: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def stack(name: str) -> dict[str, Any]:
    return next(one for one in STATES["stacks"] if one["stack"] == name)


def test_the_stored_states_are_few_and_begin_at_one_point() -> None:
    assert len(FILE.read_bytes()) < 300_000
    assert len(stack("bank")["sentences"]) + len(stack("table")["sentences"]) == 30
    for one in STATES["stacks"]:
        assert set(one["at"][0]) == {0}  # one word has one vector, before the first block
        assert all(0 <= share <= 1 for share in one["share"])
        assert all(word in sentence for word, sentence in zip(one["tokens"], one["sentences"], strict=True))


def test_the_share_between_two_groups_is_that_of_an_analysis_of_variance() -> None:
    """`between` on numbers made by hand, and about 1 / (N - 1) for groups without a difference."""
    between = program("tools/word_states.py").between
    topic = torch.tensor([0, 0, 1, 1])
    vectors = torch.tensor([[[0.0, 0], [2, 0], [10, 0], [12, 0]]], dtype=torch.double)
    assert between(vectors, topic).tolist() == pytest.approx([100 / 104])
    noise = torch.randn(1, 4000, 8, dtype=torch.double)
    assert float(between(noise, torch.arange(4000) % 2)) < 0.01
    assert between(torch.ones(1, 4, 2, dtype=torch.double), topic).tolist() == [0]


def test_the_figures_of_the_documentation_are_those_of_the_file() -> None:
    text = " ".join((ROOT / "docs/concepts/live-page.md").read_text(encoding="utf-8").split())
    between = program("tools/word_states.py").between

    def mean(numbers: list[float]) -> str:
        blocks = numbers[1:]  # all but the embedding
        return f"{100 * sum(blocks) / len(blocks):.0f}%"

    def in_plane(one: dict[str, Any]) -> str:
        at = torch.tensor(one["at"], dtype=torch.double).reshape(len(one["at"]), -1, 2)
        return mean(between(at, torch.tensor(one["text"])).tolist())

    bank, cut, table = stack("bank"), stack("bank, deciding word cut"), stack("table")
    random = stack("bank, random directions")
    for sentence in (
        f"As a mean of all blocks, {mean(bank['between'])} of the variance of “bank” lies between the topics.",
        f"it is 1/15, about {mean(bank['chance'])}.",
        f"cut in all layers, {mean(cut['between'])} is left",
        f"and has {mean(table['between'])}.",
        f"shows {100 * sum(random['share']) / len(random['share'][1:]):.1f}% of the variance",
        f"and {in_plane(random)} of what it shows",
        f"which shows {mean(bank['share'])} of the variance, it is {in_plane(bank)}.",
        "After the first four blocks, “table” has more than “bank”.",
    ):
        assert sentence in text, sentence
    more = [a < b for a, b in zip(bank["between"][1:], table["between"][1:], strict=True)]
    assert more == [True] * 4 + [False] * (len(more) - 4)


@pytest.mark.heavy
def test_the_stored_states_are_those_of_the_model(smollm2: Model) -> None:
    """Points within 5 of 1000 steps; those with the deciding word cut are not."""
    one = program("tools/word_states.py")
    made = one.made(smollm2)
    assert one.difference(STATES, made) <= one.WITHIN
    assert one.difference(STATES["stacks"][0], made["stacks"][1]) > one.WITHIN
