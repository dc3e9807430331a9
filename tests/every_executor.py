"""One operation in every executor: a small decoder whose MLP calls it, run by each of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import native_models
import tiny
from browser import CHROMIUM, Browser
from live_pages import in_browser, in_python, interpreter_page
from test_static_step import STEPS, StaticRun
from triptych import nn
from triptych.explain import explain
from triptych.model import Model
from triptych.nn.feedforward import GLU
from triptych.page.live_export import export
from triptych.program import interpret, lower

IDS = [3, 1, 4, 1, 5, 9, 2]
WITHIN = 1e-4  # of log-probabilities, in fp32


def check_everywhere(
    patch: pytest.MonkeyPatch, folder: Path, name: str, combine: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Every executor computes what the modules compute where the MLP is `down(combine(gate(x), up(x)))`, and its
    program has the operation `name`.  The page is checked where there is a Chromium; `folder` is for its profile."""
    patch.setattr(GLU, "forward", _forward(combine))
    module = tiny.decoder()
    program = lower(module)
    assert not program.unlowered, program.unlowered
    assert name in {step.op for step in program.instructions()}
    inputs, rows = nn.flat([IDS], torch.device("cpu"))
    with torch.no_grad():
        expected = module(nn.Batch(inputs=inputs, rows=rows))
        assert torch.equal(interpret(program, dict(module.named_parameters()), inputs, rows), expected)
    assert StaticRun(module).gap(STEPS) <= WITHIN
    assert native_models.Run(module).gap(native_models.STEPS) <= WITHIN
    model = Model(module)
    walk = explain(model, IDS)
    assert walk.agrees, walk.verdict
    if CHROMIUM is not None:
        exported = export(model)
        with Browser(folder / "profile") as browser:
            page = in_browser(browser.open(interpreter_page(folder / "page.html")), model, exported, IDS)
        apart = (page.flatten() - in_python(model, exported, IDS).flatten()).abs().max()
        assert float(apart) <= 10 * WITHIN


def _forward(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: GLU, x: Tensor, ctx: nn.Context, taps: nn.Taps) -> Tensor:
        gate, up = taps("gate", self.gate(x), ctx.rows), taps("up", self.up(x), ctx.rows)
        return self.down(taps("act", combine(gate, up), ctx.rows))

    return forward
