"""Directories as sentence-transformers writes them: how vectors are pooled, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import references
import triptych
from triptych.checkpoints.convert import convert
from triptych.errors import CheckpointError, InputError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "river", "bank", "she", "sat", "##s", "by", "the"]
TEXTS = ["she sat by the river banks", "a bank", "the the the she sat"]


def encoder(path: Path, variant: str = "bert-pooler") -> Path:
    """A bare encoder with a vocabulary of words."""
    references.saved(variant)[0].save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("mode", ["cls", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_what_sentence_transformers_writes_today(mode: str, normalize: bool, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer, models

    words = models.Transformer(str(encoder(tmp_path / "bert")))
    pooling = models.Pooling(words.get_word_embedding_dimension(), pooling_mode=mode)
    theirs = SentenceTransformer(modules=[words, pooling, *([models.Normalize()] if normalize else [])], device="cpu")
    theirs.save(str(tmp_path / "sentences"))
    expected = torch.from_numpy(theirs.encode(TEXTS))
    model = triptych.load(tmp_path / "sentences")
    found = model.encode(TEXTS)
    assert (found - expected).abs().max() <= 1e-4
    assert (model.encode(TEXTS, pooling="first" if mode == "mean" else "mean") - expected).abs().max() > 0.01
    model.save(tmp_path / "ours")
    assert torch.equal(triptych.load(tmp_path / "ours").encode(TEXTS), found)


def sentences(path: Path, pooling: dict[str, Any], *more: tuple[str, str]) -> Path:
    """A directory with such a `1_Pooling`, as far as version 4 wrote it, and `more` modules."""
    encoder(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    chain = [("Transformer", ""), ("Pooling", "1_Pooling"), *more]
    told = [{"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{t}"}
            for i, (t, p) in enumerate(chain)]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(told))
    return path


OLD = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
       "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
       "include_prompt": True}  # fmt: skip


@pytest.mark.parametrize(("mode", "flag"), [("first", "pooling_mode_cls_token"), ("mean", "pooling_mode_mean_tokens")])
def test_flags_of_older_files(mode: str, flag: str, tmp_path: Path) -> None:
    model = triptych.load(sentences(tmp_path / "m", OLD | {flag: True}, ("Normalize", "2_Normalize")))
    assert (model.spec.head.mode, model.spec.head.normalize) == (mode, True)


@pytest.mark.parametrize("told", [OLD, OLD | {"pooling_mode_max_tokens": True}, {"pooling_mode": "lasttoken"},
    OLD | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, {"pooling_mode": ["cls", "mean"]},
    {"pooling_mode": 3}])  # fmt: skip
def test_other_pooling_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unsupported pooling_mode"):
        triptych.load(sentences(tmp_path / "m", told))


def test_vectors_that_go_through_another_matrix_are_refused(tmp_path: Path) -> None:
    path = sentences(tmp_path / "m", OLD | {"pooling_mode_mean_tokens": True}, ("Dense", "2_Dense"))
    with pytest.raises(CheckpointError, match=r"Dense.*ignore=\['2_Dense'\]"):
        triptych.load(path)
    assert triptych.load(path, ignore=["2_Dense"]).spec.head.mode == "mean"


def test_a_class_whose_head_was_left_behind(tmp_path: Path) -> None:
    path = sentences(tmp_path / "m", OLD | {"pooling_mode_mean_tokens": True})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    model = triptych.load(path)
    assert (model.encode(TEXTS) - triptych.load(encoder(tmp_path / "bare")).encode(TEXTS)).abs().max() <= 1e-6
    model.save(tmp_path / "ours")
    assert torch.equal(triptych.load(tmp_path / "ours").encode(TEXTS), model.encode(TEXTS))
    (path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        triptych.load(path)


LONG = ["a bank " * 40, "b", "c d " * 9]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("length", [7, None])
def test_a_text_is_cut_where_sentence_transformers_cuts_it(length: int | None, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer, models

    words = models.Transformer(str(encoder(tmp_path / "bert")), max_seq_length=length)
    pooling = models.Pooling(words.get_word_embedding_dimension(), pooling_mode="mean")
    theirs = SentenceTransformer(modules=[words, pooling], device="cpu")
    theirs.save(str(tmp_path / "sentences"))
    expected = torch.from_numpy(theirs.encode(LONG))
    if length is not None:  # as its versions before 5 wrote it
        own = tmp_path / "sentences" / "sentence_bert_config.json"
        own.write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}))
    model = triptych.load(tmp_path / "sentences")
    assert (model.encode(LONG) - expected).abs().max() <= 1e-4
    model.save(tmp_path / "ours")
    assert torch.equal(triptych.load(tmp_path / "ours").encode(LONG), model.encode(LONG))
    convert(tmp_path / "sentences", tmp_path / "x.gguf")
    assert (triptych.load(tmp_path / "x.gguf").encode(LONG) - expected).abs().max() <= 1e-4
    ids = model.ids(LONG)
    assert len(ids[0]) > 52 == model.spec.context
    with pytest.raises(InputError, match="row 0 needs 82 positions"):  # ids are read whole
        model.encode(ids)
    (tmp_path / "sentences" / "modules.json").unlink()
    (tmp_path / "sentences" / "sentence_bert_config.json").unlink()
    with pytest.raises(InputError, match="row 0 needs 82 positions"):  # as is a text by an ordinary encoder
        triptych.load(tmp_path / "sentences").encode(LONG)


@pytest.mark.weights
def test_four_hundred_words_are_embedded_as_sentence_transformers_does(minilm_dir: Path) -> None:
    from sentence_transformers import SentenceTransformer

    text = [" ".join(f"word{i} and" for i in range(200))]
    expected = torch.from_numpy(SentenceTransformer(str(minilm_dir), device="cpu").encode(text))
    assert (triptych.load(minilm_dir).encode(text) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("settings", [{"max_seq_length": 2}, {"max_seq_length": "x"}, {"do_lower_case": 1},
    {"max_seq_length": True}])  # fmt: skip
def test_bad_sentence_settings_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    (encoder(tmp_path / "m") / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"sentence_bert_config\.json: "):
        triptych.load(tmp_path / "m").encode(["a"])


def test_lower_case_is_made_before_the_tokenizer(tmp_path: Path) -> None:
    path = encoder(tmp_path / "m")
    cased = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (path / "tokenizer_config.json").write_text(json.dumps(cased))
    plain = triptych.load(path).encode(["A b"])
    (path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    lower = triptych.load(path).encode(["A b"])
    assert torch.equal(lower, triptych.load(path).encode(["a b"]))
    assert not torch.equal(lower, plain)
