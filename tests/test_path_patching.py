"""Path patching finds the composition of a circuit written by hand and no other; steering reaches every token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import circuits_by_hand as planted
import cli_models
import tiny
from browser import CHROMIUM, Browser
from circuits_by_hand import CLEAN, COPIER, CORRUPT, FIRST, PREVIOUS, B, C
from triptych.errors import InputError, ProbeError
from triptych.model import Model, load
from triptych.page import write
from triptych.page.interventions import lens_page, patch_page
from triptych.probe import Edit, Where, put

SENDERS = [(0, head) for head in range(3)]
RECEIVERS = [(1, head) for head in range(3)]


# ---------------------------------------------------------------- paths of a circuit written by hand


@pytest.mark.parametrize("into", ["q", "k", "v"])
def test_the_planted_composition_is_found_and_no_other(into: str) -> None:
    """The head that reads the token before tells the copying head through its keys, and nothing else is told."""
    grid = planted.induction().path_patch(CLEAN, CORRUPT, SENDERS, RECEIVERS, into=into, answer=(B, C))
    expected = torch.zeros(3, 3)
    if into == "k":
        expected[PREVIOUS[1], COPIER[1]] = 1
    assert torch.allclose(grid.restored, expected, atol=1e-5)
    assert grid.rows[FIRST[1]] == "blocks.0.attn head 1"
    assert grid.columns[1] == f"blocks.1.attn head 1.{into}"


def test_only_the_last_head_of_the_circuit_reaches_the_logits_directly() -> None:
    """The first head's whole effect passes through the second: its direct path gives nothing."""
    model = planted.induction()
    grid = model.path_patch(CLEAN, CORRUPT, [PREVIOUS, FIRST, COPIER], "logits", answer=(B, C))
    assert torch.allclose(grid.restored, torch.tensor([[0.0], [0.0], [1.0]]), atol=1e-5)


def test_without_freezing_the_other_heads_the_first_would_reach_the_logits() -> None:
    """The control of the test above: patching the same head with everything free restores the answer."""
    grid = planted.induction().patch(CLEAN, CORRUPT, answer=(B, C), heads=[0], site="blocks.0.attn.z", positions=None)
    assert float(grid.restored) == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------- against edits by hand


def by_hand(model: Model, sender: tuple[int, int], receiver: tuple[int, int], into: str, frozen: bool) -> Tensor:
    """The logits of run 3, from two traces and two forwards with edits of whole values."""
    clean, corrupt = [3, 4, 5, 6], [3, 9, 5, 6]
    leaves = ["attn.z"] + (["mlp.out"] if frozen else [])
    names = [f"blocks.{block}.{leaf}" for block in range(len(model.spec.stacks["decoder"].blocks)) for leaf in leaves]
    ours, other = model.trace([clean], read=names), model.trace([corrupt], read=names)
    held = {name: other[name][0].clone() for name in names}
    own = f"blocks.{sender[0]}.attn.z"
    held[own][:, sender[1]] = ours[own][0][:, sender[1]]
    site = f"blocks.{receiver[0]}.attn.{into}"
    told = model.trace([corrupt], read=[site], edit=[put(n, v) for n, v in held.items()], allow_null=True)[site][0]
    head = receiver[1] if into == "q" else receiver[1] * tiny.G // tiny.H
    return model.logits([corrupt], edit=[put(site, told[:, head : head + 1], heads=[head])], allow_null=True)[0][-1]


@pytest.mark.parametrize("into", ["q", "k", "v"])
@pytest.mark.parametrize("mlps", ["recomputed", "frozen"])
def test_paths_under_grouped_heads_and_mlps(into: str, mlps: str) -> None:
    model = Model(tiny.decoder(blocks=3))
    grid = model.path_patch(
        [3, 4, 5, 6], [3, 9, 5, 6], [(0, 2)], [(2, 5), (1, 0)], into=into, answer=(7, 8), mlps=mlps, batch_tokens=5
    )
    for column, receiver in enumerate([(2, 5), (1, 0)]):
        logits = by_hand(model, (0, 2), receiver, into, mlps == "frozen")
        assert float(grid.values[0, column]) == pytest.approx(float(logits[7] - logits[8]), abs=1e-4)
    assert bool(grid.fired.all())


@pytest.mark.parametrize("receivers", [[(1, 1), (1, 4)], "logits"])
def test_what_the_metric_cannot_see_has_no_effect_at_all(receivers: Any) -> None:
    """Prompts that differ only behind the measured token: every path gives the corrupt prompt's metric, to the bit."""
    grid = Model(tiny.decoder()).path_patch(
        [3, 4, 5, 6], [3, 4, 5, 9], [(0, 1), (0, 3)], receivers, answer=(7, 8), at=2, batch_tokens=5
    )
    assert grid.clean == grid.corrupt
    assert torch.equal(grid.values, torch.full_like(grid.values, grid.corrupt))


def test_a_path_that_carries_nothing_has_no_effect_at_all() -> None:
    """A source that is the same in both prompts: what the encoder's head tells cross-attention does not change."""
    model = Model(tiny.encoder_decoder())
    cross = [("decoder.blocks.1.cross", head) for head in range(2)]
    grid = model.path_patch(
        [3, 4, 5], [3, 4, 5], [("encoder.blocks.0.attn", 1)], cross, into="k", answer=(7, 8), target=[1, 2],
        corrupt_target=[1, 5],
    )  # fmt: skip
    assert not bool(grid.fired.any())
    assert grid.clean != grid.corrupt
    assert not bool(grid.restored.any())


@pytest.mark.usefixtures("unchecked")
def test_heads_may_be_numpy_s_integers() -> None:
    model, how = Model(tiny.decoder()), {"answer": (7, 8)}
    heads = [(np.int64(0), np.int32(1))], [(np.int64(1), np.int64(2))]
    found = model.path_patch([3, 4, 5], [3, 9, 5], *heads, **how)  # type: ignore[arg-type]
    plain = model.path_patch([3, 4, 5], [3, 9, 5], [(0, 1)], [(1, 2)], **how)
    assert (found.rows, found.columns) == (plain.rows, plain.columns)
    assert torch.equal(found.values, plain.values)


def test_the_encoder_reaches_the_decoder_through_keys_and_values_of_cross_attention() -> None:
    model = Model(tiny.encoder_decoder())
    how: dict[str, Any] = {"answer": (7, 8)}
    cross = ("decoder.blocks.1.cross", 2)
    for into in ("k", "v"):
        grid = model.path_patch([3, 4, 5], [3, 9, 5], [("encoder.blocks.0.attn", 1)], [cross], into=into, **how)
        assert abs(float(grid.values - grid.corrupt)) > 1e-6
    with pytest.raises(ProbeError, match="no direct path leads"):
        model.path_patch([3, 4], [3, 9], [("encoder.blocks.0.attn", 1)], [("decoder.blocks.0.attn", 0)], **how)
    with pytest.raises(ProbeError, match="it reads the encoder"):
        model.path_patch([3, 4], [3, 9], [("decoder.blocks.0.attn", 1)], [cross], into="v", **how)


def test_heads_of_two_stacks_are_named() -> None:
    with pytest.raises(InputError, match="in which stack"):
        Model(tiny.encoder_decoder()).path_patch([3, 4], [3, 9], [(0, 1)], "logits", answer=(7, 8))


# ---------------------------------------------------------------- steering


@pytest.fixture(scope="module")
def words() -> Model:
    return load(cli_models.checkpoint("decoder"))


def counted(edit: Edit) -> tuple[Edit, list[int]]:
    """The edit, and the positions it was called at."""
    seen: list[int] = []

    def fn(value: Tensor, where: Any) -> Tensor:
        seen.extend(where.positions)
        return edit.fn(value, where)

    return Edit(edit.site, fn, edit.items, edit.at, edit.heads), seen


def test_a_vector_is_added_in_every_token_of_a_generation(words: Model) -> None:
    edit = words.steer("good", "evil", site="blocks.1.resid_post", scale=8.0)
    steered, seen = counted(edit)
    (out,) = words.generate(["abc"], max_new_tokens=6, edit=steered)
    prompt = len(words.ids(["abc"])[0])
    assert seen == list(range(prompt + len(out.ids) - 1))  # the last token is chosen and not read
    assert out.ids != words.generate(["abc"], max_new_tokens=6)[0].ids


def test_steering_with_a_cache_is_steering_the_whole_text(words: Model) -> None:
    edit = words.steer("good", "evil", site="blocks.1.resid_post", scale=8.0, over="mean")
    (out,) = words.generate(["abc"], max_new_tokens=6, edit=edit, read=["logits"])
    whole = words.logits([[*words.ids(["abc"])[0], *out.ids[:-1]]], edit=edit)[0]
    assert torch.allclose(out.trace["logits"][0], whole[-len(out.ids) :], atol=1e-4)


def test_the_vector_is_the_difference_of_the_last_tokens(words: Model) -> None:
    site = "blocks.1.resid_post"
    first, second = (words.trace([text], read=[site])[site][0] for text in ("good", "evil"))
    for over, expected in (("last", first[-1] - second[-1]), ("mean", first.mean(0) - second.mean(0))):
        edit = words.steer("good", "evil", site=site, scale=2.0, over=over)
        value = torch.zeros(1, len(expected))
        assert torch.allclose(edit.fn(value, Where(site, 0, (0,)))[0], 2 * expected, atol=1e-5)
    given = words.steer(site=site, vector=first[-1])
    assert torch.equal(given.fn(torch.zeros_like(first), Where(site, 0, (0, 1))), first[-1].expand_as(first))


def test_a_steered_generation_runs_the_modules(words: Model) -> None:
    engine = words.engine()
    edit = words.steer("good", "evil", site="blocks.1.resid_post")
    assert "".join(words.stream("abc", max_new_tokens=4, edit=edit, engine=engine))
    assert engine.why_modules == "an edit is made at blocks.1.resid_post"


PATH = {"clean": [3, 4], "senders": [(0, 1)], "receivers": [(1, 1)], "corrupt": [3, 9], "answer": (7, 8)}
ALONE = {"positive": None, "negative": None}
STEER = {"positive": "good", "negative": "evil", "site": "blocks.1.resid_post"}


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        (PATH, {"receivers": [(0, 1)]}, ProbeError, "it is not after it"),
        (PATH, {"senders": [(7, 1)]}, ProbeError, "no attention 'blocks.7.attn'"),
        (PATH, {"senders": [(0, 9)]}, ProbeError, r"heads 0\.\.5, not 9"),
        (PATH, {"senders": []}, InputError, "at least one"),
        (PATH, {"senders": [3]}, InputError, "3 is not a head"),
        (PATH, {"senders": [(0, -1)]}, ProbeError, r"heads 0\.\.5, not -1"),
        (PATH, {"senders": [(0, True)]}, ProbeError, r"heads 0\.\.5, not True"),
        (PATH, {"senders": [(-1, 0)]}, ProbeError, "no attention 'blocks.-1.attn'"),
        (PATH, {"receivers": [(1, 6)]}, ProbeError, r"heads 0\.\.5, not 6"),
        (PATH, {"receivers": []}, InputError, "at least one"),
        (PATH, {"receivers": "final"}, InputError, "must be a list of heads"),
        (PATH, {"into": "o"}, InputError, "into=.* must be 'q' or 'k' or 'v'"),
        (PATH, {"mlps": "some"}, InputError, "must be 'recomputed' or 'frozen'"),
        (PATH, {"corrupt": [3, 4]}, InputError, "are the same"),
        (PATH, {"corrupt": [3, 4, 5]}, InputError, "has 2 tokens and the corrupt one 3"),
        (PATH, {"answer": (7, 7)}, InputError, "same token"),
        (STEER, {"site": "blocks.1.resid"}, ProbeError, "did you mean"),
        (STEER, {"site": "blocks.*.resid_post"}, ProbeError, "names 3 sites"),
        (STEER, {"site": "blocks.1.attn.z"}, ProbeError, "choose resid_post"),
        (STEER, {"site": "logits"}, ProbeError, "choose resid_post"),
        (STEER, {"scale": float("nan")}, InputError, "finite number other than 0"),
        (STEER, {"site": 3}, InputError, "site=3 must be a string"),
        (STEER, {**ALONE, "vector": [1.0]}, InputError, "vector a tensor"),
        (STEER, {"scale": 0}, InputError, "finite number other than 0"),
        (STEER, {"negative": None}, InputError, "give two prompts"),
        (STEER, {"vector": torch.ones(24)}, InputError, "give two prompts"),
        (STEER, {**ALONE, "vector": torch.ones(5)}, ProbeError, r"is \[5\]; at .* 24 finite"),
        (STEER, {**ALONE, "vector": torch.full((24,), float("nan"))}, ProbeError, "24 finite"),
        (STEER, {"negative": "good"}, InputError, "prompts are the same"),
        (STEER, {"over": "first"}, InputError, "'last' or 'mean'"),
    ],
)
def test_what_cannot_be_patched_or_steered_is_one_line(
    words: Model, unchecked: None, options: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = words.steer if options is STEER else Model(tiny.decoder()).path_patch
    with pytest.raises(error, match=message) as raised:
        call(**options | change)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- patching and lenses on SmolLM2

FRANCE, ITALY = "The capital of France is the city of", "The capital of Italy is the city of"
SUBJECT, LAST = 3, 7


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Model:
    return load(smollm2_gguf)


@pytest.mark.heavy
def test_a_fact_moves_from_its_subject_to_the_last_token(smollm2: Model) -> None:
    """Packed weights, grouped heads.  The largest values are at the subject below a block and at the end above it."""
    grid = smollm2.patch(FRANCE, ITALY, answer=(" Paris", " Rome"))
    assert grid.clean > 4
    assert grid.corrupt < -4
    restored = grid.restored
    assert float(restored[:23, SUBJECT].min()) > 0.9
    assert float(restored[24:, SUBJECT].abs().max()) < 0.1
    assert float(restored[:23, LAST].abs().max()) < 0.1
    assert float(restored[24:, LAST].min()) > 0.5
    assert float(restored[:, :SUBJECT].abs().max()) == 0  # the prompts are the same there
    assert not grid.fired[:, :SUBJECT].any()
    heads = smollm2.patch(FRANCE, ITALY, answer=(" Paris", " Rome"), heads=True, positions=None)
    shares = heads.restored.flatten().sort(descending=True)
    assert heads.best(1)[0][:2] == ("blocks.23.attn.z", "head 4")
    assert float(shares.values[0]) == pytest.approx(0.86, abs=0.02)  # docs/concepts/interventions.md
    assert float(shares.values[1]) < 0.5


@pytest.mark.heavy
def test_one_backward_pass_finds_the_same_places(smollm2: Model) -> None:
    real = smollm2.patch(FRANCE, ITALY, answer=(" Paris", " Rome"))
    estimated = smollm2.patch(FRANCE, ITALY, answer=(" Paris", " Rome"), gradient=True)
    both = torch.stack([real.restored.flatten(), estimated.restored.flatten()])
    assert float(torch.corrcoef(both)[0, 1]) > 0.95


@pytest.mark.heavy
def test_the_answer_appears_in_the_last_layers_and_its_parts_sum(smollm2: Model, smollm2_gguf: Path) -> None:
    seen = smollm2.lens(FRANCE, top=1, positions=[LAST])
    best = [row[0][0] for row in seen.names]
    assert best[-1] == "␣Paris"
    assert "␣Paris" not in best[:24]
    assert smollm2.attribute_logit(FRANCE, " Paris").error < 0.1  # packed: the kernels round activations
    parts = load(smollm2_gguf, dequantize=True).attribute_logit(FRANCE, " Paris")
    assert parts.error < 1e-4
    assert "blocks.23.attn head 4" in [name for name, _ in parts.largest(8)]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.heavy
def test_pages_fit_the_window_and_print_nothing_on_the_console(smollm2: Model, tmp_path: Path, width: int) -> None:
    grid = smollm2.patch(FRANCE, ITALY, answer=(" Paris", " Rome"), site="blocks.2?.resid_pre")
    write(tmp_path / "patch.html", patch_page(grid, [("Clean", FRANCE)]))
    write(tmp_path / "lens.html", lens_page(smollm2.lens(FRANCE, top=2), smollm2.attribute_logit(FRANCE), []))
    with Browser(tmp_path / "profile") as browser:
        for name in ("patch.html", "lens.html"):
            tab = browser.open(tmp_path / name, width=width).wait()
            assert tab.console() == []
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate("document.querySelectorAll('td.tint-9').length") > 0
