"""The three layouts in NumPy beside the library's, in float64, and each piece of the file broken."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import triptych
from test_numpy_transformer import check_that_it_needs_numpy_alone, mutant_of
from triptych import nn
from triptych.attention import Rows
from triptych.attention.rope import sinusoidal
from triptych.generate import Engine, Request
from triptych.generate.beam import beam_search
from triptych.spec.positions import SinusoidalSpec
from triptych_lectures.scratch import numpy_panels
from triptych_lectures.scratch.numpy_panels import Array, PanelConfig, Weights

FILE = Path(numpy_panels.__file__)
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 31, "hidden_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 20,
        "type_vocab_size": 2, "pad_token_id": 0, "initializer_range": 0.3}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 20,
        "initializer_range": 0.3}  # fmt: skip
MARIAN = {"model_type": "marian", "vocab_size": 31, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
          "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
          "max_position_embeddings": 30, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
          "activation_function": "swish", "scale_embedding": True, "init_std": 0.3}  # fmt: skip
HOW = {
    "bert": PanelConfig(3, eps=1e-12),
    "gpt2": PanelConfig(3, "gelu_tanh"),
    "marian": PanelConfig(3, "swish", scale=24**0.5),
}
IDS = np.random.default_rng(0).integers(2, 31, (2, 9))
SOURCE = np.random.default_rng(1).integers(2, 31, (2, 7))


def library(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[nn.Transformer, Weights]:
    """A model of the library with random weights, and these for NumPy."""
    torch.manual_seed(0)
    module = triptych.create(config).module.to(dtype).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("bias") or "norm" in name:  # 0 and 1 would hide what is left out
                weight += 0.3 * torch.randn(weight.shape, dtype=dtype)
    named = module.named_parameters(remove_duplicate=False)
    return module, {name: weight.detach().numpy() for name, weight in named}


@torch.no_grad()
def expected(module: nn.Transformer) -> Array:
    """The logits of both rows of IDS, after SOURCE where there are two stacks."""
    rows = Rows((IDS.shape[1],) * 2)
    source = None
    if module.encoder is not None and module.decoder is not None:
        source = (torch.from_numpy(SOURCE.reshape(-1)), Rows((SOURCE.shape[1],) * 2))
    logits = module.logits(nn.Batch(inputs=torch.from_numpy(IDS.reshape(-1)), rows=rows, source=source))
    return logits.reshape(*IDS.shape, -1).numpy()


def found(mine: ModuleType, name: str, w: Weights) -> Array:
    c: Any = mine.PanelConfig(**vars(HOW[name]))
    calls: dict[str, Callable[[], Array]] = {
        "bert": lambda: mine.encoder_logits(IDS, w, c),
        "gpt2": lambda: mine.decoder_logits(IDS, w, c),
        "marian": lambda: mine.both_logits(SOURCE, IDS, w, c),
    }
    return calls[name]()


def gap(mine: ModuleType, config: dict[str, Any]) -> float:
    module, w = library(config)
    return float(np.abs(found(mine, config["model_type"], w) - expected(module)).max())


@pytest.mark.parametrize("config", [BERT, GPT2, MARIAN], ids=lambda config: config["model_type"])
def test_logits_are_those_of_the_library(config: dict[str, Any]) -> None:
    module, w = library(config)
    if config is MARIAN:  # the library's sines are fp32
        table = sinusoidal(torch.arange(30), SinusoidalSpec(width=24, theta=10_000.0, layout="halves")).double().numpy()
        np.testing.assert_allclose(numpy_panels.sinusoids(np.arange(30), 24), table, atol=1e-5)
        w |= {f"{side}.embed.position.weight": table for side in ("encoder", "decoder")}
    assert np.abs(found(numpy_panels, str(config["model_type"]), w) - expected(module)).max() <= 1e-10


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh", "swish"])
def test_activations_are_those_of_torch(act: str) -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    theirs = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "swish": torch.nn.functional.silu,
              "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}[act](x)  # fmt: skip
    np.testing.assert_allclose(numpy_panels.ACTIVATIONS[act](x.numpy()), theirs.numpy(), atol=1e-12)


@pytest.mark.parametrize("config", [GPT2, MARIAN], ids=lambda config: config["model_type"])
def test_a_cache_changes_nothing(config: dict[str, Any]) -> None:
    """In pieces of any length; and what is written greedily is what the library writes."""
    module, w = library(config)
    c = HOW[config["model_type"]]
    source = None if config is GPT2 else SOURCE
    memory = None if source is None else numpy_panels.stack("encoder", source, w, c)
    cache: dict[str, Array] = {}
    pieces = [
        numpy_panels.stack("decoder", IDS[:, first:last], w, c, source=memory, cache=cache)
        for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    logits = numpy_panels.unembed(np.concatenate(pieces, 1), w, c)
    np.testing.assert_allclose(logits, found(numpy_panels, config["model_type"], w), atol=1e-10)
    written = numpy_panels.greedy(IDS[:, :2], 8, w, c, source=source)
    engine = Engine(module, executor="modules", reuse=False)
    rows = engine.add(*[
        Request(prompt=ids.tolist(), max_new_tokens=8, source=None if source is None else source[i].tolist())
        for i, ids in enumerate(IDS[:, :2])
    ])  # fmt: skip
    while engine.rows:
        engine.step()
    assert [row.new for row in rows] == written[:, 2:].tolist()


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_find_what_the_library_s_find(beams: int, penalty: float) -> None:
    module, w = library(MARIAN)
    w["head.proj.bias"][1] += 3  # texts end at different lengths
    lengths = set()
    for source in SOURCE:
        mine = numpy_panels.beam_search(source, 0, 1, w, HOW["marian"], beams=beams, new=9, penalty=penalty)
        request = Request(prompt=[0], source=source.tolist(), max_new_tokens=9, ends=(1,))
        engine = Engine(module, executor="modules", reuse=False)
        (theirs,) = beam_search(engine, [request], beams=beams, length_penalty=penalty)
        assert [text.tokens for text in mine] == [beam.tokens for beam in theirs]
        np.testing.assert_allclose([t.logprob for t in mine], [b.logprob for b in theirs], atol=1e-4)
        lengths |= {len(text.tokens) for text in mine}
    assert len(lengths) > 1 or beams == 1 or penalty


def test_a_cache_that_does_not_follow_the_beams_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: Any = mutant(monkeypatch, "array[rows] for name", "array[sorted(rows, reverse=True)] for name")
    _, w = library(MARIAN)
    both = [
        mine.beam_search(SOURCE[0], 0, 1, w, mine.PanelConfig(**vars(HOW["marian"])), beams=4, new=9)[0].logprob
        for mine in (numpy_panels, broken)
    ]
    assert abs(both[0] - both[1]) > 1e-3


def mutant(monkeypatch: pytest.MonkeyPatch, text: str, instead: str) -> ModuleType:
    return mutant_of(FILE, monkeypatch, text, instead)


# what is broken, and in which layouts it shows: (text, in its place, names)
MUTATIONS = {
    "no bias": ('+ w.get(f"{name}.bias", 0.0)', "", "bert gpt2 marian"),
    "a norm that keeps the mean": ("apart = x - x.mean(-1, keepdims=True)", "apart = x", "bert gpt2 marian"),
    "a norm without its bias": ('return y * w[f"{name}.weight"] + w[f"{name}.bias"]', 'return y * w[f"{name}.weight"]',
                                "bert gpt2 marian"),
    "no scale": ("/ math.sqrt(q.shape[-1])", "", "bert gpt2 marian"),
    "a mask one late": ("np.arange(keys) <= place[:, None]", "np.arange(keys) <= place[:, None] + 1", "gpt2 marian"),
    "no mask": ("visible = np.arange(keys) <= place[:, None] if causal else None", "visible = None", "gpt2 marian"),
    "a mask in the encoder": ('c, name == "decoder", cache', "c, True, cache", "bert marian"),
    "keys of the target": ('split(linear(source, w, f"{name}.{part}"), c.heads)',
                           'split(linear(x, w, f"{name}.{part}"), c.heads)', "marian"),
    "no way past a part": ("layer_norm(x + h, w", "layer_norm(h, w", "bert gpt2 marian"),
    "cosines first": ("[np.sin(angles), np.cos(angles)]", "[np.cos(angles), np.sin(angles)]", "marian"),
    "embeddings as they are": ("[ids] * c.scale", "[ids]", "marian"),
    "no positions": ('x = x + w[f"{name}.position.weight"][positions]', "pass", "bert gpt2"),
    "no sentence": ('x = x + w[f"{name}.token_types.weight"][0]', "pass", "bert"),
    "the other sentence": ('token_types.weight"][0]', 'token_types.weight"][1]', "bert"),
    "no last norm": ('return layer_norm(x, w, f"{name}.final_norm", c.eps)', "return x", "gpt2"),
    "a head without its layer": ('if "head.transform.dense.weight" in w:', "if False:", "bert"),
    "another activation": ("lambda x: x / (1 + np.exp(-x))", "lambda x: x / (1 + np.exp(-2 * x))", "marian"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "instead", "names"), MUTATIONS.values(), ids=MUTATIONS)
def test_each_piece_matters(text: str, instead: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(monkeypatch, text, instead)
    for config in (BERT, GPT2, MARIAN):
        name = str(config["model_type"])
        assert (gap(broken, config) <= 1e-5) == (name not in names.split()), name


def test_it_is_one_file_that_needs_numpy_alone_and_runs() -> None:
    check_that_it_needs_numpy_alone(FILE, 400)
    ran = subprocess.run([sys.executable, "-I", str(FILE)], capture_output=True, text=True, check=True)
    assert "decoder: another last token moves the logits of the first token by 0.000" in ran.stdout
    assert "encoder: another last token moves the logits of the first token by 0.0" not in ran.stdout
