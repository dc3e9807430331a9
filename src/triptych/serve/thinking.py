"""How much a model thinks before it answers, as requests of several APIs ask for it: variables of its chat template.

Ollama's `think` turns thinking on or off, or is a level; OpenAI's `reasoning_effort` and `reasoning.effort` are levels.
`chat_template_kwargs`, which vLLM and SGLang have, are variables by their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from triptych.errors import TextError, nearest, shown
from triptych.text import ChatTemplate, Tokenizer
from .fields import ApiError, Fields, shown_name
from .worker import ModelWorker

LEVEL = "reasoning_effort"  # the variable of templates that have levels
LEVELS = ("low", "medium", "high")
SWITCHES = ("enable_thinking", "thinking")  # those that are true or false
OWN = frozenset({"messages", "tools", "add_generation_prompt"})  # variables that have fields of their own


@lru_cache(maxsize=64)
def _variables(source: str) -> frozenset[str]:
    try:
        return ChatTemplate(source).variables()
    except TextError:  # which a conversation will be refused for
        return frozenset()


def variables_of(tokenizer: Tokenizer | None) -> frozenset[str]:
    """The variables that the chat template of a model reads and no other field of a request sets."""
    template = None if tokenizer is None else tokenizer.chat
    return frozenset() if template is None else _variables(template.source) - OWN - {*template.special_tokens}


def thinks(tokenizer: Tokenizer | None) -> bool:
    """Whether the chat template of a model can be told to think."""
    return not variables_of(tokenizer).isdisjoint({LEVEL, *SWITCHES})


def think_values(tokenizer: Tokenizer | None) -> list[bool | str]:
    """What Ollama's `think` may be for a model; false, which has no effect, for one whose template has no thinking."""
    known = variables_of(tokenizer)
    return [False, *([True] if thinks(tokenizer) else []), *(LEVELS if LEVEL in known else ())]


def with_thinking(worker: ModelWorker, fields: Fields, templated: bool = True) -> dict[str, Any]:
    """The variables for Ollama's `think`.  A model that has nothing to turn off does as it is told by `false`, which is
    then without effect.

    Raises ApiError for thinking where the template has none or nothing renders it, and for a level where it has none.
    """
    think = fields.get("think")
    if think is None:
        return {}
    known = variables_of(worker.model.tokenizer) if templated else frozenset[str]()
    switch = next((name for name in SWITCHES if name in known), None)
    if isinstance(think, str) and LEVEL in known:
        return {LEVEL: think}
    if isinstance(think, str) and switch is not None:
        problem = f"think: the chat template of {worker.name} has no levels of thinking; give true or false"
        raise ApiError(400, problem, "think")
    if switch is not None:
        return {switch: think}
    if think and LEVEL not in known:
        problem = f"think: {worker.name} has no chat template that turns thinking on; leave it out"
        raise ApiError(400, problem, "think")
    if not think:
        fields.note("think")
    return {}


def with_effort(worker: ModelWorker, fields: Fields, effort: str | None, name: str) -> dict[str, Any]:
    """The variables for the level in the field `name`, which has no effect where the template has no levels."""
    if effort is None:
        return {}
    if LEVEL in variables_of(worker.model.tokenizer):
        return {LEVEL: effort}
    fields.note(name)
    return {}


def with_reasoning(worker: ModelWorker, fields: Fields) -> dict[str, Any]:
    """The variables for `reasoning` of OpenAI's responses, of which all but the effort has no effect.  Raises ApiError
    for an effort that is no text."""
    reasoning = fields.get("reasoning", {})
    effort = reasoning.get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, f"reasoning.effort must be of type string, not {shown(effort)}", "reasoning.effort")
    if any(value is not None for name, value in reasoning.items() if name != "effort"):
        fields.note("reasoning")
    return with_effort(worker, fields, effort, "reasoning")


def with_variables(worker: ModelWorker, fields: Fields) -> Mapping[str, Any]:
    """The variables of `chat_template_kwargs`, and that of `reasoning_effort`.

    Raises ApiError for a variable that the template does not read or that a field of the request sets, and for a value
    that is no text, number or boolean.
    """
    values: dict[str, Any] = fields.get("chat_template_kwargs", {})
    known = variables_of(worker.model.tokenizer)
    for name, value in values.items():
        path = f"chat_template_kwargs.{shown_name(name)}"
        if name not in known:
            reads = ", ".join(sorted(known)) or "none"
            problem = f"{path}: the chat template has no such variable{nearest(name, known)}; it reads {reads}"
            raise ApiError(400, problem, "chat_template_kwargs")
        if not isinstance(value, str | int | float | bool):
            raise ApiError(400, f"{path} must be a text, a number, true or false", "chat_template_kwargs")
    return with_effort(worker, fields, fields.get("reasoning_effort"), "reasoning_effort") | values
