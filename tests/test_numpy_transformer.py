"""The transformer in NumPy beside the library's: logits, gradients and training in float64, and each line of it broken.

The two share no arithmetic.  A mutation replaces one piece of the file's text; the measure it names must then see it.
"""

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from triptych_lectures.labs import gradients as lab
from triptych_lectures.scratch import numpy_transformer as by_hand
from triptych_lectures.scratch.numpy_transformer import Config

FILE = Path(by_hand.__file__)
UNTIED = Config(V=29, D=24, H=6, G=3, K=10, F=37, blocks=2, tied=False, theta=500.0, eps=1e-5)
CONFIGS = {  # and steps of training
    "untied": (UNTIED, 200),
    "tied": (replace(UNTIED, tied=True, G=1), 200),
    "every head its own": (replace(UNTIED, G=6, blocks=1), 20),
}
BOUNDS = {"logits": 1e-10, "gradients": 1e-8, "losses": 1e-6}


def measured(mine: ModuleType, c: Config, steps: int = 0) -> dict[str, float]:
    """How far `mine` is from the library: largest differences, of gradients relative to the largest of each weight."""
    random = np.random.default_rng(0)
    w, (ids, targets) = lab.weights(c, random), random.integers(c.V, size=(2, 3, 11))
    module = lab.library(c, w)
    theirs, dw = lab.autograd(module, w, ids, targets), mine.gradients(w, ids, targets, c)[1]
    assert set(dw) == set(w)
    found = {
        "logits": np.abs(mine.forward(w, ids, c)[0] - lab.logits(module, ids)).max(),
        "gradients": max(np.abs(dw[n] - theirs[n]).max() / np.abs(theirs[n]).max() for n in w),
    }
    losses = lab.GradientsLab(steps=steps).train(w, module, c, random)
    return found | {"losses": max((abs(a - b) for a, b in losses), default=0.0)}


@pytest.mark.parametrize(("c", "steps"), CONFIGS.values(), ids=CONFIGS)
def test_it_is_the_library_s_llama(c: Config, steps: int) -> None:
    found = measured(by_hand, c, steps)
    assert all(found[name] <= bound for name, bound in BOUNDS.items()), found


def test_the_slowest_pair_turns_as_often_as_the_file_says() -> None:
    """After 2πθ^(1 - 2/K) tokens, a third of 2πθ for a head of 16."""
    c = Config(V=2)
    turn = 2 * np.pi * c.theta ** (1 - 2 / c.K)
    slowest = np.zeros((1, 1, round(turn) + 1, c.K))
    slowest[..., c.K // 2 - 1] = 1  # the last of the pairs
    turned = by_hand.rope(slowest, c.theta)
    np.testing.assert_allclose(turned[0, 0, -1], slowest[0, 0, 0], atol=1e-3)
    assert turned[0, 0, :-2, c.K // 2 - 1].argmin() == pytest.approx(turn / 2, abs=2)
    assert "slowest pair takes 2πθ^(1 - 2/K) tokens for a turn" in FILE.read_text("utf-8")


# what is broken, and where it shows: (text, in its place, measure)
MUTATIONS = {
    "a linear map back through itself": ("return dy @ w, dy.reshape", "return 2 * dy @ w, dy.reshape", "gradients"),
    "a weight's gradient of the first tokens only": (
        "dy.reshape(-1, w.shape[0]).T @ x.reshape(-1, w.shape[1])",
        "dy.reshape(-1, w.shape[0])[:-1].T @ x.reshape(-1, w.shape[1])[:-1]",
        "gradients",
    ),
    "no eps in the norm": ("keepdims=True) + eps)", "keepdims=True))", "logits"),
    "a norm whose divisor is a constant": ("(dn - n * (dn * n).mean(-1, keepdims=True)) / r", "dn / r", "gradients"),
    "a norm whose weight is left out": ("dn = dy * w", "dn = dy", "gradients"),
    "a norm's weight times r": ("(dy * n).reshape(-1, len(w))", "(dy * n * r).reshape(-1, len(w))", "gradients"),
    "interleaved pairs": ("x[..., :half], x[..., half:]", "x[..., ::2], x[..., 1::2]", "logits"),
    "half the frequencies": ("-np.arange(half) / half", "-np.arange(half) / half / 2", "logits"),
    "a gradient of q turned on": ("merge(rope(dq, c.theta, turn=-1))", "merge(rope(dq, c.theta))", "gradients"),
    "a gradient of k not turned": ("merge(rope(dk, c.theta, turn=-1))", "merge(dk)", "gradients"),
    "no scale": ("k.swapaxes(-1, -2) / np.sqrt(K)", "k.swapaxes(-1, -2)", "logits"),
    "no scale on the way back": ("keepdims=True)) / np.sqrt(q.shape[-1])", "keepdims=True))", "gradients"),
    "a mask one late": ("np.arange(S) > np.arange(T)[:, None]", "np.arange(S) - 1 > np.arange(T)[:, None]", "logits"),
    "other groups": ("q.reshape(B, G, H // G, T, K)", "q.reshape(B, H // G, G, T, K).swapaxes(1, 2)", "logits"),
    "softmax without its division": ("p * (dp - (dp * p).sum(-1, keepdims=True))", "p * dp", "gradients"),
    "k from one head": ("@ q).sum(2)", "@ q)[:, :, 0]", "gradients"),
    "v from one head": ("@ dz).sum(2)", "@ dz)[:, :, 0]", "gradients"),
    "nothing back through v": ("return dx_q + dx_k + dx_v", "return dx_q + dx_k", "gradients"),
    "silu' without its slope": ("sigma * (1 + g * (1 - sigma))", "sigma", "gradients"),
    "up without its gate": ("linear_backward(da * g * sigma,", "linear_backward(da * sigma,", "gradients"),
    "nothing back through the gate": ("return dx_g + dx_u", "return dx_u", "gradients"),
    "no way past the MLP": ("    dx = dx + through\n", "    dx = through\n", "gradients"),
    "no way past attention": ("return dx + through, dw_mlp", "return through, dw_mlp", "gradients"),
    "a token counted once": ("np.add.at(embed, ids, dx)", "embed[ids] += dx", "gradients"),
    "a sum for a mean": ("p / targets.size", "p", "gradients"),
    "no target": ("np.put_along_axis(p, at, right - 1, -1)", "np.put_along_axis(p, at, right, -1)", "gradients"),
    "momentum not begun from 0": ("(m / (1 - b1**self.t) / size", "(m / size", "losses"),
    "squares not begun from 0": ("np.sqrt(v / (1 - b2**self.t))", "np.sqrt(v)", "losses"),
    "decay for everything": ('if value.ndim == 2 and name != "embed" else 0.0', "", "losses"),
    "decay for nothing": ('decay if value.ndim == 2 and name != "embed" else 0.0', "0.0", "losses"),
    "decay inside the gradient": ("(1 - b1) * dw[name]", "(1 - b1) * (dw[name] + self.decay[name] * w)", "losses"),
    "one beta for both": ("b2 * self.v[name] + (1 - b2)", "b1 * self.v[name] + (1 - b1)", "losses"),
}  # fmt: skip


def mutant(monkeypatch: pytest.MonkeyPatch, text: str, instead: str) -> ModuleType:
    return mutant_of(FILE, monkeypatch, text, instead)


def mutant_of(file: Path, monkeypatch: pytest.MonkeyPatch, text: str, instead: str) -> ModuleType:
    """The module of a file in which one piece of the text is replaced."""
    source = file.read_text(encoding="utf-8")
    assert source.count(text) == 1, text
    made = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", made)  # dataclasses look their module up
    exec(compile(source.replace(text, instead), "mutant", "exec"), made.__dict__)
    return made


@pytest.mark.parametrize(("text", "instead", "seen_by"), MUTATIONS.values(), ids=MUTATIONS)
def test_each_piece_matters(monkeypatch: pytest.MonkeyPatch, text: str, instead: str, seen_by: str) -> None:
    broken: Any = mutant(monkeypatch, text, instead)
    monkeypatch.setattr(lab, "by_hand", broken)
    with np.errstate(all="ignore"):
        found = measured(broken, UNTIED, 8 if seen_by == "losses" else 0)
    assert not found[seen_by] <= 100 * BOUNDS[seen_by], found  # NaN is seen too
    if seen_by == "losses":
        assert found["gradients"] <= BOUNDS["gradients"]
    if seen_by != "logits":
        assert found["logits"] <= BOUNDS["logits"]


def test_it_is_one_short_file_that_needs_numpy_alone() -> None:
    check_that_it_needs_numpy_alone(FILE, 300)


def check_that_it_needs_numpy_alone(file: Path, most: int) -> None:
    """And that it has at most so many lines."""
    source = file.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= most
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules = names | {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) == {"numpy"}


def test_it_learns_a_text_and_writes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40, encoding="utf-8")
    ran = run_it(str(text), "--steps", "30")
    first, *steps, sample = ran.stdout.strip().split("\n")
    assert first.startswith("960 characters, 11 different")
    nats = [float(line.split()[2]) for line in steps]
    assert nats[0] == pytest.approx(np.log(11), abs=0.4)  # guessing
    assert nats[-1] < 2.0
    assert len(sample) > 250
    assert set(sample) <= set("the cat sat on the mat.")


@pytest.mark.parametrize("name", ["missing.txt", "short.txt"])
def test_a_file_it_cannot_learn_from(tmp_path: Path, name: str) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    ran = run_it(str(tmp_path / name))
    assert ran.returncode == 2
    assert ran.stderr.endswith(f"{name} is not a text of more than 64 characters\n")


def run_it(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a file of its own, without the package."""
    command, env = [sys.executable, "-I", str(FILE), *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)
