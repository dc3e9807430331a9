"""`hub:` against a stand-in of the hub on the loopback; nothing here leaves the machine."""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import pytest

import malformed
import triptych
from triptych.checkpoints import fetch, local_path, open_source
from triptych.checkpoints.hub import choose
from triptych.checkpoints.locate import HubName, parse_name
from triptych.errors import CheckpointError, FetchError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": malformed.safetensors(),
    "tokenizer.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"\x80\x04.",
    "onnx/model.onnx": b"onnx",
    "modeling_custom.py": b"raise SystemExit",
    "README.md": b"# m",
    "q4.gguf": malformed.gguf(),
}


class Hub(ThreadingHTTPServer):
    """As much of the hub's HTTP as a download uses, for the one repository `org/name`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = dict(FILES)
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        if path in ("/api/models/org/name", *(f"/api/models/org/name/revision/{r}" for r in ("main", "v1", COMMIT))):
            siblings = [{"rfilename": name} for name in self.server.files]
            self.send_json({"id": "org/name", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/api/models/org/name/revision/"):
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path == "/api/models/org/gated":
            self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/org/broken":
            self.send(500, b"")
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            self.send_json([self.node(name, content) for name, content in self.server.files.items()])
        elif (name := path.removeprefix(f"/org/name/resolve/{COMMIT}/")) in self.server.files:
            content = self.server.files[name]
            self.send(200, content, {"ETag": f'"{self.digest(content)}"', "X-Repo-Commit": COMMIT})
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    @staticmethod
    def digest(content: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def node(self, name: str, content: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(content), "oid": self.digest(content)}

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetches_weights_and_texts_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/name", endpoint=hub.url, cache=tmp_path)
    got = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert got == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert open_source(folder).names == ["a", "b"]
    assert not [path for path in hub.asked if path.endswith((".bin", ".py", ".onnx", ".gguf"))]


def test_a_header_comes_without_its_weights(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/name", endpoint=hub.url, cache=tmp_path, weights=False)
    assert (folder / "config.json").is_file()
    assert not list(folder.rglob("*.safetensors*"))
    assert not [path for path in hub.asked if path.endswith(".safetensors")]


def test_offline_finds_what_was_fetched_and_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/name", endpoint=hub.url, cache=tmp_path)
    hub.asked.clear()
    assert fetch("org/name", offline=True, endpoint=hub.url, cache=tmp_path) == folder
    with pytest.raises(FetchError, match=r"hub:org/other: has not been downloaded; run once without --offline"):
        fetch("org/other", offline=True, endpoint=hub.url, cache=tmp_path)
    assert hub.asked == []


def test_fetches_one_gguf_at_a_revision(hub: Hub, tmp_path: Path) -> None:
    path = fetch("org/name", "v1", "q4.gguf", endpoint=hub.url, cache=tmp_path)
    assert path.read_bytes() == FILES["q4.gguf"]
    assert [file.name for file in path.parent.iterdir()] == ["q4.gguf"]


@pytest.mark.parametrize(
    ("repo", "revision", "file", "says"),
    [
        ("org/absent", None, None, "hub:org/absent: no such repository"),
        ("org/gated", None, None, "hub:org/gated: asks you to accept its terms"),
        ("org/name", "v9", None, "hub:org/name@v9: has no revision v9"),
        ("org/name", None, "q5.gguf", r"no such file in the repository \(did you mean 'q4.gguf'\?\)"),
        ("org/broken", None, None, "hub:org/broken: could not be fetched"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    repo: str, revision: str | None, file: str | None, says: str, hub: Hub, tmp_path: Path
) -> None:
    with pytest.raises(FetchError, match=says) as refused:
        fetch(repo, revision, file, endpoint=hub.url, cache=tmp_path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/x.json", "a/../../b/config.json", "c:\\x.json", "[a].json"])
def test_unsafe_names_from_the_hub_are_refused_before_any_download(name: str, hub: Hub, tmp_path: Path) -> None:
    hub.files[name] = b"{}"
    with pytest.raises(FetchError, match="unsafe name"):
        fetch("org/name", endpoint=hub.url, cache=tmp_path / "cache")
    assert not [path for path in hub.asked if "/resolve/" in path]
    assert not list(tmp_path.rglob("*.json"))


def test_without_a_network_the_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object, **__: object) -> NoReturn:
        raise OSError("network blocked")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "create_connection", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    with pytest.raises(FetchError, match=r"hub:org/name: could not be fetched .*use --offline"):
        fetch("org/name", cache=tmp_path)


def test_a_path_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a path reached the network")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    assert local_path("org/name") == Path("org/name")
    assert local_path(Path("x.gguf")) == Path("x.gguf")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hub:org/name", HubName("org/name")),
        ("hub:Org-1/na.me_2@v1.0", HubName("Org-1/na.me_2", "v1.0")),
        ("hub:o/n@refs/pr/1:q/Q4_K_M.gguf", HubName("o/n", "refs/pr/1", "q/Q4_K_M.gguf")),
        ("hub:o/n:x.gguf", HubName("o/n", None, "x.gguf")),
    ],
)
def test_names_are_taken_apart_and_put_together(text: str, name: HubName) -> None:
    assert parse_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("smollm2", "hub:HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("MiniLM", "hub:sentence-transformers/all-MiniLM-L6-v2"),
        ("gpt2-medium", "hub:openai-community/gpt2-medium"),
        ("Qwen/Qwen3-4B", "hub:Qwen/Qwen3-4B"),
        ("runs/my model", "hub:org/name"),
        ("../name", "hub:org/name"),
    ],
)
def test_a_missing_path_names_what_to_write_for_the_hub(name: str, full: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"no such file or directory; to download from the hub, write {full}$"):
        triptych.load(name)
    if "/" not in name:
        with pytest.raises(FetchError, match=f"did you mean {re.escape(full)}"):
            parse_name(f"hub:{name}")


@pytest.mark.parametrize(
    "text",
    [
        "hub:",
        "hub:name",
        "hub:org/name/more",
        "hub:../name",
        "hub:org/..",
        "hub:org/na..me",
        "hub:-org/name",
        "hub:org/name@",
        "hub:org/name@../../x",
        "hub:org/name@a b",
        "hub:org/name:model.bin",
        "hub:org/name:../x.gguf",
        "hub:org/name:/x.gguf",
        "hub:org/name\n",
        "hub:örg/name",
        "hub:org/" + "n" * 500,
        "https://huggingface.co/org/name",
    ],
)
def test_ill_formed_names_are_refused_without_a_network(text: str) -> None:
    with pytest.raises(FetchError, match="is not hub:org/name"):
        parse_name(text)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["q8.gguf"], "name one, for example hub:o/n:q8.gguf"),
        (["pytorch_model.bin", "config.json"], r"only as a pickle \(pytorch_model.bin\)"),
        (["config.json"], "holds no model.safetensors"),
    ],
)
def test_a_repository_without_safetensors_says_what_to_do(files: list[str], says: str) -> None:
    with pytest.raises(FetchError, match=says):
        choose(HubName("o/n"), files)


def test_shards_are_chosen_with_their_index() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = ["consolidated.safetensors", "adapter_model.safetensors", "x/model.safetensors", "a/b/config.json"]
    index = "model.safetensors.index.json"
    assert set(choose(HubName("o/n"), [*shards, *others, index])) == {*shards, index}


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("gpt2", "hub:openai-community/gpt2"),
        ("bert-base-uncased", "hub:google-bert/bert-base-uncased"),
        ("distilbert-base-cased", "hub:distilbert/distilbert-base-cased"),
    ],
)
def test_a_name_without_its_organization_gets_it_as_a_hint(name: str, full: str) -> None:
    with pytest.raises(FetchError, match=rf"'hub:{name}' is not hub:org/name.*; did you mean {full}\?"):
        local_path(f"hub:{name}")
    with pytest.raises(FetchError, match=r"file\.gguf$"):
        local_path("hub:unheard-of")
