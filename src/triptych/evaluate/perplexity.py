"""The perplexity of a text of one's own, by tokens, words and bytes.

Of a decoder it is exp(-(1/N) Σ log P(token | those before it)); of an encoder-decoder the same of targets beside their
sources.  An encoder has none; its pseudo-perplexity (Salazar et al. 2020) takes for each token the probability that it
has where it alone is masked, so that it sees what follows too, and is not comparable with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from triptych.arguments import checked, integer
from triptych.errors import InputError, counted, shown
from triptych.generate import MAX_ROWS, QueueProgress, Request, score
from triptych.model import Model
from triptych.nn import Batch, flat
from triptych.spec import LMHeadSpec, MaskedLMHeadSpec
from triptych.text import Encoded
from .scoring import scheduler_of

WINDOW, MASKED_WINDOW = 2048, 128  # tokens of a window, unless given; the work of the second grows with its square
MASKED_TOKENS = 4096  # of one forward of masked rows, unless a single row is longer

OnTokens = Callable[[int, int], None]
"""Called with the tokens that are scored, and their number in all."""


@dataclass(frozen=True)
class Perplexity:
    """Of a text: its log-likelihood in nats, and what it is divided by.

    kind      "perplexity", or "pseudo-perplexity" of an encoder.
    tokens    that were scored, of the `text_tokens` that the text has: without the first one of a text where nothing
              can stand before it.
    words     separated by white space, and `bytes` of UTF-8, of what the scored tokens spell.
    window    tokens that the model reads at once, and `overlap` those of them that it only reads again; None where each
              row was read whole.
    """

    kind: Literal["perplexity", "pseudo-perplexity"]
    nats: float
    tokens: int
    text_tokens: int
    words: int
    bytes: int
    window: int | None
    overlap: int | None

    @property
    def by_token(self) -> float:
        return _exp(-self.nats / self.tokens)

    @property
    def by_word(self) -> float:
        return _exp(-self.nats / self.words)

    @property
    def by_byte(self) -> float:
        return _exp(-self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return -self.nats / self.bytes / math.log(2)

    def to_dict(self) -> dict[str, Any]:
        """The fields and the figures, for JSON."""
        figures = ("by_token", "by_word", "by_byte", "bits_per_byte")
        return asdict(self) | {name: getattr(self, name) for name in figures}


@checked
def perplexity(
    model: Model,
    text: str | Sequence[str],
    *,
    sources: Sequence[str] | None = None,
    window: int | None = None,
    overlap: int = 0,
    max_rows: int = MAX_ROWS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of a text, or of several together, each by itself; of an encoder-decoder that of the targets
    `text`, one for each of `sources`.

    A decoder reads a text longer than `window` in windows (`windows`), by default as many tokens as the model reads and
    at most 2,048; a window begins anew with no memory of the one before, but for `overlap` tokens that it reads again.
    The first token follows BOS, or EOS where there is no BOS; where there is neither it is not scored.  An encoder's
    windows have special tokens around them, and by default 128 tokens.  A target is scored with the special tokens that
    the tokenizer puts around it, the end token among them.  At most `max_rows` windows run at once.

    `on_progress` is called with the tokens that are scored, and their number in all.

    Raises InputError for a text without a token to score, for sources that do not fit the model or the texts, for
    numbers out of range, for a model that predicts no tokens, and for log-probabilities that are NaN; TextError without
    a tokenizer.
    """
    texts = [text] if isinstance(text, str) else list(text)
    _check(model, texts, sources)
    integer("overlap", overlap, 0)
    integer("max_rows", max_rows, 1)
    words = model.inputs.words
    size = sum(len(one.split()) for one in texts), sum(len(one.encode()) for one in texts)
    if model.spec.layout == "encoder":
        return _masked(model, texts, _window(model, window, overlap, MASKED_WINDOW), overlap, size, on_progress)
    counts: tuple[int, int]
    limits: tuple[int | None, int | None] = None, None
    if sources is not None:
        if window is not None or overlap:
            raise InputError("a target is read whole beside its source; leave window and overlap out")
        start, targets = model.spec.start_id(), model.ids(texts, target=True)
        rows = [([start], ids) for ids in targets]
        counts = (sum(map(len, targets)),) * 2
    else:
        width = _window(model, window, overlap, WINDOW)
        first = words.bos_id if words.bos_id is not None else words.eos_id
        every = [words.encode_corpus(one).tolist() for one in texts]
        rows = [pair for ids in every for pair in windows(ids, first, width, overlap)]
        counts, limits = (sum(len(ids) for _, ids in rows), sum(map(len, every))), (width, overlap)
        if first is None:
            heads = [words.decode(ids[:1]) for ids in every]
            size = size[0] - sum(map(bool, map(str.split, heads))), size[1] - sum(len(one.encode()) for one in heads)
    if not counts[0]:
        raise InputError("the text has no token to score; give a longer one")
    read = None if sources is None else model.source(list(sources))
    nats = _log_likelihood(model, rows, read, max_rows, counts[0], on_progress)
    return Perplexity("perplexity", nats, *counts, max(size[0], 1), max(size[1], 1), *limits)


def windows(
    ids: Sequence[int], first: int | None, window: int, overlap: int = 0
) -> Iterator[tuple[list[int], list[int]]]:
    """What is read and what is scored behind it, for each part of `ids`; every id is scored once.

    A part reads at most `window` ids: the last one that is scored is not read.  The first part is read behind the id
    `first`; without one its own first id is not scored.  Every other one scores `window - overlap` ids and reads those
    before them, at least `overlap + 1`; the last one reads as many as fit.  These are the windows of lm-eval's
    `loglikelihood_rolling` with `context_len = overlap + 1`.
    """
    if first is None:
        before, done = list(ids[:1]), min(window + 1, len(ids))
        part = list(ids[1:done])
    else:
        before, done = [first], min(window, len(ids))
        part = list(ids[:done])
    if part:
        yield before, part
    while done < len(ids):
        end = min(done + window - overlap, len(ids))
        yield list(ids[end - window - 1 : done]), list(ids[done:end])
        done = end


def _check(model: Model, texts: Sequence[str], sources: Sequence[str] | None) -> None:
    """Raise InputError for texts, sources and models that have no perplexity."""
    spec = model.spec
    model.check_words("a perplexity")
    if not texts:
        raise InputError("there is no text; give one to score")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"text {i} is {'empty' if isinstance(text, str) else shown(text)}; give a text to score")
    wants = MaskedLMHeadSpec if spec.layout == "encoder" else LMHeadSpec
    if not isinstance(spec.head, wants):
        raise InputError(f"this {spec.family} {spec.layout} has no head that predicts tokens, so no perplexity")
    if (spec.layout == "encoder-decoder") != (sources is not None):
        if sources is None:
            raise InputError("an encoder-decoder scores targets beside their sources; give sources, one for each text")
        raise InputError(f"this {spec.family} {spec.layout} reads no sources; give the text alone")
    if sources is not None and len(sources) != len(texts):
        raise InputError(f"{counted(len(sources), 'source')} and {counted(len(texts), 'text')}; give one for each")


def _window(model: Model, window: int | None, overlap: int, most: int) -> int:
    limit = model.spec.longest_row
    if window is None:
        window = min(most, most if limit is None else limit)
    if limit is not None and integer("window", window, 1) > limit:
        raise InputError(f"window={window}, and the model reads at most {limit} tokens at once")
    if overlap >= integer("window", window, 1):
        raise InputError(f"overlap={overlap} leaves nothing of window={window} to score; share fewer tokens")
    return window


def _log_likelihood(
    model: Model, rows: Sequence[tuple[list[int], list[int]]], sources: Sequence[Any] | None, max_rows: int,
    total: int, on_progress: OnTokens | None,
) -> float:  # fmt: skip
    """The sum of log P of what is scored in each row."""
    requests = [
        Request(
            prompt=[*before, *part], source=None if sources is None else sources[i], score_from=len(before),
            max_new_tokens=0, number=i,
        )
        for i, (before, part) in enumerate(rows)
    ]  # fmt: skip
    ends = [0, *accumulate(len(part) for _, part in rows)]

    def progressed(progress: QueueProgress) -> None:
        if on_progress is not None:
            on_progress(ends[progress.done], total)

    scores = score(scheduler_of(model, max_rows), requests, on_progress=progressed)
    return math.fsum(one.logprob for row in scores for one in row)


@torch.inference_mode()
def _masked(
    model: Model, texts: Sequence[str], window: int, overlap: int, size: tuple[int, int],
    on_progress: OnTokens | None,
) -> Perplexity:  # fmt: skip
    """The pseudo-perplexity of texts: in each window every token is masked alone once, but for those that it shares
    with the window before."""
    mask = model.inputs.words.mask_id
    if mask is None:
        raise InputError("this tokenizer has no mask token, so an encoder has no pseudo-perplexity")
    rows: list[tuple[Encoded, list[int]]] = []
    for text in texts:
        for i, row in enumerate(model.inputs.text_windows(text, window, overlap)):
            inside = [at for at, sequence in enumerate(row.sequence_ids) if sequence is not None]
            rows.append((row, inside[overlap if i else 0 :]))
    total, done, nats = sum(len(places) for _, places in rows), 0, 0.0
    if not total:
        raise InputError("the text has no token to score; give a longer one")
    for row, places in rows:
        together = max(1, MASKED_TOKENS // len(row.ids))
        for first in range(0, len(places), together):
            part = places[first : first + together]
            nats += _masked_log_likelihood(model, row, part, mask)
            done += len(part)
            if on_progress is not None:
                on_progress(done, total)
    if math.isnan(nats):
        raise InputError("the model's log-probabilities are NaN; are its weights finite?")
    return Perplexity("pseudo-perplexity", nats, total, total, max(size[0], 1), max(size[1], 1), window, overlap)


def _masked_log_likelihood(model: Model, row: Encoded, places: Sequence[int], mask: int) -> float:
    """The sum of log P of the tokens at `places`, each masked in a copy of the row."""
    module, width = model.module, len(row.ids)
    ids, rows = flat([row.ids] * len(places), module.device)
    masked = torch.arange(len(places), device=ids.device) * width + torch.tensor(places, device=ids.device)
    right = ids[masked]
    ids[masked] = mask
    types = torch.tensor(row.token_types * len(places), device=ids.device)
    hidden = module(Batch(inputs=ids, rows=rows, token_types=types))[masked]
    scores = module.unembed(hidden, rows).float().log_softmax(-1)
    return float(scores.gather(-1, right[:, None]).double().sum())


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
