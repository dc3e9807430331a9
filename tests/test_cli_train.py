"""train and quickstart as a user types them."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cli_models import Captured, answered, checkpoint, said
from test_page import Reader
from triptych import quickstart
from triptych.cli import screen, training_progress
from triptych.cli.training_progress import TrainingProgress, summary
from triptych.errors import InputError, TextError
from triptych.model import load
from triptych.page import Sample
from triptych.quickstart import write_page
from triptych.quickstart.panels import PANELS, HeldOutResult
from triptych.train import Checkpoints, Event, ShownRow, ShownToken, read_recipe
from triptych.train.recipe import DataSettings

RECIPE = """
tokenizer = "byte"
[model]
model_type = "llama"
hidden_size = 16
intermediate_size = 28
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 40
[data]
path = "{text}"
held_out = 0.3
[objective]
name = "causal"
[run]
steps = 6
rows = 3
length = 20
"""


@pytest.fixture
def recipe(text: Path, tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(text=text), encoding="utf-8")
    return str(path)


def test_a_run_its_checkpoint_and_its_resumption(recipe: str, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "run"
    found = answered(["train", recipe, "--out", str(out), "--set", "run.steps=4"], capsys)
    assert (found["steps"], found["out"]) == (4, str(out))
    assert found["held_out"]["nats_per_token"] > 0
    checkpoint = next(path for path in sorted(out.rglob("config.json")))
    assert load(checkpoint.parent).spec.family == "llama"
    again = answered(["train", recipe, "--out", str(out), "--resume", "--set", "run.steps=6"], capsys)
    assert again["steps"] == 6


def test_progress_and_samples_are_notes(recipe: str, capsys: Captured) -> None:
    out, err = said(["train", recipe, "--set", "run.steps=20"], capsys)
    assert out.startswith("held out: ")
    assert "tokens/s" in err
    assert "step 20" in err
    assert len(err.splitlines()) < 60


def test_show_batch(recipe: str, capsys: Captured) -> None:
    rows = answered(["train", recipe, "--show-batch"], capsys)["rows"]
    assert len(rows) >= 3
    tokens = rows[0]["tokens"]
    assert [one["target"] for one in tokens[:-1]] == [one["token"] for one in tokens[1:]]
    out, _ = said(["train", recipe, "--show-batch"], capsys)
    assert "row 1 of" in out
    assert "target" in out


def test_verify_resume(recipe: str, capsys: Captured) -> None:
    assert answered(["train", recipe, "--verify-resume", "4"], capsys) == {"steps": 4, "equal": True}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere.toml"], "no recipe nowhere.toml"),
        ([""], "'.' is a directory; give a .toml file"),
        (["/"], "'/' is a directory; give a .toml file"),
        (["{r}", "--set", "run.step=3"], "did you mean 'steps'?"),
        (["{r}", "--set", "run"], "section.key=value"),
        (["{r}", "--set", "data.path=/nowhere/text"], "/nowhere/text"),
        (["{r}", "--resume"], "--out DIR"),
        (["{r}", "--resume", "--out", "/nowhere/run"], "/nowhere/run"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_recipes_that_cannot_be_run(argv: list[str], says: str, recipe: str, capsys: Captured) -> None:
    out, err = said(["train", *(part.replace("{r}", recipe) for part in argv)], capsys, code=1)
    assert not out
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert err.splitlines()[-1:] == errors
    assert says in errors[0]
    assert "unexpected" not in errors[0]


# ---------------------------------------------------------------- the live line


def event(step: int, progress: float, **more: Any) -> Event:
    return Event(step, 2.5, 12_345.6, 61.0, progress, 1.0, 0.5, **more)


def test_the_line() -> None:
    assert summary(event(1200, 0.5)) == "step 1,200  loss 2.500  12,346 tokens/s  1:01 left"


def test_without_a_terminal_a_run_reports_ten_times(capsys: Captured) -> None:
    with TrainingProgress() as bar:
        for step in range(1, 1001):
            bar.step(event(step, step / 1000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("step 1,000")


def test_samples_keep_to_text(capsys: Captured) -> None:
    with TrainingProgress() as bar:
        bar.sample("step 3", "a\x1b[31mb")
    assert "a\N{REPLACEMENT CHARACTER}[31mb" in capsys.readouterr().err


def test_quickstart_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured) -> None:
    options_of_run: dict[str, Any] = {}

    held_out = HeldOutResult("nats", 1.55, "uniform", 4.2, "1.55 nats a character")
    result = quickstart.Result("encoder", tmp_path / "model", tmp_path / "report.html", 7, 1.0, held_out, [])

    def run(**options: Any) -> quickstart.Result:
        options_of_run.update(options)
        options["watch"].say("reading")
        return result

    monkeypatch.setattr(quickstart, "run", run)
    argv = ["quickstart", "--panel", "encoder", "--data", str(tmp_path), "--seconds", "3", "--out", "here", "--resume"]
    out, err = said(argv, capsys)
    assert {name: options_of_run[name] for name in ("panel", "data", "seconds", "out", "resume", "force")} == {
        "panel": "encoder", "data": tmp_path, "seconds": 3.0, "out": Path("here"), "resume": True, "force": False,
    }  # fmt: skip
    said([*argv[:-1], "--force"], capsys)
    assert (options_of_run["resume"], options_of_run["force"]) == (False, True)
    assert "7 steps in 1 s. 1.55 nats a character" in out
    assert "report.html" in out
    assert "reading" in err
    assert answered(argv, capsys) == result.to_dict()


# ---------------------------------------------------------------- a directory that holds a run

FILES = ("report.html", "loss.png", "model/config.json", "samples.json", "checkpoints/step-00000007/config.json")


def finished(out: Path) -> Path:
    """A directory with the files of a finished quickstart, by name only."""
    for name in FILES:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")
    return out


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture
def small_panel(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart trains the recipe of these tests."""
    monkeypatch.setattr(
        quickstart, "read_recipe", lambda _, values: read_recipe(recipe, ["run.sample_every=0"], values)
    )


class Stop(quickstart.Silent):
    """Ctrl-C after the first step, twice: nothing more is saved."""

    def step(self, event: Event) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("panel", "heading"),
    [
        ("decoder", "Generated text"),
        ("encoder", "Predictions for masked words"),
        ("encoder-decoder", "Passages in modern spelling"),
    ],
)
def test_the_page_of_a_run_names_what_its_model_gives(
    panel: str, heading: str, tmp_path: Path, unchecked: None
) -> None:
    at = SimpleNamespace(step=1, tokens=2, elapsed=3.0, history=[SimpleNamespace(step=1, loss=2.0, held_out=2.5)])
    job = SimpleNamespace(
        trainer=SimpleNamespace(at=at),
        recipe=SimpleNamespace(tokenizer="byte", data=SimpleNamespace(path="shakespeare")),
    )
    held_out = HeldOutResult("measure", 1.0, "baseline", 2.0, "1 against 2")
    model = load(checkpoint(panel))
    write_page(tmp_path, PANELS[panel], job, model, [Sample(None, "label", "text")], held_out)  # type: ignore[arg-type]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert heading in page
    assert "What it writes" not in page
    live = next(one for one in Reader(page).sections() if one["kind"] == "live")
    assert live["text"] == PANELS[panel].text
    assert live["weights"]


def test_a_quickstart_that_cannot_start_deletes_nothing(tmp_path: Path) -> None:
    out = finished(tmp_path / "run")
    with pytest.raises(TextError, match="no file or folder"):
        quickstart.run(data=tmp_path / "none.txt", out=out, force=True)
    assert files(out) == set(FILES)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        (FILES, "holds a finished run; continue it with --resume"),
        (FILES[2:], "holds a run that was stopped; continue it with --resume"),
        (FILES[2:3], "holds model, which a run would replace; "),
    ],
)
def test_a_quickstart_keeps_a_run(left: tuple[str, ...], says: str, tmp_path: Path, small_panel: None) -> None:
    out = finished(tmp_path / "run")
    for name in set(FILES) - set(left):
        (out / name).unlink()
    for empty in ("checkpoints/step-00000007", "checkpoints"):
        if not any((out / empty).iterdir()):
            (out / empty).rmdir()
    with pytest.raises(InputError, match=says) as error:
        quickstart.run(out=out)
    assert "\n" not in str(error.value)
    assert "--force" in str(error.value)
    assert files(out) == set(left)


def test_a_quickstart_that_is_stopped_has_no_file_of_the_run_before(tmp_path: Path, small_panel: None) -> None:
    out = finished(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        quickstart.run(out=out, force=True, watch=Stop())
    assert {name.split("/")[0] for name in files(out)} == {"checkpoints"}
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000000"]


def test_a_finished_quickstart_that_goes_on_has_no_page(tmp_path: Path, small_panel: None) -> None:
    """Its model and page are older than its checkpoints until it has finished again."""
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        quickstart.run(out=out, watch=Stop())
    for name in FILES[:4]:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("[]")
    with pytest.raises(KeyboardInterrupt):
        quickstart.run(out=out, resume=True, watch=Stop())
    assert {name.split("/")[0] for name in files(out)} == {"checkpoints", "samples.json"}


def test_a_second_run_needs_force(recipe: str, tmp_path: Path, capsys: Captured) -> None:
    argv = ["train", recipe, "--out", str(tmp_path / "run")]
    said(argv, capsys)
    before = files(tmp_path / "run")
    _, err = said([*argv, "--set", "run.steps=3"], capsys, code=1)
    assert err.splitlines()[-1].endswith("--resume, delete it and start over with --force, or give another --out")
    assert files(tmp_path / "run") == before
    said([*argv, "--set", "run.steps=3", "--force"], capsys)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000002", "step-00000003"]
    for refused in (["quickstart", "--out", str(tmp_path / "run"), "--force"],):
        assert "holds a run of `triptych train`" in said(refused, capsys, code=1)[1]


def test_train_keeps_the_run_of_a_quickstart(recipe: str, tmp_path: Path, capsys: Captured) -> None:
    out = finished(tmp_path / "run")
    _, err = said(["train", recipe, "--out", str(out), "--force"], capsys, code=1)
    assert "holds a run of `triptych quickstart`; give another --out" in err
    assert files(out) == set(FILES)


def test_starting_over_deletes_before_it_writes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    argv = ["train", recipe, "--out", str(tmp_path / "run"), "--force"]
    said(argv, capsys)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "write", stop)
    said(argv, capsys, code=130)
    assert files(tmp_path / "run") == set()


@pytest.mark.parametrize("command", ["train decoder", "quickstart"])
def test_resuming_and_starting_over_exclude_each_other(command: str, capsys: Captured) -> None:
    _, err = said([*command.split(), "--resume", "--force"], capsys, code=2)
    assert "--resume continues the run that --force deletes" in " ".join(err.split())


def test_samples_of_ones_own_text_begin_with_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the old mill stands where the river bends\n" * 40)
    mine = DataSettings(path=str(tmp_path / "notes.txt"))
    assert PANELS["decoder"].prompts_for(mine) == ("the old mill stands",)
    assert PANELS["decoder"].text_for(mine) == "the old mill stands"
    gaps = PANELS["encoder"].prompts_for(mine)
    assert set(gaps) == {"the old mill stands [MASK] the river bends"}
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("source,target\n" + "".join(f"old {i},new {i}\n" for i in range(40)))
    assert PANELS["encoder-decoder"].prompts_for(DataSettings(path=str(pairs))) == ("old 38", "old 39")
    plays = DataSettings(path="shakespeare")
    assert "KING HENRY" in PANELS["decoder"].prompts_for(plays)[0]
    assert PANELS["encoder"].text_for(plays) in PANELS["encoder"].prompts_for(plays)


# ---------------------------------------------------------------- the batch that --show-batch shows


CAUSAL = ShownRow((ShownToken("a", "b", False), ShownToken("b", "␣c", True), ShownToken("␣c", "⏎", True)))
MASKED = ShownRow(
    (ShownToken("[CLS]", "[CLS]", False), ShownToken("[MASK]", "mill", True), ShownToken("##s", "##s", True)),
    shifted=False,
)
PAIR = ShownRow((ShownToken("<pad>", "x", True), ShownToken("x", "</s>", True)), ("s", "o"))


def test_each_token_has_its_state() -> None:
    assert CAUSAL.text == [("a", "read"), ("b", "read"), ("␣c", "trained"), ("⏎", "trained")]
    assert MASKED.text == [("[CLS]", "read"), ("mill", "hidden"), ("##s", "trained")]
    assert PAIR.text == [("<pad>", "read"), ("x", "trained"), ("</s>", "trained")]


def terminal(monkeypatch: pytest.MonkeyPatch, rows: list[ShownRow]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80, highlight=False)
    monkeypatch.setattr(screen, "console", lambda **_: console)
    training_progress.show_batch(rows)
    return out.getvalue()


def test_a_terminal_shows_the_text_in_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, [CAUSAL, MASKED, PAIR])
    assert "trained: in the loss" in shown
    assert "\x1b[1;32m c\x1b[0m" in shown  # a trained token, with its space
    assert "\x1b[2mb\x1b[0m" in shown  # one that is only read
    assert "\x1b[7;35mmill\x1b[0m" in shown  # the hidden word, not its mask
    assert "[MASK]" not in shown
    assert "\x1b[2ms\x1b[0m" in shown  # the source
    control = terminal(monkeypatch, [ShownRow((ShownToken("a", "b", False),))])
    assert "\x1b[1;32mb" not in control


def test_control_characters_of_a_token_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, [ShownRow((ShownToken("a", "\x1b]0;x\x07", True),))])
    assert "\x1b]0;" not in shown


@pytest.mark.parametrize(
    ("layout", "objective", "states"),
    [("decoder", "causal", {"read", "trained"}), ("encoder", "masked", {"read", "trained", "hidden"})],
)
def test_a_pipe_gets_plain_text_and_json_the_states(
    layout: str, objective: str, states: set[str], tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "text.txt").write_text("the old mill stands where the river bends\n" * 40)
    recipe = tmp_path / "x.toml"
    rate = "rate = 0.5\n" if objective == "masked" else ""
    recipe.write_text(
        f'[model]\npath = "{checkpoint(layout)}"\n[data]\npath = "{tmp_path}/text.txt"\n'
        f'[objective]\nname = "{objective}"\n{rate}[run]\nrows = 12\nlength = 24\nsteps = 1\n'
    )
    out = said(["train", str(recipe), "--show-batch"], capsys)[0]
    assert "\x1b" not in out
    assert "row 1 of 12" in out
    rows = answered(["train", str(recipe), "--show-batch"], capsys)["rows"]
    assert {token["state"] for row in rows for token in row["text"]} <= states
    assert {token["state"] for row in rows for token in row["text"]} >= states - {
        "trained" if "hidden" in states else ""
    }
