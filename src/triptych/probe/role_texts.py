"""The rows on which heads are scored: short texts, pairs of words that belong together, and random tokens
repeated; and the places of words and punctuation in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from triptych.arguments import as_index
from triptych.errors import InputError, shown
from triptych.spec import ModelSpec
from triptych.text import Tokenizer

TEXTS = (
    "Early in the morning the old man walked down to the harbour, where his boat lay. He checked the ropes, the sail "
    "and the oars; then he sat down and waited for the tide. A young woman came along the pier.",
    "Most of the letters in the box were short. One, however, was long: it told how two brothers crossed the mountains "
    "in winter, lost their mule, and reached the village after nine days. Nobody believed them.",
    "When the rain stopped, the children ran outside. They built a dam of stones and mud across the stream, and the "
    "water rose behind it. By evening it had broken; the garden was full of sand.",
    "Our teacher asked a simple question: why is the sky blue? Some of us guessed, others laughed, and one girl wrote "
    "a whole page. She had read about light, dust and colour. The answer surprised us all.",
    "Every night, after the shops had closed, a baker carried bread to the station. Travellers, porters and soldiers "
    "ate it while it was warm. In spring the trains came late, but he waited.",
    "Although the museum was small, its clocks were famous. Some were made of brass, some of wood; each showed a "
    "different hour. The guard wound them on Mondays. Visitors often asked him what time it was.",
)

REPEATS, SHORTEST, LONGEST = 8, 10, 20  # rows of random tokens; tokens of the sequence that is repeated
CUT = 128  # tokens of a built-in text that are read
PUNCTUATION = set(",;:.!?()[]\"'-–—…«»“”")
ENDINGS = set(".!?…")

SampleKind = Literal["text", "repeated", "control", "bare", "linked"]
Word = str | int
Link = tuple[str | Sequence[int], Word, Word]  # a text (or its ids), the word that reads, and the word that is read


def _links(table: str) -> list[Link]:
    """Lines of the word that reads, the one that is read, and the text."""
    lines = (line.split(maxsplit=2) for line in table.strip().splitlines())
    return [(text, query, key) for query, key, text in lines]


LINKS = {
    "subject-verb": _links("""
spoke teacher Yesterday the teacher who likes music spoke to us
bark dogs In the evening the dogs near the gate bark
left farmer After the storm the farmer with two sons left the valley
sing birds Every spring the birds in the old tower sing again
bought woman At the market the woman in a red coat bought apples
died king Last year the king of that small island died
play children On Sundays the children from our street play football
walked soldier In the story the soldier without a horse walked home
lie boats By the lake the boats of the fishermen lie empty
ate doctor Before dinner the doctor and her nurse ate bread
"""),
    "coreference": _links("""
she woman Yesterday the woman came home late because she had missed the train
he boy In the park the boy fell and then he cried
he uncle When we met my uncle at the station he was carrying a bag
she queen Although the queen was old she travelled to the coast
they girls At noon the girls stopped because they were hungry
she mother Last week my mother wrote that she would visit us
he king After lunch the king said that he would leave
they farmers In spring the farmers sold the horses because they needed money
she Mary On the bridge Mary told us that she was cold
he John At school John asked whether he could go home
"""),
}


@dataclass(frozen=True)
class HeadSample:
    """One row.

    ids        what the model reads; the source of an encoder-decoder.
    target     what the decoder beside an encoder reads.
    kind       text; repeated: random tokens, `half` of them from `start` on and then the same again; control: as
               repeated, with other tokens in place of the second half; bare: as control, without the special tokens
               that stand before every text; linked: a text with pairs of words.
    start      place of the first random token in ids, and in target.
    links      for each role the token places of the words that read, and of those that are read.
    """

    ids: list[int]
    target: list[int] | None
    kind: SampleKind
    half: int = 0
    start: tuple[int, int] = (0, 0)
    links: dict[str, list[tuple[list[int], list[int]]]] = field(default_factory=dict)

    @property
    def decoded(self) -> list[int]:
        """The ids that the decoder reads, or the only stack."""
        return self.ids if self.target is None else self.target


def random_samples(spec: ModelSpec, tokenizer: Tokenizer | None, seed: int) -> list[HeadSample]:
    """`REPEATS` rows of random tokens repeated, each followed by one with the same beginning that is not; none where
    the vocabulary or the context is too small."""
    noise = np.random.default_rng([seed, 0])
    before: list[int] = []  # the special tokens that stand before every text
    if tokenizer is not None:
        (row,) = tokenizer.encode_with_offsets("a")
        before = row.ids[: next((at for at, sequence in enumerate(row.sequence_ids) if sequence is not None), 0)]
    ids = ordinary_ids(spec, tokenizer)
    room = (min(spec.context or LONGEST * 4, LONGEST * 2 + len(before)) - len(before)) // 2
    longest = min(LONGEST, len(ids) // 2, room)
    if longest < 4:
        return []
    samples = []
    both = spec.layout == "encoder-decoder"
    for _ in range(REPEATS):
        half = int(noise.integers(min(SHORTEST, max(4, longest // 2)), longest + 1))
        drawn = noise.choice(ids, 2 * half, replace=False).tolist()
        once = drawn[:half]
        rows: list[tuple[SampleKind, list[int]]] = [("repeated", once + once), ("control", drawn)]
        for kind, ids_of_row in rows + ([("bare", drawn)] if before else []):
            start = 0 if kind == "bare" else len(before)
            target = [spec.ids.start or 0, *ids_of_row] if both else None
            samples.append(HeadSample([*before[:start], *ids_of_row], target, kind, half, (start, 1)))
    return samples


def linked_samples(
    links: dict[str, Sequence[Link]], spec: ModelSpec, tokenizer: Tokenizer | None, *, strict: Sequence[str]
) -> list[HeadSample]:
    """The texts with pairs of words, by role.  A pair that cannot be used is left out; for the roles of `strict`,
    which the user gave, it is an InputError."""
    samples = []
    for role, every in links.items():
        for text, query, key in every:
            try:
                ids, spans = words_of(text, tokenizer)
                pair = place(query, spans), place(key, spans)
                if spec.layout == "decoder" and min(pair[0]) <= max(pair[1]):
                    raise InputError(
                        f"{query!r} does not stand after {key!r} in {shown(text)}, and a decoder reads only what came "
                        "before; the word that reads comes first in a pair, so exchange the two"
                    )
            except InputError:
                if role in strict:
                    raise
                continue
            target = None if spec.layout != "encoder-decoder" else [spec.ids.start or 0]
            if spec.context is None or len(ids) <= spec.context:
                samples.append(HeadSample(ids, target, "linked", links={role: [pair]}))
    return samples


def words_of(text: str | Sequence[int], tokenizer: Tokenizer | None) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """The ids of a text and its words in order, each with the places of its tokens; ids are words by themselves.

    Raises InputError for a text without a tokenizer, and for what are no ids.
    """
    if not isinstance(text, str):
        wrong = [token for token in text if as_index(token) is None]
        if wrong:
            raise InputError(f"{shown(wrong[0])} is no token id; give one text, or the ids of one")
        ids = [int(i) for i in text]
        return ids, [(str(i), [at]) for at, i in enumerate(ids)]
    if tokenizer is None:
        raise InputError(f"this model has no tokenizer, so give token ids in place of {shown(text)}")
    (row,) = tokenizer.encode_with_offsets(text)
    words = []
    for match in re.finditer(r"\w+(?:['’]\w+)*|[^\w\s]", text):
        places = [
            at for at, (a, b) in enumerate(row.offsets)
            if row.sequence_ids[at] is not None and a < match.end() and b > match.start()
        ]  # fmt: skip
        if places:
            words.append((match[0], places))
    return row.ids, words


def place(word: Word, words: Sequence[tuple[str, list[int]]]) -> list[int]:
    """The token places of a word: `bank`, or `bank@2` for the second one from the left.

    Raises InputError for a word that is not there, or more than once and without a number.
    """
    name, _, number = str(word).rpartition("@") if re.search(r".@\d+$", str(word)) else (str(word), "", "")
    matches = [places for text, places in words if text == name]
    if not matches:
        matches = [places for text, places in words if text.lower() == name.lower()]
    if not matches:
        there = ", ".join(dict.fromkeys(text for text, _ in words[:24])) or "none, as it is empty"
        raise InputError(f"there is no word {name!r} in the text; its words are {there}")
    if not number and len(matches) > 1:
        raise InputError(
            f"{name!r} stands {len(matches)} times in the text; write {name}@1 for the first from the left"
        )
    if number and not 1 <= int(number) <= len(matches):
        raise InputError(f"{name!r} stands {len(matches)} times in the text, so {word!r} is not there")
    return matches[int(number or 1) - 1]


def punctuation(tokenizer: Tokenizer | None, ids: Sequence[int]) -> tuple[set[int], set[int]]:
    """Of these ids, those that are punctuation or a special token that ends a text, and those that end a sentence."""
    if tokenizer is None:
        return set(), set()
    ends = {tokenizer.backend.token_to_id(text) for name, text in tokenizer.specials.named().items() if name in
            ("eos", "sep")}  # fmt: skip
    marks, stops = set(), set()
    for token in set(ids):
        text = tokenizer.tokens([token])[0].strip("␣Ġ▁ #")
        if text and set(text) <= PUNCTUATION:
            marks.add(token)
            if set(text) & ENDINGS:
                stops.add(token)
        elif token in ends:
            marks.add(token)
            stops.add(token)
    return marks, stops


def ordinary_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> list[int]:
    """The ids that may be drawn: no special tokens, and with a tokenizer only those of letters."""
    vocab = min(spec.vocab, spec.source_vocab)
    known = {spec.ids.pad, spec.ids.bos, spec.ids.start, *spec.ids.eos}
    every = [i for i in range(vocab) if i not in known]
    if tokenizer is None:
        return every
    every = [i for i in every if i < tokenizer.vocab_size]
    if len(every) > 2000:  # enough to draw from, and few to name
        every = every[:: len(every) // 2000]
    names = tokenizer.tokens(every)
    letters = [i for i, name in zip(every, names, strict=True) if name.strip("␣Ġ▁ #").isalpha()]
    return letters if len(letters) >= 2 * SHORTEST else every
