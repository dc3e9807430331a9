"""Training on records of sounds: rows and losses against the reference, a model from its data to its transcripts, and
records that cannot be used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

import triptych
from cli_models import Captured
from spoken_tones import spoken
from test_audio import wav
from test_hearing import FIRST, LETTERS, directory, reference, tokenizer  # noqa: F401
from triptych.cli import main
from triptych.errors import ConfigError, InputError, TextError
from triptych.media.audio import RATE, log_mel, padded, read_wav, write_wav
from triptych.text import SPEECH, WhisperTokens, with_whisper_tokens, word_tokenizer
from triptych.train import Job, check_recipe, collate, evaluate, loss, prepare, resume, show_batch
from triptych.train.audio_records import HeldSpeech, SpokenExample, SpokenRows
from triptych.train.metrics import distance, word_error_rate
from triptych_lectures.data.digit_recordings import DigitRecorder, write_recordings

MELS, WINDOW = 20, 0.9  # bands, seconds
MODEL = {
    "model_type": "whisper", "d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": MELS,
    "max_source_positions": 45, "max_target_positions": 12, "dropout": 0.0, "init_std": 0.15,
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Recordings of one to three words made of tones."""
    recorder = DigitRecorder(words=(1, 3), pause=(0.02, 0.06), noise=(25.0, 40.0), seconds=WINDOW)
    return write_recordings(tmp_path / "data", 48, 12, speakers=(8, 4), recorder=recorder, spoken=spoken(tmp_path))


def tables(train: Path, held: Path | None, **run: Any) -> dict[str, Any]:
    data = {"path": str(train)} | ({} if held is None else {"held_out_path": str(held)})
    settings = {"rows": 16, "length": 8, "steps": 3, "precision": "fp32", **run}
    optimizer = {"name": "muon", "lr": 5e-3, "muon_lr": 1e-2}
    return {
        "tokenizer": "words:40", "model": dict(MODEL), "data": data, "objective": {"name": "transcripts"},
        "optimizer": optimizer, "run": settings,
    }  # fmt: skip


def job(train: Path, held: Path | None, **run: Any) -> Job:
    return prepare(check_recipe(tables(train, held, **run)))


def write(folder: Path, rows: list[Mapping[str, object]], name: str = "some.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder / name


# ---------------------------------------------------------------- rows and losses


def test_the_decoder_is_trained_on_the_transcript_and_its_end(files: tuple[Path, Path]) -> None:
    prepared = job(*files)
    data = prepared.trainer.data
    assert isinstance(data, SpokenRows)
    (row,) = data.draw(0, 0, 1)
    (shown,) = show_batch([row], prepared.tokenizer)
    text = row.text  # type: ignore[attr-defined]
    assert [one.token for one in shown.tokens] == ["<|startoftranscript|>", "<|notimestamps|>", *text.split()]
    trained = [one.target for one in shown.tokens if one.trained]
    assert trained == [*text.split(), "<|endoftext|>"]
    assert not shown.tokens[0].trained


def test_frames_are_those_that_transcribing_reads(files: tuple[Path, Path]) -> None:
    rows = job(*files).trainer.data
    first = json.loads(files[0].read_text("utf-8").splitlines()[0])
    expected = log_mel(padded(read_wav(files[0].parent / first["audio"]), 90), MELS)
    examples = list(rows.held_out_rows())
    assert np.array_equal(examples[0].frames.numpy(), expected)  # type: ignore[attr-defined]
    batch = collate(examples[:3])
    assert batch.source is not None
    assert batch.source[0].shape == (3 * 90, MELS)
    assert batch.source[1].lengths == (45, 45, 45)


def test_frames_that_are_not_kept_are_computed_again(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [one.frames for one in job(*files).trainer.data.draw(0, 0, 8)]  # type: ignore[attr-defined]
    monkeypatch.setattr("triptych.train.audio_records.MEMORY", 4 * 90 * MELS * 4)  # of four sounds
    data = job(*files).trainer.data
    assert isinstance(data, SpokenRows)
    assert sum(isinstance(one, SpokenExample) and isinstance(one.sound, torch.Tensor) for one in data.examples) == 4
    assert all(torch.equal(a, b.frames) for a, b in zip(kept, data.draw(0, 0, 8), strict=True))  # type: ignore[attr-defined]


@pytest.fixture
def whisper(directory: Path) -> Path:  # noqa: F811
    """The random model of `test_hearing`, with a tokenizer that knows several words in a text."""
    words = tokenizer()
    words.backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(directory)
    return directory


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_gradients_are_the_reference_s(whisper: Path, tmp_path: Path, accumulate: int) -> None:
    """Ragged transcripts, beside transformers' own loss of the same batch."""
    random = np.random.default_rng(0)
    rows: list[Mapping[str, object]] = []
    for i, words in enumerate(("w1", "w2 w3 w4", "w5 w6", "w1 w1 w7 w8 w9")):
        write_wav(tmp_path / f"{i}.wav", random.normal(0, 0.1, 3000 + 200 * i).astype(np.float32))
        rows.append({"audio": f"{i}.wav", "text": words})
    records = write(tmp_path, rows)
    recipe = tables(records, records, rows=4, length=16, steps=1, accumulate=accumulate)
    recipe["model"] = {"path": str(whisper)}
    recipe["objective"]["language"] = "de"
    del recipe["tokenizer"]
    prepared = prepare(check_recipe(recipe))
    module, examples = prepared.trainer.module, list(prepared.trainer.data.held_out_rows())
    ours = sum(loss(module, collate(examples[i::accumulate]))[0] for i in range(accumulate)) / 15
    ours.backward()
    wide = max(len(one.ids) for one in examples)
    ids = torch.full((4, wide), LETTERS)
    labels = torch.full((4, wide), -100)
    for i, one in enumerate(examples):
        ids[i, : len(one.ids)] = torch.from_numpy(one.ids.astype(np.int64))
        goal = torch.from_numpy(np.where(one.trained, one.targets, -100).astype(np.int64))
        labels[i, : len(goal)] = goal
    assert (labels >= 0).sum() == 15
    assert ids[0, :4].tolist() == [LETTERS + 1, LETTERS + 3, LETTERS + 6, FIRST - 1]  # start, de, transcribe, no times
    features = torch.stack([one.frames.T for one in examples])  # type: ignore[attr-defined]
    model = reference()
    model.zero_grad()
    result = model(input_features=features, decoder_input_ids=ids, labels=labels)
    result.loss.backward()
    assert float(ours.detach()) == pytest.approx(float(result.loss.detach()), rel=1e-5)
    expected = model.model.encoder.conv1.weight.grad
    found = module.encoder.embed.conv1.weight.grad  # type: ignore[union-attr]
    assert torch.allclose(found, expected, atol=1e-6, rtol=1e-3)
    assert float(expected.abs().max()) > 1e-4


def test_words_wrong_are_counted_by_the_fewest_changes() -> None:
    assert word_error_rate(["one two three"], ["one two three"]) == 0
    assert word_error_rate(["one three"], ["one two three"]) == pytest.approx(1 / 3)
    assert word_error_rate(["One, two!", "four"], ["one two", "five six"]) == pytest.approx(2 / 4)
    assert word_error_rate(["one one one"], ["two"]) == 3
    assert distance("kitten", "sitting") == 3
    with pytest.raises(InputError, match="needs transcripts with words"):
        word_error_rate(["one"], ["..."])


def test_the_evaluation_writes_the_held_out_transcripts(files: tuple[Path, Path]) -> None:
    prepared = job(*files)
    held = prepared.trainer.held_out
    assert isinstance(held, HeldSpeech)
    texts = [json.loads(line)["text"] for line in files[1].read_text("utf-8").splitlines()]
    score = evaluate(prepared.trainer.module, held)
    frames = [one.frames for batch in held.batches for one in batch.examples]  # type: ignore[attr-defined]
    written = held.speech.written(prepared.trainer.module, frames, held.most)
    words = [prepared.tokenizer.decode(ids) for ids in written]
    assert score.metrics == {"word error rate": word_error_rate(words, texts)}
    assert score.baselines == {"another transcript": word_error_rate([*texts[1:], *texts[:1]], texts)}
    assert score.tokens == sum(len(text.split()) + 1 for text in texts)


# ---------------------------------------------------------------- from records to a transcript


@pytest.mark.heavy
def test_a_trained_model_transcribes_with_its_own_settings(
    files: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    recipe = tables(*files, steps=240, out=str(tmp_path / "run"))
    recipe["data"]["path"] = str(many(tmp_path))
    trained = prepare(check_recipe(recipe))
    trained.run()
    score = trained.trainer.last_score()
    assert score.metrics["word error rate"] < 0.3 < score.baselines["another transcript"]
    one = json.loads(files[1].read_text("utf-8").splitlines()[0])
    sound = files[1].parent / one["audio"]
    assert main(["transcribe", str(tmp_path / "run" / "model"), str(sound), "--format", "text"]) == 0
    shown = capsys.readouterr().out.strip()
    model = triptych.load(tmp_path / "run" / "model")
    assert shown == model.transcribe(sound).text
    settings = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text("utf-8"))
    assert settings["return_timestamps"] is False
    with pytest.raises(InputError, match="the vocabulary of this model has no times; use timestamps=False"):
        model.transcribe(sound, timestamps=True)
    long = np.concatenate([read_wav(sound)] * 4)
    assert len(model.transcribe(long).segments) == -(-len(long) // round(WINDOW * RATE))  # window after window


def many(folder: Path) -> Path:
    recorder = DigitRecorder(words=(1, 3), pause=(0.02, 0.06), noise=(25.0, 40.0), seconds=WINDOW)
    return write_recordings(folder / "many", 600, 1, speakers=(8, 4), recorder=recorder, spoken=spoken(folder))[0]


def test_a_run_goes_on_as_if_it_had_not_stopped(files: tuple[Path, Path], tmp_path: Path) -> None:
    whole = job(*files, steps=4)
    whole.run()
    half = job(*files, steps=4, out=str(tmp_path / "run"))
    half.run(until=2)
    half_saved = triptych.train.Checkpoints(tmp_path / "run")
    half_saved.save(half.trainer, half.hf, half.tokenizer, half.recipe.model_dump(), half.files)
    resumed = resume(tmp_path / "run")
    resumed.run()
    assert "generation_config.json" in resumed.files
    for name, parameter in whole.trainer.module.named_parameters():
        assert torch.equal(parameter, resumed.trainer.module.get_parameter(name)), name


def test_the_start_token_is_whisper_s(files: tuple[Path, Path]) -> None:
    prepared = job(*files)
    tokens = WhisperTokens.of(prepared.tokenizer, {}, prepared.tokenizer.vocab_size)
    assert prepared.trainer.module.spec.ids.start == tokens.start
    assert tokens.first_time == prepared.tokenizer.vocab_size
    fresh = with_whisper_tokens(word_tokenizer(["one two"], 20, SPEECH))
    assert fresh.eos_id == WhisperTokens.of(fresh, {}, fresh.vocab_size).end


# ---------------------------------------------------------------- what cannot be used


def test_other_rates_and_channels_are_read(files: tuple[Path, Path], tmp_path: Path) -> None:
    t = np.arange(8000) / 44_100
    stereo = np.stack([0.3 * np.sin(2 * np.pi * 440 * t)] * 2, 1).astype(np.float32)
    (tmp_path / "stereo.wav").write_bytes(wav(stereo, 44_100))
    (tmp_path / "short.wav").write_bytes(wav(stereo[:40], 44_100))
    names = ("stereo.wav", "short.wav", str(tmp_path / "stereo.wav"))
    records = write(tmp_path, [{"audio": name, "text": "one"} for name in names])
    assert len(list(job(records, records).trainer.data.held_out_rows())) == 3


BAD: dict[str, tuple[dict[str, object], str]] = {
    "missing": ({"audio": "none.wav", "text": "one"}, r"some.jsonl, line 1: .*none.wav"),
    "no sound": ({"audio": "empty.wav", "text": "one"}, r"line 1: .*empty.wav: has no samples"),
    "text": ({"audio": "text.wav", "text": "one"}, r"line 1: .*text.wav: is not a WAV file"),
    "long": (
        {"audio": "long.wav", "text": "one"},
        r"line 1: long.wav: it lasts 2.00 s, and the model reads 0.9 s at once; .* data.drop_longer = true",
    ),
    "words": (
        {"audio": "good.wav", "text": "one " * 9},
        r"line 1: good.wav: its transcript has 11 tokens, more than run.length = 8",
    ),
    "no transcript": ({"audio": "good.wav", "text": " "}, "line 1: text is empty"),
    "a number": ({"audio": 3, "text": "one"}, "line 1: audio is 3, not a text"),
    "no column": ({"sound": "good.wav", "text": "one"}, "line 1: there is no field 'audio'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_one_line(name: str, tmp_path: Path) -> None:
    bad, message = BAD[name]
    good = 0.1 * np.sin(np.arange(8000) / 5)[:, None].astype(np.float32)
    (tmp_path / "good.wav").write_bytes(wav(good))
    (tmp_path / "long.wav").write_bytes(wav(np.tile(good, (4, 1))))
    (tmp_path / "empty.wav").write_bytes(wav(good[:0]))
    (tmp_path / "text.wav").write_text("no sound at all, but a text that is long enough to be a header")
    fine = {"audio": "good.wav", "text": "one two"}
    records, held = write(tmp_path, [bad, fine]), write(tmp_path, [fine], "held.jsonl")
    with pytest.raises((InputError, TextError), match=message) as error:
        job(records, held)
    assert "\n" not in str(error.value)
    if name in ("long", "words"):
        recipe = tables(records, held)
        recipe["data"]["drop_longer"] = True
        assert len(list(prepare(check_recipe(recipe)).trainer.data.held_out_rows())) == 1
        recipe["data"]["path"] = str(write(tmp_path, [bad], "bad.jsonl"))
        with pytest.raises(InputError, match=r"every training record is longer than the model's window or run.length"):
            prepare(check_recipe(recipe))


def test_settings_that_do_not_fit_are_one_line(files: tuple[Path, Path], whisper: Path) -> None:
    recipe = tables(*files)
    recipe["data"]["cut_longer"] = True
    with pytest.raises(ConfigError, match=r"data.cut_longer would cut a transcript and not its sound"):
        prepare(check_recipe(recipe))
    recipe = tables(*files)
    recipe["model"] = {"model_type": "t5", "d_model": 32, "d_ff": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1}
    with pytest.raises(ConfigError, match="a t5 model reads no sound; use one of model_type whisper"):
        prepare(check_recipe(recipe))
    recipe = tables(*files)
    recipe["objective"]["language"] = "en"
    with pytest.raises(ConfigError, match=r"objective.language: language='en' is not one of none: the model knows"):
        prepare(check_recipe(recipe))
    recipe = tables(*files)
    recipe["model"] = {"path": str(whisper)}
    del recipe["tokenizer"]
    with pytest.raises(ConfigError, match="this model knows 3 languages; say which one, such as en"):
        prepare(check_recipe(recipe))
    recipe["objective"] = {"name": "seq2seq", "language": "en"}
    with pytest.raises(ConfigError, match=r"objective.language is for transcripts"):
        prepare(check_recipe(recipe))
