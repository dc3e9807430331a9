"""Misuses of the public API: each is refused in one line of a TriptychError, and none is accepted in silence."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

import cli_models
import tiny
import triptych
from hub_encoders import HUB
from triptych import generate, measure, page, probe, quickstart, shards, text
from triptych.check import check
from triptych.checkpoints.convert import convert
from triptych.count import ClusterRates, count, plan, predict
from triptych.draw import draw
from triptych.errors import InputError, TriptychError
from triptych.evaluate import perplexity
from triptych.explain import explain, worked
from triptych.generate import Engine, LiveRow, Request, forbid
from triptych.media import audio, image
from triptych.model import Model, create, load
from triptych.page.live import live_page
from triptych.quantize import quantize
from triptych.text import SPEECH, with_whisper_tokens, word_tokenizer
from triptych_lectures import exercises, labs
from triptych_lectures.data import digit_recordings, scenes
from triptych_lectures.labs.lab import Setup

pytestmark = pytest.mark.usefixtures("unchecked")
LINES = Path(__file__).with_name("misuses.txt").read_text(encoding="utf-8").splitlines()
RIGHT = [line.removeprefix("right: ") for line in LINES if line.startswith("right: ")]
MISUSES = [line.partition("  ## ")[::2] for line in LINES if line and not line.startswith(("#", "right: "))]
#: Calls with the wrong number of arguments, of which Python itself says so.
WRONG_NUMBER = (
    "m.generate(['a'], 5)", "m.generate()", "m.steer()", "Read()", "Edit('embed')", "attend(q4, q4)",
    "triptych.window()", "triptych.causal(5)", "m.steer('a', 'b')", "triptych.train(m, ['texts'])", "m.eval(5)",
    "triptych.train()", "create(LlamaConfig=1, config=llama)",
)  # fmt: skip

#: Models that cannot be run as they are, by the layout of each.
BROKEN = {"nan_model": "decoder", "nan_encoder": "encoder", "meta_model": "decoder", "mixed_model": "decoder"}


def busy(model: Model) -> Engine:
    """An engine in the middle of another text."""
    engine = model.engine()
    pieces = model.stream("a", max_new_tokens=60, engine=engine)
    next(pieces)
    BUSY.append(pieces)
    return engine


BUSY: list[Any] = []


def freed(engine: Engine) -> LiveRow:
    """A row that has left the engine."""
    (row,) = engine.add(Request(prompt=[1, 2]))
    engine.free([row])
    return row


def in_thread(call: Callable[[], object]) -> object:
    """What a call gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def names(folder: Path) -> dict[str, Any]:
    """What the lines of misuses.txt speak of: models of each layout, with tokenizers, and values of odd kinds."""
    words = word_tokenizer(cli_models.WORDS, 90)
    bert = {**cli_models.BERT, "vocab_size": words.vocab_size, "pad_token_id": words.pad_id}
    heads = {"c": "SequenceClassification", "t": "TokenClassification", "q": "QuestionAnswering"}
    labelled = {name: create({**bert, "architectures": [f"BertFor{head}"]}, words) for name, head in heads.items()}
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("the old mill stands where the river bends\n")
    both = load(cli_models.checkpoint("encoder-decoder"))
    broken = {name: load(cli_models.checkpoint(layout)) for name, layout in BROKEN.items()}
    with torch.no_grad():
        for name in ("nan_model", "nan_encoder"):
            broken[name].module.get_parameter(f"{broken[name].spec.layout}.blocks.0.attn.q.weight").fill_(math.nan)
    broken["meta_model"].module.to("meta")
    broken["mixed_model"].module.get_submodule("decoder.blocks.0").half()
    copytree(cli_models.checkpoint("decoder"), folder / "copied")
    sounds = with_whisper_tokens(word_tokenizer(["zero one two"], 64, SPEECH))
    with warnings.catch_warnings(action="ignore"):  # torch is about to remove such tensors
        quantized = torch.quantize_per_tensor(torch.ones(1, 3), 1.0, 0, torch.quint8)
    return {
        **vars(triptych), **{name: getattr(triptych, name) for name in triptych.__all__},
        "triptych": triptych, "probe": probe, "torch": torch, "np": np, "Path": Path, "nan": math.nan, "inf": math.inf,
        "m": load(cli_models.checkpoint("decoder")), "e": load(cli_models.checkpoint("encoder")), "b": both,
        "x": Model(tiny.decoder()), "w": create({**HUB["openai/whisper-tiny"], "vocab_size": 300}, sounds),
        "v": create(HUB["google/vit-base-patch16-224-in21k"]), **labelled,
        "tok": load(cli_models.checkpoint("decoder")).tokenizer, "files": cli_models.checkpoint("decoder"),
        "out": folder, "notes": folder / "notes", "llama": {**cli_models.LLAMA, "vocab_size": 40},
        **broken, "copied": folder / "copied",
        "q4": torch.ones(1, 2, 4, 8), "quantized": quantized, "busy": busy, "convert": convert, "forbid": forbid,
        "count": count, "draw": draw, "predict": predict, "plan": plan, "ClusterRates": ClusterRates,
        "live_page": live_page, "explain": explain, "worked": worked,
        "labs": labs, "Setup": Setup, "exercises": exercises, "audio": audio, "quantize": quantize, "image": image,
        "bench": measure.bench, "page": page, "text": text, "scenes": scenes, "digit_recordings": digit_recordings,
        "quickstart": quickstart.run, "in_thread": in_thread, "perplexity": perplexity,
        "shards": shards,
        "generate": generate, "check": check, "freed": freed(load(cli_models.checkpoint("decoder")).engine()),
    }  # fmt: skip


def problem(code: str, values: dict[str, Any], hint: str = "") -> str:
    """What is wrong with how a misuse is answered; empty where it is answered well."""
    try:
        result = eval(code, dict(values))
    except TriptychError as error:
        line = str(error)
        return "" if line and "\n" not in line and len(line) < 500 and hint in line else f"message: {line!r}"
    except TypeError as error:
        counted = "positional argument" in str(error) or "missing" in str(error)
        return "" if counted and code.replace('"', "'") in WRONG_NUMBER else f"TypeError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"accepted: {result!r:.60}"


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    yield names(tmp_path_factory.mktemp("misuse"))
    for pieces in BUSY:
        pieces.close()


def test_there_are_misuses_of_everything_public(values: dict[str, Any]) -> None:
    """The list has 300 and more, none twice, and at least one of each public function and method."""
    lines = [code for code, _ in MISUSES]
    assert len(lines) == len(set(lines)) > 900
    functions = {name for name in triptych.__all__ if callable(getattr(triptych, name)) and not name.endswith("Error")}
    results = {"Generation", "Trace", "Mask"}  # classes that are not made by their constructor
    for name in functions - results:
        assert any(f"{name}(" in line for line in lines), name
    without_arguments = {"draw", "parameters", "eval", "check_words", "trained", "note_on_vectors"}
    for name in {name for name in vars(type(values["m"])) if not name.startswith("_")} - without_arguments:
        if callable(getattr(values["m"], name, None)):
            assert any(f".{name}(" in line for line in lines), name


def test_each_misuse_is_refused_in_one_line(values: dict[str, Any]) -> None:
    wrong = {code: answer for code, hint in MISUSES if (answer := problem(code, values, hint))}
    assert not wrong, "\n".join(f"{code}: {answer}" for code, answer in wrong.items())


def test_an_engine_streams_one_text_at_a_time(values: dict[str, Any]) -> None:
    """Of several that begin together, in one thread or in several, the first is whole and the others are refused."""
    model = values["m"]
    expected = "".join(model.stream("ab", max_new_tokens=20))
    engine = model.engine()
    first, second = (model.stream(text, max_new_tokens=20, engine=engine) for text in ("ab", "xy"))
    begun = next(first)
    with pytest.raises(InputError, match="runs another text"):
        next(second)
    assert begun + "".join(first) == expected
    assert "".join(model.stream("ab", max_new_tokens=20, engine=engine)) == expected
    streams = [model.stream("ab", max_new_tokens=20, engine=engine) for _ in range(4)]
    with ThreadPoolExecutor(len(streams)) as pool:
        results = [pool.submit("".join, stream) for stream in streams]
    texts = [result.result() for result in results if not isinstance(result.exception(), InputError)]
    assert expected in texts
    assert set(texts) == {expected}


def test_a_row_named_twice_has_its_logits_twice_and_one_of_another_engine_is_refused(values: dict[str, Any]) -> None:
    first, second = (Engine(values["m"].module) for _ in range(2))
    (row,), (other,) = (engine.add(Request(prompt=[5, 6], max_new_tokens=4)) for engine in (first, second))
    assert torch.equal(*first.logits(rows=[row, row]))
    with pytest.raises(InputError, match="rows that run in this engine"):
        first.free([other])
    assert first.add(Request(prompt=[7]))[0].slot != row.slot
    row.ids.append(10**6)
    with pytest.raises(InputError, match="vocabulary"):
        first.step()


def test_memory_that_torch_does_not_get_is_named_in_one_line(values: dict[str, Any]) -> None:
    def metric(logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes\nlines of C++")

    assert problem("m.patch('ab', 'ac', metric=metric)", {**values, "metric": metric}, "not enough memory") == ""


def test_gradients_are_read_in_inference_mode_too(values: dict[str, Any]) -> None:
    with torch.inference_mode():
        trace = values["m"].trace(["ab"], read="embed", grad=True)
    trace.logits[0].sum().backward()
    assert trace["embed"][0].grad is not None


@pytest.mark.parametrize("code", RIGHT)
def test_what_is_right_is_not_refused(values: dict[str, Any], code: str) -> None:
    """The control of the list: the same calls with values that are usable, in each form that is."""
    eval(code, dict(values))


def test_files_with_checked_functions_keep_annotations_as_text() -> None:
    """`checked` reads annotations as they are written, so their file needs the future import."""
    decorated = re.compile(r"^ *@(arguments\.)?checked(_methods)?$", re.MULTILINE)
    files = [path.read_text("utf-8") for path in Path(triptych.__file__).parents[1].rglob("*.py")]
    wanted = [text for text in files if decorated.search(text)]
    assert len(wanted) > 20
    assert all("from __future__ import annotations" in text for text in wanted)
