"""The released clients of OpenAI and Anthropic against a running server: chat, streams, tools, errors and models."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from scripted import ANSWERS, ARGUMENTS, TEMPLATES, WEATHER, model, serving  # noqa: E402
from test_serve_calls import FORMS  # noqa: E402
from triptych.serve.generation import ADVICE  # noqa: E402

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Orléans?"}]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
MESSAGES_TOOLS: list[Any] = [{"name": "get_weather", "input_schema": WEATHER}]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving({name: model(name) for name in TEMPLATES}, key="k") as port:
        yield port


def text_before_call(name: str) -> str:
    return "Let me look." if ANSWERS[name].startswith("Let") else ""


# ---------------------------------------------------------------- chat


@pytest.mark.parametrize("name", FORMS)
def test_chat_calls_a_tool_whole_and_streamed(by_openai: Any, name: str) -> None:
    asked = {"model": name, "messages": ASK, "tools": CHAT_TOOLS}
    whole = by_openai.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    assert (whole.message.content or "") == text_before_call(name)
    with by_openai.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.content or "") == text_before_call(name)
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 2  # the arguments come piece by piece


def test_the_name_of_a_call_comes_in_one_chunk(by_openai: Any) -> None:
    """Clients such as langchain's join what comes under one index."""
    chunks = [*by_openai.chat.completions.create(model="hermes", messages=ASK, tools=CHAT_TOOLS, stream=True)]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["get_weather", *[None] * (len(calls) - 1)]
    assert {call.index for call in calls} == {0}


def test_a_conversation_goes_on_with_what_the_tool_returned(by_openai: Any) -> None:
    for name in FORMS:
        first = by_openai.chat.completions.create(model=name, messages=ASK, tools=CHAT_TOOLS).choices[0].message
        returned = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "9 degrees"}
        again = by_openai.chat.completions.create(
            model=name, messages=[*ASK, first.model_dump(exclude_none=True), returned], tools=CHAT_TOOLS
        )
        assert again.choices[0].finish_reason == "tool_calls", name


def test_without_tools_or_with_none_the_same_text_is_no_call(by_openai: Any) -> None:
    for more in ({}, {"tools": CHAT_TOOLS, "tool_choice": "none"}):
        choice = by_openai.chat.completions.create(model="hermes", messages=ASK, **more).choices[0]
        assert choice.message.content == ANSWERS["hermes"]
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


def test_instructions_at_the_beginning_are_one_message(by_openai: Any) -> None:
    """Most templates take one message of the system, and the first."""

    def prompt(*system: Any) -> int:
        usage = by_openai.chat.completions.create(model="hermes", messages=[*system, *ASK], max_tokens=1).usage
        return int(usage.prompt_tokens)

    first, second = {"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be short."}
    assert prompt(first, second) == prompt({"role": "system", "content": "Be kind.\n\nBe short."})


def test_log_probabilities_come_with_streamed_calls(by_openai: Any) -> None:
    asked = {"model": "hermes", "messages": ASK, "tools": CHAT_TOOLS, "logprobs": True, "top_logprobs": 2}
    whole = by_openai.chat.completions.create(**asked)
    chunks = [*by_openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    tokens = [one.token for chunk in chunks[:-1] for one in (chunk.choices[0].logprobs or Empty).content]
    assert tokens == [one.token for one in whole.choices[0].logprobs.content]
    assert len(tokens) == whole.usage.completion_tokens


class Empty:
    content: tuple[Any, ...] = ()


def test_a_length_is_said_where_a_call_is_cut(by_openai: Any) -> None:
    asked = {"model": "hermes", "messages": ASK, "tools": CHAT_TOOLS, "max_tokens": 14}
    choice = by_openai.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_a_second_turn_reuses_the_first(by_openai: Any) -> None:
    """The first prompt and its answer are not computed again; where the first message is another, both are."""
    system = {"role": "system", "content": "This conversation is the only one about reuse. " * 4}
    talk = [system, *ASK]
    first = by_openai.chat.completions.create(model="plain", messages=talk)
    answered = {"role": "assistant", "content": first.choices[0].message.content}
    more = [*talk, answered, {"role": "user", "content": "And tomorrow?"}]
    second = by_openai.chat.completions.create(model="plain", messages=more).usage
    assert second.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 2
    other = [{"role": "system", "content": "Other words come first. " * 8}, *more[1:]]
    third = by_openai.chat.completions.create(model="plain", messages=other).usage
    assert third.prompt_tokens_details.cached_tokens < len("system:\nOther words")


# ---------------------------------------------------------------- responses


@pytest.mark.parametrize("name", FORMS)
def test_responses_call_a_tool_whole_and_streamed(by_openai: Any, name: str) -> None:
    asked = {"model": name, "input": ASK, "tools": RESPONSES_TOOLS}
    whole = by_openai.responses.create(**asked)
    call = whole.output[-1]
    assert (whole.status, call.type, call.name, json.loads(call.arguments)) == (
        "completed", "function_call", "get_weather", ARGUMENTS,
    )  # fmt: skip
    assert whole.output_text == text_before_call(name)
    with by_openai.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (final.output[-1].arguments, final.output_text) == (call.arguments, text_before_call(name))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"}
    items = [item.model_dump(exclude_none=True) for item in whole.output]
    again = by_openai.responses.create(model=name, input=[*ASK, *items, returned], tools=RESPONSES_TOOLS)
    assert again.output[-1].type == "function_call"


@pytest.mark.parametrize("name", FORMS)
def test_the_events_of_responses_add_up(by_openai: Any, name: str) -> None:
    """Clients that add deltas to the item that was added get what the item is when it is done."""
    items: dict[int, Any] = {}
    for event in by_openai.responses.create(model=name, input=ASK, tools=RESPONSES_TOOLS, stream=True):
        if event.type == "response.output_item.added":
            items[event.output_index] = event.item.model_dump()
        elif event.type == "response.content_part.added":
            items[event.output_index]["content"].append(event.part.model_dump())
        elif event.type == "response.output_text.delta":
            items[event.output_index]["content"][event.content_index]["text"] += event.delta
        elif event.type == "response.function_call_arguments.delta":
            items[event.output_index]["arguments"] += event.delta
        elif event.type == "response.output_item.done":
            assert items[event.output_index] | {"status": "completed"} == event.item.model_dump()
    assert items[len(items) - 1]["name"] == "get_weather"


def test_responses_stream_a_text_in_the_order_of_its_parts(by_openai: Any) -> None:
    events = list(by_openai.responses.create(model="plain", input="Hello", instructions="Be short.", stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if "delta" in event.type) == ANSWERS["plain"]
    assert events[-1].response.output_text == ANSWERS["plain"]
    assert events[-1].response.usage.output_tokens > 0


def test_responses_that_are_cut_are_incomplete(by_openai: Any) -> None:
    response = by_openai.responses.create(model="plain", input="Hello", max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert ANSWERS["plain"].startswith(response.output_text)
    *_, last = by_openai.responses.create(model="plain", input="Hello", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("name", FORMS)
def test_messages_call_a_tool_whole_and_streamed(by_anthropic: Any, name: str) -> None:
    asked = {"model": name, "max_tokens": 200, "messages": ASK, "tools": MESSAGES_TOOLS}
    whole = by_anthropic.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    call = whole.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", ARGUMENTS)
    with by_anthropic.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    returned = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "9 degrees"}]}
    talk = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [returned]}]
    assert by_anthropic.messages.create(**asked | {"messages": talk}).stop_reason == "tool_use"


def test_messages_stop_where_they_are_told(by_anthropic: Any) -> None:
    asked = {"model": "plain", "max_tokens": 50, "messages": ASK}
    stopped = by_anthropic.messages.create(**asked, stop_sequences=["never", " it says"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " it says")
    assert stopped.content[0].text == ANSWERS["plain"].partition(" it says")[0]
    with by_anthropic.messages.stream(**asked, stop_sequences=[" it says"]) as stream:
        assert "".join(stream.text_stream) == stopped.content[0].text
        assert stream.get_final_message().stop_sequence == " it says"
    cut = by_anthropic.messages.create(**asked | {"max_tokens": 2})
    assert cut.stop_reason == "max_tokens"
    most = by_anthropic.messages.create(**asked | {"max_tokens": 16_000})  # more than the model has room for
    assert (most.stop_reason, most.content[0].text) == ("end_turn", ANSWERS["plain"])


def test_messages_go_on_from_a_beginning(by_anthropic: Any) -> None:
    """The prompt ends with the beginning, without what ends the assistant's turn."""
    talk = [*ASK, {"role": "assistant", "content": "Let"}]
    for name in ("plain", "hermes"):
        whole, begun = (
            by_anthropic.messages.count_tokens(model=name, messages=messages).input_tokens for messages in (ASK, talk)
        )
        assert begun == whole + len("Let")


def test_tokens_are_counted_as_they_are_used(by_anthropic: Any) -> None:
    asked = {"model": "hermes", "messages": ASK, "tools": MESSAGES_TOOLS, "system": "Be short."}
    count = by_anthropic.messages.count_tokens(**asked).input_tokens
    usage = by_anthropic.messages.create(**asked, max_tokens=50).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    without = by_anthropic.messages.count_tokens(model="hermes", messages=ASK).input_tokens
    assert count > without + len("Be short.")


# ---------------------------------------------------------------- models and errors


def test_models_are_listed_for_both(by_openai: Any, by_anthropic: Any) -> None:
    assert {one.id for one in by_openai.models.list()} == set(TEMPLATES)
    assert {one.id for one in by_anthropic.models.list()} == set(TEMPLATES)
    assert by_openai.models.retrieve("plain").id == by_anthropic.models.retrieve("plain").id == "plain"


def test_errors_are_the_ones_that_clients_know(by_openai: Any, by_anthropic: Any, port: int) -> None:
    chat, messages, responses = by_openai.chat.completions, by_anthropic.messages, by_openai.responses
    with pytest.raises(openai.NotFoundError, match="no model"):
        chat.create(model="gpt-5", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="does not read tools") as error:
        chat.create(model="plain", messages=ASK, tools=CHAT_TOOLS)
    assert error.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="whole conversation as input"):
        responses.create(model="plain", input="Hi", previous_response_id="resp_1")
    with pytest.raises(anthropic.NotFoundError, match="no model") as missing:
        messages.create(model="claude", max_tokens=5, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="does not read tools"):
        messages.create(model="plain", max_tokens=5, messages=ASK, tools=MESSAGES_TOOLS)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        messages.create(model="plain", max_tokens=5, messages=ASK, extra_body={"container": "x"})
    address = f"http://127.0.0.1:{port}"
    other = {"api_key": "other", "max_retries": 0}
    with anthropic.Anthropic(base_url=address, **other) as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="plain", max_tokens=5, messages=ASK)
    with openai.OpenAI(base_url=f"{address}/v1", **other) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_what_a_worker_refuses_comes_before_the_stream_begins(by_openai: Any, by_anthropic: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="positions"):
        by_openai.chat.completions.create(model="plain", messages=ASK, max_tokens=9000, stream=True)
    with pytest.raises(anthropic.BadRequestError, match="reads at most"):
        by_anthropic.messages.create(
            model="plain", max_tokens=5, messages=[{"role": "user", "content": "x" * 9000}], stream=True
        )


def test_what_has_no_effect_is_named(by_openai: Any, by_anthropic: Any) -> None:
    raw = by_openai.responses.with_raw_response.create(
        model="hermes", input=[{"type": "reasoning", "summary": [], "id": "rs_1"}, *ASK], store=True,
        include=["reasoning.encrypted_content"], tools=[*RESPONSES_TOOLS, {"type": "web_search"}],
        reasoning={"effort": "low"},
    )  # fmt: skip
    named = {name.strip() for name in raw.headers[ADVICE].split(",")}
    assert named == {"store", "include", "reasoning", "input.reasoning", "tools.web_search"}
    kept = {"type": "ephemeral"}
    raw = by_anthropic.messages.with_raw_response.create(
        model="hermes", max_tokens=5, system=[{"type": "text", "text": "Hi.", "cache_control": kept}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": kept}]}],
        tools=[MESSAGES_TOOLS[0] | {"cache_control": kept}], metadata={"user_id": "u"},
    )  # fmt: skip
    assert {name.strip() for name in raw.headers[ADVICE].split(",")} == {
        "metadata", "system.cache_control", "messages.content.cache_control", "tools.cache_control",
    }  # fmt: skip
