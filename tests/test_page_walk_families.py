"""The matrices of an attention that the page's interpreter gives are those that it computed with, for every family."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
import references
from browser import CHROMIUM, Browser, Tab
from live_pages import interpreter_page, section
from triptych.page.live_export import LiveExport, export

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]
WITHIN = 1e-4

WALKS = """
((section, given, heads) => {
  const engine = new Engine(section);
  const plain = (x) => x && { shape: x.shape, data: [...x.data] };
  return heads.map(([part, head]) => {
    const { walk, runs } = engine.compute({ ...given, rows: [0], walk: { part, head } });
    if (walk.problem) return walk;
    const pattern = Object.values(runs).map(({ patterns }) => patterns.get(part)).find((one) => one);
    const rows = pattern.queries * pattern.keys;
    const parts = Object.fromEntries(Object.entries(walk.parts).map(([key, one]) => [key, { b: one.b && [...one.b],
      x: plain(one.x), w: plain(one.w), projected: plain(one.projected), used: plain(one.used) }]));
    return { ...walk, parts, bias: walk.bias && [...walk.bias], concat: plain(walk.concat),
      out: { w: plain(walk.out.w), b: walk.out.b && [...walk.out.b], value: plain(walk.out.value) },
      pattern: { shape: [pattern.queries, pattern.keys],
        data: [...pattern.data.slice(head * rows, (head + 1) * rows)] } };
  });
})"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    folder = tmp_path_factory.mktemp("walk")
    with Browser(folder / "profile") as browser:
        yield browser.open(interpreter_page(folder / "interpreter.html"))


def numbers(value: dict[str, Any]) -> Tensor:
    return torch.tensor(value["data"], dtype=torch.float64).reshape(value["shape"][0], -1)


def walks(name: str, tab: Tab) -> list[dict[str, Any]]:
    """The first and the last head of every attention."""
    model = parity.ours(name)
    exported: LiveExport = export(model)
    heads = [[one["part"], h] for one in exported.parts() if not one["mlp"] for h in (0, one["heads"] - 1)]
    row, targets = parity.rows_of(model)[0], parity.targets_of(model)
    inputs, _ = model.module.flat([row])
    if inputs.is_floating_point():
        pytest.skip("the page of a model has a text")
    given: Any = {"ids": inputs.tolist()} if targets is None else {"source": inputs.tolist(), "ids": targets[1]}
    arguments = ", ".join(map(json.dumps, (section(model, exported), given, heads)))
    found: list[dict[str, Any]] = tab.evaluate(f"{WALKS}({arguments})")
    return found


def weights_of(walk: dict[str, Any], seen: Tensor, scale: float) -> Tensor:
    """From the queries and keys of a walk, in the order scale, softcap, bias, mask, sink, softmax."""
    q, k = (numbers(walk["parts"][key]["used"]) for key in "qk")
    scores = q @ k.T * scale
    if walk.get("softcap"):
        scores = walk["softcap"] * (scores / walk["softcap"]).tanh()
    if walk.get("bias"):
        scores = scores + torch.tensor(walk["bias"], dtype=torch.float64).reshape(scores.shape)
    sink = torch.full((len(q), 1), float("-inf") if walk["sink"] is None else walk["sink"], dtype=torch.float64)
    return torch.cat([scores.masked_fill(~seen, float("-inf")), sink], 1).softmax(-1)[:, :-1]


@pytest.mark.parametrize("name", references.NAMES)
def test_the_matrices_of_a_head_give_its_weights_and_its_result(name: str, tab: Tab) -> None:
    for walk in walks(name, tab):
        assert "problem" not in walk
        for part in walk["parts"].values():
            bias = torch.tensor(part.get("b") or [0.0])
            apart = numbers(part["x"]) @ numbers(part["w"]) + bias - numbers(part["projected"])
            assert float(apart.abs().max()) <= WITHIN
        pattern = numbers(walk["pattern"])
        weights = weights_of(walk, pattern > 0, walk["scale"])
        assert float((weights - pattern).abs().max()) <= WITHIN
        v, head = numbers(walk["parts"]["v"]["used"]), walk["head"]
        z = numbers(walk["concat"])
        own = z[:, head * v.shape[1] : (head + 1) * v.shape[1]]
        assert float((weights @ v - own).abs().max()) <= WITHIN
        mixed = z @ numbers(walk["out"]["w"]) + torch.tensor(walk["out"].get("b") or [0.0])
        assert float((mixed - numbers(walk["out"]["value"])).abs().max()) <= WITHIN
        # With another scale the weights are others, unless a query sees one key only.
        if int((pattern > 0).sum(-1).max()) > 1:
            assert float((weights_of(walk, pattern > 0, 5 * walk["scale"]) - pattern).abs().max()) > WITHIN
