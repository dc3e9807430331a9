"""Encoders, encoder-decoders, sound and image models of random configurations, against the reference library.

Each is run on ragged rows, which the reference pads; through the cache; and saved, to be opened by the reference again.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import triptych
from hub_encoders import HUB
from random_encoders import ABSENT, FAMILIES, Drawn, draw
from triptych import families, nn
from triptych.attention import Rows
from triptych.errors import ConfigError
from triptych.model import Model
from triptych.nn import flat
from triptych.spec import ClassHeadSpec, LMHeadSpec, MaskedLMHeadSpec, PoolingSpec, ReplacedHeadSpec
from triptych.tasks.labels import head_outputs
from triptych.text import Encoded

WITHIN = 1e-4
SEEDS, MANY = 3, 60
LENGTHS, TARGET_LENGTHS = (17, 3, 8, 1), (5, 9, 2, 1)
CPU = torch.device("cpu")


def build(drawn: Drawn, seed: int) -> Any:
    """The reference model, every tensor random: norms and biases too."""
    import transformers

    torch.manual_seed(crc32(f"{drawn.model} {seed}".encode()))
    config = getattr(transformers, drawn.config)(**drawn.keys)
    model = getattr(transformers, drawn.model)(config, **drawn.options).eval().float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or name.endswith("inv_freq") or "embed_positions" in name:
                continue
            if tensor.dim() == 1 or "final_logits_bias" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif "T5" not in drawn.model:  # whose own beginning is as large
                tensor.copy_(torch.randn_like(tensor) * 0.3)
        if drawn.own_head:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    return model


def published(repository: str) -> Drawn:
    """A model as a repository would have it."""
    import transformers

    told = HUB[repository]
    kind = told.get("architectures", ["BertModel"])[0].replace("T5WithLMHeadModel", "T5ForConditionalGeneration")
    config = transformers.AutoConfig.for_model(**deepcopy(told))
    types = told.get("type_vocab_size") if kind.startswith(("Bert", "Electra")) else None
    own = "T5ForConditionalGeneration" in kind and told.get("tie_word_embeddings") is False
    file = dict.fromkeys(config.to_dict(), ABSENT) | told
    keys = {key: value for key, value in deepcopy(told).items() if key != "model_type"}
    return Drawn(type(config).__name__, kind, keys, file, types=types, own_head=own)


def write(model: Any, drawn: Drawn, path: Path) -> None:
    """The reference's directory, with the config an older file would have."""
    model.save_pretrained(path)
    told = json.loads((path / "config.json").read_text()) | drawn.file
    (path / "config.json").write_text(json.dumps({key: v for key, v in told.items() if v is not ABSENT}))
    if drawn.whole:
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """[B, T] ids and their mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


class Asked:
    """What a model is asked: ids, with token types where they count, or floats; and targets beside an encoder."""

    def __init__(self, model: Any, drawn: Drawn, seed: int) -> None:
        self.config, self.random = model.config, torch.Generator().manual_seed(seed)
        self.pad = getattr(self.config, "pad_token_id", None) or 0
        self.both = bool(getattr(self.config, "is_encoder_decoder", False)) and not drawn.encodes
        self.labels = self.both and drawn.model.endswith(("SequenceClassification", "QuestionAnswering"))
        self.types = None if drawn.types is None else [self._ids(drawn.types, n, low=0) for n in LENGTHS]
        if "ViT" in drawn.model:
            side = self.config.image_size
            sides = side if isinstance(side, list | tuple) else [side, side]
            self.floats = [self._floats(self.config.num_channels, *sides) for _ in LENGTHS]
        elif "Whisper" in drawn.model:
            size = 2 * self.config.max_source_positions, self.config.num_mel_bins
            self.floats = [self._floats(*size) for _ in LENGTHS]
        else:
            self.floats = []
        vocab, end = self.config.vocab_size if not self.floats else 9, [self.config.eos_token_id] if self.labels else []
        self.rows = [self._ids(vocab, n) + end for n in LENGTHS]
        if self.both:
            vocab = getattr(self.config, "decoder_vocab_size", None) or self.config.vocab_size
            start = self.config.decoder_start_token_id
            self.targets = [[start, *self._ids(vocab, n - 1)] for n in TARGET_LENGTHS]

    def _ids(self, vocab: int, n: int, low: int | None = None) -> list[int]:
        """Ids that are neither padding nor an end."""
        if low is not None:
            return torch.randint(low, vocab, (n,), generator=self.random).tolist()
        words = [i for i in range(vocab) if i not in (self.pad, getattr(self.config, "eos_token_id", None))]
        return [words[i] for i in torch.randint(0, len(words), (n,), generator=self.random)]

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def theirs(self, model: Any) -> list[Tensor]:
        """What the reference says to one padded batch."""
        more: dict[str, Any] = {}
        if not self.floats:
            more["input_ids"], more["attention_mask"] = padded(self.rows, self.pad)
        elif self.both:
            more["input_features"] = torch.stack([row.T for row in self.floats])
        else:
            more["pixel_values"] = torch.stack(self.floats)
        if self.types is not None:
            more["token_type_ids"] = padded(self.types, 0)[0]
        if self.both and not self.labels:
            more["decoder_input_ids"], more["decoder_attention_mask"] = padded(self.targets, self.pad)
        out = model(**more)
        if hasattr(out, "start_logits"):
            said = torch.stack((out.start_logits, out.end_logits), dim=-1)
        else:
            names = ("prediction_logits", "logits", "last_hidden_state")
            said = next(getattr(out, name) for name in names if hasattr(out, name))
        if type(model).__name__.endswith("Classification") and "Token" not in type(model).__name__:
            return list(said)
        lengths = map(len, self.targets if self.both and not self.labels else self.rows)
        return list(said) if self.floats and not self.both else [row[:n] for row, n in zip(said, lengths, strict=True)]

    def ours(self, model: Model) -> list[Tensor]:
        """The same of our model, uncached; a label is read through the function that users call."""
        module = model.module
        if self.labels:
            return head_outputs(module, [Encoded(row, [0] * len(row), [], []) for row in self.rows])
        inputs, where = module.flat(self.floats or self.rows)
        if module.decoder is not None:
            source, (ids, where) = (inputs, where), flat(self.targets, CPU)
            return scored(model, module(nn.Batch(inputs=ids, rows=where, source=source)), where)
        types = None if self.types is None else torch.tensor([kind for row in self.types for kind in row])
        return scored(model, module(nn.Batch(inputs=inputs, rows=where, token_types=types)), where)

    def cached(self, model: Model) -> list[Tensor]:
        """`ours`, a few tokens of each target at a time."""
        module = model.module
        cross, cache = module.decoder.cross_cache(), module.decoder.cache(len(LENGTHS))
        module(nn.Batch(source=module.flat(self.floats or self.rows), cross=cross))
        pieces: list[list[Tensor]] = [[] for _ in self.targets]
        for begin, end in ((0, 2), (2, 3), (3, 4), (4, 7), (7, 9)):
            parts = [row[begin:end] for row in self.targets]
            step = Rows(tuple(map(len, parts)), tuple(cache.lengths))
            ids = torch.tensor([token for part in parts for token in part], dtype=torch.long)
            hidden = module(nn.Batch(inputs=ids, rows=step, cache=cache, cross=cross))
            for piece, new in zip(pieces, step.split(hidden), strict=True):
                piece.append(new)
        rows = [torch.cat(piece) for piece in pieces]
        return scored(model, torch.cat(rows), Rows(tuple(map(len, rows))))


def scored(model: Model, hidden: Tensor, where: Rows) -> list[Tensor]:
    """What the head says of each row; the hidden vectors where there is none, or one that pools."""
    head = model.spec.head
    if head is None or isinstance(head, PoolingSpec):
        return list(where.split(hidden))
    said = model.module.unembed(hidden, where)
    if isinstance(head, ReplacedHeadSpec):
        said = said[:, 0]
    return list(said) if isinstance(head, ClassHeadSpec) else list(where.split(said))


def gap(found: list[Tensor], expected: list[Tensor], model: Model) -> float:
    """The worst |Δ log-softmax| of a head over words; |Δ| of other outputs, beside their largest number."""
    worst = torch.zeros(())
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        if isinstance(model.spec.head, LMHeadSpec | MaskedLMHeadSpec):
            a, b = a.log_softmax(-1), b.log_softmax(-1)
        worst = torch.maximum(worst, ((a - b).abs() / b.abs().max().clamp(min=1)).max())
    return float(worst)


@torch.inference_mode()
def check(drawn: Drawn, seed: int, folder: Path) -> None:
    """One configuration: forward, cached, pooled, saved and opened again."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    reference = build(drawn, seed)
    asked = Asked(reference, drawn, seed)
    write(reference, drawn, folder / "theirs")
    model, expected = triptych.load(folder / "theirs"), asked.theirs(reference)
    assert gap(asked.ours(model), expected, model) <= WITHIN
    if asked.both and not asked.labels:
        assert gap(asked.cached(model), expected, model) <= WITHIN
    if isinstance(model.spec.head, PoolingSpec) and model.spec.head.dense is not None and asked.types is None:
        given = (
            {"pixel_values": torch.stack(asked.floats)} if asked.floats else {"input_ids": torch.tensor(asked.rows[:1])}
        )
        pooled = model.encode(asked.floats or asked.rows[:1], pooling="dense")
        assert gap([pooled], [reference(**given).pooler_output], model) <= WITHIN
    model.save(folder / "ours")
    again = type(reference).from_pretrained(folder / "ours", **drawn.options).eval()
    for ours, theirs in zip(asked.theirs(again), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_configurations(family: str, seed: int, tmp_path: Path) -> None:
    check(draw(family, seed), seed, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(SEEDS, MANY))
def test_many_random_configurations(family: str, seed: int, tmp_path: Path) -> None:
    check(draw(family, seed), seed, tmp_path)


@pytest.mark.parametrize("repository", HUB)
def test_configurations_as_repositories_have_them(repository: str, tmp_path: Path) -> None:
    check(published(repository), 0, tmp_path)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text()) == HUB[repository]


def test_a_family_that_is_none_of_ours_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'mpnet' is not one of .*") as refused:
        families.read_config({"model_type": "mpnet", "architectures": ["MPNetForMaskedLM"], "hidden_size": 24})
    assert "\n" not in str(refused.value)
