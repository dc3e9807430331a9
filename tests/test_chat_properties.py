"""Random conversations in several templates: the tokens that are trained are those that transformers marks between
`{% generation %}` and `{% endgeneration %}`."""

from __future__ import annotations

import random

import pytest

from test_train_tasks import chat_tokenizer
from triptych.train.chat_task import assistant_spans, chat_example

END = "{{ eos_token }}"
#: A template with the marks of transformers around what an assistant writes.
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}" + END + "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "trimmed": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}[A] {% generation %}"
    "{{ m['content'] | trim }}" + END + "{% endgeneration %}{% else %}[{{ m['role'] | upper }}] "
    "{{ m['content'] | trim }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A] {% endif %}",
    "system beside the first user": "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}<u>{{ first if loop.first else '' }}{{ m['content'] }}</u>"
    "{% elif m['role'] == 'assistant' %}<a>{% generation %}{{ m['content'] }}" + END + "{% endgeneration %}"
    "{% else %}<o>{{ m['content'] }}</o>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
}
WORDS = ("hi", "assistant", "<assistant>", "[A]", "</u>", "\n", " ", "Ä", "<a>", "bye!", "")
MARKS = ("{% generation %}", "{% endgeneration %}")


def conversation(r: random.Random) -> list[dict[str, str]]:
    """Turns in any order after the first, which is not the assistant's; their words look like the template's."""
    middle = r.choices(["user", "assistant", "tool"], k=r.randint(0, 4))
    roles = [r.choice(["system", "user"]), *middle, "assistant"]
    return [{"role": role, "content": "".join(r.choices(WORDS, k=r.randint(0, 5)))} for role in roles]


def differing(name: str, seeds: int, *, shift: int = 0) -> int:
    """How many conversations are trained at other tokens; `shift` moves where a turn begins."""
    transformers = pytest.importorskip("transformers")
    template = TEMPLATES[name]
    plain = template
    for mark in MARKS:
        plain = plain.replace(mark, "")
    ours = chat_tokenizer(plain.replace("{{ bos_token }}", ""))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=ours.backend, eos_token=ours.specials.eos, bos_token="", chat_template=template
    )
    assert ours.chat is not None
    wrong = 0
    for seed in range(seeds):
        turns = conversation(random.Random(f"{name} {seed}"))
        wanted = theirs.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        ((text, spans),) = assistant_spans(ours.chat, turns)
        row = chat_example(text, [(start + shift, stop) for start, stop in spans], ours)
        ids, trained = [int(row.ids[0]), *row.targets.tolist()], [0, *row.trained.astype(int).tolist()]
        wrong += (ids, trained) != (wanted["input_ids"], wanted["assistant_masks"])
    return wrong


@pytest.mark.heavy
@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_tokens_are_those_that_transformers_marks(name: str) -> None:
    assert differing(name, 60) == 0


@pytest.mark.heavy
def test_a_turn_that_begins_one_letter_late_is_noticed() -> None:
    assert differing("plain", 10, shift=1) > 0
