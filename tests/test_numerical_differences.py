"""Each cause in the table of docs/concepts/numerical-differences.md, made on purpose, is found where the table says."""

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triptych
from cli_models import Captured
from triptych import nn
from triptych.check import Report
from triptych.check.comparison import case_of
from triptych.check.peer import against_transformers
from triptych.cli.check import _show
from triptych.model import Model
from triptych.spec import AttentionSpec, LMHeadSpec, RMSNormSpec, SinusoidalSpec, causal, full
from triptych.spec.parts import EmbedSpec, GLUSpec
from triptych.spec.positions import Interpolate, RopeSpec

PAGE = (Path(__file__).parents[1] / "docs" / "concepts" / "numerical-differences.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", re.M)
WINDOW, THRESHOLD = 7, 1e-5

LLAMA = {"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "max_position_embeddings": 64,
         "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3"}
GEMMA2 = LLAMA | {"model_type": "gemma2", "sliding_window": WINDOW, "query_pre_attn_scalar": 10}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": WINDOW}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 64,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
ROBERTA = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 61, "hidden_size": 24,
           "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 66,
           "type_vocab_size": 1, "initializer_range": 0.3}  # fmt: skip
MARIAN = {"model_type": "marian", "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
          "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
          "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
          "init_std": 0.3}  # fmt: skip


def everywhere(part: Any, kind: type, **changes: Any) -> Any:
    """A copy of a spec in which every part of a kind has other fields."""
    if isinstance(part, tuple):
        return tuple(everywhere(one, kind, **changes) for one in part)
    if isinstance(part, dict):
        return {name: everywhere(one, kind, **changes) for name, one in part.items()}
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inner = {field.name: everywhere(getattr(part, field.name), kind, **changes) for field in fields(part) if field.init}
    changed = {name: value for name, value in inner.items() if value is not getattr(part, name)}
    return replace(part, **changed | (changes if isinstance(part, kind) else {}))


Change = Callable[[Model], Model]


def spec_of(kind: type, **changes: Any) -> Change:
    return lambda model: with_spec(model, everywhere(model.spec, kind, **changes))


def with_spec(model: Model, spec: Any) -> Model:
    """The same weights in a model of another spec; those that it does not have are left out."""
    module = nn.new(spec, 0)
    own = dict(module.named_parameters())
    module.load_state_dict({k: v for k, v in model.module.state_dict().items() if k in own}, strict=False)
    return Model(module, model.tokenizer, model.hf, model.path)


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def changed(model: Model) -> Model:
        with torch.no_grad():
            parameter = model.module.get_parameter(name)
            parameter.copy_(change(parameter))
        return model

    return changed


def masks(**by_kind: Any) -> Change:
    def changed(model: Model) -> Model:
        stack = model.spec.decoder
        kinds = {name: replace(kind, mask=by_kind.get(name, kind.mask)) for name, kind in stack.kinds.items()}
        return with_spec(model, replace(model.spec, decoder=replace(stack, kinds=kinds)))

    return changed


def kinds_swapped(model: Model) -> Model:
    stack = model.spec.decoder
    first, second = stack.kinds
    other = {first: second, second: first}
    blocks = tuple(
        replace(block, attn=replace(block.attn, kind=other[block.attn.kind])) if i else block
        for i, block in enumerate(stack.blocks)
    )
    return with_spec(model, replace(model.spec, decoder=replace(stack, blocks=blocks)))


def without_final_norm(model: Model) -> Model:
    return with_spec(model, replace(model.spec, decoder=replace(model.spec.decoder, final_norm=None)))


def heads_rolled(model: Model) -> Model:
    """Heads of block 0 in another order, in queries and output alike, so that they read other groups."""
    queries = weight("decoder.blocks.0.attn.q.weight", lambda w: w.view(6, 10, 24).roll(2, 0).flatten(0, 1))
    return weight("decoder.blocks.0.attn.out.weight", lambda w: w.view(24, 6, 10).roll(2, 1).flatten(1))(queries(model))


def without_softcap_of_logits(model: Model) -> Model:
    assert isinstance(model.spec.head, LMHeadSpec)
    return with_spec(model, replace(model.spec, head=replace(model.spec.head, softcap=None)))


def window(length: int) -> Any:
    return causal() & triptych.window(length)


#: What the page calls a cause -> a config, and the change.
CAUSES: dict[str, tuple[dict[str, Any], Change]] = {
    "scale of the embeddings": (GEMMA2, spec_of(EmbedSpec, scale=None)),
    "offset of learned positions": (
        ROBERTA, weight("encoder.embed.position.weight", lambda table: table.roll(1, 0))
    ),
    "layout of sinusoidal positions": (MARIAN, spec_of(SinusoidalSpec, layout="interleaved")),
    "base of the rotation": (LLAMA, spec_of(RopeSpec, theta=500.0)),
    "pairing of the rotation": (LLAMA, spec_of(RopeSpec, pairing="interleaved")),
    "scaling of the rotation": (LLAMA, spec_of(RopeSpec, scaling=Interpolate(factor=2.0))),
    "scale of the scores": (LLAMA, spec_of(AttentionSpec, scale=0.2)),
    "softcap of the scores": (GEMMA2 | {"attn_logit_softcapping": 1.0}, spec_of(AttentionSpec, softcap=None)),
    "norm of queries and keys left out": (QWEN3, spec_of(AttentionSpec, q_norm=None, k_norm=None)),
    "order of the heads in queries": (LLAMA, heads_rolled),
    "a mask that lets the future through": (LLAMA, masks(self=full())),
    "length of the window": (MISTRAL, masks(self=window(WINDOW + 1))),
    "epsilon of the norms": (LLAMA, spec_of(RMSNormSpec, eps=0.1)),
    "offset of the norms' weights": (GEMMA2, spec_of(RMSNormSpec, offset=0.0)),
    "activation": (LLAMA | {"hidden_act": "gelu"}, spec_of(GLUSpec, act="gelu_tanh")),
    "one wrong weight of block 1": (LLAMA, weight("decoder.blocks.1.mlp.down.weight", lambda w: w.roll(1))),
    "layers that have the window": (GEMMA2, kinds_swapped),
    "final norm left out": (LLAMA, without_final_norm),
    "head not tied": (LLAMA, weight("head.proj.weight", lambda w: w.roll(1))),
    "softcap or scale of the logits": (GEMMA2 | {"final_logit_softcapping": 2.0}, without_softcap_of_logits),
}  # fmt: skip


def table() -> dict[str, tuple[str, str]]:
    """Cause -> first site and first position, as the page has them."""
    lines = PAGE[PAGE.index("| Cause | First site") : PAGE.index("A test makes each")]
    rows = [row for row in ROW.findall(lines) if row[0] != "Cause" and not row[0].startswith("---")]
    return {cause: (site.partition(" (")[0].strip("`"), position) for cause, site, position in rows}


def compared(config: dict[str, Any], change: Change | None, path: Path) -> Report:
    """What `check` finds beside transformers; its other comparisons are not made."""
    triptych.create(config).save(path)
    model = triptych.load(path)
    case = case_of(model if change is None else change(model), THRESHOLD)
    against_transformers(case)
    return Report(str(path), THRESHOLD, tuple(case.findings), tuple(case.layers))


def test_the_page_has_every_cause_that_is_tried_and_no_other() -> None:
    rows = table()
    for cause in CAUSES:
        assert [name for name in rows if name.startswith(cause)], cause
    assert len(rows) == len(CAUSES)


@pytest.mark.heavy
@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_found_where_the_page_says(cause: str, tmp_path: Path) -> None:
    config, change = CAUSES[cause]
    assert compared(config, None, tmp_path / "sound").first_layer is None
    report = compared(config, change, tmp_path / "broken")
    site, position = next(row for name, row in table().items() if name.startswith(cause))
    if site.startswith("none"):
        assert report.first_layer is None
        return
    if site.startswith("the first layer whose kind"):
        site = "blocks.1.resid_post"
    assert report.first_layer.site.removeprefix("encoder.") == site
    assert report.first_layer.first_position == (WINDOW if position == "the window's length" else int(position))


def test_the_command_says_where_and_from_which_position(capsys: Captured, tmp_path: Path) -> None:
    config, change = CAUSES["base of the rotation"]
    _show(compared(config, change, tmp_path / "m"), as_json=False)
    assert "first difference from transformers: blocks.0.resid_post, from position 1 on" in capsys.readouterr().out
    config, change = CAUSES["head not tied"]
    _show(compared(config, change, tmp_path / "n"), as_json=False)
    assert "every site agrees with transformers: the difference is in the head" in capsys.readouterr().out
