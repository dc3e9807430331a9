"""Sound to text: Whisper's rules, its windows and whole transcripts against the reference, on a tiny random model.

No trained Whisper is at hand, so nothing here says that real speech is understood.  What a window says is random; that
it obeys the rules, and which window comes next, is not.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

import references
import triptych
from cli_models import Captured, answered, said
from test_audio import tone, wav
from triptych.errors import InputError, TextError
from triptych.media.audio import log_mel
from triptych.model import Model
from triptych.tasks import WhisperDecoder, WhisperTokens
from triptych.tasks.transcribe import rules, segments, transcribe_frames
from triptych.text import Tokenizer

LETTERS = 30
SPECIAL = ["endoftext", "startoftranscript", "en", "de", "haw", "translate", "transcribe", "startofprev", "nospeech"]
TIMES = 14  # 0.00 to 0.26, a window of 13 positions
FIRST = LETTERS + len(SPECIAL) + 1
V = FIRST + TIMES
MELS, CONTEXT = 7, 13


def tokenizer() -> Tokenizer:
    names = [f"w{i}" for i in range(LETTERS)]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in [*SPECIAL, "notimestamps"]])
    backend.add_tokens([AddedToken(f"<|{0.02 * i:.2f}|>", special=False) for i in range(TIMES)])
    assert backend.get_vocab_size() == V
    return Tokenizer(backend)


TOLD = {
    "is_multilingual": True, "suppress_tokens": [3, 11], "begin_suppress_tokens": [5, LETTERS],
    "max_initial_timestamp_index": 4,
}  # fmt: skip


@cache
def reference() -> Any:
    """A random Whisper that says much: its norms are random, its weights wide."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(7)
    config = WhisperConfig(
        vocab_size=V, num_mel_bins=MELS, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
        decoder_attention_heads=3, encoder_ffn_dim=37, decoder_ffn_dim=39, max_source_positions=CONTEXT,
        max_target_positions=52, init_std=0.4, pad_token_id=LETTERS, bos_token_id=LETTERS, eos_token_id=LETTERS,
        decoder_start_token_id=LETTERS + 1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    told = model.generation_config
    for name, value in {**TOLD, "no_timestamps_token_id": FIRST - 1}.items():
        setattr(told, name, value)
    told.lang_to_id = {f"<|{name}|>": LETTERS + SPECIAL.index(name) for name in ("en", "de", "haw")}
    told.task_to_id = {name: LETTERS + SPECIAL.index(name) for name in ("translate", "transcribe")}
    told.prev_sot_token_id = LETTERS + SPECIAL.index("startofprev")
    told.eos_token_id = told.pad_token_id = LETTERS
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    reference().save_pretrained(path)
    tokenizer().save(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return triptych.load(directory)


def whisper(model: Model, **how: Any) -> WhisperDecoder:
    words = WhisperTokens.of(tokenizer(), TOLD, V)
    return WhisperDecoder(model.module, tokenizer(), words, **{"temperatures": (0.0,), **how})


def test_words_are_read_off_the_tokenizer() -> None:
    words = WhisperTokens.of(tokenizer(), TOLD, V)
    assert words.start == LETTERS + 1
    assert words.languages == {"en": LETTERS + 2, "de": LETTERS + 3, "haw": LETTERS + 4}
    assert words.first_time == FIRST
    assert words.no_speech == LETTERS + 8
    assert words.suppressed == (3, 11)
    assert WhisperTokens.of(tokenizer(), {"is_multilingual": False}, V).languages == {}
    with pytest.raises(TextError, match="not that of a Whisper"):
        WhisperTokens.of(Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="a"))), {}, V)
    with pytest.raises(TextError, match="suppress_tokens must be a list"):
        WhisperTokens.of(tokenizer(), {"suppress_tokens": "all"}, V)


# ---------------------------------------------------------------- rules and windows


def spoken(random: np.random.Generator) -> list[int]:
    """Ids in any order of words and times, the kinds in runs."""
    kinds = random.integers(0, 2, random.integers(0, 9))
    times = iter(np.sort(random.integers(0, TIMES, 9)))
    return [FIRST + int(next(times)) if kind else int(random.integers(0, LETTERS)) for kind in kinds]


@pytest.mark.parametrize("timed", [True, False])
def test_what_may_follow_is_the_reference_s(timed: bool) -> None:
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    random, begun = np.random.default_rng(0), 3
    words = replace(WhisperTokens.of(tokenizer(), TOLD, V), suppressed=(), suppressed_first=())
    theirs = WhisperTimeStampLogitsProcessor(reference().generation_config, begin_index=begun)
    forbidden = 0
    for _ in range(200):
        row = [31, 32, 36, *spoken(random)]
        scores = torch.from_numpy(random.normal(0, 3, (1, V)).astype(np.float32))
        found = rules(words, begun, timestamps=timed)(scores[0], row)
        if timed:
            assert torch.equal(found, theirs(torch.tensor([row]), scores)[0])
            forbidden += int(found.isinf().sum())
        else:
            assert found.isinf().nonzero().flatten().tolist() == list(range(FIRST - 1, V))
    assert not timed or forbidden > 2000


def test_suppressed_tokens_are_never_said() -> None:
    rule, scores = rules(WhisperTokens.of(tokenizer(), TOLD, V), 1, timestamps=False), torch.zeros(V)
    first, later = rule(scores, [31]), rule(scores, [31, 7])
    assert [i for i in range(FIRST - 1) if first[i].isinf()] == [3, 5, 11, LETTERS]
    assert [i for i in range(FIRST - 1) if later[i].isinf()] == [3, 11]


def test_sentences_and_the_next_window_are_the_reference_s() -> None:
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    random = np.random.default_rng(1)
    joined = 0
    for _ in range(300):
        ids, frames = [FIRST, *spoken(random), 4], int(random.integers(5, 14)) * 2
        theirs, moved = WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(ids), seek_outputs=[{"token_timestamps": None}], time_offset=[torch.tensor(0.0)],
            timestamp_begin=FIRST, seek_num_frames=[torch.tensor(frames)], time_precision=0.02,
            time_precision_features=0.01, input_stride=2, prev_idx=0, idx=0, return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )  # fmt: skip
        ours, step = segments(ids, frames, FIRST)
        assert step == int(moved)
        assert len(ours) == len(theirs)
        for (begin, end, piece), segment in zip(ours, theirs, strict=True):
            assert [begin * 0.02, end * 0.02] == pytest.approx([float(segment["start"]), float(segment["end"])])
            assert segment["tokens"].tolist()[: len(piece)] == piece
        joined += len(ours) > 1
    assert joined > 20


# ---------------------------------------------------------------- whole transcripts


@pytest.mark.parametrize(("language", "previous"), [("de", False), (None, False), ("de", True), (None, True)])
def test_a_long_recording_is_the_reference_s(model: Model, language: str | None, previous: bool) -> None:
    """Windows, seeks, times and words of 1.5 s heard 0.26 s at a time."""
    spoken, limit = 150, 20
    frames = torch.zeros(spoken + 2 * CONTEXT, MELS)
    frames[:spoken] = torch.randn(spoken, MELS, generator=torch.Generator().manual_seed(5)) * 3
    how = {} if language is None else {"language": language}
    theirs = reference().generate(
        frames[:spoken].T[None], attention_mask=torch.ones(1, spoken), return_timestamps=True, return_segments=True,
        task="transcribe", max_new_tokens=limit, num_beams=1, do_sample=False, temperature=0.0,
        condition_on_prev_tokens=previous, **how,
    )["segments"][0]  # fmt: skip
    listener = whisper(model, previous=previous)
    ours = transcribe_frames(listener, frames, spoken, language=language, limit=limit)
    assert (transcribe_frames(whisper(model), frames, spoken, language=language, limit=limit) == ours) is not previous
    expected = [
        (float(segment["start"]), float(segment["end"]), listener.text(segment["tokens"].tolist()))
        for segment in theirs
    ]
    assert [(s.start, s.end, s.text) for s in ours.segments] == [
        (pytest.approx(a), pytest.approx(b), text) for a, b, text in expected if text.strip()
    ]
    assert len({round(s.start / 0.26 % 1, 2) for s in ours.segments}) > 3  # windows begin anywhere
    assert language is None or ours.language == language


def test_frames_of_another_form_are_refused(model: Model) -> None:
    wrong = {"25 frames": (25, MELS), "0 frames": (0, MELS), r"\[T, 7\], not \[26, 8\]": (26, 8), "14 pos": (28, MELS)}
    for problem, shape in wrong.items():
        with pytest.raises(InputError, match=problem):
            model.logits([torch.zeros(shape)], [[31]])
    with pytest.raises(InputError, match="reads texts or token ids"):
        triptych.load(references.saved("gpt2")[1]).logits([torch.zeros(3)])


def test_rows_of_other_lengths_are_heard_alone(model: Model) -> None:
    """The reference takes whole windows only; ours of any length give in a batch what they give alone."""
    rows = [torch.randn(n, MELS) for n in (26, 8, 14)]
    together = model.logits(rows, [[31, 32, 36]] * 3)
    for row, found in zip(rows, together, strict=True):
        (alone,) = model.logits([row], [[31, 32, 36]])
        assert (found - alone).abs().max() < 1e-4
    trace = model.trace(rows, [[31]] * 3, read=["encoder.embed"])
    assert [len(x) for x in trace["encoder.embed"]] == [13, 4, 7]


def test_generate_writes_from_frames(model: Model) -> None:
    row = torch.randn(26, MELS)
    (found,) = model.generate([row], max_new_tokens=5)
    expected = reference()
    ids = [LETTERS + 1]
    with torch.no_grad():
        for _ in range(5):
            scores = expected(input_features=row.T[None], decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(scores.argmax()))
            if ids[-1] == LETTERS:
                break
    assert found.ids == ids[1:]


# ---------------------------------------------------------------- from a file


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "a.wav"
    sound = tone(440, 44_100, 1.0) * np.linspace(0, 1, 44_100, dtype=np.float32)
    path.write_bytes(wav(np.stack((sound, sound), 1), rate=44_100))
    return path


def test_a_file_is_what_its_samples_are(model: Model, recording: Path) -> None:
    from triptych.media.audio import read_wav

    once: dict[str, Any] = {"language": "en", "temperatures": (0.0,)}
    found = model.transcribe(recording, **once)
    assert found == model.transcribe(read_wav(recording), **once)
    assert found.language == "en"
    assert found.segments
    assert all(0 <= s.start <= s.end <= 1.3 for s in found.segments)
    assert found.text == "".join(s.text for s in found.segments).strip()
    assert model.transcribe(recording, timestamps=False, **once) != found
    with pytest.raises(InputError, match=r"language='dee' is not one of de, en, haw \(did you mean 'de'\?\)"):
        model.transcribe(recording, language="dee")
    with pytest.raises(InputError, match="task='sing' is not one of"):
        model.transcribe(recording, task="sing")
    with pytest.raises(InputError, match="use transcribe"):
        model.logits([recording], [[31]])


def test_the_last_window_of_a_long_recording_is_padded_as_features(model: Model) -> None:
    """As in the reference: zeros after the features of the sound, which are not the features of silence."""
    sound = np.concatenate([tone(f, 16_000, 0.21) for f in (300, 500, 800)])[: 16_000 * 6 // 10]
    frames = torch.from_numpy(log_mel(sound, MELS))
    assert len(frames) == 60 > 2 * model.inputs.spec.reads.embed.position.length
    theirs = reference().generate(
        frames.T[None], attention_mask=torch.ones(1, len(frames)), return_timestamps=True, return_segments=True,
        task="transcribe", language="de", num_beams=1, do_sample=False, temperature=0.0,
        condition_on_prev_tokens=False,
    )["segments"][0]  # fmt: skip
    found = model.transcribe(sound, language="de", temperatures=(0.0,))
    kept = [s["tokens"].tolist() for s in theirs]
    words = [[token for token in ids if token < FIRST - 1] for ids in kept]
    assert [[t for t in s.ids if t < FIRST - 1] for s in found.segments] == [ids for ids in words if ids]
    silent = torch.from_numpy(log_mel(np.pad(sound, (0, 26 * 160)), MELS))
    other = transcribe_frames(whisper(model), silent, len(frames), language="de")
    assert [s.ids for s in other.segments] != [s.ids for s in found.segments]  # as it was


def test_what_is_poor_is_written_again(model: Model) -> None:
    """A random model is unlikely at once: the last temperature is taken, or nothing where silence is likely."""
    listener = whisper(model, temperatures=(0.0, 0.7))
    frames = torch.randn(26, MELS, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cross = listener.encode_window(frames)
        prompt = listener.prompt("en")
        plain, likelihood = listener._write(cross, prompt, 0.0, 9)
        assert (likelihood < -1.0) == (listener.write(cross, prompt, 9)[0] != plain)
        surest = int(listener.first_scores(cross).argmax())
        silence = float(listener.first_scores(cross).softmax(-1)[surest])
        quiet = replace(listener, tokens=replace(listener.tokens, no_speech=surest))
        assert (quiet.write(cross, prompt, 9)[0] == []) == (likelihood < -1.0 and silence > 0.6)


@pytest.mark.heavy
def test_transcribe_says_what_the_library_says(
    directory: Path, recording: Path, model: Model, capsys: Captured, tmp_path: Path
) -> None:
    from triptych.cli import main

    (tmp_path / "model").mkdir()
    for file in directory.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    argv = ["transcribe", str(tmp_path / "model"), str(recording), "--language", "de"]
    expected = model.transcribe(recording, language="de")
    found = answered([*argv], capsys)
    assert found["language"] == "de"
    assert found["seconds"] == 1.0
    assert [(s["start"], s["end"], s["text"]) for s in found["segments"]] == [
        (s.start, s.end, s.text.strip()) for s in expected.segments
    ]
    first = expected.segments[0]
    begin, end, text = (*(f"{1000 * t:03.0f}" for t in (first.start, first.end)), first.text.strip())
    shown = {
        "times": f"[00:00.{begin} -> 00:00.{end}]  {text}\n",
        "text": f"{text}\n",
        "srt": f"1\n00:00:00,{begin} --> 00:00:00,{end}\n{text}\n\n",
        "vtt": f"WEBVTT\n\n00:00:00.{begin} --> 00:00:00.{end}\n{text}\n\n",
    }
    for form, begins in shown.items():
        assert said([*argv, "--format", form], capsys)[0].startswith(begins), form
    twice = said([*argv[:2], str(recording), str(recording), "--language", "de"], capsys)[0].split(f"{recording}:\n")
    assert twice[0] == ""
    assert twice[1] == twice[2]
    assert twice[1].startswith(shown["times"])
    several = answered([*argv[:2], str(recording), str(recording), "--language", "de"], capsys)["results"]
    assert several == [{"file": str(recording), **found}] * 2
    records, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    files = {"a": str(recording), "none": str(tmp_path / "none.wav"), "b": str(recording)}
    records.write_text("".join(json.dumps({"id": one, "file": file}) + "\n" for one, file in files.items()))
    answered([*argv[:2], "--language", "de", "--records", str(records), "--out", str(out)], capsys)
    first_record, missing, last = (json.loads(line) for line in out.read_text("utf-8").strip().split("\n"))
    assert (first_record, last) == ({"id": "a", **found}, {"id": "b", **found})
    assert "none.wav" in missing["error"]
    assert main([*argv[:2], str(recording), str(recording), "--format", "srt"]) == 2
    assert "srt describes one file" in capsys.readouterr().err
    recording.with_name("b.wav").write_bytes(recording.read_bytes()[:-9])
    error = said([*argv[:2], str(recording.with_name("b.wav"))], capsys, 1)[1]
    assert error.startswith("error: ")
    assert "cut short" in error
    assert error.count("\n") == 1


def test_what_needs_words_is_refused(model: Model) -> None:
    from triptych.explain.forward_steps import checked
    from triptych.page.inspect import inspect_text

    with pytest.raises(InputError, match="whisper model reads sound"):
        inspect_text(model, "hello")
    with pytest.raises(InputError, match="whisper model reads sound"):
        checked(model, "hello", 0, 0)
