"""Chat templates: a conversation to the one text a chat model was trained on.

A template is a Jinja program that came with a checkpoint, so it is not trusted.  It runs in Jinja's sandbox, which
keeps it from Python's objects, inside a process of its own, which can be stopped: a sandbox alone bounds neither
time (nested loops) nor memory (a string doubled forty times).  The process starts at the first prompt, in about a
tenth of a second, and answers later ones in under a millisecond.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from triptych.errors import InputError, TextError, nearest, shown

#: Bounds of one rendering.  Real prompts take milliseconds and stay far below a megabyte of text.
SECONDS = 5.0
CHARACTERS = 16 << 20


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model is to read it, with its special tokens written out.

    A type of its own, so that `Tokenizer.encode` knows not to put a second BOS in front.
    """

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja `source` of a template and the `special_tokens` it may name (`bos_token`, `eos_token`, ...)."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        seconds: float = SECONDS,
        **variables: Any,
    ) -> RenderedPrompt:
        """The prompt for `messages`, each with its `role` and `content`, ending where the model is to go on.

        `variables` are handed to the template (`tools`, `documents`, `enable_thinking`, ...).  What a message has no
        value for it does not have, and what was thought before an answer goes by the names templates read, whichever of
        `reasoning_content`, `thinking` and `reasoning` it came under: both as in transformers.

        Raises InputError if the template reads no such variable or the messages are not plain JSON data, and TextError
        if the template refuses the conversation, is broken, or passes its bounds of time, memory or output.
        """
        request = {
            "source": self.source,
            "messages": [_as_read(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "special_tokens": dict(self.special_tokens),
            "variables": variables,
            "characters": CHARACTERS,
        }
        try:
            line = json.dumps(request)
        except (TypeError, ValueError) as error:
            raise InputError(f"chat messages and variables must be plain JSON data: {error}") from error
        answer = _WORKER.ask(line, seconds)
        if "unread" in answer:
            name, known = answer["unread"], answer["known"]
            raise InputError(
                f"this chat template has no variable {name!r}{nearest(name, known)}; it reads {', '.join(known)}"
            )
        if "error" in answer:
            raise TextError(f"chat template: {answer['error']}")
        return RenderedPrompt(answer["text"])


def _as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"a chat message is {shown(message)}, not a table with a role and a content")
    given = {key: value for key, value in message.items() if value is not None}
    thought = next((given[name] for name in ("reasoning_content", "thinking", "reasoning") if name in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


class _Worker:
    """The process that renders, one line of JSON in and one out; started when needed, killed when it overruns.

    A process made by `os.fork` never uses the worker of its parent, whose replies it would take: it starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """The worker's answer to the request `line`, which it is killed over after `seconds`."""
        with self._lock:
            process = self._running()
            stdin, stdout = _pipes(process)
            overdue = threading.Timer(seconds, process.kill)
            overdue.start()
            try:
                stdin.write(line + "\n")
                stdin.flush()
                reply = stdout.readline()
            except BrokenPipeError:
                reply = ""
            finally:
                overdue.cancel()
            if not reply:
                self.close()
                return {"error": f"stopped, it took more than {seconds:g} s or too much memory; use another template"}
            answer: dict[str, Any] = json.loads(reply)
            return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            script = Path(__file__).with_name("chat_worker.py")
            self._process = subprocess.Popen(
                # -I: neither the working directory nor the environment can put other modules in Jinja's place.
                [sys.executable, "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            _pipes(self._process)[1].readline()  # "ready": the time to start is not the template's
        return self._process

    def _forget(self) -> None:
        """In a forked child: let go of the parent's worker without a byte to it, and of a lock another thread held."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is None:
            return
        process.returncode = 0  # not a child of this process: nothing to wait for
        nowhere = os.open(os.devnull, os.O_RDWR)
        for pipe in _pipes(process):  # closing them would flush what the parent had not written yet
            os.dup2(nowhere, pipe.fileno())
        os.close(nowhere)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _pipes(process: subprocess.Popen[str]) -> tuple[TextIOWrapper, TextIOWrapper]:
    assert isinstance(process.stdin, TextIOWrapper)
    assert isinstance(process.stdout, TextIOWrapper)
    return process.stdin, process.stdout


_WORKER = _Worker()
