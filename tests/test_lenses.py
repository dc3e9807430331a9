"""Lenses and attributions against the model itself run with edits, circuits written by hand, and formulas by loops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import circuits_by_hand as planted
import references
import tiny
from circuits_by_hand import CLEAN, B, C
from parity import TARGETS, ours, rows_of
from triptych import nn
from triptych.errors import InputError, ProbeError
from triptych.model import Model
from triptych.nn.linear import LayerNorm, RMSNorm
from triptych.probe import logit_attribution, put, rollout, value_weighted
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec

MODELS = {
    "decoder": tiny.decoder,
    "mixture": tiny.mixture,
    "attention-only": tiny.attention_only,
    "encoder": tiny.encoder,
    "encoder-decoder": tiny.encoder_decoder,
}
WITHIN = 1e-4
TEXT, TARGET = [3, 4, 5, 6], [0, 7, 9]


def both(model: Model) -> dict[str, Any]:
    return {"target": TARGET} if model.spec.layout == "encoder-decoder" else {}


def logits(model: Model, *edits: Any) -> Tensor:
    return model.logits([TEXT], [TARGET] if both(model) else None, edit=edits, allow_null=True)[0]


# ---------------------------------------------------------------- the logit lens


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_the_lens_is_what_the_model_answers_if_its_stream_ends_there(name: str) -> None:
    """The oracle is the model with the vectors of that layer put after its last block."""
    model = Model(MODELS[name]())
    seen = model.lens(TEXT, top=3, **both(model))
    last = seen.layers[-1]
    for row, site in enumerate(seen.layers):
        value = model.trace([TEXT], [TARGET] if both(model) else None, read=[site])[site][0]
        expected = logits(model, put(last, value)).softmax(-1)
        assert torch.allclose(expected.gather(-1, seen.ids[row]), seen.probabilities[row], atol=1e-5), site
        assert torch.equal(expected.topk(3).indices, seen.ids[row])
    assert torch.allclose(logits(model).softmax(-1).topk(3).values, seen.probabilities[-1], atol=1e-5)


def test_the_lens_of_a_circuit_shows_the_answer_where_it_is_written() -> None:
    seen = planted.induction().lens(CLEAN, top=1, positions=[4])
    assert seen.ids[-1, 0, 0] == B
    assert seen.probabilities[-1, 0, 0] > 0.99
    assert float(seen.probabilities[:-1].max()) < 0.2  # nothing is unembedded before: all tokens are alike


def test_the_lens_of_an_encoder_beside_a_decoder() -> None:
    """Through its own final norm and the shared table; refused where the table is another."""
    model = Model(tiny.encoder_decoder())
    seen = model.lens(TEXT, stack="encoder", top=2, positions=[1, 3])
    assert seen.layers[0] == "encoder.embed"
    assert seen.tokens == ("4", "6")
    final = model.trace([TEXT], [TARGET], read=["encoder.final"])["encoder.final"][0]
    names = dict(model.module.named_parameters())
    table, scale = names["encoder.embed.tokens.weight"], head_scale(model)
    expected = (final @ table.T * scale).softmax(-1)[[1, 3]]
    assert torch.allclose(expected.topk(2).values, seen.probabilities[-1], atol=1e-5)
    untied = Model(nn.new(replace(model.spec, ties={})))
    with pytest.raises(ProbeError, match="not the unembedding of this model"):
        untied.lens(TEXT, stack="encoder")


def head_scale(model: Model) -> float:
    head = model.spec.head
    assert isinstance(head, LMHeadSpec)
    return head.scale or 1.0


@pytest.mark.heavy
@pytest.mark.parametrize("name", references.VARIANTS)
def test_the_lens_ends_in_the_model_s_answer_and_the_parts_sum_to_the_logit_in_every_variant(name: str) -> None:
    model = ours(name)
    rows = rows_of(model)
    target = TARGETS[1] if model.spec.layout == "encoder-decoder" else None
    if not isinstance(model.spec.head, LMHeadSpec | MaskedLMHeadSpec):
        with pytest.raises(ProbeError, match="head over the vocabulary"):
            model.lens(rows[0], target=target)
        with pytest.raises(ProbeError, match="head over the vocabulary"):
            model.attribute_logit(rows[0], 3, at=1, target=target)
        return
    whole = model.logits([rows[0]], None if target is None else [target])[0]
    seen = model.lens(rows[0], top=4, target=target)
    assert torch.allclose(seen.probabilities[-1], whole.softmax(-1).topk(4).values, atol=1e-5)
    for at in (0, 2):
        for answer in (None, 3, (3, 5)):
            parts = model.attribute_logit(rows[0], answer, at=at, target=target)
            assert parts.error <= WITHIN * max(1.0, abs(parts.logit)), (at, answer, parts.error)
    capped = getattr(model.spec.head, "softcap", None)
    one = model.attribute_logit(rows[0], 3, at=2, target=target)
    shown = one.logit if capped is None else capped * torch.tensor(one.logit / capped).tanh()
    assert one.softcapped == (capped is not None)
    assert float(shown) == pytest.approx(float(whole[2, 3]), abs=WITHIN)


# ---------------------------------------------------------------- direct logit attribution


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_sum_to_the_logit(name: str) -> None:
    model = Model(MODELS[name]())
    at = 2
    for answer in (None, 7, (7, 8)):
        parts = model.attribute_logit(TEXT, answer, at=at, **both(model))
        own = logits(model)[at]
        expected = own.max() if answer is None else own[7] - (own[8] if isinstance(answer, tuple) else 0)
        assert parts.logit == pytest.approx(float(expected), abs=1e-5)
        assert float(parts.values.sum()) == pytest.approx(parts.logit, abs=WITHIN)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_a_norm_without_its_gain_does_not_sum(norm: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the sum notices a norm that is taken for the identity."""
    parts, through = logit_attribution._StreamParts, logit_attribution._StreamParts.through
    monkeypatch.setattr(parts, "through", lambda own, one, name: isinstance(one, norm) or through(own, one, name))
    model = Model(tiny.encoder() if norm is LayerNorm else tiny.decoder())
    assert model.attribute_logit(TEXT, 7, at=2).error > 0.01


def test_a_circuit_written_by_hand_is_attributed_to_its_last_head() -> None:
    parts = planted.induction().attribute_logit(CLEAN, (B, C))
    assert parts.largest(1) == [("blocks.1.attn head 1", pytest.approx(10, abs=1e-4))]
    assert float(parts.values.abs().sum()) == pytest.approx(10, abs=1e-4)


def test_without_a_final_norm_a_last_head_s_part_is_what_its_ablation_takes() -> None:
    model = planted.induction()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.normal_(0, 0.3)
    parts = model.attribute_logit(CLEAN, (B, C))
    ablated = model.ablate([CLEAN], answer=(B, C), within="blocks.1.*")
    for unit, effect in zip(ablated.units, ablated.effect.tolist(), strict=True):
        part = parts.parts.index(unit.name.replace(".z", ""))
        assert float(parts.values[part]) == pytest.approx(-effect, abs=1e-4)


# ---------------------------------------------------------------- rollout and value-weighted attention


@pytest.mark.parametrize("name", MODELS)
def test_rollout_is_the_product_of_half_the_mean_pattern_and_half_the_identity(name: str) -> None:
    model = Model(MODELS[name]())
    prefix = "decoder." if both(model) else ""
    names = [f"{prefix}blocks.{i}.attn.pattern" for i in range(2)]
    trace = model.trace([TEXT], [TARGET] if both(model) else None, read=names)
    rolled, expected = rollout(model, TEXT, **both(model)), None
    for layer, site in enumerate(names):
        pattern = trace[site][0].double()
        step = sum(pattern[h] for h in range(len(pattern))) / len(pattern) / 2 + torch.eye(pattern.shape[1]) / 2
        expected = step if expected is None else step @ expected
        assert torch.allclose(rolled[layer].double(), expected, atol=1e-6)
    assert torch.allclose(rolled.sum(-1), torch.ones(rolled.shape[:2]), atol=1e-5)


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_value_weighted_attention_is_the_length_of_what_each_head_moves(name: str) -> None:
    model = Model(MODELS[name]())
    place = "decoder.blocks.1.cross" if both(model) else "blocks.1.attn"
    sites = [f"{place}.pattern", f"{place}.v"]
    trace = model.trace([TEXT], [TARGET] if both(model) else None, read=sites)
    pattern, v = trace[sites[0]][0], trace[sites[1]][0]
    module = model.module.get_submodule(place if both(model) else f"decoder.{place}")
    width, group = v.shape[-1], len(pattern) // v.shape[1]
    weighed = value_weighted(model, TEXT, **both(model))[place]
    for h in range(len(pattern)):
        columns = module.out.weight[:, h * width : (h + 1) * width]  # type: ignore[union-attr, index]
        for s in range(len(v)):
            length = (columns @ v[s, h // group]).norm()
            assert torch.allclose(weighed[h, :, s], pattern[h, :, s] * length, atol=1e-5)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top": 0}, InputError, "top=0 must be from 1 to 41"),
        ({"top": 42}, InputError, "top=42 must be"),
        ({"positions": [4]}, InputError, "the row has positions 0 to 3"),
        ({"positions": []}, InputError, "positions=.* at least one"),
        ({"stack": "encoder"}, InputError, "this decoder model has decoder"),
        ({"target": [1]}, InputError, "a target is for encoder-decoders"),
        ({"max_bytes": 10}, ProbeError, "over max_bytes=10"),
        ({"text": []}, InputError, "has no ids|is empty|no tokens|at least one"),
        ({"text": [50]}, InputError, "50"),
        ({"text": [1] * 65}, InputError, "65 tokens and the model reads 64"),
    ],
)
def test_what_no_lens_can_show_is_one_line(
    unchecked: None, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    options: dict[str, Any] = {"text": TEXT} | change
    with pytest.raises(error, match=message) as raised:
        Model(tiny.decoder()).lens(options.pop("text"), **options)
    assert "\n" not in str(raised.value)


def test_answers_and_patterns_that_are_not_there_are_refused(unchecked: None) -> None:
    model = Model(tiny.decoder())
    with pytest.raises(InputError, match="3 answers were given"):
        model.attribute_logit(TEXT, (1, 2, 3))
    with pytest.raises(InputError, match="from 0 to 40"):
        model.attribute_logit(TEXT, 41)
    with pytest.raises(ProbeError, match="forms no pattern"):
        rollout(Model(tiny.decoder(mechanism="linear")), TEXT)
    with pytest.raises(InputError, match="has decoder"):
        value_weighted(model, TEXT, stack="encoder")


def test_results_are_printed_and_plain_data() -> None:
    model = Model(tiny.decoder())
    assert "position 3, '6'" in str(model.lens(TEXT))
    assert len(model.lens(TEXT).to_dict()["layers"]) == 3  # type: ignore[arg-type]
    parts = model.attribute_logit(TEXT)
    assert "all parts sum to" in str(parts)
    assert parts.to_dict()["error"] == parts.error
