"""Records with images: captions and labels of drawn pictures, from the files to the commands that use the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import triptych
from cli_models import Captured, said
from triptych.errors import ConfigError, InputError, TextError, TriptychError
from triptych.media.image import png
from triptych.train import check_recipe, prepare, resume, show_batch, verify_resume, write_new_recipe
from triptych.train.data import HiddenWords
from triptych.train.image_tasks import PREPROCESSOR
from triptych_lectures.data import scenes
from triptych_lectures.labs import drawn_pictures as lab

VIT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 36, "patch_size": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 24}
RUN = {"rows": 8, "length": 12, "steps": 3, "precision": "fp32", "save_every": 0, "sample_every": 0}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "scenes"
    scenes.write(folder, 80, 12)
    return folder


def captions(drawn: Path, **changes: Any) -> dict[str, Any]:
    model = {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit", **VIT}, "decoder": GPT2}
    data = {"path": str(drawn / "captions.jsonl"), "held_out_path": str(drawn / "captions-held-out.jsonl")}
    tables = {"tokenizer": "words:60", "model": model, "data": data, "objective": {"name": "captions"}, "run": RUN}
    return tables | changes


def labels(drawn: Path, **changes: Any) -> dict[str, Any]:
    data = {"path": str(drawn / "shapes.jsonl"), "held_out_path": str(drawn / "shapes-held-out.jsonl")}
    tables = {"model": {"model_type": "vit", **VIT}, "data": data, "objective": {"name": "labels"}, "run": RUN}
    return tables | changes


# ---------------------------------------------------------------- drawn scenes


def test_scenes_are_a_function_of_the_seed_and_hold_pairs_out() -> None:
    train, held = scenes.scenes(300, 4), scenes.scenes(100, 4, held_out=True)
    again = scenes.scenes(300, 4)
    assert all(a.caption == b.caption and (a.pixels == b.pixels).all() for a, b in zip(train, again, strict=True))
    assert (
        scenes.scenes(1, 5)[0].caption != train[0].caption or (scenes.scenes(1, 5)[0].pixels != train[0].pixels).any()
    )
    pairs = [one.pair for scene in train for one in scene.objects]
    assert not set(pairs) & set(scenes.HELD_OUT)
    assert {colour for colour, _ in pairs} == set(scenes.COLOURS)
    assert {shape for _, shape in pairs} == set(scenes.SHAPES)
    assert all(any(one.pair in scenes.HELD_OUT for one in scene.objects) for scene in held)


def test_a_caption_says_what_is_drawn() -> None:
    for scene in scenes.scenes(60, 1):
        first, second = scene.objects
        axis = 1 if scene.relation == "left of" else 0
        assert first.centre[axis] + first.radius < second.centre[axis] - second.radius + 1e-9
        assert not (first.mask() & second.mask()).any()
        for one in scene.objects:
            middle = scene.pixels[one.mask()].mean(0)
            distances = {name: float(np.abs(middle - colour).max()) for name, colour in scenes.COLOURS.items()}
            assert distances[one.colour] < 120
            covered = one.mask().sum()
            in_patches = np.repeat(np.repeat(one.patches(6).reshape(6, 6), 6, 0), 6, 1)
            assert (in_patches & one.mask()).sum() == covered
        assert scene.caption == f"a {' '.join(first.pair)} {scene.relation} a {' '.join(second.pair)}"


def test_a_png_file_is_what_other_programs_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 11, 3), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(png(pixels))
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "RGB"
        assert (np.asarray(image) == pixels).all()


def test_a_folder_that_exists_is_not_overwritten(drawn: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        scenes.write(drawn, 1, 1)


# ---------------------------------------------------------------- training


def test_captions_train_and_the_model_opens(drawn: Path, tmp_path: Path) -> None:
    job = prepare(check_recipe(captions(drawn, run={**RUN, "save_every": 1.0, "out": str(tmp_path / "run")})))
    job.run()
    score = job.trainer.last_score()
    assert set(score.metrics) == {"exact captions", "tokens"}
    assert score.baselines == {"commonest caption": 0.0}
    (row,) = show_batch(job.trainer.data.draw(0, 0, 1), job.words)
    assert [token for token, _ in row.text][1] == "a"
    assert row.tokens[-1].target == "</s>"
    model = triptych.load(tmp_path / "run" / "model")
    files = sorted((drawn / "captions").iterdir())[:2]
    assert [one.ids for one in model.generate(files, max_new_tokens=8)]
    config = json.loads((tmp_path / "run" / "model" / PREPROCESSOR).read_text())
    assert config["size"] == {"height": 36, "width": 36}
    assert model.hf["decoder"]["vocab_size"] == model.tokenizer.vocab_size


def test_exact_captions_are_those_that_greedy_decoding_writes(drawn: Path) -> None:
    """The metric generates nothing: it is compared with what a model writes that learned few pictures by heart."""
    few = captions(drawn, optimizer={"name": "adamw", "lr": 0.01}, run={**RUN, "rows": 10, "steps": 60})
    few["data"] = {
        "path": str(drawn / "captions-held-out.jsonl"),
        "held_out_path": str(drawn / "captions-held-out.jsonl"),
    }
    job = prepare(check_recipe(few))
    job.run()
    records = [json.loads(line) for line in (drawn / "captions-held-out.jsonl").read_text().splitlines()]
    model = triptych.Model(job.trainer.module.eval(), job.words, job.hf)
    written = model.generate([drawn / record["image"] for record in records], max_new_tokens=12)
    exact = np.mean([one.text == record["text"] for one, record in zip(written, records, strict=True)])
    assert 0.0 < exact == pytest.approx(job.trainer.last_score().metrics["exact captions"])


def test_a_vit_trains_without_a_tokenizer_and_resumes(drawn: Path, tmp_path: Path) -> None:
    recipe = check_recipe(labels(drawn, run={**RUN, "save_every": 0.4, "out": str(tmp_path / "run")}))
    job = prepare(recipe)
    job.run(until=2)
    again = resume(tmp_path / "run")
    again.run()
    assert again.words is None
    with pytest.raises(TextError, match="reads no text"):
        _ = again.tokenizer
    assert set(again.trainer.last_score().baselines) == {"majority", "linear on pixels"}
    model = triptych.load(tmp_path / "run" / "model")
    (ranked,) = model.classify([drawn / "shapes" / "00000.png"])
    assert {name for name, _ in ranked} == set(scenes.SHAPES)
    assert not (tmp_path / "run" / "model" / "tokenizer.json").exists()
    assert len(show_batch(again.trainer.data.draw(0, 0, 1), None)[0].tokens) == 37


def test_hidden_words_are_those_of_the_lab(drawn: Path) -> None:
    """The key hides what the lab hides: the same rows, drawn by the same numbers; and nothing in the held-out data."""
    plain = prepare(check_recipe(captions(drawn)))
    job = prepare(check_recipe(captions(drawn, objective={"name": "captions", "hidden": lab.HIDDEN})))
    of_lab = HiddenWords(plain.trainer.data.examples, job.tokenizer.unk_id, lab.HIDDEN)
    ours, theirs = (data.draw(3, 2, 8) for data in (job.trainer.data, of_lab))
    assert all((a.ids == b.ids).all() for a, b in zip(ours, theirs, strict=True))
    assert all((a.targets == b.targets).all() for a, b in zip(ours, plain.trainer.data.draw(3, 2, 8), strict=True))
    shown = np.concatenate([one.ids[1:] for one in ours])
    assert 0.7 < (shown == job.tokenizer.unk_id).mean() < 1.0
    assert {int(one.ids[0]) for one in ours} == {job.tokenizer.pad_id}
    for a, b in zip(job.trainer.held_out.batches, plain.trainer.held_out.batches, strict=True):
        assert torch.equal(a.ids, b.ids)
    verify_resume(check_recipe(captions(drawn, objective={"name": "captions", "hidden": 0.5})), 2)


@pytest.mark.parametrize("make", [captions, labels])
def test_a_run_continues_bit_for_bit(make: Any, drawn: Path) -> None:
    verify_resume(check_recipe(make(drawn)), 2)


@pytest.mark.parametrize("make", [captions, labels])
def test_a_saved_model_is_trained_further(make: Any, drawn: Path, tmp_path: Path) -> None:
    prepare(check_recipe(make(drawn, run={**RUN, "save_every": 1.0, "out": str(tmp_path / "run")}))).run()
    further = make(drawn) | {"model": {"path": str(tmp_path / "run" / "model")}}
    job = prepare(check_recipe({key: value for key, value in further.items() if key != "tokenizer"}))
    before = {name: p.clone() for name, p in job.trainer.module.named_parameters()}
    job.run()
    assert any(not torch.equal(p, before[name]) for name, p in job.trainer.module.named_parameters())
    assert PREPROCESSOR in job.files


def test_other_sizes_and_modes_are_prepared_as_the_checkpoint_says(drawn: Path, tmp_path: Path) -> None:
    picture = Image.open(drawn / "captions" / "00000.png")
    rows = []
    for name, image in (("grey.png", picture.convert("L")), ("wide.jpg", picture.resize((90, 50)))):
        image.save(tmp_path / name)
        rows += [{"image": name, "text": f"a {name.partition('.')[0]} one"}] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = prepare(check_recipe(captions(drawn, data={"path": str(tmp_path / "a.jsonl"), "held_out": 0.5})))
    (example, *_) = job.trainer.data.draw(0, 0, 1)
    assert example.image.pixels().shape == (3, 36, 36)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"image": "absent.png", "text": "a"}, "a.jsonl, line 2: .*absent.png: cannot be read"),
        ({"image": "a.jsonl", "text": "a"}, "a.jsonl, line 2: .*is not an image"),
        ({"image": 3, "text": "a"}, "line 2: image is 3, not a text"),
        ({"image": "00000.png"}, "line 2: there is no field 'text'"),
        ({"picture": "00000.png", "text": "a"}, "line 2: there is no field 'image'"),
        ({"image": "00000.png", "text": " "}, "line 2: text is empty"),
        ({"image": "00000.png", "text": "a b c d e f g h i j k l m n"}, "has 15 tokens, more than run.length = 12"),
    ],
)
def test_bad_records_are_refused_in_one_line(row: dict[str, Any], problem: str, drawn: Path, tmp_path: Path) -> None:
    (tmp_path / "00000.png").write_bytes((drawn / "captions" / "00000.png").read_bytes())
    rows = [{"image": "00000.png", "text": "a b"}, row]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    held = str(drawn / "captions-held-out.jsonl")
    made = captions(drawn, data={"path": str(tmp_path / "a.jsonl"), "held_out_path": held})
    with pytest.raises(TriptychError, match=problem) as refused:
        prepare(check_recipe(made))
    assert "\n" not in str(refused.value)


def test_recipes_that_do_not_fit_are_refused(drawn: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a vit reads no text; remove tokenizer"):
        check_recipe(labels(drawn, tokenizer="byte"))
    with pytest.raises(ConfigError, match="vision-encoder-decoder"):
        prepare(check_recipe(captions(drawn, model={"model_type": "t5", "d_model": 16})))
    grey = captions(drawn)
    grey["model"] = grey["model"] | {"encoder": grey["model"]["encoder"] | {"num_channels": 1}}
    with pytest.raises(ConfigError, match="1 channels"):
        prepare(check_recipe(grey))
    with pytest.raises(ConfigError, match="trains one of"):
        prepare(check_recipe(labels(drawn, objective={"name": "tags"}) | {"data": {"path": _tags(tmp_path)}}))
    (tmp_path / "text.txt").write_text("a b c d\n" * 40)
    with pytest.raises(ConfigError, match="MaskedLMHeadSpec"):
        prepare(
            check_recipe(labels(drawn, objective={"name": "masked"}) | {"data": {"path": str(tmp_path / "text.txt")}})
        )


def test_a_recipe_is_written_for_a_model_of_captions(drawn: Path, tmp_path: Path) -> None:
    made = captions(drawn, run={**RUN, "steps": 1, "save_every": 1.0, "out": str(tmp_path / "run")})
    prepare(check_recipe(made)).run()
    recipe = write_new_recipe(tmp_path / "mine.toml", base=str(tmp_path / "run" / "model"))
    assert (recipe.objective.name, recipe.data.path) == ("captions", "captions.jsonl")
    wrong = recipe.model_dump(exclude_none=True) | {
        "objective": {"name": "seq2seq"},
        "data": {"path": _pairs(tmp_path)},
    }
    with pytest.raises(ConfigError, match="objective seq2seq reads text, which a vision-encoder-decoder does not"):
        prepare(check_recipe(wrong))


def _pairs(folder: Path) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"source": "a b", "target": "c"}) for _ in range(4)))
    return str(path)


def _tags(folder: Path) -> str:
    path = folder / "tags.jsonl"
    path.write_text("\n".join(json.dumps({"words": ["a", "b"], "tags": ["x", "y"]}) for _ in range(4)))
    return str(path)


@pytest.mark.heavy
def test_by_command_from_the_pictures_to_the_caption_and_the_label(
    tmp_path: Path, capsys: Captured, unchecked: None
) -> None:
    """A few hundred pictures, learned by heart: the commands train, write and name what they were trained on."""
    scenes.write(tmp_path / "scenes", 60, 10)
    for name in ("captions", "shapes"):
        recipe = Path(__file__).parents[1] / "docs" / "examples" / f"{name}.toml"
        out = tmp_path / name
        arguments = ["train", str(recipe), "--out", str(out), "--set", f"data.path={tmp_path}/scenes/{name}.jsonl"]
        arguments += ["--set", f"data.held_out_path={tmp_path}/scenes/{name}.jsonl", "--set", "run.steps=150"]
        score = json.loads(said([*arguments, "--json"], capsys)[0])["held_out"]["metrics"]
        assert score["exact captions" if name == "captions" else "accuracy"] > 0.8
    records = [json.loads(line) for line in (tmp_path / "scenes" / "captions.jsonl").read_text().splitlines()[:20]]
    files = [str(tmp_path / "scenes" / record["image"]) for record in records]
    rows = json.loads(said(["caption", str(tmp_path / "captions" / "model"), *files, "--json"], capsys)[0])["results"]
    assert np.mean([row["text"] == record["text"] for row, record in zip(rows, records, strict=True)]) > 0.8
    records = [json.loads(line) for line in (tmp_path / "scenes" / "shapes.jsonl").read_text().splitlines()[:20]]
    files = [str(tmp_path / "scenes" / record["image"]) for record in records]
    rows = json.loads(said(["classify", str(tmp_path / "shapes" / "model"), *files, "--json"], capsys)[0])["results"]
    named = [row["labels"][0]["label"] == record["label"] for row, record in zip(rows, records, strict=True)]
    assert np.mean(named) > 0.8
