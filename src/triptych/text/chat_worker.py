"""The program that renders chat templates; `triptych.text.chat` starts it and limits its time.

It reads one JSON request per line and answers with one line of JSON that has `text`, or `error`, or `unread` where
a variable was given that the template never uses; to a request without messages, the variables that it uses as
`known`.  It imports nothing of Triptych, so that it starts fast.
"""

import json
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY = 1 << 30
#: Variables that templates test without `is defined`.
_OFTEN_ABSENT = ("tools", "documents")


class GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant says, which training needs; here it renders its contents."""

    tags = {"generation"}  # noqa: RUF012  # Jinja requires a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        start = next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=start.lineno)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore: Python calls some of those outside the sandbox."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be one of the attributes
        self, *positional = args
        values = dict(*positional, **attributes)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: the name begins with an underscore")


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as in transformers: blocks trimmed, `tojson` without HTML escapes, `raise_exception`, `strftime_now`."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["namespace"] = Namespace
    sandbox.globals["raise_exception"] = _raise
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the names of the variables that it reads."""
    sandbox = environment()
    names = meta.find_undeclared_variables(sandbox.parse(source)) - set(sandbox.globals)
    return sandbox.from_string(source), frozenset(names)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request."""
    template, known = _compiled(request["source"])
    if "messages" not in request:
        return {"known": sorted(known)}
    variables = request["variables"]
    unread = sorted(set(variables) - known)
    if unread:
        return {"unread": unread[0], "known": sorted(known)}
    context = dict.fromkeys(_OFTEN_ABSENT) | request["special_tokens"] | variables
    context |= {"messages": request["messages"], "add_generation_prompt": request["add_generation_prompt"]}
    pieces, size = [], 0
    for piece in template.generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > request["characters"]:
            return {"error": f"stopped, its output exceeds {request['characters']} characters; use another template"}
    return {"text": "".join(pieces)}


def guarded(work: Callable[[dict[str, Any]], dict[str, Any]], line: str) -> dict[str, Any]:
    """The reply of `work` to the request in `line`, or an error of one line."""
    try:
        return work(json.loads(line))
    except MemoryError:
        return {"error": "stopped, it took too much memory; use another template"}
    except RecursionError:
        return {"error": "stopped, it is nested too deeply; use another template"}
    except Exception as error:  # a hostile template can raise anything
        return {"error": str(error).partition("\n")[0][:300] or type(error).__name__}


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # this system has no such limit; the limit on time remains
    reply = sys.stdout
    reply.write("ready\n")
    reply.flush()
    for line in sys.stdin:
        reply.write(json.dumps(guarded(answer, line)) + "\n")
        reply.flush()


if __name__ == "__main__":
    main()
