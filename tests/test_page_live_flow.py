"""The page's flow diagram and chapters in a real browser: what they show is the program and the numbers of the model,
and every button leads to the state that it names."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from browser import CHROMIUM, Browser, Tab
from live_pages import in_python, without
from test_page_live_view import VIEW, act, press, quickstart, typed
from triptych.page import write
from triptych.page.live import live_page
from triptych.page.live_export import LiveExport, export
from triptych.program import Instruction, Program

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]
PANELS = ("decoder", "encoder", "encoder-decoder")
FLOW = f"{VIEW}.flow"
TARGET = "I haue"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for panel in PANELS:
        write(folder / f"{panel}.html", live_page(quickstart(panel), panel))
    return {panel: folder / f"{panel}.html" for panel in PANELS}


def opened(browser: Browser, pages: dict[str, Path], panel: str, **options: Any) -> Tab:
    tab = browser.open(pages[panel], **options).wait()
    if panel == "encoder-decoder":
        typed(tab, TARGET, 1)
    return tab


def tokens(tab: Tab) -> dict[str, list[int]]:
    found: dict[str, list[int]] = tab.evaluate(f"{VIEW}.tokens")
    return found


def logits(tab: Tab) -> Tensor:
    return torch.tensor(tab.evaluate(f"{VIEW}.now.logits.map((row) => [...row])"))


def python_logits(panel: str, tab: Tab, program: Program | None = None) -> Tensor:
    """Of the rows that the page shows, on the same int8 weights."""
    model, now = quickstart(panel), tokens(tab)
    source, target = (now["source"], now["ids"]) if "source" in now else (now["ids"], None)
    rows = tab.evaluate(f"{VIEW}.rowsOf({json.dumps(now['ids'])})")
    return in_python(model, export(model), source, target, program=program)[rows]


def sites(panel: str, tab: Tab) -> tuple[LiveExport, dict[str, Tensor]]:
    """Every site's value in the torch interpreter, on the tokens of the page."""
    model, now = quickstart(panel), tokens(tab)
    exported, values = export(model), dict[str, Tensor]()

    def keep(name: str) -> Any:
        return lambda value: values.setdefault(name, value)

    steps = [step for entry in exported.lowered.entries.values() for step in entry.instructions]
    edits = {step.out[0]: keep(step.out[0]) for step in steps if step.op == "site"}
    source, target = (now["source"], now["ids"]) if "source" in now else (now["ids"], None)
    in_python(model, exported, source, target, edits=edits)
    return exported, values


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


# ---------------------------------------------------------------- the diagram

PASSED = {"site", "split_heads", "merge_heads", "cast", "extend", "shift", "rotation_cos", "rotation_sin"}


@pytest.mark.parametrize("panel", PANELS)
def test_every_operation_that_computes_is_a_box(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, panel)
    program = export(quickstart(panel)).lowered
    expected = set[str]()
    for name, entry in program.entries.items():
        for step in entry.instructions:
            parts = ("scores", "softmax", "mix") if step.op == "attend" else ("",)
            own = [f"{name}:{step.out[0]}" + (f":{part}" if part else "") for part in parts]
            expected |= set() if step.op in PASSED else set(own)
    stacks = f"Object.entries({FLOW}.stacks)"
    boxes = tab.evaluate(f"{stacks}.flatMap(([, boxes]) => boxes.map((box) => box.id))")
    assert set(boxes) == expected
    # Every layer can be chosen, and then all its boxes are buttons that lie apart.
    drawn = set()
    for at in range(tab.evaluate(f"{FLOW}.chooser.children.length")):
        act(tab, f"{FLOW}.chooser.children[{at}].click()")
        frames = tab.evaluate(f"{FLOW}.shown.map(({{ id, frame }}) => [id, frame.x, frame.y, frame.width])")
        drawn |= {identity for identity, *_ in frames}
        assert tab.evaluate(f"{FLOW}.picture.querySelectorAll('button').length") == len(frames)
        for number, (_, x, y, width) in enumerate(frames):
            assert x >= 0
            assert all(y != v or x + width <= u or u + w <= x for _, u, v, w in frames[number + 1 :])
    assert drawn == expected
    assert tab.console() == []


@pytest.mark.parametrize("panel", PANELS)
def test_the_numbers_of_a_box_are_the_model_s(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    """Of every box that a site names, in every layer, for the first token and the last."""
    tab = opened(browser, pages, panel)
    _, values = sites(panel, tab)
    read = f"""(() => {{
      const found = {{}};
      for (const box of {FLOW}.shown) {{
        const stack = box.entry === "cross_kv" ? "encode" : box.entry;
        if (!box.site || !["encode", "decode", "cross_kv"].includes(box.entry)) continue;
        found[box.site] = ["first", "last"].map((which) => {{
          {FLOW}.followed[stack] = which === "first" ? 0 : 1e9;
          return [...{FLOW}.numbers(box)];
        }});
      }}
      return found;
    }})()"""
    found = {}
    for at in range(tab.evaluate(f"{FLOW}.chooser.children.length")):
        act(tab, f"{FLOW}.chooser.children[{at}].click()")
        found |= tab.evaluate(read)
    assert len(found) > 10
    for site, both in found.items():
        expected = values[site].flatten(1)[[0, -1]]
        assert apart(torch.tensor(both), expected) <= 1e-3, site
    # The comparison is not blind: the numbers of another token are others.
    name = next(iter(found))
    assert apart(torch.tensor(found[name][0]), values[name].flatten(1)[-1]) > 1e-3


def test_an_open_box_shows_its_equation_shapes_and_numbers(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, "decoder")
    _, values = sites("decoder", tab)
    act(tab, f"""{FLOW}.openWhere(({{ site }}) => site === "blocks.2.mlp.gate", 2)""")
    shown = tab.evaluate(f"{FLOW}.detail.textContent")
    length = len(tokens(tab)["ids"])
    assert "x weightᵀ + bias" in shown
    assert f"x {length} × 128" in shown
    assert "weight 344 × 128" in shown
    assert f"result {length} × 344" in shown
    cells = f"[...{FLOW}.detail.querySelectorAll('td')].map((one) => one.textContent.replace('−', '-'))"
    expected = values["blocks.2.mlp.gate"]
    assert [float(x) for x in tab.evaluate(cells)] == pytest.approx(expected[-1, :8].tolist(), abs=2e-3)
    # It follows the token that is chosen, and the text.
    act(tab, f"{FLOW}.tokens.children[3].click()")
    assert [float(x) for x in tab.evaluate(cells)] == pytest.approx(expected[3, :8].tolist(), abs=2e-3)
    typed(tab, "the king")
    _, values = sites("decoder", tab)
    follows = values["blocks.2.mlp.gate"][3, :8].tolist()
    assert [float(x) for x in tab.evaluate(cells)] == pytest.approx(follows, abs=2e-3)


@pytest.mark.parametrize("panel", PANELS)
def test_attention_s_scores_and_weights_are_the_model_s(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    """Of the followed token's row, from the queries and keys of the torch interpreter; with biases, at a cross slot."""
    tab = opened(browser, pages, panel)
    exported, values = sites(panel, tab)
    stack = "encode" if panel == "encoder" else "decode"
    entry = exported.lowered.entries[stack]
    attends = [step for step in entry.instructions if step.op == "attend"][:2]
    for step in attends:
        part = step.attributes["ports"][0].rpartition(".")[0]
        box = f'{FLOW}.stacks.{stack}.find((box) => box.id === "{stack}:{step.out[0]}:softmax")'
        act(tab, f"{FLOW}.choose('{stack}', {box}.layer)")
        row = tab.evaluate(
            f"(() => {{ {FLOW}.head = 1; const row = {FLOW}.row({box});"
            " return { ...row, weights: [...row.weights] }; })()"
        )
        q, k = values[f"{part}.q_rot"][row["t"], 1], values[f"{part}.k_rot"][:, 1]
        dots = k @ q
        assert apart(torch.tensor(row["dots"]), dots) <= 1e-3
        scores = torch.tensor(row["scores"])
        if "bias" not in step.inputs:
            assert apart(scores, dots * step.attributes["scale"]) <= 1e-3
        weights = scores.masked_fill(~torch.tensor(row["seen"]), -math.inf).softmax(-1)
        assert apart(torch.tensor(row["weights"]), weights) <= 1e-4


def with_a_zero(program: Program, name: str, step: Instruction, key: str) -> Program:
    """The program in which one input of one step of an entry is zero."""
    entry = program.entries[name]
    at = entry.instructions.index(step)
    zero = Instruction("scale", ("zero",), {"x": step.inputs[key]}, {}, {"factor": 0.0})
    changed = replace(step, inputs={**step.inputs, key: "zero"})
    steps = (*entry.instructions[:at], zero, changed, *entry.instructions[at + 1 :])
    return replace(program, entries=dict(program.entries) | {name: replace(entry, instructions=steps)})


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(("op", "key"), [("add", "x"), ("add", "y"), ("attend", "q"), ("attend", "v")])
def test_a_cut_arrow_is_read_as_zeros(panel: str, op: str, key: str, browser: Browser, pages: dict[str, Path]) -> None:
    """In the last layer, so that the run of the whole model is used again below it, and in the first."""
    tab = opened(browser, pages, panel)
    program = export(quickstart(panel)).lowered
    name = "encode" if panel == "encoder" else "decode"
    whole = logits(tab)
    steps = [step for step in program.entries[name].instructions if step.op == op][2 if op == "add" else 0 :]
    for step in (steps[-1], steps[0]):
        arrow = f"{name}:{step.out[0]}<{key}"
        act(tab, f"{FLOW}.view.board.press({json.dumps(arrow)})")
        now = logits(tab)
        assert apart(now, python_logits(panel, tab, with_a_zero(program, name, step, key))) <= 1e-3
        assert apart(now, whole) > 1e-3
        assert "KL divergence" in tab.evaluate('document.querySelector(".effect").textContent')
        act(tab, f"{FLOW}.view.board.press({json.dumps(arrow)})")
        assert apart(logits(tab), whole) <= 1e-4


def test_arrows_are_cut_by_a_press_on_the_picture_and_by_a_button(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, "decoder")
    hits = f'{FLOW}.picture.querySelectorAll(".hit")'
    assert tab.evaluate(f"{hits}.length") > 15
    act(tab, f'{hits}[4].dispatchEvent(new MouseEvent("click", {{ bubbles: true }}))')
    assert tab.evaluate(f"{VIEW}.board.cuts.size") == 1
    assert tab.evaluate(f'{FLOW}.picture.querySelectorAll("g.cut").length') == 1
    act(tab, f"{VIEW}.board.reset.click()")
    assert tab.evaluate(f'{FLOW}.picture.querySelectorAll("g.cut").length') == 0
    act(tab, f"""{FLOW}.openWhere(({{ site }}) => /mlp.act$/.test(site))""")
    names = f'[...{FLOW}.detail.querySelectorAll(".cuts button")].map((one) => one.textContent)'
    assert "Cut this MLP" in tab.evaluate(names)
    act(tab, f'{FLOW}.detail.querySelector(".cuts button").click()')
    assert tab.evaluate(f"[...{VIEW}.board.cuts]") == ["blocks.0.mlp"]
    assert "Put back this MLP" in tab.evaluate(names)
    assert tab.evaluate("""document.querySelector('.board [aria-label="layer 0, MLP"]').ariaPressed""") == "false"
    assert tab.console() == []


def test_the_keyboard_walks_the_diagram(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, "decoder")
    tab.evaluate(f"{FLOW}.buttons.get({FLOW}.shown[0]).focus()")
    title = f'{FLOW}.detail.querySelector("h4").textContent'
    reached = []
    for key, code in (("ArrowDown", 40), ("ArrowDown", 40), ("ArrowRight", 39), ("ArrowRight", 39), ("ArrowLeft", 37)):
        press(tab, key, code)
        reached.append(tab.evaluate(title))
        assert tab.evaluate("document.activeElement.textContent").startswith(reached[-1])
    assert reached == ["RMSNorm", "Queries", "Keys", "Values", "Keys"]
    press(tab, "Tab", 9)  # the head, then the buttons that cut
    for _ in range(10):
        if tab.evaluate("document.activeElement.textContent").startswith("Cut the arrow"):
            break
        press(tab, "Tab", 9)
    press(tab, " ", 32)
    tab.wait()
    assert tab.evaluate(f"{VIEW}.board.cuts.size") == 1
    assert tab.evaluate("document.activeElement.textContent").startswith("Put back the arrow")


# ---------------------------------------------------------------- the chapters

LESSONS = f"{VIEW}.lessons"


@pytest.mark.parametrize("panel", PANELS)
def test_every_button_of_a_chapter_leads_to_what_it_names(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, panel)
    assert tab.evaluate(f"{LESSONS}.chooser.children.length") == 11
    state = f"""({{
      cuts: [...{VIEW}.board.cuts], off: {VIEW}.off, masked: [...{VIEW}.masked], open: {FLOW}.box.kind,
      site: {FLOW}.box.site, ids: {VIEW}.tokens.source ?? {VIEW}.tokens.ids,
      text: {VIEW}.source.input.value, heat: {VIEW}.temperature ? Number({VIEW}.temperature.input.value) : null,
      wrote: {VIEW}.cachePicture ? !{VIEW}.cachePicture.node.hidden : null,
    }})"""
    text = tab.evaluate(f"{VIEW}.source.input.value")
    stack = "encode" if panel == "encoder" else "decode"
    prefix = "decoder.blocks.0" if panel == "encoder-decoder" else "blocks.0"
    part = f"{prefix}.cross" if panel == "encoder-decoder" else f"{prefix}.attn"
    heads = sorted(f"{part}:{h}" for h in range(4))
    checks = {
        "Open the embedding": lambda now: now["open"] == "embedding",
        "Write one token twice": lambda now: len(set(now["ids"])) < len(now["ids"]),
        "Open the step": lambda now: now["open"] in ("rotate", "embedding", "t5_bias"),
        "Open the queries": lambda now: now["site"] == f"{prefix}.attn.q",
        "Open the scores": lambda now: now["open"] == "scores",
        "Open softmax": lambda now: now["open"] == "softmax",
        "Cut the arrow of the values": lambda now: len(now["cuts"]) == 1 and now["cuts"][0].endswith("<v"),
        "Turn 1/√d off": lambda now: now["off"]["scale"],
        "Turn the mask off": lambda now: now["off"]["mask"],
        "Turn it on": lambda now: not now["off"]["scale"] and not now["off"]["mask"],
        "Mask the third token": lambda now: 2 in now["masked"],
        "Cut head 0": lambda now: now["cuts"] == [f"{part}:0"],
        "Cut all heads of the layer": lambda now: sorted(now["cuts"]) == heads,
        "Cut the stream": lambda now: len(now["cuts"]) == 1 and now["cuts"][0].startswith(f"{stack}:"),
        "Put it back": lambda now: now["cuts"] == [],
        "Put all back": lambda now: now["cuts"] == [],
        "Open the norm": lambda now: now["open"].endswith("_norm"),
        "Open the neurons": lambda now: now["site"] == f"{prefix}.mlp.act",
        "Cut the MLP of layer 0": lambda now: now["cuts"] == [f"{prefix}.mlp"],
        "Temperature 0": lambda now: now["heat"] == 0,
        "Temperature 1": lambda now: now["heat"] == 1,
        "Temperature 2": lambda now: now["heat"] == 2,
        "Open the unembedding": lambda now: (now["site"] or "").endswith("logits"),
        "Write 20 tokens": lambda now: now["wrote"],
        "Put the text back": lambda now: now["text"] == text,
        "Double the text": lambda now: now["ids"][1] in now["ids"][2:],
        "Follow the first token": lambda now: True,
        "Follow the last token": lambda now: True,
    }
    pressed = set()
    for chapter in range(11):
        act(tab, f"{LESSONS}.chooser.children[{chapter}].click()")
        opened_at = tab.evaluate(state)
        assert (opened_at["cuts"], any(opened_at["off"].values())) == ([], False)  # what the one before did is undone
        assert 30 < len(tab.evaluate(f"{LESSONS}.text.textContent").split()) <= 120
        assert not tab.evaluate(f'{LESSONS}.card.querySelector("details").open')
        assert tab.evaluate(f"{LESSONS}.card.querySelectorAll('b.number').length") >= 2
        for at in range(tab.evaluate(f"{LESSONS}.steps.length")):
            one = f"{LESSONS}.steps[{at}].one"
            label = tab.evaluate(f"{one}.textContent")
            act(tab, f"{one}.click()")
            tab.wait(f"!{VIEW}.running").wait()
            assert tab.evaluate(f"{one}.ariaPressed") == "true", (chapter, label)
            assert checks[label](tab.evaluate(state)), (chapter, label, tab.evaluate(state))
            pressed.add(label)
        numbers = tab.evaluate(f"[...{LESSONS}.card.querySelectorAll('b.number')].map((one) => one.dataset.value)")
        assert all(math.isfinite(float(number)) for number in numbers)
    assert len(pressed) >= 17
    assert tab.console() == []


def chapter(tab: Tab, number: int) -> dict[str, float]:
    """The numbers of a chapter's text, by name."""
    act(tab, f"{LESSONS}.chooser.children[{number - 1}].click()")
    numbers = f"[...{LESSONS}.card.querySelectorAll('b.number')]"
    found = tab.evaluate(f"{numbers}.map(({{ dataset }}) => [dataset.name, dataset.value])")
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("panel", PANELS)
def test_the_numbers_of_the_chapters_are_python_s(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    model, tab = quickstart(panel), opened(browser, pages, panel)
    exported, values = sites(panel, tab)
    now, stack = tokens(tab), "encode" if panel == "encoder" else "decode"
    name = "decoder.blocks.0" if panel == "encoder-decoder" else "blocks.0"
    t = tab.evaluate(f"{FLOW}.position('{stack}')")
    near = {"abs": 1e-3}

    table = exported.weights[f"{'decoder' if panel == 'decoder' else 'encoder'}.embed.tokens.weight"]
    reading = now.get("source", now["ids"])
    token = reading[0 if panel == "encoder-decoder" else t]
    cosines = torch.nn.functional.cosine_similarity(table[token], table, dim=-1)
    cosines[token] = -2
    one = chapter(tab, 1)
    assert one["tokens"] == len(reading)
    assert (one["vocabulary"], one["width"]) == tuple(table.shape)
    assert one["id"] == token
    assert one["first"] == pytest.approx(float(table[token, 0]), **near)
    assert one["cosine"] == pytest.approx(float(cosines.max()), **near)

    q, k = values[f"{name}.attn.q_rot"][t, 0], values[f"{name}.attn.k_rot"][:, 0]
    dots = k @ q
    sees = slice(0, t + 1) if stack == "decode" else slice(None)
    three = chapter(tab, 3)
    assert three["dot"] == pytest.approx(float(dots[sees].max()), **near)
    assert three["best"] == int(dots[sees].argmax())

    if panel != "encoder-decoder":
        weights = (dots[sees] / math.sqrt(32)).softmax(-1)
        four, sharp = chapter(tab, 4), dots[sees].softmax(-1)
        assert four["entropy"] == pytest.approx(float(torch.special.entr(weights).sum()), **near)
        assert four["sharp"] == pytest.approx(float(torch.special.entr(sharp).sum()), **near)
        assert four["keys"] == len(weights)

    def size(value: Tensor) -> float:
        return float(value[t].square().mean().sqrt())

    seven = chapter(tab, 7)
    assert seven["enters"] == pytest.approx(size(values[f"{name}.resid_pre"]), **near)
    assert seven["attention"] == pytest.approx(size(values[f"{name}.attn.out"]), **near)

    neurons = values[f"{name}.mlp.act"][t]
    eight = chapter(tab, 8)
    assert eight["neurons"] == len(neurons)
    assert eight["strength"] == pytest.approx(float(neurons[neurons.abs().argmax()]), **near)
    assert eight["active"] == pytest.approx(int((neurons.abs() > 0.1).sum()), abs=1)

    chances = python_logits(panel, tab)[0].double().softmax(-1)
    ten = chapter(tab, 10)
    assert ten["answers"] == model.spec.vocab
    assert ten["likeliest"] == pytest.approx(float(chances.max()), **near)
    if panel != "encoder":
        drawn = (python_logits(panel, tab)[0].double() / 0.8).softmax(-1)
        assert (ten["temperature"], ten["drawn"]) == (0.8, pytest.approx(float(drawn.max()), **near))
        heading = "document.querySelector('.prediction h4').textContent"
        assert tab.evaluate(heading) == "Next token, at temperature 0.80"
    assert ten["entropy"] == pytest.approx(float(torch.special.entr(chances).sum()), **near)

    # They are computed from the page as it is: after a cut the prediction's numbers are others.
    act(tab, f"{VIEW}.board.set(['{name}.mlp'])")
    assert chapter(tab, 10)["entropy"] != ten["entropy"]
    assert chapter(tab, 8)["moved"] > 0


@pytest.mark.parametrize("panel", ["decoder", "encoder-decoder"])
def test_without_the_mask_an_earlier_prediction_has_moved_as_in_python(
    panel: str, browser: Browser, pages: dict[str, Path]
) -> None:
    model, tab = quickstart(panel), opened(browser, pages, panel)
    chapter(tab, 5)
    act(tab, f"{VIEW}.switch('mask', true)")
    shown = chapter(tab, 5)
    now, exported = tokens(tab), export(model)
    source, target = (now["source"], now["ids"]) if "source" in now else (now["ids"], None)
    middle = (len(now["ids"]) - 1) // 2
    before, after = (
        in_python(model, exported, source, target, program=one)[middle].double().log_softmax(-1)
        for one in (exported.lowered, without(exported.lowered, mask=True))
    )
    moved = float((before.exp() * (before - after)).sum())
    assert (shown["earlier"], shown["earlier moved"]) == (middle, pytest.approx(moved, abs=1e-3))
    assert shown["earlier moved"] != shown["moved"]


def test_matrices_maps_and_diagram_open_at_the_masked_token(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages, "encoder")
    masked = tokens(tab)["ids"].index(tab.evaluate(f"{VIEW}.section.ids.mask"))
    opens_at = f"[{FLOW}.position('encode'), {VIEW}.walk.walk.chosen[0], {VIEW}.attention.chosen[0]]"
    assert tab.evaluate(opens_at) == [masked] * 3
