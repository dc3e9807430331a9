"""The tools of a request, and which of them the model may call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from triptych.text import ChatTemplate
from .call_form import CallForm, NoCallForm, call_form
from .call_parser import NAME as NAME_OF_A_TOOL
from .call_parser import check_form
from .fields import ApiError, Fields

TYPE = re.compile(r"[a-z0-9_]{1,64}")  # of a tool, in a header
NAME = re.compile(NAME_OF_A_TOOL)


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def variable(self) -> dict[str, Any]:
        """As chat templates read it, which is OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    choice      auto, none, required (some tool), or named (the only one of `tools`).
    parallel    whether an answer may have more than one call.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether the model may call a tool."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice in ("required", "named")

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool.name: tool.parameters for tool in self.tools}


def functions(
    fields: Fields, types: Sequence[str | None], tool_of: Callable[[Fields], Tool], table: str
) -> list[Tool]:  # fmt: skip
    """The functions among the tools of a request, which `tool_of` reads from the fields of a table.  Tools of other
    types, which other servers run themselves, are left out; the header of fields without effect names them.

    Raises ApiError for a tool that is none and for two of one name.
    """
    tools: dict[str, Tool] = {}
    for i, one in enumerate(fields.get("tools", ())):
        kind = one.get("type") if isinstance(one, Mapping) else None
        if isinstance(kind, str) and kind not in types:
            fields.note(f"tools.{kind}" if TYPE.fullmatch(kind) else "tools.type")
            continue
        at = f"tools[{i}]"
        tool = tool_of(fields.inner(one, table, at=at))
        if not NAME.fullmatch(tool.name):
            problem = f"{at}.name must be of letters, digits and _ - . : /, which models write as they are"
            raise ApiError(400, problem, at)
        if tool.name in tools:
            raise ApiError(400, f"two tools are named {tool.name!r}; give each another name", "tools")
        tools[tool.name] = tool
    return [*tools.values()]


def tool_use(tools: Sequence[Tool], choice: str, name: str | None, parallel: bool) -> ToolUse:
    """The tools of a request whose `choice` may be of one by its name.

    Raises ApiError for a choice that needs a tool that is not there.
    """
    if name is not None:
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
        return ToolUse(tuple(tools), "named", parallel)
    if choice not in ("auto", "none", "required"):
        raise ApiError(400, f"tool_choice must be auto, none, required or a tool, not {choice!r}", "tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is required, and there are no tools", "tool_choice")
    return ToolUse(tuple(tools), choice, parallel)


def form_of(template: ChatTemplate) -> CallForm:
    """How a model writes calls.  Raises ApiError where its template does not show it."""
    form = _form(template.source, tuple(template.special_tokens.items()))
    if isinstance(form, str):
        raise ApiError(400, f"tools are not supported here: {form}", "tools")
    return form


@lru_cache(maxsize=64)
def _form(source: str, special_tokens: tuple[tuple[str, str], ...]) -> CallForm | str:
    template = ChatTemplate(source, dict(special_tokens))

    def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        return template.render(messages, add_generation_prompt, **variables).text

    try:
        form = call_form(render)
        check_form(form, render)
    except NoCallForm as error:
        return str(error)
    return form
