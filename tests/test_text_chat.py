"""Chat templates: byte for byte what transformers renders, and nothing that a template of ill will could do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from triptych.checkpoints.gguf_reader import GGUFSource
from triptych.errors import InputError, TextError
from triptych.text import ChatTemplate, byte_tokenizer, from_gguf

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- "\\n" }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set content = '<|start|>' + message['role'] + '<|stop|>\n\n'+ message['content'] | trim + '<|eot|>' %}
    {% if loop.index0 == 0 %}
        {% set content = bos_token + content %}
    {% endif %}
    {{ content }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}
"""
GEMMA = """\
{{ bos_token }}{% set ns = namespace(turns=0) %}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% set ns.turns = ns.turns + 1 %}{% generation %}
{{ '<start>' + message['role'].replace('assistant', 'model') + '\n' + message['content'] }}{% endgeneration %}
{% endfor %}{{ ns.turns }}{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}
"""
TALK = [
    {"role": "user", "content": '  Größe & <b>"quotes"</b> 日本 🙂\n'},
    {"role": "assistant", "content": "O'er\tthere.{{ not a template }}"},
    {"role": "user", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "naïve", "parameters": {"b": [1, None, True], "a": 0.5}}}]


def _theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    backend = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend, **SPECIAL)
    return backend.apply_chat_template(messages, chat_template=source, tokenize=False, **options)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA], ids=["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("going_on", [True, False])
def test_renders_what_transformers_renders(source: str, going_on: bool) -> None:
    ours = ChatTemplate(source, SPECIAL).render(TALK, add_generation_prompt=going_on)
    assert ours.text == str(ours) == _theirs(source, TALK, add_generation_prompt=going_on)


def test_hands_variables_to_the_template() -> None:
    template = ChatTemplate(CHATML, SPECIAL)
    for options in ({"tools": TOOLS}, {"enable_thinking": False}, {"tools": TOOLS, "enable_thinking": True}):
        assert template.render(TALK, **options).text == _theirs(CHATML, TALK, add_generation_prompt=True, **options)


def test_messages_are_read_as_transformers_reads_them() -> None:
    """A value of None is no value, and a thought has every name that templates read."""
    source = (
        "{% set ns = namespace(self=2, n=0) %}{% for m in messages %}{% set ns.n = ns.n + ns.self %}{{ m.content }}"
        "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}[{{ m.reasoning_content }}|{{ m.thinking }}]"
        "{% endfor %}{{ ns.n }}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": None}}]}
    for name in ("reasoning_content", "thinking", "reasoning"):
        talk = [TALK[0], call, {"role": "assistant", "content": "so", name: "because", "tool_calls": None}]
        shown = ChatTemplate(source, SPECIAL).render(talk)
        assert shown.text == _theirs(source, talk)
        assert shown.text.endswith("so[because|because]6")
        assert "None" not in shown.text


def test_smollm2_renders_and_frames_as_transformers_does(smollm2_gguf: Path) -> None:
    made = from_gguf(GGUFSource(smollm2_gguf).metadata)
    assert made.bos_id == 1
    for talk in (TALK, [{"role": "system", "content": "Be brief."}, *TALK]):
        prompt = made.chat.render(talk)
        assert prompt.text == _theirs(made.chat.source, talk, add_generation_prompt=True)
        ids = made.encode(prompt)
        assert ids[0] == made.bos_id != ids[1]
        assert made.decode(ids, skip_special=False) == prompt.text


def test_a_variable_nobody_reads_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no variable 'enable_thinkin' \(did you mean 'enable_thinking'\?\)"):
        ChatTemplate(CHATML).render(TALK, enable_thinkin=False)
    assert {"messages", "enable_thinking"} <= ChatTemplate(CHATML).variables()
    with pytest.raises(TextError):
        ChatTemplate("{% for %}").variables()
    with pytest.raises(InputError, match="no variable 'tools'"):
        ChatTemplate(LLAMA3).render(TALK, tools=TOOLS)
    with pytest.raises(InputError, match="plain JSON"):
        ChatTemplate(CHATML).render([{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('System role\nnot supported') }}", "chat template: System role"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(source: str, message: str) -> None:
    with pytest.raises(TextError, match=message) as caught:
        ChatTemplate(source).render(TALK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ strftime_now.__code__.co_name }}",
        "{{ ('%s' | attr('format')).__globals__.x }}",
        "{{ ''['__cla' + 'ss__']['__mro__'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].environ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__html__ = cycler %}{{ n | escape }}",
        "{{ namespace({'__html__': cycler}) | escape }}",
        "{{ namespace(_x=1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.environ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TextError):
        ChatTemplate(source).render(TALK)


DOUBLED = "{% set n = namespace(s='a' * 99) %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
NESTED = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NESTED, "more than 0.5 s"),
        ("{{ 9 ** (9 ** (9 ** 9)) }}", "more than 0.5 s|too much memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "exceeds 16777216 characters"),
        ("{{ ('a' * (2 * 10**9)) | length }}", "it took too much memory"),
        (DOUBLED, "memory|0.5 s"),
        ("{{ range(10**9) | list }}", "[Rr]ange too big"),
        ("{% if " + "(" * 5000 + "1" + ")" * 5000 + " %}{% endif %}", "nested too deeply"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ],
)
def test_a_bomb_is_stopped_and_the_next_prompt_renders(source: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        ChatTemplate(source).render(TALK, seconds=0.5)
    assert ChatTemplate("{{ messages | length }}").render(TALK).text == "3"


def test_tojson_is_python_json_not_html() -> None:
    value = {"b": "<é&'>", "a": [1, 2.5, None, False]}
    shown = ChatTemplate("{{ v | tojson }}").render([], v=value).text
    assert shown == json.dumps(value, ensure_ascii=False)
    assert ChatTemplate("{{ strftime_now('%%') }}").render([]).text == "%"


FORKING = """
import os, sys, threading, warnings
from triptych.text import ChatTemplate

warnings.simplefilter("ignore")  # of forking while threads run, which is what is tested
template = ChatTemplate("{{ messages[0].n }}" + "x" * 2000)
def render(n):
    return template.render([{"n": n}]).text == str(n) + "x" * 2000

assert render(0)
started, stop, wrong = threading.Event(), threading.Event(), []
def beside():
    n = 0
    while not stop.is_set():
        n += 1
        wrong.extend([] if render(n) else [n])
        started.set()
thread = threading.Thread(target=beside)
thread.start()
started.wait()
children = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        good = all(render(f"{child} {n}") for n in range(50))
        sys.stdout.flush()
        sys.exit(0 if good else 3)  # with its exit functions, which must leave the parent's worker alone
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
stop.set()
thread.join()
assert codes == [0, 0, 0], codes
assert not wrong and render(1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_renders_and_its_parent_loses_no_reply() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
