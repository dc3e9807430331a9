"""Labels of rows, tags of tokens and answers, as a person asks for them, against transformers' own pipelines."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import references
import triptych
from cli_models import BERT, WORDS, Captured, answered, said
from triptych.cli import main
from triptych.errors import InputError
from triptych.model import Model, create, load
from triptych.text import word_tokenizer

TEXTS = ["the old mill stands", "The river bends, and the evening tide came in.", "ship"]
NAMES = {"0": "calm", "1": "storm", "2": "fog"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny BERT of a class, saved with its tokenizer: our model and its directory, made once."""

    @cache
    def make(name: str, labels: tuple[str, ...] = tuple(NAMES.values()), problem: str | None = None) -> Model:
        tokenizer = word_tokenizer(WORDS, 90)
        given = {"id2label": {str(i): label for i, label in enumerate(labels)}, "problem_type": problem}
        hf = BERT | {"architectures": [name], "vocab_size": tokenizer.vocab_size, "pad_token_id": 0} | given
        hf["model_type"] = "electra" if name.startswith("Electra") else "bert"
        path = tmp_path_factory.mktemp("labels") / name
        create(hf, tokenizer, seed=3).save(path)
        return load(path)

    return make


def pipeline(task: str, path: Path | None, **how: Any) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.pipeline(task, model=str(path), device="cpu", **how)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (tuple(NAMES.values()), None),
        (tuple(NAMES.values()), "multi_label_classification"),
        (("score",), None),
        (("score",), "regression"),
    ],
)
def test_classify_says_what_the_pipeline_says(made: Any, labels: tuple[str, ...], problem: str | None) -> None:
    model = made("BertForSequenceClassification", labels, problem)
    found = model.classify(TEXTS)
    expected = pipeline("text-classification", model.path, top_k=None)(TEXTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert [label for label, _ in ours] == [one["label"] for one in theirs]
        assert [p for _, p in ours] == pytest.approx([one["score"] for one in theirs], abs=1e-5)
    assert found[0] != found[1]


def test_pairs_have_types_of_their_own(made: Any) -> None:
    import transformers

    model = made("BertForSequenceClassification")
    second = ["the tide came in", "the mill", "old river"]
    found = model.classify(TEXTS, second=second)
    assert found != model.classify(TEXTS)
    reference = transformers.BertForSequenceClassification.from_pretrained(model.path)
    for first, other, ours in zip(TEXTS, second, found, strict=True):
        a, b = model.ids([first, other])  # [CLS] ... [SEP] each
        ids, types = [*a, *b[1:]], [0] * len(a) + [1] * (len(b) - 1)
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
        assert dict(ours) == pytest.approx(dict(zip(model.labels, logits.softmax(-1).tolist(), strict=True)), abs=1e-5)


def test_tags_have_their_place_in_the_text(made: Any) -> None:
    model = made("BertForTokenClassification")
    expected = pipeline("token-classification", model.path, ignore_labels=[])(TEXTS)
    for text, ours, theirs in zip(TEXTS, model.tag(TEXTS), expected, strict=True):
        assert [(tag.begin, tag.end, tag.label) for tag in ours] == [
            (t["start"], t["end"], t["entity"]) for t in theirs
        ]
        assert [tag.probability for tag in ours] == pytest.approx([t["score"] for t in theirs], abs=1e-5)
        assert all(tag.token == text[tag.begin : tag.end] for tag in ours)


BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.mark.parametrize("labels", [BIO, ("O", "PER", "LOC", "B-TIME")])
def test_entities_are_the_pipeline_s(labels: tuple[str, ...], made: Any) -> None:
    model = made("BertForTokenClassification", labels)
    texts = [" ".join(WORDS[i : i + 25]) for i in range(0, 60, 7)]
    expected = pipeline("token-classification", model.path, aggregation_strategy="simple")(texts)
    joined = 0
    for text, ours, theirs in zip(texts, model.entities(texts), expected, strict=True):
        assert [(one.begin, one.end, one.label) for one in ours] == [
            (t["start"], t["end"], t["entity_group"]) for t in theirs
        ]
        assert [one.probability for one in ours] == pytest.approx([t["score"] for t in theirs], abs=1e-5)
        assert all(one.text == text[one.begin : one.end] for one in ours)
        joined += sum(" " in one.text for one in ours)
    assert joined


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        ("B-PER I-PER O B-LOC", ["a b PER", "d LOC"]),
        ("B-PER B-PER I-LOC I-PER", ["a PER", "b PER", "c LOC", "d PER"]),
        ("I-PER I-PER B-PER PER", ["a b PER", "c d PER"]),
        ("O O O O", []),
    ],
)
def test_what_neighbours_name(labels: str, named: list[str]) -> None:
    from triptych.tasks import Tag, joined

    tags = [Tag("abcd"[i], label, 0.5 + i / 10, 2 * i, 2 * i + 1) for i, label in enumerate(labels.split())]
    found = joined(tags, "a b c d")
    assert [f"{one.text} {one.label}" for one in found] == named
    if named[:1] == ["a b PER"]:
        assert found[0].probability == pytest.approx(0.55)


def test_replaced_tokens(made: Any) -> None:
    model = made("ElectraForPreTraining")
    (found,) = model.tag(TEXTS[:1])
    (logits,) = model.logits(TEXTS[:1])
    told = logits[1:-1, 0].sigmoid().tolist()  # without [CLS] and [SEP]
    assert [tag.label for tag in found] == ["replaced" if p > 0.5 else "original" for p in told]
    assert [tag.probability for tag in found] == pytest.approx([max(p, 1 - p) for p in told])


CONTEXT = "the old mill stands where the river bends . the ship came in on the evening tide"
QUESTION = "where the ship ?"


def spans(model: Model, context: str, longest: int) -> dict[tuple[int, int], float]:
    """The score of every piece, from transformers, by hand."""
    import transformers

    reference = transformers.BertForQuestionAnswering.from_pretrained(model.path)
    row = model.tokenizer.backend.encode(QUESTION, context)
    with torch.no_grad():
        out = reference(input_ids=torch.tensor([row.ids]), token_type_ids=torch.tensor([row.type_ids]))
    inside = [i for i, of in enumerate(row.sequence_ids) if of == 1]
    return {
        (row.offsets[i][0], row.offsets[j][1]): float(out.start_logits[0, i] + out.end_logits[0, j])
        for i in inside
        for j in inside
        if i <= j < i + longest
    }


@pytest.mark.parametrize("longest", [1, 4])
def test_answers_are_the_best_of_all_pieces(made: Any, longest: int) -> None:
    model = made("BertForQuestionAnswering", ("begin", "end"))
    scores = spans(model, CONTEXT, longest)
    found = model.answer(QUESTION, CONTEXT, longest=longest, top=3)
    best = sorted(scores, key=lambda place: -scores[place])[:3]
    assert [(one.begin, one.end) for one in found] == best
    told = torch.tensor(list(scores.values())).softmax(0).max()
    assert found[0].probability == pytest.approx(float(told), abs=1e-5)
    assert all(one.text == CONTEXT[one.begin : one.end] for one in found)


def test_a_long_context_is_read_in_windows(made: Any) -> None:
    model = made("BertForQuestionAnswering", ("begin", "end"))
    far = " ".join(["the tide ."] * 90)
    (found,) = model.answer(QUESTION, far + " " + CONTEXT)
    assert found.text == (far + " " + CONTEXT)[found.begin : found.end]
    every = {one.begin for one in model.answer(QUESTION, far + " " + CONTEXT, longest=1, top=10_000)}
    assert every == {
        match for match in range(len(far) + len(CONTEXT) + 1) if _begins_a_word(far + " " + CONTEXT, match)
    }
    with pytest.raises(InputError, match="shorten it"):
        model.answer("the " * 80, CONTEXT)
    with pytest.raises(InputError, match="no tokens to answer with"):
        model.answer(QUESTION, "")


def _begins_a_word(text: str, at: int) -> bool:
    return text[at] != " " and (at == 0 or text[at - 1] == " ")


@pytest.mark.parametrize(("name", "end"), [("bart-classes", 2), ("t5-classes", 1)])
def test_an_encoder_decoder_reads_the_text_twice(name: str, end: int) -> None:
    model = triptych.load(references.saved(name)[1])
    rows = [[7, 3, 11, end], [5, 19, 3, 40, 8, end]]
    with torch.no_grad():
        expected = [references.saved(name)[0](input_ids=torch.tensor([row])).logits[0] for row in rows]
    # The reference shifts the text itself, from `decoder_start_token_id` on.
    for ours, theirs in zip(model.classify(rows), expected, strict=True):
        by_name = dict(ours)
        assert [by_name[f"LABEL_{i}"] for i in range(5)] == pytest.approx(theirs.softmax(-1).tolist(), abs=1e-5)
    with pytest.raises(InputError, match="end-of-text"):
        model.classify([[7, 3, 11]])


def test_what_a_head_cannot_do_is_said(made: Any) -> None:
    model = made("BertForSequenceClassification")
    with pytest.raises(InputError, match="no head over tokens"):
        model.tag(TEXTS)
    with pytest.raises(InputError, match="no head over answers"):
        model.answer(QUESTION, CONTEXT)
    with pytest.raises(InputError, match="no head over classes"):
        made("BertForTokenClassification").classify(TEXTS)
    with pytest.raises(InputError, match="list of strings"):
        model.tag("one text")


def test_the_command(made: Any, capsys: Captured) -> None:
    model = made("BertForSequenceClassification")
    rows = answered(["classify", str(model.path), *TEXTS], capsys)["results"]
    assert [[(one["label"], one["score"]) for one in row["labels"]] for row in rows] == model.classify(TEXTS)
    out = said(["classify", str(model.path), TEXTS[0], "--top", "2", "--pair", "the mill"], capsys)[0]
    best = model.classify(TEXTS[:1], second=["the mill"])[0]
    assert best[0][0] in out
    assert best[2][0] not in out
    tagger = made("BertForTokenClassification")
    (row,) = answered(["classify", str(tagger.path), TEXTS[1]], capsys)["results"]
    assert [token["label"] for token in row["tokens"]] == [tag.label for tag in tagger.tag(TEXTS[1:2])[0]]
    (named,) = made("BertForTokenClassification", BIO).entities(TEXTS[1:2])
    (row,) = answered(["classify", str(made("BertForTokenClassification", BIO).path), TEXTS[1]], capsys)["results"]
    assert [(one["text"], one["label"]) for one in row["entities"]] == [(one.text, one.label) for one in named]
    assert main(["classify", str(made("BertForTokenClassification", BIO).path), TEXTS[1]]) == 0
    shown = capsys.readouterr().out.split("entity")[1]
    assert all(one.text in shown for one in named)
    assert (
        answered(["classify", str(made("ElectraForPreTraining").path), TEXTS[1]], capsys)["results"][0]["entities"]
        == []
    )


def test_t5_is_never_kept_in_fp16() -> None:
    path = references.saved("t5")[1]
    moved = load(path, dtype=torch.float16)
    assert {p.dtype for p in moved.module.parameters()} == {torch.float32}
    assert moved.report.notes == ("t5 overflows fp16, so its weights are loaded in float32",)
    assert moved.report.notes[0] in str(moved.report)
    kept = load(references.saved("llama")[1], dtype=torch.float16)
    assert {p.dtype for p in kept.module.parameters()} == {torch.float16}
    assert kept.report.notes == ()
