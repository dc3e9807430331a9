"""A recipe written for data of one's own: the objective follows from the fields of the records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_models import LLAMA, Captured, checkpoint, said
from triptych.cli import main
from triptych.errors import ConfigError, InputError, TextError
from triptych.media.image import png
from triptych.model import create
from triptych.text import DECODER, byte_tokenizer
from triptych.train import OBJECTIVES, check_recipe, prepare, read_recipe, write_new_recipe
from triptych.train.new_head import LAYOUTS
from triptych.train.new_recipe import FIELDS, objective_of
from triptych.train.recipe import sections
from triptych.train.records import read_records

TEXTS = [
    ("the old mill", "calm"),
    ("the storm broke", "wild"),
    ("the sea lay still", "calm"),
    ("the mast fell", "wild"),
]
SHORT = ("--set", "run.steps=1", "--set", "run.rows=2", "--set", "run.length=12", "--set", "data.held_out=0.5")


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def images(folder: Path) -> Path:
    for label, value in (("dark", 10), ("light", 240)):
        (folder / label).mkdir(parents=True)
        for i in range(3):
            pixels = np.full((12, 12, 3), value + i, dtype=np.uint8)
            (folder / label / f"{i}.png").write_bytes(png(pixels))
    (folder / "dark" / ".hidden").write_text("no image")
    return folder


def test_the_fields_of_records_name_their_objective(tmp_path: Path) -> None:
    for objective, fields in FIELDS:
        path = written(tmp_path / "a.jsonl", dict.fromkeys((*fields, "id"), "x"))
        assert objective_of(path) == objective
        left = written(tmp_path / "b.jsonl", dict.fromkeys(fields[1:], "x"))
        if fields[1:] and set(fields[1:]) != {"text"}:
            with pytest.raises(InputError, match="by which no objective is known; name it with --objective"):
                objective_of(left)
    (tmp_path / "a.txt").write_text("the old mill")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the old mill")
    plain = written(tmp_path / "plain.jsonl", {"text": "the old mill"})
    assert [objective_of(str(one)) for one in (plain, tmp_path / "a.txt", tmp_path / "texts", "shakespeare")] == [
        None
    ] * 4
    assert objective_of(str(images(tmp_path / "images"))) == "labels"
    with pytest.raises(TextError, match="holds no text"):
        objective_of(written(tmp_path / "empty.jsonl"))
    assert set(LAYOUTS) == set(OBJECTIVES)


def test_a_recipe_for_records_trains_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    base = str(checkpoint("encoder"))
    Path("reviews.csv").write_text("comment,mood\n" + "".join(f"{text},{label}\n" for text, label in TEXTS * 3))
    new = ["train", "--new", "mood.toml", "--from", base, "--data", "reviews.csv"]
    assert "has the fields comment, mood, by which no objective is known" in said(new, capsys, 1)[1]
    named = [*new, "--objective", "labels", "--set", 'data.columns={text = "comment", label = "mood"}']
    assert main([*named, *SHORT]) == 0
    assert capsys.readouterr().out == "wrote mood.toml, objective labels; train with: triptych train mood.toml\n"
    assert read_recipe("mood.toml").objective.name == "labels"
    assert main(["train", "mood.toml"]) == 0
    assert {"calm", "wild"} <= set(said(["classify", "runs/mood", "the old mill"], capsys)[0].split())


@pytest.mark.parametrize("layout", ["decoder", "encoder"])
@pytest.mark.parametrize("texts", [["the old mill\n"] * 3, ["the old mill stands where the river bends"]])
def test_a_recipe_for_a_folder_of_short_notes_runs_as_written(
    layout: str, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes/pictures").mkdir(parents=True)
    for i, text in enumerate(texts):
        Path(f"notes/{i}.md").write_text(text)
    Path("notes/paper.pdf").write_bytes(b"%PDF-1.7\n\xe2\xe3\xcf\xd3")
    Path("notes/pictures/a.png").write_bytes(png(np.zeros((4, 4, 3), dtype=np.uint8)))
    assert main(["train", "--new", "notes.toml", "--from", str(checkpoint(layout)), "--data", "notes"]) == 0
    lines = [line for line in Path("notes.toml").read_text().splitlines() if " = " in line and line[0] != "#"]
    assert len(lines) <= 9
    capsys.readouterr()
    err = " ".join(said(["train", "notes.toml", "--set", "run.steps=2"], capsys)[1].split())
    assert "notes: skipped 2 binary or not UTF-8" in err
    assert "fewer than a row may have" in err
    assert ("at the end of the longest document" in err) == (len(texts) > 1)
    assert Path("runs/notes/model/config.json").is_file()


def test_the_recipe_of_the_page_is_the_one_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs/concepts/recipes.md").read_text("utf-8")
    create(LLAMA | {"vocab_size": 257, "max_position_embeddings": 300}, byte_tokenizer(DECODER)).save("model.gguf")
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("the old mill")
    write_new_recipe("notes.toml", base="model.gguf", data="notes/")
    written = Path("notes.toml").read_text()
    assert f"```toml\n{written[written.index('[model]') :]}```" in page


def test_data_that_are_nowhere_are_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    for more in (["--from", str(checkpoint("decoder"))], []):
        assert main(["train", "--new", "new.toml", "--data", "nowhere", *more]) == 1
        assert "no file or folder nowhere; give a UTF-8 text file" in " ".join(capsys.readouterr().err.split())
        assert not Path("new.toml").exists()
    Path("empty").mkdir()
    Path("a.png").write_bytes(png(np.zeros((4, 4, 3), dtype=np.uint8)))
    for data, problem in (("empty", "holds no text"), ("a.png", "is not UTF-8 at byte 0"), ("/dev/null", "a device")):
        assert problem in " ".join(said(["train", "--new", "new.toml", "--data", data], capsys, 1)[1].split())
    assert main(["train", "--keys", "--new", "new.toml"]) == 2
    assert main(["train", "--new", "new.toml", "--data", "shakespeare", "--from", str(checkpoint("decoder"))]) == 0


def test_an_encoder_decoder_without_sentinels_is_not_trained_on_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the old mill\n" * 9)
    with pytest.raises(InputError, match="a t5 learns from records, not from plain text"):
        write_new_recipe(tmp_path / "new.toml", base=str(checkpoint("encoder-decoder")), data=str(tmp_path / "a.txt"))


def test_every_key_of_a_recipe_is_listed(capsys: Captured) -> None:
    listed = json.loads(said(["train", "--keys", "--json"], capsys)[0])
    assert {name: set(kind.model_fields) for name, kind in sections().items()} == {
        name: set(of_table) for name, of_table in listed.items() if name
    }
    assert listed["run"]["length"]["default"] is None
    shown = said(["train", "--keys"], capsys)[0]
    assert all(key in shown for of_table in listed.values() for key in of_table)


def test_a_recipe_that_could_not_run_is_not_written(tmp_path: Path) -> None:
    encoder, decoder = str(checkpoint("encoder")), str(checkpoint("decoder"))
    new = tmp_path / "new.toml"
    chat = written(tmp_path / "chat.jsonl", {"messages": [{"role": "assistant", "content": "Aye."}]})
    mood = written(tmp_path / "mood.jsonl", *({"text": text, "label": label} for text, label in TEXTS))
    with pytest.raises(ConfigError, match="objective chat needs the layout decoder; bert is of layout encoder"):
        write_new_recipe(new, base=encoder, data=chat)
    with pytest.raises(ConfigError, match=r"objective labels trains one of bert, .*; the model is of type llama"):
        write_new_recipe(new, base=decoder, data=mood)
    with pytest.raises(InputError, match="objective tags reads records; give the file with --data"):
        write_new_recipe(new, base=encoder, objective="tags")
    with pytest.raises(InputError, match="an objective is chosen for an existing model alone"):
        write_new_recipe(new, "decoder", objective="causal")
    assert not new.exists()
    assert write_new_recipe(new, base=decoder, data=chat).objective.name == "chat"


def test_images_in_folders_are_labelled_by_their_folder(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    records = read_records(folder, ("image", "label"))
    assert [(Path(one.text("image")).name, one.label("label")) for one in records] == [
        (f"{i}.png", label) for label in ("dark", "light") for i in range(3)
    ]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = {"model_type": "vit", "image_size": 12, "patch_size": 6, **sizes}
    run = {"rows": 2, "length": 8, "steps": 1}
    tables = {"model": model, "data": {"path": str(folder)}, "objective": {"name": "labels"}, "run": run}
    job = prepare(check_recipe(tables))
    job.run()
    assert job.hf["id2label"] == {"0": "dark", "1": "light"}
    with pytest.raises(TextError, match=r"is not one of \.jsonl"):
        read_records(folder, ("text", "label"))
    (folder / "loose.png").write_bytes((folder / "dark" / "0.png").read_bytes())
    with pytest.raises(TextError, match=r"loose\.png lies in no subfolder"):
        read_records(folder, ("image", "label"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text;label\ngood;1\n", r"line 1 is one column, 'text;label'; in a \.csv file there is a comma"),
        ("a.tsv", "text,label\ngood,1\n", r"in a \.tsv file there is a tab between columns"),
        ("a.csv", "text,label\ngood\n", "line 2 has 1 field, and the first row names 2 columns"),
        ("a.csv", "review,label\ngood,1\n", r'it has review, label; data\.columns = {text = "\.\.\."} in the recipe'),
        ("a.jsonl", '[{"text": "a"}, {"text": "b"}]', r"line 1 is a list, not an object .*; write one object a line"),
        ("a.csv", "text,label\ngood,1\n".encode("utf-16"), r"a\.csv is UTF-16; write it as UTF-8"),
    ],
)
def test_files_of_other_programs_are_refused_with_what_to_do(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TextError, match=message):
        read_records(tmp_path / name, ("text", "label"))


def test_a_batch_says_how_many_tokens_it_does_not_show(tmp_path: Path, capsys: Captured) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the old mill stands where the river bends\n" * 200, encoding="utf-8")
    argv = ["train", "decoder", "--data", str(text), "--show-batch", "--set", "run.rows=1"]
    assert "and 16 more tokens; --json has them all" in said([*argv, "--set", "run.length=40"], capsys)[0]
    assert "more token" not in said([*argv, "--set", "run.length=24"], capsys)[0]
