"""Training data and run directories that are unusual: each either works or is refused before the first step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.errors import CheckpointError, ConfigError, InputError, TextError
from triptych.text import Encoded
from triptych.train import Job, check_recipe, loop, prepare, read_recipe, resume, write_new_recipe
from triptych.train.data import in_epochs
from triptych.train.evaluate import batched
from triptych.train.label_tasks import _question, best_span, first_tokens, ordered_labels, windows
from triptych.train.labelled import ClassLoss, SpanLoss, labelled
from triptych.train.metrics import recall_at
from triptych.train.records import DataRecord, read_records
from triptych.train.sources import texts
from triptych.train.task import trained_at

SIZES = {"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = {"tokenizer": "byte", "model": {"model_type": "llama", "max_position_embeddings": 24, **SIZES}}
ENCODER = {"tokenizer": "words:200", "model": {"model_type": "bert", "max_position_embeddings": 24, **SIZES}}
RUN = {"rows": 2, "length": 12, "steps": 3, "evaluate_every": 0.0, "sample_every": 0.0}
LINE = "the old mill stands where the river bends\n"


def job(of: dict[str, Any], objective: str, path: Path, run: dict[str, Any], **data: Any) -> Job:
    sections = {"objective": {"name": objective}, "data": {"path": str(path), **data}, "run": RUN | run}
    return prepare(check_recipe({**of, **sections}))


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


# ---------------------------------------------------------------- records and recipes


@pytest.mark.parametrize("text", ["--5", "9" * 5000, "1.5", "-"])
def test_an_integer_of_a_record_that_is_none_is_named(text: str) -> None:
    with pytest.raises(TextError, match=r"here: start is .* not an integer"):
        DataRecord({"start": text}, "here").integer("start")
    assert DataRecord({"start": " -12 "}, "here").integer("start") == -12


def test_pairs_are_read_line_by_line_as_records_are(tmp_path: Path) -> None:
    row = json.dumps({"source": "one\u2028two\x85", "target": "x"}, ensure_ascii=False)
    path = written(tmp_path / "pairs.jsonl", f"{row}\n\n" * 6)
    train, held = job_pairs(path)
    assert {*train, *held} == {("one\u2028two\x85", "x")}
    for bad, message in (
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"source": "a", "source": "b", "target": "c"}', "line 2 has the field 'source' twice"),
        ('{"source": "\\ud800", "target": "c"}', "line 2 spells half of a surrogate pair"),
        ('{"source": "a"}', "line 2: there is no field 'target'"),
    ):
        with pytest.raises(TextError, match=message):
            job_pairs(written(path, f"{row}\n{bad}\n"))


def job_pairs(path: Path) -> Any:
    from triptych.train.recipe import DataSettings
    from triptych.train.sources import pairs

    return pairs(DataSettings(path=str(path)))


def test_a_text_of_a_record_with_half_of_a_surrogate_pair_is_refused_where_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "\\uD83D\\uDE00 \\u00e4"}\n')
    assert read_records(path, ("text",))[1].text("text") == "\N{GRINNING FACE} ä"
    with pytest.raises(TextError, match="line 2 spells half of a surrogate pair"):
        read_records(written(path, '{"text": "a"}\n{"text": "\\uDE00"}\n'), ("text",))


def test_a_field_that_is_too_long_for_csv_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f'text,label\n"{"x " * 100_000}",a\n')
    with pytest.raises(TextError, match=r"line 2 has a field of more than 131,072 characters; write .* \.jsonl"):
        read_records(path, ("text", "label"))


def test_the_end_of_a_text_with_one_long_line_is_held_out(tmp_path: Path) -> None:
    """The only line break stands far before the end: almost all of the text would be held out."""
    settings = {"data": {"path": str(written(tmp_path / "a.txt", "Title\n" + "word " * 1000))}}
    recipe = check_recipe({**DECODER, "objective": {"name": "causal"}, "run": RUN, **settings})
    (train,), (held,), _ = texts(recipe.data)
    assert 251 <= len(held) <= 255
    assert held.startswith("word ")
    assert len(train) + len(held) == 5006
    (_,), (held,), _ = texts(recipe.data.model_copy(update={"path": str(written(tmp_path / "b.txt", LINE * 100))}))
    assert held == LINE * 5


def test_recipes_that_break_their_parser(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_recipe(written(tmp_path / "deep.toml", "a = " + "[" * 100_000))
    with pytest.raises(InputError, match="a path"):
        read_recipe("a\0b")
    with pytest.raises(ConfigError, match=r"model.name = \[1\] is not a known size"):
        check_recipe({**DECODER, "model": {"name": [1]}})
    with pytest.raises(ConfigError, match=r"run\.steps"):
        read_recipe("decoder", ["run.steps=" + "[" * 100_000])


def test_a_new_recipe_with_a_path_that_is_not_utf8_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not UTF-8"):
        write_new_recipe(tmp_path / "a.toml", out="\udcff")
    assert not (tmp_path / "a.toml").exists()


# ---------------------------------------------------------------- rows, metrics and their cost


class Counted(str):
    """A label that counts how often it is looked at."""

    looks = 0

    def isdecimal(self) -> bool:
        Counted.looks += 1
        return super().isdecimal()


def test_labels_are_put_in_order_by_one_look_at_each() -> None:
    Counted.looks = 0
    assert ordered_labels(Counted(i) for i in range(300))[:3] == ["0", "1", "2"]
    assert Counted.looks == 300
    assert ordered_labels(["b", "10", "9"]) == ["10", "9", "b"]
    assert len(ordered_labels(["1", "9" * 5000])) == 2


def test_the_first_tokens_of_words_are_found_in_one_pass() -> None:
    class Offsets(list[tuple[int, int]]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    offsets = Offsets((3 * i, 3 * i + 2) for i in range(400))
    assert first_tokens(["ab"] * 400, offsets, [0] * 400) == list(range(400))
    assert offsets.reads < 10 * 400


def test_held_out_rows_are_grouped_by_one_look_at_each() -> None:
    class Ids(np.ndarray):
        reads = 0

        def __len__(self) -> int:
            Ids.reads += 1
            return super().__len__()

    rows = [labelled(Encoded([1, 2, 3], [0] * 3, [], []), [0], ClassLoss(("a", "b")), i, trained_at(3, 0))
            for i in range(200)]  # fmt: skip
    for row in rows:
        object.__setattr__(row, "ids", row.ids.view(Ids))
    groups = batched(rows, 150, "cpu")
    assert [len(group.rows.lengths) for group in groups] == [50] * 4
    assert Ids.reads < 10 * 200


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.train import data

    calls = []
    plain = data.random_numbers
    monkeypatch.setattr(data, "random_numbers", lambda *of: calls.append(of) or plain(*of))
    data._order.cache_clear()
    drawn = [one for step in range(25) for one in in_epochs(range(40), 7, step, 8)]
    assert len(calls) == 5
    assert all(sorted(drawn[i : i + 40]) == list(range(40)) for i in range(0, 200, 40))
    assert in_epochs(range(40), 7, 3, 8) == drawn[24:32]


def test_vectors_that_are_nan_are_no_success() -> None:
    scores = np.eye(4)
    assert recall_at(scores, 1) == 1.0
    scores[2] = np.nan
    assert recall_at(scores, 1) == 0.75
    assert recall_at(np.full((4, 4), np.nan), 1) == 0.0


def test_an_answer_with_spaces_around_it_is_found() -> None:
    from triptych.text import word_tokenizer

    values = {"question": "who", "context": "it was  Ann  then", "answer": " Ann ", "start": 7}
    one = _question(DataRecord(values, "here"))
    (row,) = windows(one, word_tokenizer([one.context, "who"], 200), 12, SpanLoss(), 0)
    first, last = row.goal.tolist()
    assert first == last > 0
    assert one.context[slice(*row.offsets[first])] == "Ann"


def test_a_context_without_a_token_has_no_answer() -> None:
    import torch

    row = labelled(Encoded([1, 2], [0] * 2, [], []), [0, 0], SpanLoss(), 0, trained_at(2, 0))
    object.__setattr__(row, "offsets", np.full((2, 2), -1))
    assert best_span([(row, torch.zeros(2, 2))], "", may_be_empty=False) == ""


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(("every", "wanted"), [(0.1, 10), (0.05, 20), (1 / 3, 3)])
def test_evaluations_are_as_many_as_the_share_says(every: float, wanted: int) -> None:
    """0.3 / 0.1 is 2.99..., so that every third of ten checkpoints was left out."""
    steps = 60
    counts = [loop._multiples(step / steps, every) for step in range(steps + 1)]
    changed = [step for step in range(1, steps) if counts[step] != counts[step - 1]]
    assert changed == [steps * i // wanted for i in range(1, wanted)]


def test_held_out_data_without_a_token_to_predict_is_refused_before_training(tmp_path: Path) -> None:
    text = written(tmp_path / "a.txt", LINE * 20 + "\u200b" * 60 + "\n")
    with pytest.raises(InputError, match="the held-out data has no token to predict"):
        job(ENCODER | {"model": ENCODER["model"] | {"architectures": ["BertForMaskedLM"]}}, "masked", text, {})


@pytest.mark.parametrize("rows", [3, 4])
def test_pairs_that_are_dropped_do_not_count(tmp_path: Path, rows: int) -> None:
    """Six pairs, three of which are too long, and more than that in a batch: one would hold a pair twice."""
    texts = [{"text": f"a{i} " + "b " * (40 if i % 2 else 1), "text_b": "c"} for i in range(6)]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, texts)))
    held = written(tmp_path / "b.jsonl", "\n".join(map(json.dumps, texts[:1] * 5)))
    more = {"held_out_path": str(held), "drop_longer": True}
    if rows > 3:
        with pytest.raises(InputError, match=r"3 pairs are fewer than run\.rows = 4"):
            job(ENCODER, "contrastive", path, {"rows": rows}, **more)
        return
    made = job(ENCODER, "contrastive", path, {"rows": rows}, **more)
    assert [batch.trained for batch in made.trainer.held_out.batches] == [3, 2]


def test_a_single_last_pair_is_judged_with_the_others(tmp_path: Path) -> None:
    """Alone it would have nothing to be told from, and a loss of 0."""
    texts = [{"text": f"a{i}", "text_b": f"b{i}"} for i in range(4)]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, texts)))
    made = job(ENCODER, "contrastive", path, {"rows": 3}, held_out_path=str(path))
    assert [batch.trained for batch in made.trainer.held_out.batches] == [4]


def test_weights_are_looked_through_where_they_are_saved_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    plain = loop.nonfinite_parameter
    monkeypatch.setattr(loop, "nonfinite_parameter", lambda module: looks.append(1) or plain(module))
    text = written(tmp_path / "a.txt", LINE * 20)
    job(DECODER, "causal", text, {"steps": 8, "save_every": 0.5}).run()
    assert len(looks) == 3  # two checkpoints, and the end
    looks.clear()
    job(DECODER, "causal", text, {"steps": 8, "save_every": 0.0}).run()
    assert len(looks) == 1


def test_a_run_deletes_what_it_wrote_itself_alone(tmp_path: Path) -> None:
    notes = tmp_path / "run" / ".my-step-by-step-notes"
    notes.mkdir(parents=True)
    left = tmp_path / "run" / ".step-00000007.building"
    left.mkdir()
    job(DECODER, "causal", written(tmp_path / "a.txt", LINE * 20), {"out": str(tmp_path / "run")}).run()
    assert notes.is_dir()
    assert not left.exists()


def test_a_finished_run_that_was_killed_before_its_model_was_there_gets_it(tmp_path: Path) -> None:
    text, out = written(tmp_path / "a.txt", LINE * 20), tmp_path / "run"
    job(DECODER, "causal", text, {"out": str(out)}).run()
    before = (out / "model" / "model.safetensors").read_bytes()
    (out / "model").rename(out / ".model.old")
    resume(out).run()
    assert (out / "model" / "model.safetensors").read_bytes() == before
    assert not (out / ".model.old").exists()


def test_a_run_directory_that_is_no_path(tmp_path: Path) -> None:
    made = job(DECODER, "causal", written(tmp_path / "a.txt", LINE * 20), {"out": "a\0b"})
    with pytest.raises(CheckpointError, match="cannot write"):
        made.run()
