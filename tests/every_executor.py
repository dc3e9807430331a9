"""One operation in every executor: a small decoder whose MLP calls it, run by each of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import native_models
import tiny
from browser import CHROMIUM, Browser
from live_pages import in_browser, in_python, interpreter_page
from test_static_step import STEPS, StaticRun
from triptych import nn, ops
from triptych.explain import explain
from triptych.model import Model
from triptych.nn.feedforward import GLU
from triptych.page.live_export import export
from triptych.program import interpret, lower
from triptych.program.native_operations import NOT_NATIVE

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
    check_entry(name)
    assert StaticRun(module).gap(STEPS) <= WITHIN, "steps of fixed shapes"
    if name not in NOT_NATIVE:
        assert native_models.Run(module).gap(native_models.STEPS) <= WITHIN, "the native step"
    model = Model(module)
    walk = explain(model, IDS)
    assert walk.agrees, walk.verdict
    if CHROMIUM is not None:
        exported = export(model)
        with Browser(folder / "profile") as browser:
            page = in_browser(browser.open(interpreter_page(folder / "page.html")), model, exported, IDS)
        apart = (page.flatten() - in_python(model, exported, IDS).flatten()).abs().max()
        assert float(apart) <= 10 * WITHIN, "the page"


def check_entry(name: str) -> None:
    """The table says of an operation on numbers what its function gives: dtype, shape, FLOPs, and whether a token
    depends on itself alone."""
    operation, function = ops.OPERATIONS[name], ops.RUN[name]
    inputs = [torch.linspace(-30, 30, 24).roll(5 * i).view(3, 8).bfloat16() for i in range(len(operation.arguments))]
    shapes = dict.fromkeys(operation.arguments, (3, 8))
    with FlopCounterMode(display=False) as counter:
        out = function(*inputs)
    assert (out.dtype, tuple(out.shape)) == (torch.bfloat16, operation.shape(shapes, {}))
    assert operation.dtype == "x", "dtype in the table"
    assert operation.flops(shapes, out.shape, {}) == counter.get_total_flops()
    alone = torch.cat([function(*(x[t : t + 1] for x in inputs)) for t in range(3)])
    assert torch.equal(out, alone) == operation.tokenwise, "tokenwise in the table"


def _forward(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: GLU, x: Tensor, ctx: nn.Context, taps: nn.Taps) -> Tensor:
        gate, up = taps("gate", self.gate(x), ctx.rows), taps("up", self.up(x), ctx.rows)
        return self.down(taps("act", combine(gate, up), ctx.rows))

    return forward
