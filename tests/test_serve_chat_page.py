"""The chat page in a browser, over a server of a small model: what it shows is the library's own, and it asks nobody
else."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import tokenizers
import torch

pytest.importorskip("uvicorn", reason="needs the extra serve")

from browser import CHROMIUM, Browser, Tab
from serving import ask, running
from test_page_controls import nameless
from test_serve_worker import LETTERS, letters
from triptych.generate.request import TokenLogprobs
from triptych.model import Model
from triptych.serve.app import Server
from triptych.serve.chat import logprobs_of
from triptych.serve.chat_page import page
from triptych.serve.worker import ModelWorker
from triptych.text import RenderedPrompt, Specials, Tokenizer

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
VIEW = 'document.querySelector("section.chat").chat'
IDLE = f"{VIEW}.running === null"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}so {% endif %}"


def chatting() -> Model:
    """A small model that chats in letters, and seldom ends by itself."""
    model = letters(TEMPLATE)
    assert model.tokenizer is not None
    for token in range(model.spec.vocab):
        if not model.tokenizer.decode([token]):
            model.module.head.proj.weight.data[token] = 0
    return model


def served(**how: Any) -> AbstractContextManager[int]:
    return running(Server({"letters": ModelWorker(chatting(), "letters", max_rows=4)}, **how))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(inspect=True) as port:
        yield port


@pytest.fixture
def tab(port: int, browser: Browser) -> Tab:
    return opened(browser, port)


def opened(browser: Browser, port: int, **how: Any) -> Tab:
    tab = browser.open(f"http://127.0.0.1:{port}/", **how).wait(f'{VIEW}?.settings.model.value === "letters"')
    tab.evaluate(f"({VIEW}.settings.temperature.input.value = 0, {VIEW}.settings.most.input.value = 12)")
    return tab


def say(tab: Tab, text: str) -> str:
    """Write a message with the keyboard; the answer."""
    tab.evaluate(f"{VIEW}.input.focus()")
    tab.call("Input.insertText", text=text)
    press(tab, "Enter")
    return answer(tab)


def press(tab: Tab, key: str) -> None:
    codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "Tab": 9}
    text = {"text": "\r"} if key == "Enter" else {}
    tab.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], **text)
    tab.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])


def answer(tab: Tab) -> str:
    tab.wait(IDLE)
    return str(tab.evaluate(f"{VIEW}.turns.at(-1).answer.node.textContent"))


def own(model: Model, *messages: str, begun: str = "", new: int = 12) -> str:
    """What the library writes, greedily, as the last turn of a conversation."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    prompt = RenderedPrompt(model.render(turns).text + begun)
    return model.generate([prompt], max_new_tokens=new)[0].text


# ---------------------------------------------------------------- without a browser


def test_the_page_needs_no_key_and_everything_else_does() -> None:
    with served(key="sesame") as port:
        for route in ("/health", "/v1/models", "/nowhere", "//"):
            assert ask(port, route)[0] == 401
    html, policy = page(key=True, inspect=False)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["connect-src"] == "'self'"
    assert rules["default-src"] == "'none'"
    assert all(source.startswith("'sha256-") for name in ("style-src", "script-src") for source in rules[name].split())
    assert not re.search(rb"(src|href)=\"(?!data:|#)", html)


def test_a_partial_answer_goes_on_as_if_the_model_had_written_it(port: int) -> None:
    model = chatting()
    whole = own(model, "abc")
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": whole[:5]}]
    body = {"model": "letters", "messages": turns, "temperature": 0, "max_tokens": 7, "continue_final_message": True}
    status, reply = ask(port, "/v1/chat/completions", body | {"add_generation_prompt": False})
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == whole[5:] == own(model, "abc", begun=whole[:5], new=7)
    without = {name: value for name, value in body.items() if name != "continue_final_message"}
    assert ask(port, "/v1/chat/completions", without)[1]["choices"][0]["message"]["content"] != whole[5:]  # the control


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": False, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": "abc"}]}, "continue_final_message"),
        ({"messages": [{"role": "assistant", "content": "abc"}]}, "continue_final_message"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(port: int, more: dict[str, Any], field: str) -> None:
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    body = {"model": "letters", "messages": turns, "continue_final_message": True} | more
    status, reply = ask(port, "/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, field)


# ---------------------------------------------------------------- in a browser


@pytest.mark.heavy
@in_a_browser
def test_answers_and_probabilities_are_the_librarys_own(tab: Tab) -> None:
    model = chatting()
    first = say(tab, "hello")
    assert first == own(model, "hello") != ""
    assert say(tab, "and more") == own(model, "hello", first, "and more")
    assert tab.evaluate(f"{VIEW}.turns.length") == 4
    prompt = model.ids([model.render([{"role": "user", "content": "hello"}])])[0]
    assert model.tokenizer is not None
    ids = [*prompt, *model.tokenizer.encode(first, special=False)]
    (logits,) = model.logits([ids])
    expected = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
    logprobs = json.loads(
        tab.evaluate(f"JSON.stringify({VIEW}.turns[1].answer.pieces.map(({{ entry }}) => entry.logprob))")
    )
    chosen = expected.gather(-1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0]
    assert logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
    assert "tokens/s" in tab.evaluate(f"{VIEW}.turns[1].note.textContent")
    assert re.search(r"holds [\d,]+ MiB", tab.evaluate(f"{VIEW}.status.textContent"))
    assert tab.console() == []


@pytest.mark.heavy
@in_a_browser
def test_another_token_is_chosen_with_the_keyboard_and_the_answer_goes_on_from_it(tab: Tab) -> None:
    model, first = chatting(), say(tab, "hello")
    tab.evaluate(f"{VIEW}.turns[1].answer.node.children[0].focus()")
    for _ in range(3):
        press(tab, "ArrowRight")
    assert tab.evaluate(f"document.activeElement === {VIEW}.turns[1].answer.node.children[3]")
    press(tab, "Enter")
    assert tab.evaluate(f"{VIEW}.panel.pressed.place") == 3
    shares = json.loads(tab.evaluate(f"JSON.stringify({VIEW}.panel.entries)"))
    assert sum(math.exp(one["logprob"]) for one in shares) <= 1 + 1e-6
    other = next(i for i, one in enumerate(shares) if one["token"] not in ("", first[3]))
    buttons = f"{VIEW}.panel.bars.rows.find(({{ index, node }}) => !node.hidden && index === {other}).node.firstChild"
    tab.evaluate(f"{buttons}.focus()")
    press(tab, "Enter")
    begun = first[:3] + shares[other]["token"]
    text = answer(tab)
    assert text == begun + own(model, "hello", begun=begun)
    assert tab.evaluate(f"{VIEW}.panel.piece.place") == 3  # the focus went to the new token
    assert tab.console() == []


@pytest.mark.heavy
@in_a_browser
def test_attention_of_a_token_is_the_librarys_own(tab: Tab, browser: Browser) -> None:
    model, first = chatting(), say(tab, "hello")
    tab.evaluate(f"{VIEW}.panel.keep({VIEW}.turns[1].answer.pieces[4])")
    tab.evaluate(f"{VIEW}.panel.attention.open.click()")
    tab.wait(f"!{VIEW}.panel.attention.content.hidden")
    prompt = RenderedPrompt(model.render([{"role": "user", "content": "hello"}]).text + first[:4])
    trace = model.trace([prompt], read=["blocks.*.attn.pattern"])
    layers = json.loads(tab.evaluate(f"JSON.stringify({VIEW}.panel.attention.layers)"))
    assert len(layers) == 2
    for i, layer in enumerate(layers):
        (pattern,) = trace[f"blocks.{i}.attn.pattern"]
        assert layer == pytest.approx(pattern[:, -1].mean(0).tolist(), abs=1e-5)
    assert tab.evaluate(f"{VIEW}.panel.attention.tokens.textContent") == prompt.text
    tab.evaluate(f"({VIEW}.panel.attention.layer.value = 1, {VIEW}.panel.attention.show())")
    assert "Most of it" in tab.evaluate(f"{VIEW}.panel.attention.mostRead.textContent")
    assert tab.evaluate(f"({VIEW}.panel.keep({VIEW}.turns[1].answer.pieces[2]), {VIEW}.panel.attention.content.hidden)")
    assert tab.console() == []
    with served() as plain:  # a server without --inspect has no such control
        assert opened(browser, plain).evaluate(f"{VIEW}.panel.attention === null")


@pytest.mark.heavy
@in_a_browser
def test_stop_continue_retry_and_edit(tab: Tab) -> None:
    model = chatting()
    whole = own(model, "hello", new=200)
    tab.evaluate(f"{VIEW}.settings.most.input.value = 200")
    # Escape comes while the stream runs: the first event with a token presses it.
    tab.evaluate(f"""(() => {{
      const tell = {VIEW}.tell;
      {VIEW}.tell = function (...how) {{ tell.apply(this, how); if (how[1] >= 3) this.stop(); }};
      globalThis.untell = () => ({VIEW}.tell = tell);
    }})()""")
    part = say(tab, "hello")
    tab.evaluate("untell() && 0")
    assert len(part) < len(whole)
    assert whole.startswith(part)
    assert "stopped" in tab.evaluate(f"{VIEW}.turns[1].note.textContent")
    tab.evaluate(f"{VIEW}.settings.most.input.value = 12")
    buttons = f"{VIEW}.turns[{{}}].node.querySelectorAll('.turn-buttons button')[{{}}].click()"
    tab.evaluate(buttons.format(1, 1))  # Continue
    assert answer(tab) == whole[: len(part) + 12]
    say(tab, "more")
    tab.evaluate(buttons.format(1, 0))  # Retry the first answer
    assert answer(tab) == whole[:12]
    assert tab.evaluate(f"{VIEW}.turns.length") == 2
    tab.evaluate(buttons.format(0, 0))  # Edit
    assert tab.evaluate(f"[{VIEW}.turns.length, {VIEW}.input.value]") == [0, "hello"]
    assert tab.console() == []


@pytest.mark.heavy
@in_a_browser
def test_the_key_is_asked_for_and_kept_in_memory_alone(browser: Browser) -> None:
    with served(key="sesame") as port:
        tab = browser.open(f"http://127.0.0.1:{port}/")
        tab.wait(f"!{VIEW}.keyForm.hidden && {VIEW}.form.hidden")
        assert tab.console() == []
        tab.call("Input.insertText", text="open")
        press(tab, "Enter")
        tab.wait(f'{VIEW}.problem.textContent === "The server refuses this key."')
        tab.call("Input.insertText", text="sesame")
        press(tab, "Enter")
        tab.wait(f'{VIEW}.settings.model.value === "letters" && {VIEW}.keyForm.hidden')
        tab.evaluate(f"({VIEW}.settings.temperature.input.value = 0, {VIEW}.settings.most.input.value = 12)")
        assert say(tab, "hello") == own(chatting(), "hello")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert "sesame" not in tab.evaluate(kept + " + document.documentElement.outerHTML")
    tab.evaluate(f"{VIEW}.reset()")
    tab.evaluate(f"{VIEW}.input.focus()")
    tab.call("Input.insertText", text="hello")
    press(tab, "Enter")
    tab.wait(f'{VIEW}.problem.textContent === "The server does not answer. See whether it still runs."')


@pytest.mark.heavy
@in_a_browser
def test_texts_that_come_later_than_their_tokens_are_joined_with_them(tab: Tab) -> None:
    """Text that may begin a stop string is held back, and bytes of a character wait for the rest of it."""
    events = [("", ["x"]), ("xy", ["y"]), ("", ["\ufffd"]), ("é", ["\ufffd"]), (" z", [" z", ""]), ("!", [])]
    tab.evaluate(f"""({VIEW}.server.stream = async function* () {{
      for (const [content, tokens] of {json.dumps(events)}) {{
        const entries = tokens.map((token) => ({{ token, logprob: -1, top_logprobs: [] }}));
        yield {{ choices: [{{ delta: {{ content }}, logprobs: {{ content: entries }}, finish_reason: null }}] }};
      }}
    }}, 0)""")
    assert say(tab, "hello") == "xyé z!"
    pieces = f"{VIEW}.turns[1].answer.pieces.map(({{ text, count }}) => [text, count])"
    assert tab.evaluate(pieces) == [["x", 1], ["y", 1], ["é", 2], [" z", 1], ["!", 0]]
    assert tab.console() == []


@pytest.mark.heavy
@in_a_browser
def test_texts_are_never_markup(tab: Tab) -> None:
    nasty = '<img src=x onerror="globalThis.ran=1"><script>globalThis.ran=1</script>'
    tab.evaluate(f"{VIEW}.input.focus()")
    tab.call("Input.insertText", text=nasty)
    press(tab, "Enter")
    tab.wait(IDLE)
    entry = {"token": nasty, "logprob": -1, "top_logprobs": [{"token": nasty, "logprob": -1}]}
    tab.evaluate(f"""(() => {{
      const answer = {VIEW}.turns.at(-1).answer;
      answer.add([{{ text: {json.dumps(nasty)}, count: 1, entry: {json.dumps(entry)} }}]);
      {VIEW}.panel.keep(answer.pieces.at(-1));
    }})()""")
    assert tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert tab.evaluate("globalThis.ran ?? null") is None
    assert nasty in tab.evaluate(f"{VIEW}.turns[0].node.textContent")


@pytest.mark.heavy
@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_names_widths_and_the_keyboard(port: int, browser: Browser, width: int, dark: bool) -> None:
    tab = opened(browser, port, width=width, dark=dark)
    for _ in range(6):
        say(tab, "hello")
    ends = f"{VIEW}.turns.at(-1).node.getBoundingClientRect().bottom, {VIEW}.form.getBoundingClientRect().top"
    end, form = tab.evaluate(f"[{ends}, scrollY]")[:2]
    assert 0 < end <= form + 1  # the last answer is in view
    assert tab.evaluate("scrollY") > 0  # and was not from the beginning
    tab.evaluate(f"{VIEW}.panel.keep({VIEW}.turns[1].answer.pieces[2])")
    tab.evaluate(f"{VIEW}.panel.attention.load()")
    assert nameless(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("(globalThis.reached = new Set([document.activeElement]), 0)")
    for _ in range(60):
        press(tab, "Tab")
        if tab.evaluate(f"reached.add(document.activeElement), document.activeElement === {VIEW}.input"):
            break
    missed = """[...document.querySelectorAll("button, input, textarea, select, summary, [role=button]")]
      .filter((one) => one.checkVisibility() && !one.disabled && !reached.has(one)
        && !(one.tabIndex < 0 && [...one.closest("[role=group]").children].some((other) => reached.has(other))))
      .map((one) => one.outerHTML)"""
    assert tab.evaluate(missed) == []
    asked = 'performance.getEntriesByType("resource").map(({ name }) => name).filter((name) => !/^data:/.test(name))'
    assert tab.evaluate(f"[...new Set({asked}.map((name) => new URL(name).origin))]") == [f"http://127.0.0.1:{port}"]
    assert tab.console() == []


def test_the_letters_of_these_tests_are_known() -> None:
    assert set("hello and more so abc") <= set(LETTERS)


def test_tokens_are_named_with_the_space_that_they_begin_with() -> None:
    """As a SentencePiece vocabulary has it: a decoder drops the space at the beginning of a text."""
    vocabulary = {"<unk>": 0, "▁a": 1, "▁mill": 2, "s": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend, Specials(unk="<unk>"))
    assert tokenizer.decode([2]) == "mill"  # the control
    content = logprobs_of(tokenizer, [2, 3], [TokenLogprobs(-1.0, [(2, -1.0)]), TokenLogprobs(-2.0, [(1, -0.5)])])
    assert [one["token"] for one in content["content"]] == [" mill", "s"]
    assert content["content"][1]["top_logprobs"][0]["token"] == " a"
