"""Recipes: what is refused, in which words, and what `--set` does."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych import machine
from triptych.errors import ConfigError, InputError, TextError
from triptych.train import check_recipe, prepare, read_recipe
from triptych.train.job import read_task
from triptych.train.recipe import RECIPES, SHIPPED
from triptych.train.sources import limited, pairs, pieces, refuse_records, texts

GOOD: dict[str, Any] = {
    "tokenizer": "byte",
    "model": {
        "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 3, "max_position_embeddings": 32,
    },
    "data": {"path": "text.txt"},
    "objective": {"name": "causal"},
    "run": {"rows": 3, "length": 16, "steps": 2},
}  # fmt: skip


def changed(**sections: Any) -> dict[str, Any]:
    tables = copy.deepcopy(GOOD)
    for name, value in sections.items():
        tables[name] = tables.get(name, {}) | value if isinstance(value, dict) else value
    return tables


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (changed(run={"row": 3}), r"recipe: run\.row is not a key of a recipe \(did you mean 'rows'\?\)"),
        (changed(optimiser={"lr": 1}), r"optimiser is not a key of a recipe \(did you mean 'optimizer'\?\)"),
        (changed(optimizer={"learning_rate": 1}), r"optimizer\.learning_rate is not a key"),
        (changed(run={"rows": 0}), r"run\.rows = 0: input should be greater than 0"),
        (changed(run={"rows": "many"}), r"run\.rows = 'many': input should be a valid integer"),
        (changed(run={"steps": None}), r"run needs an end; give run\.steps"),
        (changed(objective={"name": "clm"}), r"objective\.name = 'clm': input should be 'causal', 'masked'"),
        (changed(tokenizer=None), r"give one of the two"),
        (changed(model={"path": "somewhere"}), r"give one of the two"),
        ({"run": {"rows": 3}}, r"model is missing; data is missing; objective is missing; run\.length is missing"),
    ],
)
def test_what_is_not_understood_is_one_line_with_its_place(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_recipe(tables)
    assert "\n" not in str(caught.value)


def test_set_takes_toml_values_and_words() -> None:
    changes = [
        "run.seconds=90",
        "run.out=runs/a b",
        "optimizer.betas=[0.8, 0.99]",
        "run.compile=true",
        "tokenizer=bpe:300",
    ]
    recipe = check_recipe(GOOD, changes)
    assert recipe.run.seconds == 90.0
    assert recipe.run.out == "runs/a b"
    assert recipe.optimizer.betas == (0.8, 0.99)
    assert recipe.run.compile is True
    assert recipe.tokenizer == "bpe:300"
    assert "seconds" not in GOOD["run"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.seconds", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("tokenizer.kind=3", "tokenizer is a value, not a table"),
        ("run.second=3", r"run\.second is not a key of a recipe \(did you mean 'seconds'\?\)"),
    ],
)
def test_set_refuses(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_recipe(GOOD, [change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.rows=0", r"--set run\.rows=0: run\.rows = 0: input should be greater than 0"),
        (
            "objective.class_weights.good=0",
            r"--set objective\.class_weights\.good=0: objective\.class_weights = {'good': 0}: input should be "
            r"'balanced'; objective\.class_weights\.good = 0: input should be greater than 0",
        ),
        ("run=5", r"--set run=5: run = 5: "),
        ("foo.bar=1", r"--set foo\.bar=1: foo is not a key of a recipe"),
        ("run.steps=30", r"mine\.toml: optimizer\.learning_rate is not a key"),
        ("run.rows=-1", r"--set run\.rows=-1: run\.rows = -1: input .*; mine\.toml: optimizer\.learning_rate is"),
    ],
)
def test_a_problem_names_the_option_or_the_file_it_comes_from(change: str, message: str) -> None:
    tables = changed(optimizer={"learning_rate": 1}) if "mine" in message else GOOD
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        check_recipe(tables, [change], "mine.toml")
    assert ("mine.toml" in str(caught.value)) == ("mine" in message)


def test_a_value_that_replaces_a_change_is_not_blamed_on_it() -> None:
    with pytest.raises(ConfigError, match=r"^recipe: run\.rows = 'x'"):
        check_recipe(GOOD, ["run.rows=0"], values={"run.rows": "x"})


def test_a_file_that_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("run = [")
    with pytest.raises(ConfigError, match=r"bad\.toml cannot be read as TOML"):
        read_recipe(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'tokenizer = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml cannot be read as TOML"):
        read_recipe(tmp_path / "latin.toml")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_recipes_we_ship_are_recipes(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.run.seconds == 90
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"name": "masked"}}, "objective masked needs the layout encoder; llama is of layout decoder"),
        ({"run": {"length": 33}}, r"run\.length = 33 is more than the 32 positions"),
        ({"tokenizer": "bytes"}, r"tokenizer = 'bytes' is not a directory .* \(did you mean 'byte'\?\)"),
        ({"model": {"vocab_size": 100}}, "tokenizer has 257 tokens and the model 100"),
        ({"model": {"hidden_sizes": 100}}, r"model: 'hidden_sizes' \(= 100\) is not understood"),
        ({"run": {"device": "cuda:99"}}, "device 'cuda:99' "),
        ({"run": {"device": "meta"}}, "device 'meta' is not one of cpu"),
        ({"tokenizer": "bpe:9999999999"}, "has 257 to 1,048,576 tokens, not 9,999,999,999"),
        ({"tokenizer": "words:1"}, "a word-level vocabulary has 2 to"),
        ({"objective": {"rate": 0.4}}, "objective.rate is for masked, corruption, replaced; objective causal does not"),
        ({"objective": {"commonest": 4}}, "objective.commonest is for masked; objective causal does not"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n" * 9)
    tables = changed(**{"data": {"path": str(tmp_path / "text.txt")}, **changes})
    with pytest.raises((ConfigError, InputError, TextError), match=message):
        prepare(check_recipe(tables))


def test_plain_text_may_be_the_texts_of_records(tmp_path: Path) -> None:
    path = tmp_path / "speeches.csv"
    path.write_text("who,speech\n" + "".join(f"Hamlet,To be {i}\n" for i in range(10)))
    data = {"path": str(path), "columns": {"text": "speech"}, "held_out": 0.1}
    train, held, _ = texts(check_recipe(changed(data=data)).data)
    assert (train, held) == ([f"To be {i}" for i in range(9)], ["To be 9"])
    prepare(check_recipe(changed(data=data)))
    with pytest.raises(TextError, match=r"speeches\.csv, line 2: there is no field 'text'; it has who, speech"):
        prepare(check_recipe(changed(data={"path": str(path)})))


def test_keys_of_pairs_and_records_are_refused_for_plain_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n" * 9)
    for keys, message in (
        ({"columns": {"text": "a"}}, "reads plain text, and not data.columns"),
        ({"words": 3}, "for seq2seq"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(check_recipe(changed(data={"path": str(tmp_path / "text.txt"), **keys})))


def test_held_out_text_is_the_end_and_no_part_of_the_rest(tmp_path: Path) -> None:
    lines = [f"line {i}\n" for i in range(100)]
    (tmp_path / "one.txt").write_text("".join(lines))
    data = check_recipe(changed(data={"path": str(tmp_path / "one.txt"), "held_out": 0.1})).data
    (train,), (held,), notes = texts(data)
    assert not notes
    assert train + held == "".join(lines)
    assert held.startswith("line 8") or held.startswith("line 9")
    limited = data.model_copy(update={"held_out_limit": 11})
    assert texts(limited)[1] == [held[:11]]


def test_of_a_folder_the_last_documents_are_held_out(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    data = check_recipe(changed(data={"path": str(tmp_path), "held_out": 0.3})).data
    train, held, notes = texts(data)
    assert [text[-1] for text in train] == list("01234")
    assert [text[-1] for text in held] == list("56")
    assert notes == ["held out for evaluation: the last 2 of 7 documents"]


def test_of_few_documents_none_is_held_out_whole(tmp_path: Path) -> None:
    longest = "".join(f"line {i}\n" for i in range(60))
    for name, text in (("a", "short\n"), ("b", longest), ("c", "also short\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    train, held, notes = texts(check_recipe(changed(data={"path": str(tmp_path)})).data)
    assert [train[0], train[1] + held[0], train[2]] == ["short\n", longest, "also short\n"]
    assert 0.04 * len(longest) < len(held[0]) < 0.08 * len(longest)
    assert notes == [f"held out for evaluation: {len(held[0])} characters at the end of the longest document"]


def test_files_of_a_folder_that_are_no_text_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be\n" * 20)
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.7\n\xe2\xe3\xcf\xd3")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    data = check_recipe(changed(data={"path": str(tmp_path)})).data
    train, held, notes = texts(data)
    assert train[0] + held[0] == "to be\n" * 20
    assert notes == [f"{tmp_path}: skipped 2 binary or not UTF-8"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(TextError, match=r"holds no text \(skipped: 2 binary or not UTF-8\); give a UTF-8 text file"):
        texts(data)


@pytest.mark.parametrize(("count", "limit"), [(15, 10), (29, 10), (30, 10), (9, 10), (10, 10)])
def test_held_out_records_are_evenly_spaced(tmp_path: Path, count: int, limit: int) -> None:
    held = limited(list(range(count)), check_recipe(changed(data={"path": "x", "held_out_limit": limit})).data)
    assert len(held) == min(count, limit)
    gaps = np.diff([*held, count])
    assert gaps.max() - gaps.min() <= 1


def test_pairs_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"source": "loue", "target": "love"}\n{"source": "haue"}\n')
    data = check_recipe(changed(data={"path": str(path)})).data
    with pytest.raises(TextError, match=r"pairs\.jsonl, line 2: there is no field 'target'; it has source"):
        pairs(data)
    path.write_text('{"source": "loue", "target": "love"}\n{"source": "haue", "target": "have"}\n')
    assert pairs(data) == ([("loue", "love")], [("haue", "have")])


def test_pairs_are_read_from_every_file_of_records(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_bytes(b'\xef\xbb\xbfen,de\r\n"the old, mill",die Muehle\r\nthe sea,das Meer\r\n')
    (tmp_path / "held.tsv").write_text("en\tde\nthe bank\tdas Ufer\n")
    data: dict[str, Any] = {"path": str(tmp_path / "pairs.csv"), "columns": {"source": "en", "target": "de"}}
    assert pairs(check_recipe(changed(data=data)).data) == (
        [("the old, mill", "die Muehle")],
        [("the sea", "das Meer")],
    )
    data["held_out_path"] = str(tmp_path / "held.tsv")
    recipe = changed(objective={"name": "seq2seq"}, data=data)
    assert pairs(check_recipe(recipe).data)[1] == [("the bank", "das Ufer")]
    refuse_records(check_recipe(recipe))
    recipe = changed(objective={"name": "seq2seq"}, data=data | {"cut_longer": True})
    with pytest.raises(ConfigError, match=r"reads pairs from .*, each whole, and not data\.cut_longer"):
        refuse_records(check_recipe(recipe))


def test_pairs_are_cut_where_their_words_correspond() -> None:
    found = pieces([("a b c d e f g", "A B C D E F G"), ("two words", "one"), ("x", "X")], 1, 3)
    assert "".join(source for source, _ in found).replace(" ", "") == "abcdefgx"
    assert all(source.upper() == target for source, target in found)
    assert {len(source.split()) for source, _ in found} <= {1, 2, 3}
    assert len({len(source.split()) for source, _ in found}) > 1
    assert pieces([("a b c", "A B C")], 2, 2) == [("a b", "A B"), ("c", "C")]


def test_pieces_go_on_in_the_next_pair_where_the_recipe_says_so() -> None:
    """A pair that is left out ends a piece, because its two sides do not correspond word by word."""
    lines = [("a b c", "A B C"), ("d e", "D E"), ("two words", "one"), ("f", "F"), ("", ""), ("g h", "G H")]
    assert pieces(lines, 4, 4, across_lines=True) == [("a b c d", "A B C D"), ("e", "E"), ("f", "F"), ("g h", "G H")]
    assert pieces(lines, 4, 4) == [("a b c", "A B C"), ("d e", "D E"), ("f", "F"), ("g h", "G H")]
    for objective in ("seq2seq", "contrastive"):
        recipe = changed(data={"path": "shakespeare", "across_lines": True}, objective={"name": objective})
        with pytest.raises(ConfigError, match=r"recipe: data has across_lines without words; set data\.words"):
            check_recipe(recipe)


@pytest.mark.parametrize("objective", ["labels", "contrastive", "causal", "corruption"])
def test_words_are_refused_where_no_pairs_are_cut(objective: str) -> None:
    recipe = changed(data={"path": "records.jsonl", "words": 3}, objective={"name": objective})
    with pytest.raises(ConfigError, match=rf"data\.words cuts pairs of texts, .*; objective {objective} does not read"):
        read_task(check_recipe(recipe))


def test_a_named_size_is_its_config_under_the_other_keys(tmp_path: Path) -> None:
    """The vocabulary and the special tokens stay those of the tokenizer."""
    pairs_file = tmp_path / "pairs.jsonl"
    pairs_file.write_text("\n".join(f'{{"source": "{i}", "target": "{i + 1}"}}' for i in range(60)))
    tables = changed(data={"path": str(pairs_file)}, objective={"name": "seq2seq"})
    tables["model"] = {"name": "transformer-base", "encoder_layers": 1, "decoder_layers": 2}
    recipe = check_recipe(tables)
    assert recipe.model | {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_attention_heads": 8} == recipe.model
    assert (recipe.model["encoder_layers"], recipe.model["decoder_layers"]) == (1, 2)
    assert not {"name", "vocab_size", "eos_token_id", "decoder_start_token_id"} & {*recipe.model}
    job = prepare(recipe)
    assert job.hf["vocab_size"] == job.tokenizer.vocab_size != 37_000
    assert job.hf["eos_token_id"] == job.tokenizer.eos_id


def test_a_named_size_that_does_not_exist() -> None:
    tables = changed()
    tables["model"] = {"name": "transformer-bas"}
    with pytest.raises(ConfigError, match=r"model\.name = 'transformer-bas' .*did you mean 'transformer-base'"):
        check_recipe(tables)
    with pytest.raises(ConfigError, match=r"--set model\.name=gpt3: model\.name = 'gpt3'"):
        check_recipe(tables, ["model.name=gpt3"])
    with pytest.raises(ConfigError, match=r"model\.name does not go with model\.path"):
        check_recipe({**changed(tokenizer=None), "model": {"name": "gpt2", "path": "somewhere"}})


def test_a_named_size_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    if machine.free_memory() is None:
        pytest.skip("this system does not say how much memory is free")
    (tmp_path / "text.txt").write_text("a line of text\n" * 40)
    tables = changed(data={"path": str(tmp_path / "text.txt")})
    tables["model"] = {"name": "gpt3-175b"}
    with pytest.raises(InputError, match="bytes for its weights"):
        prepare(check_recipe(tables))
