"""The jobs measured of a model of each layout, and their inputs, which depend on seeds alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from triptych.errors import InputError
from triptych.media.audio import RATE, Samples
from triptych.spec import EmbedSpec, FramesSpec, ModelSpec

JobKind = Literal["first", "prefill", "decode", "together", "encode", "encoder", "write"]
Ids = list[int]

PROMPTS, CONTEXTS = (128, 512), (8, 512)  # tokens, where no lengths are given
SHORT = 8  # tokens of the prompts of `first`, and of each of several requests
SOURCES, SOURCE_TOKENS = 4, 64  # rows an encoder-decoder reads
LONGEST, SPREAD, USUAL = 198, 0.8, 16.0  # words of the built-in texts: the most, and the log-normal distribution
WORDS = """
the of and a to in he was that it his with as for had is her not but at on she be have by which him they all
this were from you so one said out when would there no who them what been more now up their into then me could
like my time very old man come little some about good see long way before day great house never two know how
much where hand night water light under three came year life head room right small found every still world door
part young
"""


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """One piece of work, and the figures it gives.

    kind      `first`: load, then the first result.  `prefill`: read `rows`.  `decode`: read one row, then `new` tokens,
              of which the time is taken; `together`: the same for several rows at once.  `encode`: a vector for each of
              `texts`.  `encoder`: the encoder on the sources.  `write`: `new` tokens for each source, by beam search
              where `beams` is above 1.
    figures   the name and unit of each figure: a number of things in a second, or seconds.
    rows      ids, for a decoder or as the sources of an encoder-decoder.
    seconds   length of the sound that an encoder-decoder of sound reads; 0 where it reads `rows`.
    """

    kind: JobKind
    figures: tuple[tuple[str, str], ...]
    rows: Sequence[Ids] = ()
    texts: Sequence[str] = ()
    seconds: float = 0
    new: int = 0
    beams: int = 1

    @property
    def name(self) -> str:
        return self.figures[0][0]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> BenchJob:
        """A job from the plain data of `dataclasses.asdict`, as JSON gives it back."""
        return cls(**{**fields, "figures": tuple((name, unit) for name, unit in fields["figures"])})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of the work.  None is a default, which is made to fit the model; a number that does not fit is refused.

    prompt_tokens   lengths of prompts to read.
    contexts        tokens before those whose decoding is timed.
    new_tokens      tokens to decode; 64, or 48 for an encoder-decoder of texts and 128 for one of sound.
    texts           how many texts an encoder reads.
    requests        requests of a decoder that run at once.
    beams           width of the beam search of an encoder-decoder.
    repeat          runs of each job, of which the median is taken.
    """

    prompt_tokens: Sequence[int] | None = None
    contexts: Sequence[int] | None = None
    new_tokens: int | None = None
    texts: int | None = None
    requests: int | None = None
    beams: int | None = None
    repeat: int = 5


# What each layout has a use for, besides `repeat`.
USED = {
    "decoder": ("prompt_tokens", "contexts", "new_tokens", "requests"),
    "encoder": ("texts",),
    "encoder-decoder": ("new_tokens", "beams"),
}

# The most of each that are measured: more take hours, or more memory than there is, before anything is printed.
MOST = {"requests": 4096, "texts": 1 << 20, "repeat": 1000, "new_tokens": 1 << 16}


def jobs(spec: ModelSpec, settings: Settings = Settings(), *, where: str = "the model") -> list[BenchJob]:
    """The jobs of a model, `first` first.

    Raises InputError for settings below 1 or above `MOST`, more beams than tokens, settings that the layout has no use
    for, lengths beyond the model's context, and for models that read images.
    """
    values = {name: value for name, value in vars(settings).items() if value is not None}
    for name, value in values.items():
        numbers = value if isinstance(value, Sequence) else [value]
        if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers):
            raise InputError(f"{name} must be at least 1, not {value}")
        most = spec.vocab if name == "beams" else MOST.get(name)
        if most is not None and max(numbers) > most:
            raise InputError(f"{name}={max(numbers)} is more than {most:,}, the most that is measured")
        if name != "repeat" and name not in USED[spec.layout]:
            article = "a" if spec.layout == "decoder" else "an"
            raise InputError(
                f"{where} is {article} {spec.layout}, which {name} does not apply to; its options are "
                f"{', '.join(USED[spec.layout])}"
            )
    match spec.layout:
        case "encoder":
            return _encoder_jobs(spec, settings, where)
        case "decoder":
            return _decoder_jobs(spec, settings, where)
    return _writing_jobs(spec, settings, where)


def _decoder_jobs(spec: ModelSpec, settings: Settings, where: str) -> list[BenchJob]:
    limit = spec.context or 1 << 30
    new = settings.new_tokens or min(64, max(1, limit // 2))
    if new + 3 > limit:
        raise InputError(f"new_tokens={new} and the prompt need {new + 3} positions; {where} has {limit}")
    prompts = _fitting(settings.prompt_tokens, PROMPTS, limit - 2, 2, where)
    contexts = _fitting(settings.contexts, CONTEXTS, limit - new - 2, new + 2, where)
    short = min(SHORT, *contexts)
    count = settings.requests or 8
    several = [ids(spec.vocab, short, seed) for seed in range(count)]
    return [
        _first("token", rows=[ids(spec.vocab, short)]),
        *(_tokens("prefill", f"prefill of {n}", [ids(spec.vocab, n)]) for n in prompts),
        *(_tokens("decode", f"decode at {n}", [ids(spec.vocab, n)], new) for n in contexts),
        _tokens("together", f"{count} requests at once", several, new),
    ]


def _encoder_jobs(spec: ModelSpec, settings: Settings, where: str) -> list[BenchJob]:
    if not isinstance(spec.reads.embed, EmbedSpec):
        raise InputError(f"{where} reads images; bench measures models that read text or sound")
    words = LONGEST if spec.context is None else min(LONGEST, max(1, (spec.context - 8) // 4))
    some = texts(settings.texts or 512, longest=words)
    figures = ((f"encode {len(some)} texts", "sentences/s"), ("of them tokens", "tokens/s"))
    return [_first("vector", texts=some[:1]), BenchJob(kind="encode", figures=figures, texts=some)]


def _writing_jobs(spec: ModelSpec, settings: Settings, where: str) -> list[BenchJob]:
    embed, beams = spec.reads.embed, settings.beams or 4
    limit = spec.context or 1 << 30
    read: dict[str, Any]
    if isinstance(embed, FramesSpec):
        seconds = embed.stride * embed.position.length / 100  # a frame is 10 ms
        new, read = settings.new_tokens or min(128, limit // 2), {"seconds": seconds}
    elif isinstance(embed, EmbedSpec):
        new = settings.new_tokens or min(48, limit // 2)
        length = min(SOURCE_TOKENS, limit)
        read = {"rows": [ids(spec.source_vocab or spec.vocab, length, seed) for seed in range(SOURCES)]}
    else:
        raise InputError(f"{where} reads images; bench measures models that read text or sound")
    if new + 1 > limit:
        raise InputError(f"new_tokens={new} and the start token need {new + 1} positions; {where} has {limit}")
    one = {key: value[:1] if isinstance(value, list) else value for key, value in read.items()}
    return [
        _first("token", **one, new=1),
        BenchJob(kind="encoder", figures=(("encoder", "s"),), **read),
        *(
            BenchJob(
                kind="write", figures=((f"{name}, {new} tokens", "tokens/s"), (f"{name}, seconds", "s")), **read,
                new=new, beams=width,
            )
            for name, width in (("greedy", 1), (f"beam {beams}", beams))
        ),
    ]  # fmt: skip


def _tokens(kind: JobKind, name: str, rows: Sequence[Ids], new: int = 0) -> BenchJob:
    return BenchJob(kind=kind, figures=((name, "tokens/s"),), rows=rows, new=new)


def _first(result: str, **work: Any) -> BenchJob:
    return BenchJob(kind="first", figures=(("load", "s"), (f"load to first {result}", "s")), **work)


def _fitting(wanted: Sequence[int] | None, usual: Sequence[int], most: int, more: int, where: str) -> list[int]:
    """The lengths `wanted`, or those of `usual` that the model has positions for.

    Raises InputError for one above `most`, which leaves room for `more` tokens.
    """
    for n in wanted or ():
        if n > most:
            raise InputError(f"{n} tokens and {more} more need {n + more} positions; {where} has {most + more}")
    if wanted:
        return list(dict.fromkeys(wanted))
    return [n for n in usual if n <= most] or [max(1, most)]


# ---------------------------------------------------------------- inputs


def ids(vocab: int, count: int, seed: int = 0) -> Ids:
    """`count` token ids, none of the first hundred of a large vocabulary, where the special ones usually are."""
    low = min(100, vocab // 2)
    return [int(i) for i in np.random.default_rng([seed, count]).integers(low, vocab, count)]


def texts(count: int, *, longest: int = LONGEST, seed: int = 0) -> list[str]:
    """`count` texts of common words: 24 tokens on average in a vocabulary of English, up to `longest` words."""
    random, words = np.random.default_rng(seed), WORDS.split()
    lengths = np.clip(random.lognormal(np.log(USUAL), SPREAD, count).round().astype(int), 3, LONGEST)
    lengths[count // 2] = LONGEST
    return [" ".join(random.choice(words, min(length, longest))) + "." for length in lengths.tolist()]


def sound(seconds: float, seed: int = 0) -> Samples:
    """A gliding tone with overtones and noise, `[seconds * 16000]`, in [-1, 1]."""
    random = np.random.default_rng(seed)
    t = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * (180 * t + 15 * np.sin(2 * np.pi * 0.7 * t))
    tones = sum(np.sin(k * phase) / k for k in range(1, 6))
    loud = 0.5 + 0.5 * np.sin(2 * np.pi * 3 * t)
    return np.asarray(0.2 * loud * tones + 0.02 * random.standard_normal(len(t)), np.float32).clip(-1, 1)
