"""A model behind the API of another server, as `triptych chat --url` talks to it."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from typer import BadParameter

from triptych.errors import InputError, shown

CONNECT = 10.0  # seconds; an answer may take as long as it takes
LONGEST = 16 << 20  # bytes of an answer that is no stream


class RemoteModel:
    """One model of a server with OpenAI's routes under `url`, with the fields that each request has.

    Raises BadParameter for another kind of address, and InputError where the server does not answer, or has several
    models of which none is named.
    """

    def __init__(self, url: str, model: str | None, key: str | None, fields: Mapping[str, Any]) -> None:
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname, parts.port
        except ValueError:
            parts, self.host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not self.host or parts.query or parts.fragment:
            raise BadParameter(f"--url {url} must be an address such as http://127.0.0.1:8080/v1")
        self.secure, self.path = parts.scheme == "https", parts.path.rstrip("/") or "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.name = self._only_model() if model is None else model
        self.fields = dict(fields)

    def _only_model(self) -> str:
        with closing(self._connection()) as connection:
            data = _json(self._sent(connection, "GET", "/models"), self.url)
        names = [str(one.get("id")) for one in data.get("data") or () if isinstance(one, dict)]
        if len(names) != 1:
            raise InputError(f"{self.url} has the models {', '.join(names) or '(none)'}; name one with --model")
        return names[0]

    def check(self, messages: Sequence[Mapping[str, str]]) -> None:
        """What only an answer shows: the server's template is its own."""

    def stream(self, messages: Sequence[Mapping[str, str]]) -> Generator[str]:
        """The answer as it comes; closing the iterator ends it on the server too.

        Raises InputError with the server's words for what it refuses, and where it leaves before the answer ends.
        """
        body = {"model": self.name, "messages": [*messages], "stream": True, **self.fields}
        with closing(self._connection()) as connection:
            response = self._sent(connection, "POST", "/chat/completions", body)
            try:
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    yield _text(_json(response, self.url), "message")
                    return
                for line in response:  # server-sent events (HTML standard, 9.2)
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield _text(_parsed(data, self.url), "delta")
            except (OSError, HTTPException) as error:
                raise InputError(f"{self.url} ended the answer early ({error or type(error).__name__})") from None
            raise InputError(f"{self.url} ended the answer early; see whether it still runs")

    def _connection(self) -> HTTPConnection:
        assert self.host is not None
        kind = HTTPSConnection if self.secure else HTTPConnection
        return kind(self.host, self.port, timeout=CONNECT)

    def _sent(self, connection: HTTPConnection, method: str, route: str, body: object = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(None)
            headers = self.headers | ({} if data is None else {"Content-Type": "application/json"})
            connection.request(method, self.path + route, data, headers)
            response = connection.getresponse()
        except (OSError, HTTPException, ValueError) as error:  # a key may have characters that no header has
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise InputError(f"{self.url} does not answer ({reason}); see whether a server runs there") from None
        if response.status != 200:
            raise InputError(f"{self.url} answered {response.status}: {_refusal(response)}")
        return response


def _parsed(data: bytes, url: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise InputError(f"{url} answered {shown(data[:80].decode(errors='replace'))}, which is not of OpenAI's API")
    if parsed.get("error"):
        raise InputError(f"{url}: {_message(parsed)}")
    return parsed


def _json(response: HTTPResponse, url: str) -> dict[str, Any]:
    return _parsed(response.read(LONGEST), url)


def _text(parsed: Mapping[str, Any], part: str) -> str:
    """The text of the first choice; nothing where an event has none."""
    choices = parsed.get("choices") or [{}]
    text = (choices[0].get(part) or {}).get("content") if isinstance(choices[0], dict) else None
    return text if isinstance(text, str) else ""


def _message(parsed: Mapping[str, Any]) -> str:
    error = parsed["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _refusal(response: HTTPResponse) -> str:
    """What the server says is wrong, in its own words where they are of OpenAI's form."""
    try:
        parsed = json.loads(response.read(LONGEST))
    except (ValueError, OSError, HTTPException):
        parsed = None
    return _message(parsed) if isinstance(parsed, dict) and parsed.get("error") else response.reason
