"""Recipes of every objective with data of its own: they train, resume, open in the commands, and refuse bad data."""

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triptych
from cli_models import CHAT, LLAMA
from triptych.errors import ConfigError, InputError, TextError, TriptychError
from triptych.model import create
from triptych.text import DECODER, ChatTemplate, Tokenizer, byte_tokenizer, shakespeare_labels, word_tokenizer
from triptych.train import check_recipe, evaluate, prepare, read_recipe, resume, show_batch
from triptych.train.chat_task import assistant_spans, chat_example
from triptych.train.contrastive import TextPair
from triptych.train.data import DocumentStream, RandomUse, random_numbers
from triptych.train.label_tasks import Question, first_tokens, windows
from triptych.train.labelled import LabelledExample, SpanLoss
from triptych.train.objectives import TokenMasking
from triptych.train.records import DataRecord
from triptych.train.task import read_split
from triptych.train.text_tasks import ReplacedText, by_frequency, corrupted, noise_spans, window_length

GOOD, BAD = ("bright", "warm", "merry"), ("cold", "grim", "bleak")
PLAIN = ("king", "sword", "river", "night", "horse", "castle", "crown")
ENCODER: dict[str, Any] = {
    "tokenizer": "words:300",
    "model": {
        "model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1,
    },
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "run": {"rows": 16, "length": 32, "steps": 40, "precision": "fp32", "save_every": 0, "sample_every": 0},
}  # fmt: skip


def recipe(objective: dict[str, Any], data: dict[str, Any], **sections: Any) -> Any:
    tables = copy.deepcopy(ENCODER) | {"objective": objective, "data": {"held_out": 0.25, **data}}
    for name, value in sections.items():
        tables[name] = tables.get(name, {}) | value if isinstance(value, dict) and name != "model" else value
    return check_recipe({key: value for key, value in tables.items() if value is not None})


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def labels(shuffled: bool = False) -> list[dict[str, str]]:
    """Texts with two words that tell; with `shuffled` labels nothing does.  They are sorted by label."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(240):
        words = [*random.choice(PLAIN, 2), *random.choice(GOOD if i < 100 else BAD, 2)]
        rows.append({"text": " ".join(random.permutation(words)), "label": "good" if i < 100 else "bad"})
    names = random.permutation([row["label"] for row in rows]) if shuffled else [row["label"] for row in rows]
    return [row | {"label": str(name)} for row, name in zip(rows, names, strict=True)]


def tags() -> list[dict[str, list[str]]]:
    random = np.random.default_rng(1)
    rows = []
    for _ in range(120):
        words, names = [str(word) for word in random.choice(PLAIN, 7)], ["O"] * 7
        at = int(random.integers(6))
        words[at : at + 2], names[at : at + 2] = ["anne", "smith"], ["B-PER", "I-PER"]
        rows.append({"words": words, "tags": names})
    return rows


def spans() -> list[dict[str, Any]]:
    random = np.random.default_rng(2)
    rows = []
    for i in range(80):
        a, b = (str(word) for word in random.choice(PLAIN, 2, replace=False))
        context = f"the {a} is here . the {b} is far away ."
        found = {"answer": f"the {b}", "start": context.index(f"the {b}")} if i % 4 else {"answer": "", "start": None}
        rows.append({"question": "what is far ?" if i % 4 else "who sleeps ?", "context": context, **found})
    return rows


def pairs(negative: bool = False) -> list[dict[str, str]]:
    random = np.random.default_rng(3)
    rows = []
    for _ in range(80):
        words = [str(word) for word in random.choice(PLAIN, 3)]
        row = {"text": " ".join(words), "text_b": " and ".join(reversed(words))}
        rows.append(row | ({"negative": " or ".join(words[:2])} if negative else {}))
    return rows


def trained(made: Any, tmp_path: Path) -> Any:
    job = prepare(made)
    job.run()
    return job, job.trainer.last_score()


@pytest.mark.heavy
def test_labels_beat_the_majority_and_shuffled_ones_fall_to_it(tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", labels())
    _, score = trained(recipe({"name": "labels"}, {"path": data}), tmp_path)
    assert score.metrics["accuracy"] == 1.0
    assert score.baselines["majority"] < 0.7
    assert score.baselines["bag of words"] > 0.95
    control = written(tmp_path / "b.jsonl", labels(shuffled=True))
    _, chance = trained(recipe({"name": "labels"}, {"path": control}), tmp_path)
    assert chance.metrics["accuracy"] < chance.baselines["majority"] + 0.15


@pytest.mark.heavy
def test_a_trained_classifier_is_saved_with_its_names_and_classifies(tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = recipe({"name": "labels"}, {"path": written(tmp_path / "a.jsonl", labels())},
                  run={"out": str(out), "save_every": 1.0})  # fmt: skip
    prepare(made).run()
    model = triptych.load(out / "step-00000040")
    assert model.labels == ["bad", "good"]
    (first, second) = model.classify(["king grim cold night", "king merry warm night"])
    assert (first[0][0], second[0][0]) == ("bad", "good")
    # Trained on with other labels: the body stays and the head is new; with the same, the head stays too.
    more = [row | {"label": row["label"] + "!"} for row in labels()]
    for rows, same in ((labels(), True), (more, False)):
        again = recipe(
            {"name": "labels"},
            {"path": written(tmp_path / "c.jsonl", rows)},
            tokenizer=None,
            model={"path": str(out / "step-00000040")},
        )
        module = prepare(again).trainer.module
        ours = dict(model.module.named_parameters())
        for name, parameter in module.named_parameters():
            assert parameter.equal(ours[name]) == (same or ".classes." not in name), name


@pytest.mark.heavy
@pytest.mark.parametrize("several", [False, True])
def test_pairs_of_texts_and_several_labels(tmp_path: Path, several: bool) -> None:
    rows = [
        {"text": row["text"], "text_b": other["text"], "labels": [row["label"], "x"], "label": row["label"]}
        for row, other in zip(labels(), labels(shuffled=True), strict=True)
    ]
    made = recipe({"name": "labels", "several": several}, {"path": written(tmp_path / "a.jsonl", rows)})
    job, score = trained(made, tmp_path)
    (example, *_) = job.trainer.data.draw(0, 0, 1)
    assert isinstance(example, LabelledExample)
    assert example.types.max() == 1
    assert score.metrics["accuracy"] > score.baselines["majority"]
    assert job.hf["problem_type"] == ("multi" if several else "single") + "_label_classification"


@pytest.mark.heavy
def test_tags_of_words(tmp_path: Path) -> None:
    job, score = trained(recipe({"name": "tags"}, {"path": written(tmp_path / "a.jsonl", tags())}), tmp_path)
    assert score.metrics["entity F1"] > 0.9
    assert score.baselines["majority"] < score.metrics["accuracy"]
    model = triptych.model.Model(job.trainer.module, job.tokenizer, job.hf)
    (tagged,) = model.tag(["king anne smith river"])
    assert [one.label for one in tagged] == ["O", "B-PER", "I-PER", "O"]


def test_the_first_token_of_a_word_has_its_tag() -> None:
    words, offsets = ["ab", "cde", "f"], [(0, 0), (0, 1), (1, 2), (3, 5), (5, 6), (7, 8), (0, 0)]
    of = [None, 0, 0, 0, 0, 0, None]
    assert first_tokens(words, offsets, of) == [1, 3, 5]
    assert first_tokens(words, offsets[:4], of[:4]) == [1, 3]  # the row was cut
    with pytest.raises(InputError, match="the tokenizer makes no token of the word 'cde'"):
        first_tokens(words, [offsets[i] for i in (0, 1, 2, 5)], [of[i] for i in (0, 1, 2, 5)])


@pytest.mark.heavy
def test_spans_of_answers(tmp_path: Path) -> None:
    made = recipe({"name": "spans"}, {"path": written(tmp_path / "a.jsonl", spans())}, run={"length": 40, "steps": 60})
    job, score = trained(made, tmp_path)
    assert score.metrics["exact match"] > 0.8
    assert score.baselines["majority (no answer)"] < 0.6
    model = triptych.model.Model(job.trainer.module, job.tokenizer, job.hf)
    (answer,) = model.answer("what is far ?", "the horse is here . the river is far away .")
    assert answer.text == "the river"


def test_long_contexts_are_cut_into_windows_that_hold_the_answer() -> None:
    context = " ".join(PLAIN * 6)
    tokenizer = word_tokenizer([context], 60)
    start = context.index("river", 100)
    one = Question("sword night", context, "river night horse", start, DataRecord({}, "a.jsonl, line 3"))
    rows = windows(one, tokenizer, 17, SpanLoss(), 0)
    assert len(rows) > 3
    assert all(len(row.ids) <= 17 for row in rows)
    answers = [tokenizer.decode(row.ids[row.goal[0] : row.goal[1] + 1].tolist()) for row in rows if row.goal[0]]
    assert set(answers) == {"river night horse"}
    assert 0 < len(answers) < len(rows)
    for length, message in ((6, r"a\.jsonl, line 3: the question needs 6 of run\.length = 6 tokens"), (8, "no row of")):
        with pytest.raises(InputError, match=message):
            windows(one, tokenizer, length, SpanLoss(), 0)


@pytest.mark.heavy
@pytest.mark.parametrize("negative", [False, True])
def test_contrast_finds_partners(tmp_path: Path, negative: bool) -> None:
    made = recipe({"name": "contrastive"}, {"path": written(tmp_path / "a.jsonl", pairs(negative))})
    job, score = trained(made, tmp_path)
    (example, *_) = job.trainer.data.draw(0, 0, 1)
    assert isinstance(example, TextPair)
    assert len(example.sides) == 2 + negative
    assert score.metrics["recall@1"] > 0.6
    assert score.baselines["chance"] < 0.06
    assert job.hf["architectures"] == ["BertModel"]


def test_corrupted_text_is_that_of_the_paper() -> None:
    """Raffel et al. 2020, figure 2, without the last sentinel, which T5's own data have no more."""
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
    source, target = corrupted(np.arange(11, dtype=np.int32), [(2, 4), (8, 9)], [100, 101, 102], 99)
    assert source.tolist() == [0, 1, 100, 4, 5, 6, 7, 101, 9, 10, 99]
    assert target.tolist() == [100, 2, 3, 101, 8, 99]
    assert [words[i] for i in target.tolist() if i < 11] == ["for", "inviting", "last"]


@pytest.mark.parametrize(
    ("length", "rate", "mean"), [(2, 0.15, 3.0), (20, 0.15, 3.0), (114, 0.15, 3.0), (50, 0.5, 1.0)]
)
def test_noise_is_that_of_the_reference_algorithm(length: int, rate: float, mean: float) -> None:
    """The counts of T5's `random_spans_noise_mask`, and its order: kept first, removed last, none of them empty."""
    removed = min(max(int(np.round(length * rate)), 1), length - 1)
    count = max(int(np.round(removed / mean)), 1)
    shapes = set()
    for seed in range(40):
        found = noise_spans(length, rate, mean, np.random.default_rng(seed))
        assert len(found) == count
        assert sum(stop - start for start, stop in found) == removed
        assert found[0][0] > 0
        assert found[-1][1] == length
        assert all(a[1] < b[0] for a, b in pairwise(found))
        shapes.add(tuple(found))
    assert len(shapes) > 1 or count in (1, removed)  # with one span, or one token a span, there is one way
    window = window_length(64, rate, mean)
    kept = [window_length(64, rate, mean) + more for more in (0, 1)]
    sizes = []
    for tokens in kept:
        found = noise_spans(tokens, rate, mean, np.random.default_rng(0))
        sides = corrupted(np.arange(tokens, dtype=np.int32), found, range(1000, 1100), 1)
        sizes.append(max(map(len, sides)))
    assert sizes[0] <= 64 < sizes[1], window


@pytest.mark.heavy
def test_t5_and_electra_train_from_text(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    text = "\n".join(" ".join(random.choice(PLAIN, 9)) for _ in range(200))
    (tmp_path / "a.txt").write_text(text)
    t5 = {"model_type": "t5", "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 3}
    made = recipe({"name": "corruption"}, {"path": str(tmp_path / "a.txt")}).model_copy(update={"model": t5})
    job = prepare(made)
    (row, *_) = show_batch(job.trainer.data.draw(0, 0, 1), job.tokenizer)
    assert row.source[-1] == "</s>"
    assert "<extra_id_0>" in row.source
    assert row.tokens[0].target == "<extra_id_0>"
    job.run(until=2)
    electra = ENCODER["model"] | {"model_type": "electra", "embedding_size": 16}
    made = recipe({"name": "replaced"}, {"path": str(tmp_path / "a.txt")}, model=electra)
    job = prepare(made)
    job.run(until=2)
    score = evaluate(job.trainer.module, job.trainer.held_out)
    assert 0.8 < score.baselines["majority"] < 0.95
    assert job.hf["architectures"] == ["ElectraForPreTraining"]


def test_a_sample_that_is_the_same_token_is_original() -> None:
    masking = TokenMasking(3, 10, frozenset(range(5)), rate=0.5, shares=(1.0, 0.0))
    shares = np.zeros(10)
    shares[7] = 1.0
    tokens = np.array([7, 8] * 10, dtype=np.int32)
    before, after = np.array([1], np.int32), np.array([2], np.int32)
    text = ReplacedText(DocumentStream.of([(tokens,)]), 20, masking, before, after, by_frequency(shares))
    row = text.row((tokens,), random_numbers(0, RandomUse.CORRUPTION, 0))
    wanted = (np.concatenate([[1], tokens, [2]]) != row.ids).astype(int)
    assert row.goal.tolist() == wanted.tolist()
    assert 0 < row.goal.sum() < 10
    assert set(row.ids.tolist()) == {1, 2, 7, 8}


TURNS = [
    {"role": "user", "content": "hi assistant"},
    {"role": "assistant", "content": "hi assistant"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "hi"},
]
ENDING = CHAT.replace("\n", "{{ eos_token if m['role'] == 'assistant' else '' }}\n")
#: Writes a note into the last turn alone, as templates do with reasoning.
LAST_ONLY = (
    "{% for m in messages %}<{{ m['role'] }}>{{ '(so) ' if loop.last and m['role'] == 'assistant' else '' }}"
    "{{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str) -> Tokenizer:
    plain = byte_tokenizer(DECODER)
    chat = ChatTemplate(template, {"eos_token": plain.specials.eos or ""})
    return Tokenizer(plain.backend, plain.specials, chat=chat)


def answers(template: str, turns: list[dict[str, str]]) -> list[list[str]]:
    """What is trained of each row, as text, piece by piece."""
    tokenizer, every = chat_tokenizer(template), []
    for text, found in assistant_spans(tokenizer.chat, turns):
        row = chat_example(text, found, tokenizer)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.trained.astype(int), [0]])))
        pieces = [row.targets[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
        every.append([tokenizer.decode(piece, skip_special=False) for piece in pieces])
    return every


def test_chat_trains_the_assistant_alone_wherever_its_words_stand() -> None:
    end = "<|endoftext|>"
    assert answers(ENDING, TURNS) == [[f"hi assistant{end}", f"hi{end}"]]  # the same words of the user are not
    assert answers(LAST_ONLY, TURNS) == [[f"(so) hi assistant{end}"], [f"(so) hi{end}"]]  # a row for each turn
    late = CHAT.replace("<assistant>", "<answer>")
    with pytest.raises(
        InputError, match="the chat template begins the assistant's turn 2 with other text than a prompt"
    ):
        answers(late, TURNS)


@pytest.mark.heavy
def test_chat_from_a_checkpoint(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(ENDING)
    create({"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_id} | LLAMA, tokenizer).save(
        tmp_path / "m"
    )
    data = {"path": written(tmp_path / "a.jsonl", [{"messages": TURNS}] * 8)}
    run = {"length": 72, "rows": 2, "steps": 2}
    job = prepare(recipe({"name": "chat"}, data, tokenizer=None, run=run, model={"path": str(tmp_path / "m")}))
    job.run()
    assert job.trainer.last_score().tokens == 2 * (len("hi assistant") + len("hi") + 2)
    silent = chat_tokenizer(CHAT)
    create({"vocab_size": silent.vocab_size, "eos_token_id": silent.eos_id} | LLAMA, silent).save(tmp_path / "s")
    with pytest.raises(InputError, match="a trained model would never stop"):
        prepare(recipe({"name": "chat"}, data, tokenizer=None, run=run, model={"path": str(tmp_path / "s")}))


CASES: dict[str, tuple[dict[str, Any], Callable[[], list[Any]]]] = {
    "labels": ({"name": "labels", "smoothing": 0.1, "class_weights": "balanced"}, labels),
    "tags": ({"name": "tags"}, tags),
    "spans": ({"name": "spans"}, spans),
    "contrastive": ({"name": "contrastive"}, pairs),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_four_steps_are_two_and_two(tmp_path: Path, case: str) -> None:
    objective, rows = CASES[case]
    out, data = tmp_path / "run", {"path": written(tmp_path / "a.jsonl", rows())}
    whole = prepare(recipe(objective, data, run={"steps": 4, "rows": 8}))
    whole.run()
    made = recipe(objective, data, run={"steps": 4, "rows": 8, "save_every": 0.5, "out": str(out)})
    prepare(made).run(until=2)
    resumed = resume(out)
    assert resumed.trainer.at.step == 2
    resumed.run()
    for name, parameter in whole.trainer.module.named_parameters():
        assert parameter.equal(resumed.trainer.module.get_parameter(name)), name


@pytest.mark.parametrize(
    ("objective", "rows", "message"),
    [
        ({"name": "labels"}, [{"text": "a", "label": "x"}] * 9, "every training record has the label"),
        ({"name": "labels"}, [*labels(), {"text": "a", "label": ["x"]}], r"line 241: label is \['x'\], not a label"),
        ({"name": "labels", "class_weights": {"good": 1.0}}, labels(), "class_weights needs a weight for each of bad"),
        ({"name": "labels", "several": True}, labels(), r"line 1: there is no field 'labels' \(did you mean 'label'"),
        ({"name": "labels"}, [row | {"text": "king " * 40} for row in labels()], r"line \d+ has 42 tokens, more than"),
        (
            {"name": "tags"},
            [*tags(), {"words": ["a", "b"], "tags": ["O"]}],
            "line 121: words and tags are 2 and 1; give one tag",
        ),
        ({"name": "tags"}, [*tags(), {"words": ["a b"], "tags": ["O"]}], "line 121: a word has a space in it"),
        ({"name": "spans"}, [*spans(), spans()[1] | {"start": 2}], "line 81: the context has .* at character 2, not"),
        ({"name": "spans"}, [*spans(), spans()[1] | {"start": None}], "line 81: answer and start must both be given"),
        ({"name": "contrastive"}, [*pairs(True), pairs()[0]], "line 81: there is no field negative, which other"),
        ({"name": "contrastive"}, pairs()[:9], "7 pairs are fewer than run.rows = 16"),
        ({"name": "chat"}, [{"messages": "hi"}] * 3, "messages is 'hi', not a list"),
        ({"name": "chat"}, [{"messages": TURNS[1:]}] * 3, "the first message is the assistant's"),
        ({"name": "chat"}, [{"messages": TURNS[:1]}] * 3, "no message is the assistant's"),
        ({"name": "chat"}, [{"messages": [{"role": "user"}]}] * 3, "give its role and its content as texts"),
    ],
)
def test_bad_records_are_one_line(tmp_path: Path, objective: dict[str, Any], rows: list[Any], message: str) -> None:
    with pytest.raises(TriptychError, match=message) as caught:
        prepare(recipe(objective, {"path": written(tmp_path / "a.jsonl", rows)}))
    assert "\n" not in str(caught.value)


def test_labels_that_training_lacks_are_named(tmp_path: Path) -> None:
    held = written(tmp_path / "b.jsonl", [{"text": "a", "label": "ugly"}])
    data = {"path": written(tmp_path / "a.jsonl", labels()), "held_out_path": held}
    with pytest.raises(InputError, match=r"b\.jsonl, line 1: the label 'ugly' occurs in no training record"):
        prepare(recipe({"name": "labels"}, data))


def test_what_does_not_fit_the_objective(tmp_path: Path) -> None:
    data = {"path": written(tmp_path / "a.jsonl", labels())}
    llama = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
             "num_attention_heads": 3, "max_position_embeddings": 64}  # fmt: skip
    made = recipe({"name": "labels"}, data).model_copy(update={"model": llama})
    with pytest.raises(ConfigError, match=r"objective labels trains one of bert, .*; the model is of type llama"):
        prepare(made)
    with pytest.raises(ConfigError, match=r"objective masked reads plain text, and not data\.columns"):
        prepare(recipe({"name": "masked"}, {"path": str(tmp_path / "a.txt"), "columns": {"text": "a"}}))
    with pytest.raises(TextError, match="there is no field 'a'; it has text, label"):
        prepare(recipe({"name": "masked"}, {**data, "columns": {"text": "a"}}))
    with pytest.raises(ConfigError, match="data has drop_longer and cut_longer, which exclude each other"):
        prepare(recipe({"name": "labels"}, {**data, "drop_longer": True, "cut_longer": True}))
    with pytest.raises(TextError, match="is not one of"):
        prepare(recipe({"name": "tags"}, {"path": "shakespeare:nothing"}))


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            {"name": "causal", "smoothing": 0.1},
            "objective.smoothing is for labels, tags, spans, captions; objective causal does",
        ),
        (
            {"name": "spans", "class_weights": "balanced"},
            "objective.class_weights is for labels, tags; objective spans",
        ),
        ({"name": "labels", "scale": 5.0}, "objective.scale is for contrastive; objective labels does not read it"),
        ({"name": "causal", "hidden": 0.3}, "objective.hidden is for captions, seq2seq; objective causal"),
    ],
)
def test_a_key_that_the_objective_does_not_read_is_refused(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(recipe(objective, {"path": "none.jsonl"}))


@pytest.mark.parametrize(
    "key",
    [
        "hidden=1.0",
        "hidden=-0.1",
        "smoothing=1.0",
        "smoothing=nan",
        "scale=0",
        "scale=nan",
        "span=0.5",
        "class_weights=3",
    ],
)  # fmt: skip
def test_numbers_out_of_range(key: str) -> None:
    tables = ENCODER | {"objective": {"name": "labels"}, "data": {"path": "a.csv"}}
    with pytest.raises(ConfigError, match=rf"--set objective\.{key.partition('=')[0]}"):
        check_recipe(tables, [f"objective.{key}"])


def test_longer_rows_are_cut_or_left_out(tmp_path: Path) -> None:
    rows = [row | {"text": row["text"] + " king" * (40 if i % 2 else 0)} for i, row in enumerate(labels())]
    data = {"path": written(tmp_path / "a.jsonl", rows)}
    for key, count in (("cut_longer", 180), ("drop_longer", 90)):
        examples = prepare(recipe({"name": "labels"}, {**data, key: True})).trainer.data.examples  # type: ignore[attr-defined]
        assert max(len(one.ids) for one in examples) <= 32
        assert abs(len(examples) - count) < 15
        assert all(one.ids[-1] == examples[0].ids[-1] for one in examples)  # the separator stays


@pytest.mark.weights
@pytest.mark.parametrize("kind", ["genres", "speakers"])
def test_labels_of_the_plays(kind: Any) -> None:
    """Passages of held-out plays are of no play that is trained on; no speech is on both sides."""
    train, held = shakespeare_labels.labelled(kind)
    assert {one.label for one in train} == {one.label for one in held}
    assert not {one.where for one in train} & {one.where for one in held}
    plays = [{one.where.partition(",")[0] for one in side} for side in (train, held)]
    assert (plays[1] == set(shakespeare_labels.HELD_OUT)) == (kind == "genres")
    assert bool(plays[0] & plays[1]) == (kind == "speakers")
    assert not any("[" in one.text for one in (*train, *held))
    assert sum("Exeunt" in one.text for one in (*train, *held)) <= 1  # a direction that the text has without brackets
    made = read_recipe(f"docs/examples/{kind}.toml")
    assert made.data.path == f"shakespeare:{kind}"
    records = read_split(made.data, ("text", "label"))
    assert [len(side) for side in records] == [len(train), min(300, len(held))]
    with pytest.raises(ConfigError, match="has texts with a label each; use objective labels"):
        read_split(made.data, ("words", "tags"))
