"""Metrics of random predictions, beside definitions written again in their slowest form; and random conversations in
several templates, whose trained tokens are those that transformers marks between `{% generation %}` and
`{% endgeneration %}`.
"""

import random
import re
import string
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from test_train_tasks import chat_tokenizer
from triptych.train import metrics
from triptych.train.chat_task import assistant_spans, chat_example

CASES = 200


def _classes(r: random.Random) -> tuple[list[int], list[int]]:
    count, labels = r.randint(1, 12), r.randint(1, 5)
    return [r.randrange(labels) for _ in range(count)], [r.randrange(labels) for _ in range(count)]


def _f1(predicted: list[int], right: list[int], label: int) -> float:
    """The harmonic mean of precision and recall; 0 where one of them is."""
    true = sum(a == b == label for a, b in zip(predicted, right, strict=True))
    if not true:
        return 0.0
    precision, recall = true / predicted.count(label), true / right.count(label)
    return 2 / (1 / precision + 1 / recall)


def labels_by_hand(r: random.Random) -> tuple[object, object]:
    predicted, right = _classes(r)
    share = sum(a == b for a, b in zip(predicted, right, strict=True)) / len(right)
    occurring = sorted({*predicted, *right})
    mean = sum(_f1(predicted, right, label) for label in occurring) / len(occurring)
    a, b = np.array(predicted), np.array(right)
    return (metrics.accuracy(a, b), metrics.macro_f1(a, b)), (share, mean)


def several_labels_by_hand(r: random.Random) -> tuple[object, object]:
    rows, columns = r.randint(1, 8), r.randint(1, 4)
    a, b = ([[r.randint(0, 1) for _ in range(columns)] for _ in range(rows)] for _ in range(2))
    mean = sum(_f1([row[c] for row in a], [row[c] for row in b], 1) for c in range(columns)) / columns
    share = sum(x == y for x, y in zip(a, b, strict=True)) / rows
    return (metrics.accuracy(np.array(a), np.array(b)), metrics.macro_f1(np.array(a), np.array(b))), (share, mean)


def _entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """Every place and length tried: a beginning, continuations of its type, and then something else."""
    found = set()
    for start, tag in enumerate(tags):
        for stop in range(start + 1, len(tags) + 1):
            inside = f"I-{tag[2:]}"
            whole = tag[:2] == "B-" and all(one == inside for one in tags[start + 1 : stop])
            if whole and (stop == len(tags) or tags[stop] != inside):
                found.add((tag[2:], start, stop))
    return found


def _tags(r: random.Random, length: int) -> list[str]:
    """Any order, so that most continuations continue nothing."""
    return r.choices(["O", "B-A", "I-A", "B-B", "I-B", "B-A-B", "I-A-B"], k=length)


def entities_by_hand(r: random.Random) -> tuple[object, object]:
    lengths = [r.randint(0, 9) for _ in range(r.randint(1, 4))]
    predicted, right = ([_tags(r, n) for n in lengths] for _ in range(2))
    sides = [[_entities(row) for row in side] for side in (predicted, right)]
    both = sum(len(a & b) for a, b in zip(*sides, strict=True))
    every = sum(len(one) for side in sides for one in side)
    found = [sorted(metrics.entities(row)) for row in (*predicted, *right)]
    missed = [0.0] if found == [sorted(row) for row in (*sides[0], *sides[1])] else [1.0]
    return [metrics.entity_f1(predicted, right), *missed], [2 * both / every if every else 0.0, 0.0]


def _squad_words(text: str) -> list[str]:
    text = "".join(char for char in text.lower() if char not in set(string.punctuation))
    return [word for word in re.split(r"\s+", text) if word and word not in ("a", "an", "the")]


def answers_by_hand(r: random.Random) -> tuple[object, object]:
    words = ["The", "a", "an", "Globe", "globe,", "theatre.", "An-other", "  ", "(the)", "then", "Ä", "1.5", "it's"]
    a, b = (" ".join(r.choices(words, k=r.randint(0, 6))) for _ in range(2))
    left, right = _squad_words(a), _squad_words(b)
    shared, rest = 0, list(right)
    for word in left:
        if word in rest:
            rest.remove(word)
            shared += 1
    if not left or not right:
        f1 = float(left == right)
    else:
        f1 = 2 * shared / (len(left) + len(right))
    return (metrics.answer_f1(a, b), metrics.exact_match(a, b)), (f1, float(left == right))


def recall_by_hand(r: random.Random) -> tuple[object, object]:
    """Equal scores count as better than the right one."""
    count, k = r.randint(1, 6), r.randint(1, 6)
    scores = [[r.choice([0.1, 0.2, 0.5, r.random()]) for _ in range(count)] for _ in range(count)]
    hits = 0
    for i, row in enumerate(scores):
        others = [score for j, score in enumerate(row) if j != i]
        hits += sum(score >= row[i] for score in others) < k
    return metrics.recall_at(np.array(scores), k), hits / count


def _edits(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Every way tried."""

    @cache
    def left(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        return min(left(i + 1, j + 1) + (a[i] != b[j]), left(i + 1, j) + 1, left(i, j + 1) + 1)

    return left(0, 0)


def word_errors_by_hand(r: random.Random) -> tuple[object, object]:
    words = ["one", "two", "Two", "three,", "o'clock", "-"]
    count = r.randint(1, 4)
    written = [" ".join(r.choices(words, k=r.randint(0, 7))) for _ in range(count)]
    right = [" ".join(["one", *r.choices(words, k=r.randint(0, 7))]) for _ in range(count)]

    def plain(text: str) -> tuple[str, ...]:
        bare = (re.sub(r"[^\w\s]", "", word.lower()) for word in text.split())
        return tuple(word for word in bare if word)

    errors = sum(_edits(plain(a), plain(b)) for a, b in zip(written, right, strict=True))
    return metrics.word_error_rate(written, right), errors / sum(len(plain(b)) for b in right)


def translations_by_hand(r: random.Random) -> tuple[object, object]:
    """chrF of one reference each: F with beta 2 of the mean precision and recall of 1 to 6 letters, as Popović 2015;
    BLEU is 100 of equal texts and 0 of texts without a common word."""
    pytest.importorskip("sacrebleu")
    letters = "abc "
    pairs = [["".join(r.choices(letters, k=r.randint(30, 50))) for _ in range(r.randint(1, 3))] for _ in range(2)]
    written, right = pairs[0], (pairs[1] * 3)[: len(pairs[0])]
    same = ["one two three four five", *right]
    found = metrics.translation(same, same)["BLEU"], metrics.translation(["x y"], ["a b"])["BLEU"]
    return (*found, metrics.translation(written, right)["chrF"]), (100.0, 0.0, _chrf(written, right))


def _chrf(written: list[str], right: list[str]) -> float:
    shares: list[tuple[float, float]] = []
    for n in range(1, 7):
        match = ours = theirs = 0
        for a, b in zip(written, right, strict=True):
            grams = [[text[i : i + n] for i in range(len(text) - n + 1)] for text in map(_letters, (a, b))]
            match += sum(min(grams[0].count(gram), grams[1].count(gram)) for gram in set(grams[0]))
            ours, theirs = ours + len(grams[0]), theirs + len(grams[1])
        if ours and theirs:
            shares.append((match / ours, match / theirs))
    if not shares:
        return 0.0
    precision, recall = (sum(side) / len(shares) for side in zip(*shares, strict=True))
    return 100 * 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


def _letters(text: str) -> str:
    return "".join(text.split())


PROPERTIES: dict[str, Callable[[random.Random], tuple[object, object]]] = {
    "labels": labels_by_hand, "several labels": several_labels_by_hand, "entities": entities_by_hand,
    "answers": answers_by_hand, "recall": recall_by_hand, "word errors": word_errors_by_hand,
    "translations": translations_by_hand,
}  # fmt: skip


def disagreements(name: str) -> int:
    wrong = 0
    for seed in range(CASES):
        found, wanted = PROPERTIES[name](random.Random(seed))
        try:
            assert found == pytest.approx(wanted, abs=1e-9)
        except AssertionError:
            wrong += 1
    return wrong


@pytest.mark.parametrize("name", PROPERTIES)
def test_metrics_are_their_definitions(name: str) -> None:
    assert disagreements(name) == 0


#: A metric that is computed otherwise, and what must then disagree.
BROKEN: dict[str, tuple[str, str, Callable[..., object]]] = {
    "a class that does not occur counts": (
        "labels", "macro_f1", lambda a, b: float(np.mean([metrics.f1(a == c, b == c) for c in range(5)])),
    ),
    "a continuation begins an entity": (
        "entities", "entities",
        lambda tags: _entities([f"B-{tag[2:]}" if tag[:1] == "I" and (not i or tags[i - 1][2:] != tag[2:]) else tag
                                for i, tag in enumerate(tags)]),
    ),
    "articles stay": ("answers", "normalized_answer", lambda text: " ".join(text.lower().split())),
    "equal scores are not better": (
        "recall", "recall_at",
        lambda scores, k: float(((scores > np.diag(scores)[:, None]).sum(1) < k).mean()),
    ),
    "a replacement counts twice": ("word errors", "distance", lambda a, b: abs(len(a) - len(b)) + 2),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_metric_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, other = BROKEN[broken]
    monkeypatch.setattr(metrics, function, other)
    assert disagreements(name) > 0


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
