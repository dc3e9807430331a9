"""What `explain` says beside its numbers is measured in the same run."""

import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from cli_models import Captured, checkpoint, said
from test_explain import FAMILIES, IDS, changed, reference
from triptych.cli.explain import _print_step
from triptych.errors import InputError
from triptych.explain import EXAMPLES, TOLERANCE, Walk, WalkStep, explain, explain_pair, explain_probability, worked
from triptych.explain.examples_by_hand import attention_steps, matrices
from triptych.explain.steps import number
from triptych.model import load
from triptych.probe.role_texts import words_of


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
        (1.0, 0.0, False, "nothing here contradicts the premise."),
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


# ---------------------------------------------------------------- two words, and a text's probability


def step_of(walk: Walk, title: str) -> WalkStep:
    (found,) = [step for step in walk.steps if step.title == title]
    return found


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_a_pair_has_both_scores_of_the_forward(layout: str) -> None:
    """Each direction's own product, scaled score and weight, at the last token of each word."""
    model, text = load(checkpoint(layout)), "the old mill"
    walk = explain_pair(model, text, "mill", "old", layer=1, head=2)
    step = step_of(walk, "Two words")
    (pair,) = step.makes
    places = dict(words_of(text, model.tokenizer)[1])
    mill, old = places["mill"][-1], places["old"][-1]
    sites = [pair.name.removesuffix("pair") + leaf for leaf in ("pattern", "scores")]
    target = [[0]] if layout == "encoder-decoder" else None
    weights, scores = (model.trace([text], target, read=sites)[site][0][2] for site in sites)
    assert pair.value[:, 2].tolist() == pytest.approx([float(weights[mill, old]), float(weights[old, mill])])
    assert layout == "encoder-decoder" or float(pair.value[0, 1]) == pytest.approx(float(scores[mill, old]))  # no bias
    assert float(pair.value[0, 0]) != pytest.approx(float(pair.value[1, 0]), rel=1e-3)
    assert walk.agrees
    assert walk.outcome.startswith("mill → old: score ")
    there, back = (number(weight) for weight in pair.value[:, 2].tolist())  # not 0.000 where it is small
    assert f"weight {there}; old → mill" in walk.outcome
    assert f"weight {back}; " in walk.outcome
    assert ("The mask hides “mill” from “old”" in step.meaning) is (layout == "decoder")


def test_a_pair_that_is_off_turns_it_red() -> None:
    walk = explain_pair(load(checkpoint("decoder")), "the old mill", "mill", "old")
    at = walk.steps.index(step_of(walk, "Two words"))
    assert not changed(walk, at, "makes", 0).agrees


def test_the_probability_of_a_text_is_the_product_of_its_conditionals() -> None:
    model = load(checkpoint("decoder"))
    ids = model.ids(["the old mill"])[0]
    walk = explain_probability(model, "the old mill")
    p = step_of(walk, "Probabilities").makes[0].value
    product = 1.0
    for t in range(1, len(ids)):  # each from a forward of its own prefix
        alone = model.logits([ids[:t]])[0][-1].double().softmax(-1)
        assert float(p[t - 1, 0]) == pytest.approx(float(alone[ids[t]]), rel=1e-4)
        product *= float(alone[ids[t]])
    totals = step_of(walk, "Product").makes[0].value[0].tolist()
    assert totals[0] == pytest.approx(product, rel=1e-3)
    assert totals[1] == pytest.approx(-np.log(product))
    assert totals[3] == pytest.approx(product ** (-1 / (len(ids) - 1)))
    assert walk.agrees
    assert f"{len(ids) - 1} tokens" in walk.outcome
    for place in range(1, 4):
        assert not changed(walk, place, "makes", 0).agrees


def test_all_texts_of_two_tokens_share_a_probability_of_one() -> None:
    """P is a distribution: over every second token the products after one first token add up to 1."""
    model = load(checkpoint("decoder"))
    texts = [explain_probability(model, [5, token]) for token in range(model.spec.vocab)]
    assert sum(float(step_of(walk, "Product").makes[0].value[0, 0]) for walk in texts) == pytest.approx(1.0)


def test_a_model_that_sees_the_future_has_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictions for a prefix alone are others where later tokens leak: the walk turns red."""
    model = load(checkpoint("decoder"))
    whole = model.logits

    def leaking(rows: list[list[int]]) -> list[torch.Tensor]:
        return [one + 0.01 * row[-1] for one, row in zip(whole(rows), rows, strict=True)]

    monkeypatch.setattr(model, "logits", leaking)
    walk = explain_probability(model, [3, 9, 27])
    assert [step.title for step, e in zip(walk.steps, walk.errors, strict=True) if e > TOLERANCE] == ["Logits"]


@pytest.mark.parametrize("layout", ["encoder", "encoder-decoder"])
def test_other_layouts_have_no_product(layout: str) -> None:
    with pytest.raises(InputError, match=f"this {layout} does not predict each token from those before it"):
        explain_probability(load(checkpoint(layout)), "the old mill")


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--pair", "mill"], 2, "two words"),
        (["--pair", "mill:old:the"], 2, "two words"),
        (["--pair", "mill:mill"], 1, "same place"),
        (["--pair", "mill:river"], 1, "no word 'river'"),
        (["--pair", "mill:old", "--cache"], 2, "give one of"),
        (["--pair", "mill:old", "--row", "1"], 2, "omit --row"),
        (["--probability", "--layer", "1"], 2, "omit --layer"),
        (["--probability", "--cache"], 2, "give one of"),
    ],
)
def test_misuses_are_one_line(arguments: list[str], code: int, problem: str, capsys: Captured) -> None:
    error = said(["explain", str(checkpoint("decoder")), "the old mill", *arguments], capsys, code)[1]
    assert error.count("\n") == 1
    assert problem in error


def test_letters_are_said(capsys: Captured) -> None:
    """A model of letters has no row for a word, and names a model that has; one of words says nothing."""
    note = "the tokens of this model are letters"
    assert note in said(["explain", str(checkpoint("decoder")), "the old mill"], capsys)[1]
    assert note not in said(["explain", str(checkpoint("decoder")), "a b"], capsys)[1]
    assert note not in said(["explain", str(checkpoint("encoder")), "the old mill"], capsys)[1]
    unknown = "no token of this text is in the vocabulary"
    assert unknown in said(["explain", str(checkpoint("encoder")), "\u65e5\u672c\u8a9e"], capsys)[1]
    assert unknown not in said(["explain", str(checkpoint("encoder")), "the \u65e5"], capsys)[1]


def test_the_help_lists_the_examples(capsys: Captured) -> None:
    words = " ".join(said(["explain", "--help"], capsys)[0].replace("│", " ").split()).replace(",", " ").split()
    assert {*EXAMPLES} <= {word.strip(".") for word in words}


def test_two_directions_differ_and_one_map_makes_them_equal() -> None:
    walk = worked("L0.2.7")
    two, one = (made for step in walk.steps if step.title == "Scores" for made in step.makes)
    assert float(two.value[0, 1]) != float(two.value[1, 0])
    assert float(one.value[0, 1]) == float(one.value[1, 0]) != 0


def test_keys_and_values_move_together() -> None:
    given, both, alone = (step.makes[0].value for step in worked("L4.pairs").steps if step.part == "Output")
    assert torch.allclose(given, both)
    assert (given - alone).abs().max() > 1


def test_a_terminal_shows_whole_words_and_where_columns_are_left_out() -> None:
    """At 80 columns, of a text of letters, the words of a pair and the first of fourteen tokens."""
    out = Console(width=80, file=io.StringIO())
    walk = explain_pair(load(checkpoint("decoder")), "old mill, the mill", "mill@2", "mill@1")
    for title in ("Tokens", "Two words"):
        _print_step(out, 1, step_of(walk, title), 0.0)
    printed = out.file.getvalue()
    assert "mill@2 → mill@1 " in printed
    names = next(line for line in printed.splitlines() if "…" in line and "more" not in line).split()
    assert names[-2] == "…"
    assert max(map(len, printed.splitlines())) <= 80
