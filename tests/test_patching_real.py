"""Patching and lenses on SmolLM2: a fact moves from its subject to the last token, by one head above all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from browser import CHROMIUM, Browser
from triptych.model import Model, load
from triptych.page import write
from triptych.page.interventions import lens_page, patch_page

pytestmark = pytest.mark.heavy

CLEAN, CORRUPT = "The capital of France is the city of", "The capital of Italy is the city of"
SUBJECT, LAST = 3, 7


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Model:
    return load(smollm2_gguf)


def test_a_fact_moves_from_its_subject_to_the_last_token(smollm2: Model) -> None:
    """Packed weights, grouped heads.  The largest values are at the subject below a block and at the end above it."""
    grid = smollm2.patch(CLEAN, CORRUPT, answer=(" Paris", " Rome"))
    assert grid.clean > 4
    assert grid.corrupt < -4
    restored = grid.restored
    assert float(restored[:23, SUBJECT].min()) > 0.9
    assert float(restored[24:, SUBJECT].abs().max()) < 0.1
    assert float(restored[:23, LAST].abs().max()) < 0.1
    assert float(restored[24:, LAST].min()) > 0.5
    assert float(restored[:, :SUBJECT].abs().max()) == 0  # the prompts are the same there
    assert not grid.fired[:, :SUBJECT].any()
    heads = smollm2.patch(CLEAN, CORRUPT, answer=(" Paris", " Rome"), heads=True, positions=None)
    shares = heads.restored.flatten().sort(descending=True)
    assert heads.best(1)[0][:2] == ("blocks.23.attn.z", "head 4")
    assert float(shares.values[0]) == pytest.approx(0.86, abs=0.02)  # docs/concepts/interventions.md
    assert float(shares.values[1]) < 0.5


def test_one_backward_pass_finds_the_same_places(smollm2: Model) -> None:
    real = smollm2.patch(CLEAN, CORRUPT, answer=(" Paris", " Rome"))
    estimated = smollm2.patch(CLEAN, CORRUPT, answer=(" Paris", " Rome"), gradient=True)
    both = torch.stack([real.restored.flatten(), estimated.restored.flatten()])
    assert float(torch.corrcoef(both)[0, 1]) > 0.95


def test_the_answer_appears_in_the_last_layers_and_its_parts_sum(smollm2: Model, smollm2_gguf: Path) -> None:
    seen = smollm2.lens(CLEAN, top=1, positions=[LAST])
    best = [row[0][0] for row in seen.names]
    assert best[-1] == "␣Paris"
    assert "␣Paris" not in best[:24]
    assert smollm2.attribute_logit(CLEAN, " Paris").error < 0.1  # packed: the kernels round activations
    parts = load(smollm2_gguf, dequantize=True).attribute_logit(CLEAN, " Paris")
    assert parts.error < 1e-4
    assert "blocks.23.attn head 4" in [name for name, _ in parts.largest(8)]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_window_and_print_nothing_on_the_console(smollm2: Model, tmp_path: Path, width: int) -> None:
    grid = smollm2.patch(CLEAN, CORRUPT, answer=(" Paris", " Rome"), site="blocks.2?.resid_pre")
    write(tmp_path / "patch.html", patch_page(grid, [("Clean", CLEAN)]))
    write(tmp_path / "lens.html", lens_page(smollm2.lens(CLEAN, top=2), smollm2.attribute_logit(CLEAN), []))
    with Browser(tmp_path / "profile") as browser:
        for name in ("patch.html", "lens.html"):
            tab = browser.open(tmp_path / name, width=width).wait()
            assert tab.console() == []
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate("document.querySelectorAll('td.tint-9').length") > 0
