"""Tiny decoders that write a fixed text after any prompt, with the chat templates of several families, and a server.

A model of these has an embedding for each token, attention and MLPs that add nothing, and a head that gives each token
the one after it: so it runs as every decoder does, and what it writes is known.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import torch
from tokenizers import AddedToken

from serving import running
from triptych.model import Model, create
from triptych.serve.app import Server
from triptych.serve.worker import ModelWorker
from triptych.text import ChatTemplate, Tokenizer, character_tokenizer

ALPHABET = "".join(map(chr, range(32, 127))) + "\n·é"

HERMES = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Functions:{% for tool in tools %}
{{ tool.function | tojson }}{% endfor %}
<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{% if tools %}<|start|>system<|end|>

{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}<|eot|>{% endif %}{% for m in messages %}{% if m.tool_calls is defined %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('this model writes one call at a time') }}{% endif -%}
<|start|>assistant<|end|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eom|>
{%- elif m.role == 'tool' %}<|start|>ipython<|end|>

{{ m.content | tojson }}<|eot|>{% else %}<|start|>{{ m.role }}<|end|>

{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""

MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last }}{% endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{{- '[/TOOL_RESULTS]' }}
{%- else %} {{ m.content }}</s>{% endif %}{% endfor %}"""

DEEPSEEK = """{{ tools | tojson if tools }}{% for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>
{%- elif m.tool_calls %}{{ m.content or '' }}<|calls_begin|>{% for call in m.tool_calls %}
{{- '\n' if not loop.first }}<|call_begin|>{{ call.type }}<|sep|>{{ call.function.name }}
```json
{{ call.function.arguments }}
```<|call_end|>{% endfor %}<|calls_end|><|eos|>
{%- elif m.role == 'tool' %}<|output|>{{ m.content }}<|output_end|>
{%- else %}{{ m.content }}<|eos|>{% endif %}{% endfor %}"""

QWEN_CODER = """{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}
</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM = """{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

PLAIN = """{% for m in messages %}{{ m.role }}:
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""

#: Templates that can be told how much to think: whether, and in levels.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}"
)
LEVELS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}({{ reasoning_effort or 'medium' }})"

TEMPLATES = {
    "hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "deepseek": DEEPSEEK, "qwen-coder": QWEN_CODER, "glm": GLM,
    "plain": PLAIN,
}  # fmt: skip
#: What each answers: a call of get_weather, where its template has calls.
ANSWERS = {
    "hermes": (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Orléans", "days": 3}}\n</tool_call>'
    ),
    "llama3": '{"name": "get_weather", "parameters": {"city": "Orléans", "days": 3}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Orléans", "days": 3}, "id": "x12345678"}]',
    "deepseek": (
        'Let me look.<|calls_begin|><|call_begin|>function<|sep|>get_weather\n```json\n{"city": "Orléans", "days": 3}\n'
        "```<|call_end|><|calls_end|>"
    ),
    "qwen-coder": (
        "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOrléans\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        "Let me look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Orléans</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "plain": "Four is what it says, and no more.",
}  # fmt: skip
SPECIAL = {"mistral": ("[TOOL_CALLS]",), "deepseek": ("<|calls_begin|>", "<|call_begin|>", "<|sep|>")}
ENDS = {"llama3": ("<|eom|>", "<|eot|>")}  # special tokens that end a row, beside EOS
WEATHER = {
    "type": "object", "required": ["city"],
    "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
}  # fmt: skip
ARGUMENTS = {"city": "Orléans", "days": 3}


def pieces_of(answer: str, special: tuple[str, ...], size: int) -> list[str]:
    """The answer in pieces of at least `size` characters, none twice; special texts are pieces of their own."""
    pieces: list[str] = []
    rest = answer
    while rest:
        at = min((at for one in special if (at := rest.find(one)) >= 0), default=len(rest))
        length = next((len(one) for one in special if rest.startswith(one)), 0) or min(size, at)
        while rest[:length] in pieces and length < at:
            length += 1
        length = at if length < at < length + 2 else length  # one character would be a token that texts have
        pieces.append(rest[:length])
        rest = rest[length:]
    assert len({*pieces}) == len(pieces)
    return pieces


def scripted(
    answer: str, template: str, special: tuple[str, ...] = (), ends: tuple[str, ...] = (), piece: int = 5
) -> Model:  # fmt: skip
    """A model that writes `answer`, in tokens of `piece` characters, and ends, after every prompt of its template.

    `special` texts are special tokens, which decoding leaves out, and a token each; so are `ends`, which end a row.
    """
    plain = character_tokenizer(ALPHABET)
    last = ChatTemplate(template).render([{"role": "user", "content": "?"}]).text[-1]
    backend, pieces = plain.backend, pieces_of(answer, special, piece)
    chain = [backend.token_to_id(last)]
    for text in pieces:
        backend.add_tokens([AddedToken(text, special=text in special, normalized=False)])
        chain.append(backend.token_to_id(text))
    assert plain.eos_id is not None
    chain.append(plain.eos_id)
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in ends])
    stops = [backend.token_to_id(text) for text in ends]
    vocab = backend.get_vocab_size(with_added_tokens=True)
    model = create(
        {"model_type": "llama", "hidden_size": vocab + vocab % 2, "num_hidden_layers": 1, "num_attention_heads": 1,
         "intermediate_size": 8, "vocab_size": vocab, "max_position_embeddings": 8192, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": plain.eos_id},
        Tokenizer(backend, plain.specials, stop_ids=stops, chat=ChatTemplate(template)),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        embedding = model.module.get_parameter("decoder.embed.tokens.weight")
        head = model.module.get_parameter("head.proj.weight")
        embedding += torch.eye(*embedding.shape)
        for now, after in pairwise(chain):
            head[after, now] = 5.0  # certain at any usual temperature
    return model


@cache
def model(kind: str) -> Model:
    return scripted(ANSWERS[kind], TEMPLATES[kind], SPECIAL.get(kind, ()), ENDS.get(kind, ()))


@contextmanager
def serving(models: Mapping[str, Model], key: str | None = None) -> Iterator[int]:
    """The port of a server of these models while it runs."""
    workers = {name: ModelWorker(model, name, max_rows=8) for name, model in models.items()}
    with running(Server(workers, key=key)) as port:
        yield port
