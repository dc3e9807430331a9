"""Records of every format, and what is wrong with them in one line with its place; splits; metrics; baselines; and the
plays as training data: pairs of the two editions, and turns of one person.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import triptych
from cli_models import Captured, said
from programs import program
from triptych.cli import main
from triptych.errors import ConfigError, InputError, TextError
from triptych.text import shakespeare, shakespeare_labels
from triptych.train import metrics, prepare, read_recipe
from triptych.train.records import DataRecord, read_records, split
from triptych.train.task import read_split

ROWS = [{"text": 'He said, "go"\nand went', "label": "1"}, {"text": "une café ", "label": "a;b"}]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def csv_of(separator: str, end: str = "\n") -> str:
    rows = [f'"{row["text"].replace(chr(34), chr(34) * 2)}"{separator}{row["label"]}' for row in ROWS]
    return end.join([f"text{separator}label", *rows]) + end


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "\n".join(json.dumps(row) for row in ROWS)),
        ("a.jsonl", b"\xef\xbb\xbf" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()),
        ("a.csv", csv_of(",")),
        ("a.csv", b"\xef\xbb\xbf" + csv_of(",", "\r\n").encode()),
        ("a.TSV", csv_of("\t")),
    ],
)
def test_every_format_gives_the_same_records(tmp_path: Path, name: str, content: str | bytes) -> None:
    records = read_records(written(tmp_path / name, content), ("text", "label"), ("text_b",))
    assert [dict(record.values) for record in records] == ROWS
    assert records[0].location.endswith(("line 1", "line 2"))


def test_the_line_of_a_record_is_where_it_begins(tmp_path: Path) -> None:
    assert [r.location[-6:] for r in read_records(written(tmp_path / "a.csv", csv_of(",")), ("text",))] == [
        "line 2",
        "line 4",
    ]
    text = json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n\n" + json.dumps({"text": "c"})
    assert read_records(written(tmp_path / "a.jsonl", text), ("text",))[1].location.endswith("line 3")


def test_columns_have_any_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "review,stars,id\ngood,5,1\n")
    (record,) = read_records(path, ("text", "label"), (), {"text": "review", "label": "stars"})
    assert record.values == {"text": "good", "label": "5"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"texts": "b"}', r"a\.jsonl, line 2: there is no field 'text' \(did you mean"),
        ("a.jsonl", '{"text": "a", "text": "b"}', r"a\.jsonl, line 1 has the field 'text' twice"),
        ("a.jsonl", '{"text": "a"}\n[1]', r"a\.jsonl, line 2 is a list, not an object"),
        ("a.jsonl", '{"text": "a"}\n{"text', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", "", "holds no text"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        ("a.csv", "text,text\na,b\n", r"a\.csv, line 1 names the column 'text' twice"),
        ("a.csv", "text,b\na\n", r"a\.csv, line 2 has 1 field, and the first row names 2 columns"),
        ("a.csv", 'text,b\n"a,b\n', r"a\.csv, line 2 is not CSV"),
        ("a.csv", "text\n", "holds no record"),
        ("a.csv", "label\nx\n", r"a\.csv, line 2: there is no field 'text'; it has label"),
        ("a.txt", "text\nx\n", r"a\.txt is not one of \.jsonl, \.csv, \.tsv, \.parquet"),
    ],
)
def test_bad_files_are_one_line_with_the_place(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(TextError, match=message) as caught:
        read_records(written(tmp_path / name, content), ("text",))
    assert "\n" not in str(caught.value)


def test_unknown_fields_and_files(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "text\nx\n")
    with pytest.raises(ConfigError, match=r"data\.columns: txt is no field .* \(did you mean 'text'\?\)"):
        read_records(path, ("text",), (), {"txt": "a"})
    with pytest.raises(TextError, match="there is no field 'second'"):
        read_records(path, ("text",), ("text_b",), {"text_b": "second"})
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(TextError, match="is a directory"):
        read_records(tmp_path / "d.csv", ("text",))
    with pytest.raises(TextError, match="no file"):
        read_records(tmp_path / "none.csv", ("text",))


@pytest.mark.parametrize(
    ("call", "value", "message"),
    [
        ("text", 3, "text is 3, not a text"),
        ("text", "  ", "text is empty"),
        ("label", None, "label is None, not a label"),
        ("label", 0.5, "label is 0.5, not a label"),
        ("label", [], "not a label"),
        ("listed", 3, "listed is 3, not a list"),
        ("integer", 0.5, "integer is 0.5, not an integer"),
        ("integer", True, "integer is True, not an integer"),
    ],
)
def test_values_of_another_type(call: str, value: object, message: str) -> None:
    record = DataRecord({call: value}, "a.jsonl, line 7")
    arguments = (call, ";") if call == "listed" else (call,)
    with pytest.raises(TextError, match=f"^a.jsonl, line 7: .*{message}"):
        getattr(record, call)(*arguments)


def test_labels_are_texts_integers_and_truth_values() -> None:
    values = {"a": " x ", "b": 3, "c": True, "d": ["x", 2], "e": "x; y;", "f": "-3", "g": ""}
    record = DataRecord(values, "")
    assert [record.label(k) for k in "abc"] == ["x", "3", "true"]
    assert record.listed("d", ";") == ["x", "2"]
    assert record.listed("e", ";") == ["x", "y"]
    assert (record.integer("f"), record.integer("g")) == (-3, None)


def test_parquet_as_pyarrow_writes_it(tmp_path: Path) -> None:
    """Texts, integers, lists, missing values and columns of no interest, in several row groups."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = {
        "body": ["warm, \n bright", "", "käse \u2028 night"],
        "stars": [5, 1, 3],
        "words": [["a", "b"], [], ["c"]],
        "start": [4, None, 0],
        "other": [b"x", b"y", None],
    }
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    records = read_records(path, ("text", "label", "words"), ("start",), {"text": "body", "label": "stars"})
    assert [one.text("text", empty=True) for one in records] == columns["body"]
    assert [one.label("label") for one in records] == ["5", "1", "3"]
    assert [one.listed("words", None) for one in records] == columns["words"]
    assert [one.integer("start") for one in records] == columns["start"]
    assert [one.location for one in records] == [f"{path}, row {row}" for row in (1, 2, 3)]
    with pytest.raises(TextError, match=r"a\.parquet, row 1: there is no field 'text'; it has body, stars"):
        read_records(path, ("text",))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TextError, match=r"a\.parquet is not Parquet: "):
        read_records(path, ("text",))


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"needs pyarrow; run: pip install pyarrow"):
        read_records(written(tmp_path / "a.parquet", b"PAR1"), ("text",))


def test_the_split_is_drawn_and_always_the_same() -> None:
    items = list(range(100))
    train, held = split(items, 0.2, "a.csv")
    assert sorted(train + held) == items
    assert len(held) == 20
    assert held != items[-20:]
    assert 3 <= sum(i < 50 for i in held) <= 17  # of data sorted by label, both halves are held out
    assert split(items, 0.2, "a.csv") == (train, held)
    with pytest.raises(TextError, match=r"a\.csv holds 1 record"):
        split([1], 0.5, "a.csv")


def test_metrics_of_labels() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    a, b = random.integers(4, size=50), random.integers(3, size=50)
    assert metrics.accuracy(a, b) == pytest.approx(sklearn.accuracy_score(b, a))
    assert metrics.macro_f1(a, b) == pytest.approx(sklearn.f1_score(b, a, average="macro"))
    several = random.integers(2, size=(2, 30, 3))
    assert metrics.accuracy(several[0], several[1]) == pytest.approx(sklearn.accuracy_score(several[1], several[0]))
    assert metrics.macro_f1(several[0], several[1]) == pytest.approx(
        sklearn.f1_score(several[1], several[0], average="macro")
    )


def test_entities_are_those_of_strict_bio() -> None:
    tags = ["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "B-LOC", "I-PER", "B-ORG"]
    assert metrics.entities(tags) == {("PER", 0, 2), ("LOC", 4, 5), ("LOC", 5, 6), ("ORG", 7, 8)}
    right = [["B-PER", "I-PER", "O", "B-LOC"]]
    assert metrics.entity_f1(right, right) == 1.0
    assert metrics.entity_f1([["B-PER", "O", "O", "B-LOC"]], right) == 0.5  # a wrong end is wrong
    assert metrics.entity_f1([["I-PER", "I-PER", "O", "B-LOC"]], right) == pytest.approx(2 / 3)
    assert metrics.entity_f1([["O"] * 4], right) == 0.0


def test_answers_are_compared_as_squad_does() -> None:
    assert metrics.exact_match("The  Globe, Theatre!", "globe theatre") == 1.0
    assert metrics.exact_match("globes", "globe") == 0.0
    assert metrics.answer_f1("the old Globe theatre", "Globe Theatre, London") == pytest.approx(2 / 3)
    assert (metrics.answer_f1("", ""), metrics.answer_f1("x", "")) == (1.0, 0.0)


def test_recall_counts_ties_as_failures() -> None:
    scores = np.array([[0.9, 0.1, 0.2], [0.5, 0.4, 0.1], [0.3, 0.3, 0.3]])
    assert [metrics.recall_at(scores, k) for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_translations_are_scored_by_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(InputError, match=r"pip install sacrebleu"):
        metrics.translation(["a"], ["a"])


@pytest.mark.parametrize("several", [False, True])
def test_the_bag_of_words_is_logistic_regression(several: bool) -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    linear = pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(1)
    texts = [" ".join(random.choice([f"W{i}" for i in range(30)], 9)) for _ in range(160)]
    right = np.digitize([text.count("W1") for text in texts], [3, 5])
    counts = text.CountVectorizer(token_pattern=r"\w+").fit(texts[:120])
    goal = np.stack([right > 0, right > 1], axis=1).astype(np.int64) if several else right
    ours = metrics.bag_of_words(texts[:120], goal[:120], texts[120:], 2 if several else 3)
    columns = goal.T if several else [goal]
    theirs = []
    for column in columns:
        model = linear.LogisticRegression(tol=1e-8, max_iter=2000).fit(counts.transform(texts[:120]), column[:120])
        theirs.append(model.predict(counts.transform(texts[120:])))
    assert np.array_equal(ours, np.stack(theirs, axis=1) if several else theirs[0])
    assert metrics.accuracy(ours, goal[120:]) > 0.5
    majority = metrics.majority(goal[:120], 40)
    assert majority.shape == ours.shape
    shuffled = metrics.bag_of_words(texts[:120], goal[:120][::-1].copy(), texts[120:], 2 if several else 3)
    assert metrics.accuracy(shuffled, goal[120:]) < metrics.accuracy(ours, goal[120:])


def test_each_word_has_its_commonest_tag() -> None:
    tags = metrics.commonest_tags(
        [["a", "b", "a"], ["a", "c", "c"]], [np.array([1, 0, 1]), np.array([2, 0, 0])], [["a", "c", "x"]]
    )
    assert tags[0].tolist() == [1, 0, 0]


def test_texts_are_near_by_the_words_they_share() -> None:
    scores = metrics.word_overlap(["the red cat", "the blue dog"], ["a red cat", "a blue dog"])
    assert metrics.recall_at(scores, 1) == 1.0
    assert metrics.recall_at(scores[::-1].copy(), 1) == 0.0


ROOT = Path(__file__).parents[1]
RETRIEVAL, CHARACTER = (ROOT / "docs" / "examples" / f"{name}.toml" for name in ("retrieval", "character"))


@pytest.fixture(scope="module")
def retrieval() -> ModuleType:
    return program("bench/retrieval.py")


def test_pieces_of_both_editions_belong_together() -> None:
    """Each pair once, of equally many words, and none of a held-out play in those to train on."""
    data = read_recipe(RETRIEVAL).data
    train, held = read_split(data, ("text", "text_b"), ("negative",))
    assert len(held) <= data.held_out_limit == 500
    for side in (train, held):
        pairs = [(one.text("text"), one.text("text_b")) for one in side]
        assert len(set(pairs)) == len(pairs)
        assert all(len(a.split()) == len(b.split()) <= data.words == 3 for a, b in pairs)
    plays = " ".join(" ".join(pair.folio.split()) for pair in shakespeare.parallel_split()[1])
    assert all(one.text("text") in plays for one in held)
    whole, _ = read_split(data.model_copy(update={"words": None}), ("text", "text_b"))
    assert max(len(one.text("text").split()) for one in whole) > 3


@pytest.mark.parametrize("key", [{"columns": {"text": "a"}}, {"held_out_path": "other.jsonl"}])
def test_pairs_have_fields_of_their_own(key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has its own fields and held-out texts"):
        read_split(read_recipe(RETRIEVAL).data.model_copy(update=key), ("text", "text_b"))


@pytest.mark.parametrize("name", shakespeare_labels.SPEAKERS)
def test_turns_answer_another_person(name: str) -> None:
    """The held-out turns are the last of the play."""
    train, held = shakespeare_labels.turns(name)
    numbers = [int(turn.where.rpartition(" ")[2]) for turn in (*train, *held)]
    assert numbers == sorted(set(numbers))
    assert 0.15 < len(held) / len(numbers) < 0.21
    assert len(numbers) > 100
    assert all(len(turn.asked.split()) <= shakespeare_labels.ASKED for turn in train)


def test_a_conversation_is_one_answer_of_the_person() -> None:
    data = read_recipe(CHARACTER).data
    records, _ = read_split(data, ("messages",))
    (first,) = (one for one in records if "A little more than kin" in json.dumps(one.values["messages"]))
    system, asked, answer = first.values["messages"]  # type: ignore[misc]
    assert "Hamlet" in system["content"]
    assert asked["content"].endswith("my cousin Hamlet, and my son--")
    assert answer["content"].startswith("[Aside.]") or answer["content"].startswith("A little more than kin")
    with pytest.raises(ConfigError, match="names no person whose turns are known; they are hamlet, iago, rosalind"):
        read_split(data.model_copy(update={"path": "shakespeare:turns:romeo"}), ("messages",))
    with pytest.raises(ConfigError, match="has conversations; use objective chat"):
        read_split(data, ("text", "label"))


def test_evaluate_prints_the_score_before_training(tmp_path: Path, capsys: Captured) -> None:
    """The score of the weights that the run begins with, which training changes."""
    (tmp_path / "text.txt").write_text("The king was cold, and the night was long. " * 40)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f"""tokenizer = "byte"
        model = {{model_type = "gpt2", n_embd = 16, n_layer = 1, n_head = 2, n_inner = 24, n_positions = 32}}
        data = {{path = '{tmp_path / "text.txt"}', held_out = 0.2}}
        objective = {{name = "causal"}}
        run = {{rows = 4, length = 16, steps = 30, save_every = 0, sample_every = 0, precision = "fp32"}}
        """
    )
    before = json.loads(said(["train", str(recipe), "--evaluate", "--json"], capsys)[0])["held_out"]["nats_per_token"]
    job = prepare(read_recipe(recipe))
    assert before == pytest.approx(job.trainer.last_score().nats_per_token)
    job.run()
    assert job.trainer.last_score().nats_per_token < before - 0.3
    assert said(["train", str(recipe), "--evaluate"], capsys)[0].startswith("held out: ")
    assert main(["train", str(recipe), "--evaluate", "--resume"]) == 2


@pytest.mark.heavy
def test_pieces_are_found_by_fine_tuned_vectors(retrieval: ModuleType, minilm_dir: Path, unchecked: None) -> None:
    """30 steps on other plays.  Without the partners' own texts, shuffled pairs, nothing is found."""
    before = retrieval.measured(triptych.load(minilm_dir), 300, 0, 3)
    changes = ["run.steps=30", "run.evaluate_every=0", "data.held_out_limit=20"]
    job = prepare(read_recipe(RETRIEVAL, changes, {"model.path": str(minilm_dir)}))
    job.run()
    after = retrieval.measured(triptych.Model(job.trainer.module, job.tokenizer, job.hf), 300, 0, 3)
    assert after["recall"][1] > before["recall"][1] > before["words in common"][1]
    assert after["shuffled"][10] < 3 * after["chance"][10]
