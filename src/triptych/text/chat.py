"""Chat templates: from the messages of a conversation to the text that a chat model reads.

A template is a Jinja program from a checkpoint, so it is not trusted.  It runs in Jinja's sandbox (`chat_worker.py`),
which denies access to Python's internals, in a process of its own, which can be stopped: a sandbox alone limits neither
time (nested loops) nor memory (a string doubled forty times).  The process starts with the first prompt, in about a
tenth of a second, and renders later ones in under a millisecond.
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

from triptych.arguments import checked_methods
from triptych.errors import InputError, TextError, nearest, shown

#: Limits of one rendering.  Real prompts take milliseconds and have far less than a megabyte of text.
SECONDS = 5.0
CHARACTERS = 16 << 20


@checked_methods
@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model reads it, with its special tokens as text.

    It is not a `str`, so that `Tokenizer.encode` adds no special tokens to it.
    """

    text: str

    def __str__(self) -> str:
        return self.text


@checked_methods
@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja `source` of a template, and the `special_tokens` that it may use: `bos_token`, `eos_token`, ..."""

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
        """The prompt for `messages`, each with a `role` and a `content`; with `add_generation_prompt` it ends where the
        assistant's answer begins.

        `variables` are passed to the template (`tools`, `documents`, `enable_thinking`, ...).  As in transformers, keys
        whose value is None are removed from the messages, and reasoning under one of the keys `reasoning_content`,
        `thinking` and `reasoning` is passed under the first two.

        Raises InputError for a variable that the template does not read and for messages that are not plain JSON data.
        Raises TextError if the template refuses the conversation, is broken, or exceeds `seconds`, a gigabyte of memory
        or 16 million characters.
        """
        if not isinstance(messages, Sequence):
            raise InputError(f'messages must be a list of {{"role": ..., "content": ...}}, not {shown(messages)}')
        request = {
            "source": self.source,
            "messages": [_normalized(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "special_tokens": dict(self.special_tokens),
            "variables": variables,
            "characters": CHARACTERS,
        }
        try:
            line = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
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

    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads, `messages` among them.  Raises TextError for a template
        that is broken."""
        answer = _WORKER.ask(json.dumps({"source": self.source}), SECONDS)
        if "error" in answer:
            raise TextError(f"chat template: {answer['error']}")
        return frozenset(answer["known"])


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"a chat message is {shown(message)}; give a dictionary with a role and a content")
    values = {key: value for key, value in message.items() if value is not None}
    reasoning = next((values[key] for key in ("reasoning_content", "thinking", "reasoning") if key in values), None)
    return values if reasoning is None else {"thinking": reasoning, **values, "reasoning_content": reasoning}


class _Worker:
    """The process that renders: it reads one line of JSON for each line that it writes.

    It is started when it is needed, and killed when it takes too long.  A process made by `os.fork` starts its own,
    because it would take the replies to its parent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """The reply to the request `line`; after `seconds` the worker is killed and the reply is an error."""
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
            except BaseException:  # an interrupt: the reply would otherwise be read as that to the next request
                self.close()
                raise
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
                # -I: modules in the working directory or on PYTHONPATH cannot replace Jinja.
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
        """In a forked child: drop the parent's worker, and a lock that another thread of the parent may hold."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is None:
            return
        process.returncode = 0  # it is not a child of this process, so there is nothing to wait for
        nowhere = os.open(os.devnull, os.O_RDWR)
        for pipe in _pipes(process):  # closing them would send what the parent had not flushed yet
            os.dup2(nowhere, pipe.fileno())
        os.close(nowhere)

    def close(self) -> None:
        """Kill the process, if it runs; the next request starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _pipes(process: subprocess.Popen[str]) -> tuple[TextIOWrapper, TextIOWrapper]:
    assert isinstance(process.stdin, TextIOWrapper)
    assert isinstance(process.stdout, TextIOWrapper)
    return process.stdin, process.stdout


_WORKER = _Worker()
