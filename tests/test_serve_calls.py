"""Calls of tools: their form is found in a template, and they are found in a text that comes in any pieces."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from scripted import ANSWERS, ARGUMENTS, PLAIN, SPECIAL, TEMPLATES, WEATHER
from triptych.serve.call_form import CallForm, NoCallForm, call_form
from triptych.serve.call_parser import AnswerPiece, CallParser, check_form
from triptych.serve.replies import CallPart, Reply, TextPart
from triptych.text import ChatTemplate

FORMS = [name for name in TEMPLATES if name != "plain"]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": WEATHER}}


def rendering(source: str) -> Any:
    template = ChatTemplate(source)
    return lambda messages, add_generation_prompt=True, **more: (
        template.render(messages, add_generation_prompt, **more).text
    )


def form(name: str) -> CallForm:
    return call_form(rendering(TEMPLATES[name]))


def parsed(form: CallForm, text: str, step: int) -> list[list[str]]:
    """What a parser finds in a text that comes `step` characters at a time; neighbors of one kind joined."""
    parser = CallParser(form, {"get_weather": WEATHER})
    found: list[AnswerPiece] = []
    for at in range(0, len(text), step):
        found += parser.put(text[at : at + step])
    joined: list[list[str]] = []
    for one in [*found, *parser.finish()]:
        if joined and joined[-1][0] == one.kind and one.kind in ("text", "arguments"):
            joined[-1][1] += one.text
        else:
            joined.append([one.kind, one.text])
    return joined


def calls_in(found: list[list[str]]) -> list[tuple[str, Any]]:
    names = [text for kind, text in found if kind == "name"]
    arguments = [json.loads(text) for kind, text in found if kind == "arguments"]
    assert [kind for kind, _ in found if kind != "text"] == ["name", "arguments", "end"] * len(names)
    return list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("step", [1, 3, 8, 1000])
def test_what_each_form_answers_is_a_call(name: str, step: int) -> None:
    found = parsed(form(name), ANSWERS[name], step)
    assert calls_in(found) == [("get_weather", ARGUMENTS)]
    text = "".join(text for kind, text in found if kind == "text")
    assert text == ("Let me look." if ANSWERS[name].startswith("Let") else "")


NASTY = {"text": 'a "quoted" {brace} </tool_call> \\ <|call_end|>\nline', "list": [1, {"x": "]}"}], "none": None}


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("qwen-coder", "glm")])
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_two_calls_that_a_template_renders_are_read_back(name: str, step: int) -> None:
    found = form(name)
    calls = [("call_1", "get_weather", NASTY), ("call_2", "other", {})]
    if found.between is None:  # a template that writes one call
        calls = calls[:1]
    text = answer_of(name, found, calls)
    assert calls_in(parsed(found, text, step)) == [(called, arguments) for _, called, arguments in calls]


def answer_of(name: str, form: CallForm, calls: Sequence[tuple[str, str, dict[str, Any]]]) -> str:
    """What the template renders of an assistant's message with calls."""
    render, user = rendering(TEMPLATES[name]), {"role": "user", "content": "?"}
    before = render([user], tools=[TOOL])
    return render([user, form.message("", calls)], False, tools=[TOOL]).removeprefix(before)


@pytest.mark.parametrize("name", ["qwen-coder", "glm"])
def test_values_of_elements_have_the_types_of_the_schema(name: str) -> None:
    """A city that looks like a number stays a text; and the space of a text stays."""
    found, arguments = form(name), {"city": "  45000\n", "days": 3, "more": {"a": [1]}}
    text = answer_of(name, found, [("call_1", "get_weather", arguments)])
    for step in (1, 1000):
        assert calls_in(parsed(found, text, step)) == [("get_weather", arguments)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        "No call at all.", "It is 3 < 4 and [x] {y}.", "<tool_call> is how a call begins.", '{"city": "Orléans"}', "{",
        "  white space around  \n", "<tool_call>\n{\"nam", "[TOOL_CALLS] none", '{"name": 3}', "<|calls_begin|>", "",
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
    ],
)  # fmt: skip
def test_a_text_without_a_call_comes_unchanged(name: str, text: str) -> None:
    for step in (1, 4, 1000):
        assert parsed(form(name), text, step) == ([["text", text]] if text else [])


def test_what_begins_like_a_call_may_be_followed_by_one() -> None:
    text = "Write <tool_call> and then: " + ANSWERS["hermes"].partition("\n")[2] + "\nDone."
    for step in (1, 7, 1000):
        found = parsed(form("hermes"), text, step)
        assert calls_in(found) == [("get_weather", ARGUMENTS)]
        assert [text for kind, text in found if kind == "text"] == ["Write <tool_call> and then:", "Done."]


def test_a_call_that_is_cut_off_is_no_text_and_not_whole() -> None:
    reply = Reply(form("hermes"), {})
    changes = [*reply.put(ANSWERS["hermes"][:-25]), *reply.finish()]
    text, call = reply.parts
    assert isinstance(text, TextPart)
    assert isinstance(call, CallPart)
    assert (text.text, call.name, call.whole, call.value()) == ("Let me look.", "get_weather", False, None)
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(call.arguments)
    assert [change.part for change in changes if change.ends] == [text, call]
    assert not reply.called


def test_without_parallel_calls_a_reply_is_complete_after_one() -> None:
    twice = ANSWERS["hermes"] + "\n" + ANSWERS["hermes"].partition("\n")[2]
    assert len(calls_in(parsed(form("hermes"), twice, 1000))) == 2
    reply = Reply(form("hermes"), {}, parallel=False)
    reply.put(twice)
    assert reply.complete
    assert len(reply.calls) == 1
    assert not reply.finish()


def test_ids_are_as_the_template_wants_them() -> None:
    long = "call_0123456789"
    assert form("hermes").id_of(long) == long
    short = form("mistral").id_of(long)
    assert len(short) == 9
    assert form("mistral").id_of(long) == short == form("mistral").id_of(short)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PLAIN, "does not read tools"),
        (PLAIN + "{{ tools }}", "in no form that is known"),
        ("{{ tools }}{{ raise_exception('only users speak') if messages | length > 1 }}", "only users speak"),
        ("{{ tools }}{% for m in messages %}{{ m.role }}{% endfor %}", "does not render what the assistant"),
    ],
)
def test_a_template_without_a_form_says_so(source: str, said: str) -> None:
    with pytest.raises(NoCallForm, match=said):
        call_form(rendering(source))


WRITES = """{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<call>{{ call.function.name }} LEFT{{ call.function.arguments | tojson }}</call>{% endfor %}
{% endfor %}"""
#: Arguments in a form of its own, which would be JSON where they were given as its text.
OWN = WRITES.replace(
    "{{ call.function.arguments | tojson }}",
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | list }}",
)


@pytest.mark.parametrize(("left", "good"), [("", True), ("with ", True), ("{{ call.id }}:", False)])
def test_a_form_in_which_another_call_is_not_read_back_is_none(left: str, good: bool) -> None:
    """The known call is found in all of them; where its id stands in the form, another call is not."""
    render = rendering(WRITES.replace("LEFT", left))
    found = call_form(render)
    with nullcontext() if good else pytest.raises(NoCallForm, match="read back"):
        check_form(found, render)


def test_arguments_are_given_as_text_only_to_templates_that_write_no_objects() -> None:
    with pytest.raises(NoCallForm, match="in no form"):
        call_form(rendering(OWN.replace("LEFT", "")))
    assert not form("deepseek").parsed


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_the_six_forms_are_read_back(name: str) -> None:
    check_form(form(name), rendering(TEMPLATES[name]))


def test_special_tokens_of_a_form_are_in_its_literals() -> None:
    """Otherwise decoding would leave out what opens a call."""
    for name, special in SPECIAL.items():
        assert all(one in form(name).literals for one in special)
    assert "[INST]" not in form("mistral").literals
