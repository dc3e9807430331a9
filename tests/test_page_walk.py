"""The walk through one attention, in the page of a model: every matrix and every number in words is the model's, and a
mask that is painted changes what it must and nothing else."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from browser import CHROMIUM, Browser, Tab
from live_pages import in_python, with_attention
from test_page_live_flow import apart, sites, tokens
from test_page_live_view import VIEW, act, press, quickstart, typed
from triptych.model import Model
from triptych.page import write
from triptych.page.live import live_page
from triptych.page.live_export import export
from triptych.spec.masks import Dense

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]
PANELS = ("decoder", "encoder", "encoder-decoder")
WALK = f"{VIEW}.walk.walk"
A = f"{VIEW}.walk.a"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for panel in PANELS:
        write(folder / f"{panel}.html", live_page(quickstart(panel), panel))
    return {panel: folder / f"{panel}.html" for panel in PANELS}


def opened(browser: Browser, pages: dict[str, Path], panel: str, **options: Any) -> Tab:
    tab = browser.open(pages[panel], **options).wait()
    if panel == "encoder-decoder":
        typed(tab, "I haue", 1)
    return tab


def matrix(tab: Tab, name: str) -> Tensor:
    data = f"((one) => [one.rows, one.columns, [...one.data].map((x) => (x === -Infinity ? 'no' : x))])({A}.{name})"
    rows, columns, numbers = tab.evaluate(data)
    flat = [float("-inf") if x == "no" else x for x in numbers]
    return torch.tensor(flat, dtype=torch.float64).reshape(rows, columns)


def parts(panel: str) -> list[tuple[str, str]]:
    """Every attention of a model with its stack: ("blocks.0.attn", "decoder")."""
    return [(one["part"], one["stack"]) for one in export(quickstart(panel)).parts() if not one["mlp"]]


def expected(panel: str, tab: Tab, part: str, head: int) -> dict[str, Tensor]:
    """The matrices of one head from the sites and the weights of the torch interpreter."""
    exported, values = sites(panel, tab)
    tower = "" if panel == "encoder-decoder" else f"{panel}."
    steps = [step for entry in exported.lowered.entries.values() for step in entry.instructions]
    attend = next(step for step in steps if step.op == "attend" and step.attributes["ports"][0].startswith(f"{part}."))

    def weight(name: str) -> Tensor:
        return exported.weights[f"{tower}{part}.{name}.weight"].double()

    def site(name: str) -> Tensor:
        return values[f"{part}.{name}"].double()

    width = site("q").shape[-1]
    own = slice(head * width, (head + 1) * width)
    x = site("in")
    memory = values["encoder.final"].double() if part.endswith("cross") else x
    w = {key: weight(key)[own].T for key in "qkv"}
    dots = site("q_rot")[:, head] @ site("k_rot")[:, head].T
    weights = weights_of(panel, tab, part, head)
    return {
        "X": x, "Y": memory, "WQ": w["q"], "WK": w["k"], "WV": w["v"], "Q": x @ w["q"], "K": memory @ w["k"],
        "V": memory @ w["v"], "QR": site("q_rot")[:, head], "KR": site("k_rot")[:, head], "dots": dots,
        "weights": weights, "z": weights @ (memory @ w["v"]), "concat": site("z").flatten(1),
        "WO": weight("out").T, "out": site("z").flatten(1) @ weight("out").T,
    } | ({} if "bias" in attend.inputs else {"scaled": dots * attend.attributes["scale"]})  # fmt: skip


@cache
def of_the_page(panel: str) -> Model:
    """The model's own modules with the int8 weights of the page."""
    module = copy.deepcopy(quickstart(panel).module)
    weights = export(quickstart(panel)).weights
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    return Model(module, quickstart(panel).tokenizer)


def weights_of(panel: str, tab: Tab, part: str, head: int) -> Tensor:
    now = tokens(tab)
    source, targets = (now["source"], [now["ids"]]) if "source" in now else (now["ids"], None)
    trace = of_the_page(panel).trace([source], targets, read=[f"{part}.pattern"])
    return trace[f"{part}.pattern"][0][head].double()


@pytest.mark.parametrize("panel", PANELS)
def test_every_matrix_is_the_model_s(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, panel)
    for place, (part, _) in enumerate(parts(panel)):
        for head in (1, 3):
            act(tab, f"{VIEW}.walk.pick({VIEW}.walk.attentions[{place}], {head})")
            wanted = expected(panel, tab, part, head)
            for name, numbers in wanted.items():
                size = max(1.0, float(numbers.abs().max()))
                assert apart(matrix(tab, name), numbers) <= 1e-4 * size, (part, head, name)
            # The comparison is not blind: another head has other numbers.
            other = expected(panel, tab, part, head - 1)
            assert apart(other["dots"], wanted["dots"]) > 1e-2
            assert apart(other["weights"], wanted["weights"]) > 1e-3
    assert tab.console() == []


def cell(tab: Tab) -> dict[str, float]:
    """The numbers in the words about the chosen number, by name."""
    read = f"[...{WALK}.cell.querySelectorAll('b.number')].map(({{ dataset }}) => [dataset.name, dataset.value])"
    return {name: float(value.replace("Infinity", "inf")) for name, value in tab.evaluate(read)}


def test_a_touched_number_shows_its_product(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, "decoder")
    wanted = expected("decoder", tab, "blocks.0.attn", 0)
    row, width = 9, wanted["Q"].shape[1]
    sums = {"Q": ("Q", 5), "K": ("K", 7), "V": ("V", 2), "QKᵀ": ("dots", 3), "A·V": ("z", 30), "W_O": ("out", 100)}
    for title, (name, column) in sums.items():
        act(tab, f"({WALK}.open('{title}'), {WALK}.choose([{row}, {column}]))")
        shown = cell(tab)
        value = float(wanted[name][row, column])
        assert shown["dot" if title == "QKᵀ" else "sum"] == pytest.approx(value, abs=1e-4 * max(1, abs(value))), title
    act(tab, f"({WALK}.open('softmax'), {WALK}.choose([{row}, 3]))")
    shown, dot = cell(tab), float(wanted["dots"][row, 3])
    scores = wanted["dots"][row, : row + 1] / width**0.5
    assert shown["dot"] == pytest.approx(dot, abs=1e-3)
    assert shown["score"] == pytest.approx(dot / width**0.5, abs=1e-4)
    assert shown["powers"] == pytest.approx(float(scores.exp().sum()), rel=1e-4)
    assert shown["weight"] == pytest.approx(float(scores.softmax(-1)[3]), abs=1e-4)
    text = tab.evaluate(f"{WALK}.cell.textContent")
    assert f"divided by √{width}" in text
    assert "The query of" in text
    # The map below says the same of its chosen weight, and a hidden key is named as such.
    act(tab, f"{VIEW}.attention.choose({row}, 3, false)")
    assert tab.evaluate(f"{VIEW}.attention.product.textContent") == text
    act(tab, f"{WALK}.choose([{row}, {row + 1}])")
    assert "hidden by the mask" in tab.evaluate(f"{WALK}.cell.textContent")
    assert cell(tab)["weight"] == 0


def test_a_head_that_is_chosen_in_the_map_is_walked_and_the_other_way_round(
    browser: Browser, pages: dict[str, Path]
) -> None:
    tab = opened(browser, pages, "encoder-decoder")
    act(tab, f"{VIEW}.attention.open({VIEW}.attention.heads.cross[2])")
    assert tab.evaluate(f"{VIEW}.walk.wanted") == {"part": "decoder.blocks.0.cross", "head": 2}
    act(tab, f"{VIEW}.walk.layers.children[0].click()")
    assert tab.evaluate(f"[{VIEW}.attention.head.stack, {VIEW}.attention.head.head]") == ["encoder", 2]
    assert tab.evaluate(f"{A}.queries.length") == len(tokens(tab)["source"])


# ---------------------------------------------------------------- a painted mask


def visible(panel: str, stack: str, tab: Tab) -> Tensor:
    now = tokens(tab)
    queries = len(now["source"] if stack == "encoder" and "source" in now else now["ids"])
    keys = len(now["source"] if "source" in now and stack != "decoder" else now["ids"])
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return seen.tril() if stack == "decoder" else seen


def now_logits(tab: Tab) -> Tensor:
    return torch.tensor(tab.evaluate(f"{VIEW}.now.logits.map((row) => [...row])"))


def patterns(tab: Tab) -> dict[str, Tensor]:
    read = f"Object.values({VIEW}.now.runs).flatMap((run) => [...run.patterns])"
    all_of_them = f"{read}.map(([part, one]) => [part, one.heads, one.queries, one.keys, [...one.data]])"
    return {part: torch.tensor(data).reshape(*shape) for part, *shape, data in tab.evaluate(all_of_them)}


@pytest.mark.parametrize(
    ("panel", "stack"),
    [("decoder",) * 2, ("encoder",) * 2, *(("encoder-decoder", stack) for stack in ("encoder", "decoder", "cross"))],
)
@pytest.mark.parametrize("how", ["cell", "padding", "all", "causal"])
def test_a_painted_mask_is_that_of_python(
    panel: str, stack: str, how: str, browser: Browser, pages: dict[str, Path]
) -> None:
    """Of all layers and heads of a stack; undone, everything is as it was."""
    if how == "causal" and stack == "cross":
        pytest.skip("a causal mask has no meaning between two texts")
    tab = opened(browser, pages, panel)
    whole, before = now_logits(tab), patterns(tab)
    place = [found for _, found in parts(panel)].index(stack)
    act(tab, f"{VIEW}.walk.pick({VIEW}.walk.attentions[{place}], 0)")
    act(tab, f"({WALK}.open('masked'), {WALK}.choose([3, 1]))")
    seen = visible(panel, stack, tab)
    if how == "cell":
        act(tab, f"{WALK}.flip()")
        seen[3, 1] = ~seen[3, 1]
    elif how == "padding":
        act(tab, f"[...{WALK}.tools.children].find((one) => one.textContent.startsWith('Padding')).click()")
        seen[:, 1] = False
    else:
        act(tab, f"[...{WALK}.tools.children].find((one) => /^{how}/i.test(one.textContent)).click()")
        seen = torch.ones_like(seen) if how == "all" else torch.ones_like(seen).tril()
    model, exported, now = quickstart(panel), export(quickstart(panel)), tokens(tab)
    painted = with_attention(exported.lowered, lambda own: {"mask": Dense(seen)} if own == stack else {})
    source, target = (now["source"], now["ids"]) if "source" in now else (now["ids"], None)
    rows = tab.evaluate(f"{VIEW}.rowsOf({json.dumps(now['ids'])})")
    assert apart(now_logits(tab), in_python(model, exported, source, target, program=painted)[rows]) <= 1e-3
    after = patterns(tab)
    crosses = tab.evaluate(f"{WALK}.plot.marks.querySelector('path').getAttribute('d')")
    assert crosses.count("M") == int((~seen).sum())
    changed = not bool((seen == visible(panel, stack, tab)).all())
    for part, own in parts(panel):
        if own == stack:
            assert float(after[part][:, ~seen].abs().sum()) == 0
            torch.testing.assert_close(after[part].sum(-1), seen.any(-1).float().expand(after[part].shape[:2]))
    first = next(part for part, own in parts(panel) if own == stack)
    if how == "cell":  # in the first layer, of that query alone
        others = [row for row in range(len(seen)) if row != 3]
        assert apart(after[first][:, others], before[first][:, others]) <= 1e-6
        assert apart(after[first][:, 3], before[first][:, 3]) > 1e-3
    assert (apart(after[first], before[first]) > 1e-3) is changed
    act(tab, f"{WALK}.tools.lastElementChild.click()")
    assert apart(now_logits(tab), whole) <= 1e-5
    assert all(apart(patterns(tab)[part], before[part]) <= 1e-6 for part in before)
    assert tab.console() == []


def test_a_painted_cell_leaves_all_earlier_tokens_as_they_were(browser: Browser, pages: dict[str, Path]) -> None:
    """In a decoder nothing before the query can change; a cell of the last query changes the prediction."""
    tab = opened(browser, pages, "decoder")
    before, whole = patterns(tab), now_logits(tab)
    act(tab, f"({WALK}.open('masked'), {WALK}.choose([10, 4]), {WALK}.flip())")
    after = patterns(tab)
    for part, own in before.items():
        assert torch.equal(after[part][:, :10], own[:, :10]), part
    assert apart(after["blocks.1.attn"][:, 10:], before["blocks.1.attn"][:, 10:]) > 1e-4
    assert apart(now_logits(tab), whole) > 1e-4
    # What is typed behind has the same painted mask.
    typed(tab, "She sat by the river bank and")
    assert float(patterns(tab)["blocks.0.attn"][:, 10, 4].abs().sum()) == 0
    act(tab, f"{VIEW}.lessons.open(2)")  # no chapter was acted on, so what is painted stays
    assert tab.evaluate(f"{VIEW}.painted.decoder.flips.length") == 1
    act(tab, f"{VIEW}.asTrained()")
    assert tab.evaluate(f"{VIEW}.changed") is False


# ---------------------------------------------------------------- by keyboard alone


def test_the_keyboard_walks_the_steps_and_paints(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, "decoder")
    tab.evaluate(f"{WALK}.overview.children[0].focus()")
    title = f"{WALK}.step.title"
    press(tab, "ArrowRight", 39)
    assert (tab.evaluate(title), tab.evaluate("document.activeElement.textContent")) == ("W", "W")
    press(tab, "Tab", 9)
    assert tab.evaluate("document.activeElement.textContent") == "Back"
    press(tab, "Tab", 9)
    for step in ("Q", "K", "V", "Q, K moved", "QKᵀ", "scaled", "masked"):
        press(tab, "Enter", 13)
        assert tab.evaluate(title) == step
        assert tab.evaluate("document.activeElement.textContent") == "Next"
    press(tab, "Tab", 9)  # to the result, drawn to scale
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("masked [T 25, T 25]")
    start = tab.evaluate(f"{WALK}.chosen")
    press(tab, "ArrowUp", 38)
    press(tab, "ArrowRight", 39)
    assert tab.evaluate(f"{WALK}.chosen") == [start[0] - 1, start[1] + 1]
    press(tab, " ", 32)
    tab.wait()
    assert tab.evaluate(f"{VIEW}.painted.decoder.flips") == [(start[0] - 1) * 1024 + start[1] + 1]
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("masked")  # the focus stays
    press(tab, "]", 221)
    assert tab.evaluate(title) == "softmax"
    press(tab, "[", 219)
    press(tab, "[", 219)
    assert tab.evaluate(title) == "scaled"
    for end in (0, 12):
        act(tab, f"{WALK}.open({WALK}.steps[{end}].title)")
    assert tab.evaluate(f"[{WALK}.back.disabled, {WALK}.next.disabled]") == [False, True]
    assert tab.console() == []
