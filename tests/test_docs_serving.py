"""docs/serving.md and deploy/: the table has the routes that there are, and the commands run as they are printed."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from cli_models import Captured, _decoder
from serving import running
from test_commands import commands_of
from triptych import create, load
from triptych.cli import main
from triptych.serve.app import Server
from triptych.serve.worker import ModelWorker

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")
SURFACE = (Path(__file__).with_name("cli_surface.txt")).read_text("utf-8").splitlines()
PORT = "127.0.0.1:8080"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that chats, with room for an answer of the usual length."""
    tokenizer, config = _decoder()
    path = tmp_path_factory.mktemp("served") / "model"
    create(config | {"max_position_embeddings": 2048, "vocab_size": tokenizer.vocab_size}, tokenizer).save(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Server:
    return Server({"model": ModelWorker(load(model), "model", max_rows=4)})


@pytest.fixture(scope="module")
def port(server: Server) -> Iterator[int]:
    with running(server) as one:
        yield one


def test_the_table_has_every_route(server: Server, port: int) -> None:
    served = {
        (method, route.path)  # type: ignore[attr-defined]
        for route in server.app().routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    told = {(method, path) for method, path in re.findall(r"`(GET|POST) (/[^`]*)`", PAGE.partition("## Routes")[2])}
    assert served == told
    assert ("POST", "/v1/completions") in served  # the control: the sets are not empty


def test_every_curl_is_answered(port: int) -> None:
    commands = [command for command in commands_of(PAGE) if command.startswith("curl ")]
    assert len(commands) >= 4
    for command in commands:
        command = command.replace(PORT, f"127.0.0.1:{port}")
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        answer = json.loads(subprocess.run(shlex.split(command), capture_output=True, check=True).stdout)
        assert answer.get("data") or answer["choices"][0], command
    wrong = commands[-1].replace(PORT, f"127.0.0.1:{port}").replace('"messages"', '"mesages"')
    assert "error" in json.loads(subprocess.run(shlex.split(wrong), capture_output=True, check=True).stdout)


def test_the_program_prints_an_answer(port: int, model: Path, capsys: Captured) -> None:
    pytest.importorskip("openai")
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert PORT in program
    program = program.replace(PORT, f"127.0.0.1:{port}").replace("max_tokens=32", "max_tokens=32, temperature=0")
    exec(program, {})
    turns = [{"role": "user", "content": "Hello"}]
    expected = "".join(load(model).chat(turns, max_new_tokens=32, temperature=0))
    assert capsys.readouterr().out == expected != ""


def test_the_client_and_the_batch_run(
    port: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(model)
    for name, text in re.findall(r'^```json title="([^"]+)"\n(.*?)^```', PAGE, re.M | re.S):
        (tmp_path / name).write_text(text, "utf-8")
    commands = [one for one in commands_of(PAGE) if one.startswith(("triptych chat", "triptych batch"))]
    assert len(commands) == 2
    for command in commands:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n"), encoding="utf-8"))
        assert main(shlex.split(command.replace(PORT, f"127.0.0.1:{port}"))[1:]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    assert [(one["custom_id"], one["response"]["status_code"]) for one in records] == [("a", 200), ("b", 200)]


def test_what_is_deployed_has_options_that_exist() -> None:
    for name in ("Dockerfile", "triptych.service"):
        text = (ROOT / "deploy" / name).read_text("utf-8")
        (line,) = re.findall(r"^(?:ENTRYPOINT|ExecStart=)(.*)", text, re.M)
        options = re.findall(r"--[a-z-]+", line)
        assert options
        assert [one for one in options if f"serve {one}" not in SURFACE] == []
