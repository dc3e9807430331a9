"""What `explain` says beside its numbers is measured in the same run."""

import re

import numpy as np
import pytest

from cli_models import Captured, said
from test_explain import FAMILIES, IDS, reference
from triptych.explain import EXAMPLES, explain, worked
from triptych.explain.examples_by_hand import attention_steps, matrices


def spreads(text: str) -> dict[str, float]:
    """The measured figures of the step "Scale", by name."""
    found = re.search(
        r"standard deviation of (?P<before>\S+)(?: before it)? \(variance (?P<variance>\S+)\)(?: and (?P<after>\S+) "
        r"after it \(variance (?P<scaled>\S+)\))?\. .* q has mean (?P<mean_q>\S+) and variance (?P<var_q>\S+), k mean "
        r"(?P<mean_k>\S+) and variance (?P<var_k>[^:]+): .*premise",
        text,
    )
    assert found, text
    return {name: float(x) for name, x in found.groupdict().items() if x is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_scale_says_what_was_measured(name: str) -> None:
    """The spread of this run's scores before and after the scale, in every attention and by any scale."""
    walk = explain(reference(name), IDS, head=1)
    scales = [i for i, step in enumerate(walk.steps) if step.title in ("Scale", "No scale") and step.part != "Output"]
    scales = [i for i in scales if walk.steps[i - 1].title == "Scores"]
    assert scales
    for i in scales:
        products = walk.steps[i - 1].makes[0]
        said = spreads(walk.steps[i].meaning)
        scores = products.value[1].double()
        assert said["before"] == pytest.approx(float(scores.std(correction=0)), rel=6e-3)
        assert said["variance"] == pytest.approx(float(scores.var(correction=0)), rel=6e-3)
        if walk.steps[i].title == "No scale":
            assert "after" not in said
            assert "not divided" in walk.steps[i].meaning
            continue
        capped = "soft cap" in walk.steps[i].meaning
        after = float(walk.steps[i].makes[0].value[1].double().std(correction=0))
        assert capped or said["after"] == pytest.approx(after, rel=6e-3)
        assert said["after"] ** 2 == pytest.approx(said["scaled"], rel=0.02)


@pytest.mark.parametrize(
    ("size", "shift", "same", "verdict"),
    [
        (1.0, 0.0, False, "the premise holds."),
        (2.0, 0.0, False, "the premise does not hold; independent entries of mean 0 and these variances would give"),
        (1.0, 1.0, False, "the premise does not hold;"),
        (1.0, 0.0, True, "the scores do not vary as those of independent entries."),
    ],
)
def test_the_scale_judges_its_premise(size: float, shift: float, same: bool, verdict: str) -> None:
    """Normal entries keep it; twice as large, shifted or equal ones break it."""
    draw = np.random.default_rng(3)
    q = size * draw.standard_normal((64, 48)) + shift
    k = draw.standard_normal((64, 48))
    if same:  # each key is a query times the same signs: standard entries that depend on each other
        one = np.sign(draw.standard_normal(48))
        q, k = np.outer(draw.standard_normal(64), one), np.outer(draw.standard_normal(64), one)
        q, k = (x / x.std() for x in (q, k))
    steps = attention_steps(matrices(Q=q, K=k, V=k))
    text = next(step.meaning for step in steps if step.title == "Scale")
    assert text.endswith(verdict) or verdict.endswith((";", "give"))
    assert verdict in text
    figures = spreads(text)
    assert figures["variance"] == pytest.approx((q @ k.T).var(), rel=6e-3)
    assert figures["var_q"] == pytest.approx(q.var(), rel=6e-3)


def test_a_few_numbers_do_not_decide_the_premise() -> None:
    """One number a token: three queries of mean 1 may come from anything."""
    (text,) = (step.meaning for step in worked("L2.1").steps if step.title == "No scale")
    assert text.endswith(": so few numbers cannot decide whether the premise holds.")


def test_the_attention_of_sat_shows_every_score_with_a_word(capsys: Captured) -> None:
    screen = said(["explain", "--example", "L1.sat"], capsys)[0]
    assert re.findall(r"The +cat +sat +on +mats\n +0.0186 +0.5561 +0.0374 +0.0152 +0.3728", screen)
    assert "0.8000    4.2000    1.5000    0.6000    3.8000" in screen
    assert "more column" not in screen


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_example_compares_a_symbol_with_itself(name: str) -> None:
    """A student can say what each step is: its formula has two sides, and figures from elsewhere are called so."""
    for step in worked(name).steps:
        assert not re.search(r"\b(\w+) = \1\b", step.formula), step.formula
        if step.part == "Reference figures":
            assert "computed without this program" in step.meaning


def test_the_lecture_s_figures_are_those_that_it_prints() -> None:
    """L0 2.9 prints 576 MB and nothing of ungrouped heads."""
    (printed,) = (step for step in worked("L0.2.9").steps if step.part == "The lecture's figures")
    assert [one.value.tolist() for one in printed.makes] == [[[576.0]]]
