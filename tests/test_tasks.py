"""Answers, entities, summaries and translations against transformers on the same tiny random weights, and the commands.

transformers 5 has no pipelines for questions, summaries and translations: the first is written here as transformers 4
had it, the others are its `generate` with the settings that the pipelines take from the config.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triptych
from cli_models import BERT, T5, WORDS, Captured, answered, checkpoint, refused, said
from triptych import tasks
from triptych.cli import main
from triptych.errors import ConfigError, InputError
from triptych.model import Model, create, load
from triptych.tasks import writing
from triptych.text import SEQ2SEQ, Tokenizer, byte_tokenizer, word_tokenizer

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
CONTEXT = "the old mill stands where the river bends . the ship came in on the evening tide"
QUESTION = "where the ship ?"


def pieces() -> Tokenizer:
    """A word-piece vocabulary in which words have one to three tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors

    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "old", "mi", "##ll", "st", "##an", "##ds", "ri",
             "##ver", "sh", "##ip", "came", "in", "ti", "##de", "even", "##ing", ".", "?", "where"]  # fmt: skip
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(known)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return Tokenizer(backend, word_tokenizer(WORDS, 90).specials)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny BERT with a head, saved with its tokenizer: our model and its directory, made once."""

    @cache
    def make(name: str, split: bool = False) -> Model:
        tokenizer = pieces() if split else word_tokenizer(WORDS, 90)
        labels = {"id2label": {str(i): label for i, label in enumerate(BIO)}} if "Token" in name else {}
        hf = BERT | {"architectures": [name], "vocab_size": tokenizer.vocab_size, "pad_token_id": 0} | labels
        path = tmp_path_factory.mktemp("tasks") / f"{name}{split}"
        create(hf, tokenizer, seed=3).save(path)
        return load(path)

    return make


# ---------------------------------------------------------------- entities

SPLIT = ["the mill stands . the river came in", "where the old ship stands in the evening tide ?", "zzz mill zzz the"]


def pipeline(path: Path, **how: Any) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.model_max_length = how.pop("length", 72)
    return transformers.pipeline("token-classification", model=str(path), tokenizer=tokenizer, device="cpu", **how)


def same_entities(ours: list[tasks.Entity], theirs: list[dict[str, Any]]) -> None:
    assert [(one.begin, one.end, one.label) for one in ours] == [
        (t["start"], t["end"], t["entity_group"]) for t in theirs
    ]
    assert [one.probability for one in ours] == pytest.approx([t["score"] for t in theirs], abs=1e-5)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_entities_are_the_pipeline_s(strategy: tasks.Strategy, split: bool, made: Any) -> None:
    model = made("BertForTokenClassification", split)
    texts = SPLIT if split else ["the old mill stands where the river bends", "the ship came in", *SPLIT]
    expected = pipeline(model.path, aggregation_strategy=strategy)(texts)
    found = model.entities(texts, strategy=strategy)
    assert any(found)
    for ours, theirs in zip(found, expected, strict=True):
        same_entities(ours, theirs)
    if split:  # the control: another strategy groups otherwise
        assert found != model.entities(texts, strategy="first" if strategy != "first" else "max")


@pytest.mark.parametrize(("window", "overlap"), [(12, 3), (9, 0), (20, 8)])
@pytest.mark.parametrize("strategy", ["simple", "average"])
def test_entities_of_a_long_text_are_the_pipeline_s(
    strategy: tasks.Strategy, window: int, overlap: int, made: Any
) -> None:
    model = made("BertForTokenClassification", True)
    text = " ".join(SPLIT * 3)
    theirs = pipeline(model.path, aggregation_strategy=strategy, stride=overlap, length=window)(text)
    (ours,) = model.entities([text], strategy=strategy, window=window, overlap=overlap)
    same_entities(ours, theirs)
    assert ours != model.entities([text], strategy=strategy)[0]
    assert len(model.entities([text * 4])[0]) > len(ours)


def test_entities_of_little_and_of_wrong_arguments(made: Any) -> None:
    model = made("BertForTokenClassification", True)
    assert model.entities([]) == []
    assert model.entities([""]) == [[]]
    for arguments, says in (({"window": 73}, "at most 72"), ({"window": 3, "overlap": 2}, "share fewer"),
                            ({"overlap": -1}, "overlap"), ({"window": 0}, "window")):  # fmt: skip
        with pytest.raises(InputError, match=says):
            model.entities([CONTEXT], **arguments)


# ---------------------------------------------------------------- answers


def pipeline_of_4(
    path: Path, question: str, context: str, *, window: int, overlap: int, longest: int, empty: bool
) -> list[dict[str, Any]]:
    """The question-answering pipeline of transformers 4, with words aligned: every answer of every window."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    reference = transformers.AutoModelForQuestionAnswering.from_pretrained(path)
    rows = tokenizer(question, context, truncation="only_second", max_length=window, stride=overlap,
                     return_overflowing_tokens=True, return_offsets_mapping=True)  # fmt: skip
    answers, least = [], 1e6
    for encoding in rows.encodings:
        batch = {"input_ids": torch.tensor([encoding.ids]), "token_type_ids": torch.tensor([encoding.type_ids])}
        with torch.no_grad():
            out = reference(**batch)
        wanted = np.array([of == 1 for of in encoding.sequence_ids])
        masked = ~wanted & (np.array(encoding.ids) != tokenizer.cls_token_id)
        begin, end = (
            np.exp(x - x.max()) / np.exp(x - x.max()).sum()
            for x in (
                np.where(masked, -10000.0, one[0].numpy().astype(np.float64))
                for one in (out.start_logits, out.end_logits)
            )
        )
        least = min(least, float(begin[0] * end[0]))
        begin[0] = end[0] = 0.0
        candidates = np.tril(np.triu(np.outer(begin, end)), longest - 1)
        for s, e in zip(*np.nonzero(np.outer(wanted, wanted) & (candidates > 0)), strict=True):
            first = encoding.word_to_chars(encoding.token_to_word(s), 1)[0]
            last = encoding.word_to_chars(encoding.token_to_word(e), 1)[1]
            answers.append({"score": candidates[s, e], "start": first, "end": last})
    if empty:
        answers.append({"score": least, "start": 0, "end": 0})
    return sorted(answers, key=lambda one: -one["score"])


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("split", "window", "overlap"), [(False, 72, 36), (True, 72, 36), (True, 14, 4), (True, 20, 0), (False, 16, 5)]
)
def test_answers_are_those_of_the_pipeline(split: bool, window: int, overlap: int, empty: bool, made: Any) -> None:
    model = made("BertForQuestionAnswering", split)
    how = {"window": window, "overlap": overlap, "longest": 5}
    expected = pipeline_of_4(model.path, QUESTION, CONTEXT, empty=empty, **how)
    found = model.answer(QUESTION, CONTEXT, top=4, no_answer=empty, **how)
    distinct = list({(one["start"], one["end"]): one["score"] for one in reversed(expected)}.items())[::-1]
    distinct = sorted(distinct, key=lambda pair: -pair[1])[:4]
    assert [(one.begin, one.end) for one in found] == [place for place, _ in distinct]
    assert [one.score for one in found] == pytest.approx([score for _, score in distinct], rel=1e-4)
    assert all(one.text == CONTEXT[one.begin : one.end] for one in found)
    least = min(x["score"] for x in pipeline_of_4(model.path, QUESTION, CONTEXT, empty=True, **how) if not x["end"])
    assert found[0].no_answer == pytest.approx(least, rel=1e-4)
    # The controls: without the windows, and with other weights, the answers are others.
    if window < 30:
        assert found != model.answer(QUESTION, CONTEXT, top=4, no_answer=empty, longest=5)
    other = create(model.hf, model.tokenizer, seed=4)
    assert [one.begin for one in other.answer(QUESTION, CONTEXT, top=4, no_answer=empty, **how)] != [
        one.begin for one in found
    ]


def test_pieces_end_with_words(made: Any) -> None:
    model = made("BertForQuestionAnswering", True)
    places = {(one.begin, one.end) for one in model.answer(QUESTION, CONTEXT, top=1000)}
    edges = {i for i, c in enumerate(CONTEXT + " ") if c == " "}
    assert {end for _, end in places} <= edges
    assert {begin - 1 for begin, _ in places} <= edges | {-1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"question": " "}, "the question has no tokens"),
        ({"context": "\n"}, "the context has no tokens to answer with"),
        ({"top": 0}, "top"),
        ({"longest": 0}, "longest"),
        ({"window": 73}, "at most 72"),
        ({"window": 5}, "shorten it"),
        ({"window": 10, "overlap": 9}, "share fewer tokens"),
        ({"overlap": -1}, "overlap"),
    ],
)
def test_bad_questions(arguments: dict[str, Any], says: str, made: Any) -> None:
    values = {"question": QUESTION, "context": CONTEXT} | arguments
    with pytest.raises(InputError, match=says):
        made("BertForQuestionAnswering").answer(values.pop("question"), values.pop("context"), **values)


# ---------------------------------------------------------------- summaries and translations

PARAMS = {
    "summarization": {"prefix": "summarize: ", "num_beams": 3, "length_penalty": 2.0, "max_length": 18, "min_length": 7,
                      "no_repeat_ngram_size": 2, "early_stopping": True},
    "translation_en_to_de": {"prefix": "translate English to German: ", "num_beams": 2, "max_length": 15,
                             "early_stopping": True},
    "translation_en_to_fr": {"prefix": "translate English to French: ", "max_length": 12},
}  # fmt: skip

END = 23


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Model:
    tokenizer = byte_tokenizer(SEQ2SEQ)
    # Random weights never choose the tokenizer's end token, so that another token ends texts.
    ids = {"eos_token_id": END, "pad_token_id": tokenizer.pad_id, "vocab_size": tokenizer.vocab_size,
           "decoder_start_token_id": tokenizer.pad_id, "num_decoder_layers": 2}  # fmt: skip
    path = tmp_path_factory.mktemp("t5") / "t5"
    create(T5 | ids | {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False,
                       "task_specific_params": PARAMS}, tokenizer, seed=5).save(path)  # fmt: skip
    return load(path)


def reference_ids(model: Model, text: str, settings: dict[str, Any]) -> list[int]:
    """What transformers' `generate` writes of `text` with the settings of a task, as its pipelines call it."""
    import transformers

    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(model.path)
    ids = torch.tensor(model.ids([settings.get("prefix", "") + text]))
    how = {name: value for name, value in settings.items() if name != "prefix"}
    return reference.generate(ids, do_sample=False, **how)[0, 1:].tolist()


@pytest.mark.parametrize("text", [CONTEXT, "tide", "the river bends\nthe ship"])
def test_summaries_are_those_of_transformers(t5: Model, text: str) -> None:
    (ours,) = t5.summarize([text])
    theirs = reference_ids(t5, text, PARAMS["summarization"])
    assert ours.ids == theirs
    assert t5.generate([text], max_new_tokens=17)[0].ids != ours.ids  # the control: without the settings


@pytest.mark.heavy
def test_every_setting_of_a_task_matters(t5: Model) -> None:
    texts = [CONTEXT[i : i + 40] for i in range(0, 40, 5)]
    ours = t5.summarize(texts)
    settings = PARAMS["summarization"]
    for name, changed in (
        ("num_beams", 1),
        ("min_length", 0),
        ("no_repeat_ngram_size", 0),
        ("max_length", 10),
        ("prefix", "the "),
    ):
        params = PARAMS | {"summarization": {**settings, name: changed}}
        other = Model(t5.module, t5.tokenizer, {**(t5.hf or {}), "task_specific_params": params})
        assert [one.ids for one in other.summarize(texts)] != [one.ids for one in ours], name
    greedy = t5.summarize(texts, beams=0)
    assert [one.ids for one in greedy] != [one.ids for one in ours]
    assert max(len(one.ids) for one in t5.summarize(texts, max_new_tokens=5)) == 5


@pytest.mark.parametrize("target", ["de", "fr"])
def test_translations_are_those_of_transformers(t5: Model, target: str) -> None:
    settings = PARAMS[f"translation_en_to_{target}"]
    for text in (CONTEXT, "the ship"):
        (ours,) = t5.translate([text], "en", target)
        assert ours.ids == reference_ids(t5, text, settings)
        assert t5.translate([text], target=target)[0].ids == ours.ids
    others = {"de": "fr", "fr": "de"}
    assert t5.translate([CONTEXT], "en", others[target])[0].ids != t5.translate([CONTEXT], "en", target)[0].ids


@pytest.mark.parametrize(("source", "target"), [("en", "it"), ("de", "en"), (None, None), ("de", None)])
def test_unknown_pairs_are_answered_with_the_known_ones(t5: Model, source: str | None, target: str | None) -> None:
    with pytest.raises(InputError, match="it translates en to de, en to fr"):
        t5.translate(["the ship"], source, target)


def multilingual(kind: str, tmp_path: Path) -> Model:
    """An encoder-decoder whose vocabulary has languages: `mbart50`, `mbart` or `marian`."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(SEQ2SEQ)
    codes = [">>deu<<", ">>fra<<"] if kind == "marian" else ["de_DE", "en_XX", "fr_XX"]
    backend = tokenizer.backend
    backend.add_special_tokens([AddedToken(code, normalized=False) for code in codes])
    eos = backend.id_to_token(tokenizer.eos_id)
    own = {"mbart50": f"en_XX $A {eos}", "mbart": f"$A {eos} en_XX", "marian": f"$A {eos}"}[kind]
    special = [(name, backend.token_to_id(name)) for name in (eos, *codes)]
    backend.post_processor = TemplateProcessing(single=own, pair=own.replace("$A", "$A $B"), special_tokens=special)
    size = backend.get_vocab_size(with_added_tokens=True)
    config = {"model_type": "marian" if kind == "marian" else "mbart", "vocab_size": size, "d_model": 24,
              "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 6, "decoder_attention_heads": 3,
              "encoder_ffn_dim": 37, "decoder_ffn_dim": 39, "init_std": 1.0, "max_position_embeddings": 72,
              "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id,
              "decoder_start_token_id": tokenizer.eos_id, "max_length": 14, "num_beams": 1}  # fmt: skip
    create(config, Tokenizer(backend, tokenizer.specials), seed=6).save(tmp_path / kind)
    return load(tmp_path / kind)


@pytest.mark.parametrize("kind", ["mbart50", "mbart", "marian"])
def test_languages_are_tokens(kind: str, tmp_path: Path) -> None:
    import transformers

    model = multilingual(kind, tmp_path)
    backend = model.inputs.words.backend
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(model.path)
    text, eos = model.inputs.words.encode("the ship", special=False), model.inputs.words.eos_id
    written = set()
    for source, target in [("en_XX", "de_DE"), ("fr_XX", "de_DE"), ("de_DE", "en_XX")]:
        if kind == "marian":
            source, target = None, {"de_DE": ">>deu<<", "en_XX": ">>fra<<"}[target]
            ids, forced = [backend.token_to_id(target), *text, eos], None
        else:
            code, forced = backend.token_to_id(source), backend.token_to_id(target)
            ids = [code, *text, eos] if kind == "mbart50" else [*text, eos, code]
        theirs = reference.generate(
            torch.tensor([ids]), max_length=14, num_beams=1, do_sample=False, forced_bos_token_id=forced
        )[0, 1:].tolist()  # fmt: skip
        (ours,) = model.translate(["the ship"], source, target)
        assert ours.ids == (theirs if kind == "marian" else theirs[1:])
        written.add(tuple(ours.ids))
    assert len(written) >= 2  # the control: languages change what is written
    short = model.translate(["the ship"], None if kind == "marian" else "de", "fra" if kind == "marian" else "en")
    assert short[0].ids == ours.ids
    listed = "deu, fra" if kind == "marian" else "de_DE, en_XX, fr_XX"
    with pytest.raises(InputError, match=f"target='it'.*it knows {listed}"):
        model.translate(["the ship"], None, "it")
    with pytest.raises(InputError, match=f"target is missing; this checkpoint writes {listed}"):
        model.translate(["the ship"])


def test_a_model_of_one_pair_needs_no_languages() -> None:
    model = load(checkpoint("encoder-decoder"))
    assert (
        model.translate(["the ship"], max_new_tokens=5)[0].ids == model.generate(["the ship"], max_new_tokens=5)[0].ids
    )
    with pytest.raises(InputError, match="names no languages"):
        model.translate(["the ship"], target="de")


def test_rules() -> None:
    logits = torch.arange(6.0)
    assert writing.at_least(4, [5])(logits, [0, 1, 2])[5] == -torch.inf
    assert torch.equal(writing.at_least(4, [5])(logits, [0, 1, 2, 3]), logits)
    rule = writing.no_repeats(2)
    assert torch.isinf(rule(logits, [1, 2, 3, 1])).nonzero().flatten().tolist() == [2]
    assert torch.isinf(rule(logits, [1])).sum() == 0
    assert torch.isinf(writing.no_repeats(1)(logits, [1, 4])).nonzero().flatten().tolist() == [1, 4]


def test_prompts_of_decoders() -> None:
    chat = load(checkpoint("decoder"))
    asked = tasks.summary(chat.inputs, CONTEXT)
    assert asked.text == f"<user>{writing.SUMMARIZE}\n\n{CONTEXT}\n<assistant>"
    plain = Model(chat.module, Tokenizer(chat.inputs.words.backend, chat.inputs.words.specials), chat.hf)
    assert tasks.summary(plain.inputs, CONTEXT).text == f"{CONTEXT}\n\nTL;DR:"
    answer = tasks.written_answer(plain.inputs, QUESTION, CONTEXT).text
    assert answer == f"Text: {CONTEXT}\n\nQuestion: {QUESTION}\nAnswer:"
    (ours,) = plain.summarize(["the ship"], max_new_tokens=6)
    assert ours.ids == plain.generate(["the ship\n\nTL;DR:"], max_new_tokens=6)[0].ids
    t5 = load(checkpoint("encoder-decoder"))
    assert tasks.written_answer(t5.inputs, "who ?", "me").text == "question: who ?  context: me"
    assert tasks.summary(t5.inputs, "me").text == "summarize: me"


@pytest.mark.parametrize("bad", [3, {"summarization": 3}, {"summarization": {"prefix": 3}},
                                 {"summarization": {"num_beams": "4"}}])  # fmt: skip
def test_settings_that_are_none_are_refused(bad: object) -> None:
    t5 = load(checkpoint("encoder-decoder"))
    with pytest.raises(ConfigError):
        tasks.summary(replace(t5.inputs, hf={"task_specific_params": bad}), CONTEXT)


# ---------------------------------------------------------------- commands


def run(argv: list[str], capsys: Captured) -> Any:
    return answered([*argv], capsys)


def test_answer_command(made: Any, tmp_path: Path, capsys: Captured) -> None:
    model = made("BertForQuestionAnswering")
    (tmp_path / "context.txt").write_text(CONTEXT)
    found = model.answer(QUESTION, CONTEXT, top=2)
    for context in (CONTEXT, str(tmp_path / "context.txt")):
        document = run(["answer", str(model.path), QUESTION, "--context", context, "--top", "2"], capsys)
        assert [(one["text"], one["start"], one["end"]) for one in document["results"]] == [
            (one.text, one.begin, one.end) for one in found
        ]
        assert document["no_answer"] == pytest.approx(found[0].no_answer)
    out, err = said(["answer", str(model.path), QUESTION, "--context", CONTEXT], capsys)
    assert found[0].text in out
    assert "score of no answer" in err
    document = run(
        ["answer", str(checkpoint("encoder-decoder")), "who?", "--context", "me", "--max-new-tokens", "3"], capsys
    )
    assert document["prompt"] == "question: who?  context: me"


def test_entities_of_records_are_those_of_their_texts(made: Any, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra data")
    model = made("BertForTokenClassification", True)
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(SPLIT)))
    run(["tag", str(model.path), "--records", str(file), "--out", str(out), "--strategy", "max"], capsys)
    records = [json.loads(line) for line in out.read_text("utf-8").split("\n") if line]
    assert [one["id"] for one in records] == [0, 1, 2]
    for record, named in zip(records, model.entities(SPLIT, strategy="max"), strict=True):
        assert [(one["text"], one["label"], one["begin"]) for one in record["entities"]] == [
            (one.text, one.label, one.begin) for one in named
        ]
    assert records[0]["entities"] != records[1]["entities"]


def test_tag_command(made: Any, capsys: Captured) -> None:
    model = made("BertForTokenClassification", True)
    document = run(["tag", str(model.path), *SPLIT, "--strategy", "max"], capsys)
    expected = model.entities(SPLIT, strategy="max")
    assert [[one["text"] for one in row["entities"]] for row in document["results"]] == [
        [one.text for one in named] for named in expected
    ]
    assert main(["tag", str(model.path), SPLIT[0]]) == 0
    assert all(one.text in capsys.readouterr().out for one in model.entities(SPLIT[:1])[0][:1])


def test_summarize_and_translate_commands(t5: Model, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.txt").write_text(CONTEXT)
    document = run(["summarize", str(t5.path), str(tmp_path / "text.txt")], capsys)
    assert document["text"] == t5.summarize([CONTEXT])[0].text.strip()
    assert document["prompt"] == f"summarize: {CONTEXT}"
    document = run(["translate", str(t5.path), "the ship", "the tide", "--from", "en", "--to", "de"], capsys)
    expected = [one.text.strip() for one in t5.translate(["the ship", "the tide"], "en", "de")]
    assert [row["translation"] for row in document["results"]] == expected
    out, err = said(["translate", str(t5.path), "the ship", "--to", "fr"], capsys)
    assert out == t5.translate(["the ship"], None, "fr")[0].text.strip() + "\n"
    assert "prompt: translate English to French: the ship" in err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["answer", "encoder", "who?", "--context", "me"], 1, "hub:deepset/roberta-base-squad2"),
        (["answer", "encoder", " ", "--context", "me"], 2, "question is empty"),
        (["answer", "encoder", "who?", "--context", " "], 2, "context is empty"),
        (["answer", "encoder", "who?", "--context", "none/context.txt"], 1, "no such file"),
        (["answer", "encoder", "who?", "--context", "EMPTY"], 1, "holds no text"),
        (["tag", "encoder", "me"], 1, "hub:dslim/bert-base-NER"),
        (["tag", "decoder", "me"], 1, "hub:dslim/bert-base-NER"),
        (["summarize", "encoder", "FILE"], 1, "hub:facebook/bart-large-cnn"),
        (["summarize", "encoder", "none.txt"], 1, "none.txt"),
        (["summarize", "encoder", "BYTES"], 1, "not UTF-8"),
        (["translate", "encoder", "me"], 1, "hub:Helsinki-NLP/opus-mt-en-de"),
        (["translate", "decoder", "me"], 1, "hub:Helsinki-NLP/opus-mt-en-de"),
        (["translate", "encoder-decoder", "me", "--to", "de"], 1, "names no languages"),
        (["translate", "encoder-decoder", " "], 1, "no text to translate"),
    ],
)
def test_what_does_not_fit_is_one_line(argv: list[str], code: int, says: str, tmp_path: Path, capsys: Captured) -> None:
    for name, content in (("FILE", b"the ship"), ("EMPTY", b" \n"), ("BYTES", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    words = [str(tmp_path / word) if word.isupper() else word for word in argv]
    words[1] = str(checkpoint(argv[1]))
    assert says in refused(words, capsys, code)


def test_the_public_package_has_the_tasks() -> None:
    assert {"search", "summarize", "translate", "answer_in_words", "answer", "entities"} <= set(dir(triptych.Model))
