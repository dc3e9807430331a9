"""Encoders natively: equal to the modules, the same bits in any batch, and the modules where the model does more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import parity
import tiny
import triptych
from native_models import EXACT, Run, needs_native
from test_native_step import unpacked
from triptych import native, nn, ops
from triptych.attention import Rows
from triptych.checkpoints.adapters import AdapterSettings, add_adapter
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.model import create
from triptych.native.step import Op
from triptych.nn import Batch
from triptych.program import lower, native_encoder
from triptych.program.native_encoder import NativeEncoder
from triptych.program.native_plan import NativePlan, encoding_plan_of
from triptych.quantize import kernel_matrix

pytestmark = needs_native
LIBRARY = native.library()
in_bf16 = pytest.mark.skipif(LIBRARY is None or LIBRARY.bf16 is None, reason="this processor has no products in bf16")

BERT = {"model_type": "bert", "vocab_size": 41, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 700, "type_vocab_size": 2, "pad_token_id": 0,
        "initializer_range": 0.3}  # fmt: skip
LENGTHS = (17, 1, 70, 3, 20, 33)


def by_modules(module: nn.Transformer, ids: list[int], rows: Rows) -> Tensor:
    inputs = torch.tensor(ids)
    both = module.spec.layout == "encoder-decoder"
    return module(Batch(source=(inputs, rows)) if both else Batch(inputs=inputs, rows=rows))


def natively(module: nn.Transformer, ids: list[int], rows: Rows, **how: bool) -> Tensor:
    native = NativeEncoder(module, matrix_of=kernel_matrix, **how or {"dense": True})
    hidden = native.hidden(ids, rows)
    assert hidden is not None, native.why_modules
    return hidden


def drawn(count: int, vocab: int = 41) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def gap(module: nn.Transformer, lengths: tuple[int, ...] = LENGTHS) -> float:
    ids, rows = drawn(sum(lengths)), Rows(lengths)
    return float((natively(module, ids, rows) - by_modules(module, ids, rows)).abs().max())


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "distilbert-base", "electra-base", "bart-base",
                                  "marian", "t5"])  # fmt: skip
@torch.no_grad()
def test_every_family_of_encoders_gives_what_its_modules_give(name: str) -> None:
    assert gap(parity.ours(name).module, (17, 1, 40, 3)) <= EXACT


LACKING = {"deberta": "no operation", "modernbert": "no mask", "gpt2": "no encode"}


@pytest.mark.parametrize("name", LACKING)
@torch.no_grad()
def test_what_the_native_step_lacks_in_an_encoder_is_named(name: str) -> None:
    native = NativeEncoder(parity.ours(name).module, dense=True)
    assert native.hidden([5, 6], Rows((2,))) is None
    assert LACKING[name] in (native.why_modules or "")


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch_and_number_of_threads(form: str | None, tmp_path: Path) -> None:
    model = create(BERT)
    model.save(tmp_path)
    module = model.module if form is None else triptych.load(tmp_path, quantize=form).module
    ids, rows = drawn(600), Rows((200, 33, 1, 300, 66))
    expected = natively(module, ids, rows)  # in two calls
    if form is None:
        assert float((expected - by_modules(module, ids, rows)).abs().max()) <= EXACT
    for count, (start, length) in zip((1, 2, 3), ((0, 200), (200, 33), (234, 300)), strict=True):
        torch.set_num_threads(count)
        alone = natively(module, ids[start : start + length], Rows((length,)))
        assert torch.equal(alone, expected[start : start + length])


def _hooked(module: Any) -> None:
    module.encoder.blocks[0].attn.out.register_forward_hook(lambda part, inputs, out: out * 0.5)


def _trained(module: Any) -> None:
    module.encoder.blocks[0].mlp.train()


@torch.no_grad()
def test_weights_are_followed_and_modules_run_where_the_model_does_more() -> None:
    ids, rows = drawn(sum(LENGTHS)), Rows(LENGTHS)
    module: Any = create(BERT).module
    before = natively(module, ids, rows)
    for weight in (module.encoder.blocks[0].attn.q.weight, module.encoder.embed.norm.bias):
        weight.mul_(-1.5)
        assert gap(module) <= EXACT
    module.encoder.blocks[0].mlp.down.weight = torch.nn.Parameter(module.encoder.blocks[0].mlp.down.weight * 2)
    assert gap(module) <= EXACT
    assert not torch.allclose(natively(module, ids, rows), before)
    native = NativeEncoder(module)
    assert native.hidden(ids, rows) is None
    assert "dense weights" in (native.why_modules or "")
    changes: list[tuple[Callable[[Any], None], str]] = [(_hooked, "has a hook"), (_trained, "is in training mode")]
    for change, reason in changes:
        module = create(BERT).module
        native = NativeEncoder(module, dense=True)
        assert native.hidden(ids, rows) is not None
        change(module)
        assert native.hidden(ids, rows) is None
        assert reason in (native.why_modules or "")


@torch.no_grad()
def test_wrong_sizes_never_reach_the_kernels() -> None:
    native = NativeEncoder(create(BERT).module, dense=True)
    for ids, rows, reason in (
        ([41], Rows((1,)), "outside the vocabulary"), ([-1], Rows((1,)), "outside the vocabulary"),
        ([1, 2], Rows((1,)), "no tokens"), ([], Rows((0,)), "no tokens"), ([1], Rows((1,), (4,)), "continue others"),
        ([1] * 701, Rows((701,)), "context"),
    ):  # fmt: skip
        assert native.hidden(ids, rows) is None
        assert reason in (native.why_modules or "")


def break_plans(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last operation of a kind is none that there is, in every plan."""
    made = native_encoder.encoding_plan_of

    def broken(*arguments: Any) -> NativePlan:
        plan = made(*arguments)
        plan.instructions["op"][np.nonzero(plan.instructions["op"] == op)[0][-1]] = -1
        return plan

    monkeypatch.setattr(native_encoder, "encoding_plan_of", broken)


@pytest.mark.parametrize("op", [Op.ATTEND, Op.LAYER_NORM, Op.LINEAR, Op.EMBED])
@torch.no_grad()
def test_a_broken_plan_is_found(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    break_plans(op, monkeypatch)
    assert not gap(create(BERT).module) <= 10 * EXACT


# -- beside a decoder -------------------------------------------------------------------------------------------------

T5 = {"model_type": "t5", "vocab_size": 41, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
      "initializer_factor": 2.0}  # fmt: skip
WHISPER = {"model_type": "whisper", "vocab_size": 41, "d_model": 64, "num_mel_bins": 8, "encoder_layers": 2,
           "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 96,
           "decoder_ffn_dim": 96, "max_source_positions": 70, "max_target_positions": 30, "init_std": 0.2,
           "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 3}  # fmt: skip
FRAMES = torch.randn(4, 140, 8, generator=torch.Generator().manual_seed(2))


def sources(module: nn.Transformer) -> list[Any]:
    return list(FRAMES) if module.spec.family == "whisper" else [drawn(n) for n in (70, 3, 33, 1)]


@pytest.mark.parametrize("config", [T5, WHISPER], ids=["t5", "whisper"])
@torch.no_grad()
def test_an_encoder_beside_a_decoder_gives_what_its_modules_give(config: dict[str, Any]) -> None:
    module = create(config).module
    inputs, rows = module.flat(sources(module))
    native = NativeEncoder(module, matrix_of=kernel_matrix, dense=True)
    expected, hidden = module(Batch(source=(inputs, rows))), native.hidden(inputs, rows)
    assert hidden is not None, native.why_modules
    assert float((hidden - expected).abs().max()) <= EXACT
    alone = native.hidden(*module.flat(sources(module)[2:3]))
    assert torch.equal(alone, hidden.split(list(rows.lengths))[2])
    assert native.hidden(inputs[:-1], rows) is None
    assert "as many as the rows have" in (native.why_modules or "")
    other = FRAMES.flatten(0, 1) if config is T5 else drawn(rows.total)
    assert native.hidden(other, rows) is None


@torch.no_grad()
def test_convolutions_give_a_sound_the_same_bits_in_any_batch() -> None:
    """Of sounds of other lengths too.  All at once they are the same to rounding."""
    embed = create(WHISPER).module.input
    sounds = [*FRAMES, FRAMES[0, :6], FRAMES[1, 30:44]]
    frames, rows = embed.flat(sounds)
    together = embed(frames, rows).split(list(rows.lengths))
    for sound, expected in zip(sounds, together, strict=True):
        assert torch.equal(embed(*embed.flat([sound])), expected)
    lengths = [2 * n for n in rows.lengths]
    at_once = embed.conv2(ops.ACTIVATIONS["gelu"](embed.conv1(frames, lengths)), lengths)
    torch.testing.assert_close(at_once, embed.convolved(frames, rows), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [T5, WHISPER], ids=["t5", "whisper"])
def test_an_engine_reads_sources_natively_from_its_first_step_on(config: dict[str, Any], tmp_path: Path) -> None:
    """The logits of a prompt with int8 weights; then those of its beams, which share their source."""
    create(config).save(tmp_path)
    module = triptych.load(tmp_path, quantize="int8").module
    found: list[Tensor] = []
    for executor in ("auto", "modules"):
        engine = Engine(module, executor=executor)  # type: ignore[arg-type]
        rows = engine.add(*[Request(prompt=[3, 7], source=source, max_new_tokens=9) for source in sources(module)])
        logits = [engine.logits()]
        rows = engine.reorder([rows[2], rows[0], rows[2], rows[2]])
        for number, row in enumerate(rows):
            row.ids.append(5 + number)
        logits.append(engine.logits())
        assert (engine.why_modules is None) == (executor == "auto"), engine.why_modules
        assert len(engine.cross.stores[0].k) == 4
        found.append(torch.cat(logits).log_softmax(-1))
    native, modules = found
    assert float((native - modules).norm() / modules.norm()) <= 1e-2
    assert not torch.equal(native, modules)


@in_bf16
@pytest.mark.parametrize("config", [T5, WHISPER], ids=["t5", "whisper"])
@torch.no_grad()
def test_sources_in_bf16_are_nearer_the_modules_than_integers_are(config: dict[str, Any], tmp_path: Path) -> None:
    """The keys that the decoder reads, of the unpacked weights by modules; the bits of a source do not depend on the
    others, nor on the number of threads."""
    create(config).save(tmp_path)
    packed_module = triptych.load(tmp_path, quantize="int8").module
    plain = unpacked(packed_module)

    def keys(module: nn.Transformer, chosen: list[Any], bf16: bool | None) -> Tensor:
        (inputs, rows), cross = module.flat(chosen), module.decoder.cross_cache()
        if bf16 is None:
            starts = Rows((1,) * len(chosen))
            module(Batch(inputs=torch.zeros(len(chosen), dtype=torch.long), rows=starts, source=(inputs, rows),
                         cross=cross))  # fmt: skip
        else:
            encoder = NativeEncoder(module, matrix_of=kernel_matrix, bf16=bf16)
            assert encoder.project(inputs, rows, cross), encoder.why_modules
        return cross.stores[-1].k[len(chosen) - 1, :, : rows.lengths[-1]].float()

    chosen = sources(plain)[:3]
    expected = keys(plain, chosen, None)
    integers, bf16 = (keys(packed_module, chosen, how) for how in (False, True))
    gaps = [float((found - expected).norm() / expected.norm()) for found in (bf16, integers)]
    assert gaps[0] < gaps[1] < 2e-2
    assert torch.equal(keys(packed_module, chosen[2:], True), bf16)


@pytest.mark.parametrize("op", [Op.EXTEND, Op.ATTEND])
@torch.no_grad()
def test_a_broken_plan_of_a_source_is_found(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Run(create(T5).module, native_sources=True).gap() <= EXACT
    break_plans(op, monkeypatch)
    assert not Run(create(T5).module, native_sources=True).gap() <= 10 * EXACT


SENTENCES = ["She sat by the river bank.", "The bank raised its rates.", "A", "To be, or not to be, " * 30, "is 4 > 3?"]


@pytest.mark.heavy
def test_sentences_in_int8_are_near_those_in_fp32(minilm_dir: Path, unchecked: None) -> None:
    expected, model = triptych.load(minilm_dir).encode(SENTENCES), triptych.load(minilm_dir, quantize="int8")
    vectors = model.encode(SENTENCES)
    near = torch.cosine_similarity(vectors, expected)
    assert float(near.mean()) >= 0.995
    assert float(near.min()) >= 0.99
    model.executor = "modules"
    modules = model.encode(SENTENCES)
    assert not torch.equal(modules, vectors)  # so the model had run natively
    torch.testing.assert_close(modules, vectors, atol=2e-2, rtol=0)
    model.executor = "native"  # type: ignore[assignment]
    with pytest.raises(InputError, match="executor must be one of"):
        model.encode(SENTENCES)


def test_an_encoder_with_an_adapter_has_a_plan_in_bf16() -> None:
    """A sum of two products is part of one of them alone, and the products of two layers wait for no adapter."""
    for module, source in ((tiny.encoder(), False), (tiny.encoder_decoder(), True)):
        add_adapter(module, AdapterSettings(rank=2))
        packed = frozenset(name for name, one in module.named_parameters() if one.dim() == 2)
        assert encoding_plan_of(lower(module.eval()), packed, True, source).instructions.size
