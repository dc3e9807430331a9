"""The autograd in NumPy beside torch's: every operation it has, and the decoder that it trains without a backward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from test_numpy_transformer import CONFIGS
from triptych_lectures.labs import gradients as lab
from triptych_lectures.scratch import numpy_autograd, numpy_transformer
from triptych_lectures.scratch.numpy_autograd import RULES, Tracked
from triptych_lectures.scratch.numpy_transformer import AdamW, Config

# The decoder of numpy_transformer.py is annotated with arrays, and here it computes with `Tracked` arrays.
pytestmark = pytest.mark.usefixtures("unchecked")
FILE = Path(numpy_autograd.__file__)
RANDOM = np.random.default_rng(0)
X, Y, ROW = RANDOM.uniform(0.5, 2, (3, 4)), RANDOM.uniform(0.5, 2, (3, 4)), RANDOM.uniform(0.5, 2, 4)
EXPRESSIONS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {  # of a library, x and y [3, 4], and a row [4]
    "sums and products": lambda of, x, y, row: x * y + row - (x / y) * row - -x,
    "a number on the left": lambda of, x, y, row: 2 - 1 / x + 3 * row,
    "roots and exponents": lambda of, x, y, row: of.sqrt(x) * of.exp(-y) + of.log(row),
    "a product of matrices": lambda of, x, y, row: x @ y.T @ (x * row),
    "rows of a product": lambda of, x, y, row: x.reshape(3, 1, 4) @ y.reshape(3, 4, 1),
    "a product that repeats": lambda of, x, y, row: x.reshape(3, 1, 4) @ y.T,
    "means and largest": lambda of, x, y, row: x.mean(-1, keepdims=True) * y + x.max() - y.sum(0) * row.max(),
    "swapped axes": lambda of, x, y, row: x.reshape(3, 2, 2).swapaxes(0, 2) * 2 + x.reshape(3, 2, 2)[0, 0, 0],
    "taken twice": lambda of, x, y, row: x[[0, 0, 2]] * y + x[:, 1:2] * x[..., None].sum(-1) + x[[2, 1], [0, 0]][0],
    "where and joined": lambda of, x, y, row: of.where(X > 1, x, y) + of.concatenate([y[:, 2:], x[:, :2]], -1),
    "one value in two places": lambda of, x, y, row: (lambda z: z * z + z)(x * y),
}  # fmt: skip


class Torch:
    """The functions of NumPy under their names, by torch."""

    sqrt, exp, log = torch.sqrt, torch.exp, torch.log

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.from_numpy(condition), a, b)

    @staticmethod
    def concatenate(pieces: Any, axis: int) -> torch.Tensor:
        return torch.cat(pieces, axis)


def both(expression: Callable[..., Any]) -> float:
    """The largest difference of the values and of the three gradients of sum(expression²)."""
    mine, theirs = [Tracked(a) for a in (X, Y, ROW)], [torch.tensor(a, requires_grad=True) for a in (X, Y, ROW)]
    y, expected = expression(np, *mine), expression(Torch, *theirs)
    (y * y).sum().backward()
    (expected * expected).sum().backward()
    pairs = [(y.data, expected), *[(a.grad, torch.zeros_like(b) if b.grad is None else b.grad)
                                   for a, b in zip(mine, theirs, strict=True)]]  # fmt: skip
    return max(float(np.abs(a - b.detach().numpy()).max()) for a, b in pairs)


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_gradients_are_torch_s(expression: Callable[..., Any]) -> None:
    assert both(expression) <= 1e-10


@pytest.mark.parametrize("ufunc", RULES, ids=lambda ufunc: ufunc.__name__)
def test_each_rule_matters(ufunc: np.ufunc, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES[ufunc]
    wrong = lambda *arrays: [lambda d, g=g: 1.01 * g(d) for g in right(*arrays)]  # noqa: E731
    monkeypatch.setitem(RULES, ufunc, wrong)
    assert any(both(expression) > 1e-4 for expression in EXPRESSIONS.values())


@pytest.mark.parametrize("broken", ["where", "unbroadcast", "max"])
def test_a_gradient_that_goes_nowhere_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "unbroadcast":
        monkeypatch.setattr(numpy_autograd, "unbroadcast", lambda d, shape: np.resize(d, shape))
    elif broken == "max":
        monkeypatch.setattr(Tracked, "max", lambda x, *axis, **keep: Tracked(x.data.max(*axis, **keep)))
    else:
        plain = lambda a: [p.data for p in a] if isinstance(a, list) else getattr(a, "data", a)  # noqa: E731
        without = lambda x, f, types, inputs, options: Tracked(f(*map(plain, inputs)))  # noqa: E731
        monkeypatch.setattr(Tracked, "__array_function__", without)
    assert any(both(expression) > 1e-4 for expression in EXPRESSIONS.values())


@pytest.mark.parametrize(("c", "steps"), CONFIGS.values(), ids=CONFIGS)
def test_it_trains_the_decoder_as_the_backward_by_hand_does(c: Config, steps: int) -> None:
    random = np.random.default_rng(0)
    w, (ids, targets) = lab.weights(c, random), random.integers(c.V, size=(2, 3, 11))
    theirs = lab.autograd(lab.library(c, w), w, ids, targets)
    loss, dw = numpy_autograd.gradients(w, ids, targets, c)
    assert loss == pytest.approx(numpy_transformer.gradients(w, ids, targets, c)[0], abs=1e-12)
    assert set(dw) == set(theirs)
    assert max(np.abs(dw[name] - theirs[name]).max() for name in dw) <= 1e-10
    losses = []
    for gradients in (numpy_autograd.gradients, numpy_transformer.gradients):
        trained = {name: value.copy() for name, value in w.items()}
        optimizer, rows, all_losses = AdamW(trained), np.random.default_rng(1), []
        for _ in range(min(steps, 30)):
            ids, targets = rows.integers(c.V, size=(2, 3, 11))
            loss, dw = gradients(trained, ids, targets, c)
            optimizer.step(dw, 3e-3)
            all_losses.append(loss)
        losses.append(all_losses)
    np.testing.assert_allclose(*losses, atol=1e-10, rtol=0)


def test_what_it_has_no_rule_for_is_named() -> None:
    with pytest.raises(TypeError, match=r"numpy\.sin has no rule here; add its gradients to RULES"):
        np.sin(Tracked(X))
    with pytest.raises(TypeError, match=r"numpy\.stack has no rule here"):
        np.stack([Tracked(X), Tracked(Y)])


def test_it_is_one_page() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 150
