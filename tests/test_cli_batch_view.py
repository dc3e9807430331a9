"""`train --show-batch`: the state of each token, in colours on a terminal, as plain text and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cli_models import checkpoint
from triptych.cli import batch_view, main, screen
from triptych.train import ShownRow, ShownToken

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
    batch_view.show(rows)
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
    layout: str, objective: str, states: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the old mill stands where the river bends\n" * 40)
    recipe = tmp_path / "x.toml"
    rate = "rate = 0.5\n" if objective == "masked" else ""
    recipe.write_text(
        f'[model]\npath = "{checkpoint(layout)}"\n[data]\npath = "{tmp_path}/text.txt"\n'
        f'[objective]\nname = "{objective}"\n{rate}[run]\nrows = 12\nlength = 24\nsteps = 1\n'
    )
    assert main(["train", str(recipe), "--show-batch"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "row 1 of 12" in out
    assert main(["train", str(recipe), "--show-batch", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {token["state"] for row in rows for token in row["text"]} <= states
    assert {token["state"] for row in rows for token in row["text"]} >= states - {
        "trained" if "hidden" in states else ""
    }
