"""Every part of the 31 exercises is answered: what each asks, and the words, code or command that answer it.

The parts are those of the lectures' own questions, written down once and not taken from the answers.  A part is
answered by a phrase of the entry's answer, or by one of its commands; the sessions of the answers run here.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from test_docs import failures

DATA = tomllib.loads((Path(__file__).parents[1] / "docs" / "lectures.toml").read_text("utf-8"))
PARTS = {  # exercise -> part -> what answers it
    "L0.1": {
        "weights printed": "weights.round(3)",
        "rows sum to 1": "array([1., 1., 1., 1.])",
        "4 of width 8": "(4, 8)",
    },
    "L0.2": {"a block": "def block(x, w)", "SwiGLU": "silu(h @", "[1, 16, 256]": "torch.Size([1, 16, 256])"},
    "L0.3": {"to 1e-5": "largest difference below `1e-5`", "its flash path": "only its flash kernel is allowed"},
    "L0.4": {
        "train and sample": "triptych lab mask-leak",
        "lower loss": "copy it",
        "nonsense": "there is no character",
    },
    "L0.5": {"heatmap": "draws the heatmap", "the head": "head 2 of layer 4", "unreadable": "head 6 of layer 7"},
    "L0.6": {"count": "3,243,704,320", "published": "4,022,468,096", "the gap": "what differs is the MLP"},
    "L0.7": {"permuted": "same vectors in the new order", "with positions": "another vector"},
    "L0.8": {
        "every quantity": "`rope_theta` the base",
        "the shape": "(4096, 2560)",
        "verified": "triptych lab parameters",
    },
    "L2.1": {"weights": "0.981690", "output": "19.82349"},
    "L2.2": {"head width": "= 64", "W_Q, W_K, W_V": "1024×64 each", "scores": "128×128 scores", "output": "128×1024"},
    "L2.3": {"where": "softmax(QKᵀ/√d + M) V", "trained without it": "copy the target from the next position"},
    "L4.1": {"a dictionary": "`Σ_j 1[k_j = q] v_j`", "differentiable": "its gradient\nhas a simple form"},
    "L4.2": {"derivation": "*The sum.*", "assumptions": "q and k are independent of each other"},
    "L4.3": {"the distribution": "all weight to one key", "gradients": "∂p_i/∂s_j = p_i (δ_ij − p_j)"},
    "L4.4": {"a concrete case": "“A B … A”", "why": "the best match to A would return A"},
    "L4.5": {"the mask": "query 0     0   −∞   −∞   −∞", "exactly 0": "0/Σ = 0"},
    "L4.6": {"self": "10×10", "cross": "10×15"},
    "L4.7": {"projections": "W_Q, W_K, W_V and W_O are D×D", "scores": "H·T² instead of T²"},
    "L4.8": {"what it computes": "token *after* the first A", "its pattern": "A       0    1    0    0"},
    "L4.9": {"the factor": "= 256"},
    "L4.10": {"the line": "`full()` for the encoder, `causal()` for the decoder", "why": "cache would be\nwrong"},
    "L4.11": {"shape": "an output of 64×64", "rows": "each row of which sums to 1", "entropy": "leave 0.6108"},
    "L4.12": {
        "a class": "class SelfAttention",
        "different contexts": "# in two contexts\nFalse",
        "equal": "[2])  # equal",
    },
    "L4.13": {"drawn": "triptych inspect", "triangular": "other 45 are exactly 0"},
    "L4.14": {"the reshape": "x.view(16, 8, 64).transpose(0, 1)", "shapes": "(8, 16, 16), (8, 16, 64), (16, 512)"},
    "L4.15": {"computed": "example L4.15", "drawn": "--save map.svg"},
    "L4.16": {"to 1e-5": "largest difference below `1e-5`"},
    "L4.17": {"several maps": "draws their maps", "previous": "head 0 of layer 16", "delimiter": "head 1 of layer 1"},
    "L4.18": {"a cache": "against the cached keys", "speed-up": "triptych lab kv-cache"},
    "L4.19": {"measured": "triptych lab quadratic"},
    "L4.20": {"backward": "ds = p (dp − Σ dp p)", "against PyTorch": "triptych lab gradients", "block": "every part"},
}


def answered(entry: dict[str, Any]) -> str:
    """All that an entry answers with."""
    examples = [f"triptych explain --example {name}" for name in entry.get("examples", ())]
    return "\n".join([entry["answer"], entry.get("figures", ""), *entry.get("run", ()), *examples])


def open_parts(name: str, entry: dict[str, Any]) -> list[str]:
    return [part for part, answer in PARTS[name].items() if answer not in answered(entry)]


def test_every_exercise_has_its_parts() -> None:
    assert [*PARTS] == [*DATA["exercise"]]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_answered(name: str) -> None:
    assert not open_parts(name, DATA["exercise"][name])


def test_the_sessions_of_the_answers_run() -> None:
    answers = [
        entry.get("answer", "") for kind in ("concept", "correction", "exercise") for entry in DATA[kind].values()
    ]
    assert not failures("\n".join(answers), "docs/lectures.toml")


def test_a_part_without_an_answer_is_noticed() -> None:
    entry = DATA["exercise"]["L2.2"]
    assert open_parts("L2.2", entry | {"answer": "K = 1024/16 = 64."}) == ["W_Q, W_K, W_V", "scores", "output"]
    assert open_parts("L4.15", DATA["exercise"]["L4.15"] | {"run": []}) == []  # the answer names the option too
