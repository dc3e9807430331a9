"""What packing, and a cache of fewer bits, cost in quality: the perplexity of a text under the forms of a model, and
their divergence."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from triptych.attention import CacheType, check_cache_type
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.spec import LMHeadSpec
from .comparison import Quality, measured, run

WINDOW = 256  # tokens of a row; a shorter context shortens it
MOST = 2048  # tokens of a text that are read
PIECE = 16  # tokens of a row that are read at once where they are read through a cache
#: What is measured where no text is given, written for this purpose.
TEXT = """\
The ferry leaves the north pier at seven in the morning, and by then the queue of vans reaches the fish market. Anna
counts them from her kitchen window while the coffee boils: eleven today, two more than yesterday. Her brother drives
the third one. He sells bread on the island, and comes back at noon with empty crates and news of who is ill, who is
building, and whose boat needs a new engine.

In winter there are days when no ship can leave. Then the island is on its own, and people bake for each other. The
teacher keeps a list on the door of the school, with what every house can spare: flour, candles, a spare battery, an
hour of work. Nobody has ever taken more than they gave, she says, although nobody has ever checked either.

To estimate how much bread will be sold, he writes down the weather, the day of the week and the number of guests in the
two hotels. A warm Saturday in July means three hundred loaves; a wet Tuesday in March means forty. After ten years the
notebook knows the island better than he does. It was wrong only once, on the day of the wedding, because everyone had
been invited and no one had thought of telling the baker.
"""


def quality(
    models: Mapping[str, Model], text: str = TEXT, caches: Sequence[CacheType] = ()
) -> tuple[Quality, ...]:  # fmt: skip
    """The perplexity of `text`, read in rows of 256 tokens and 2,048 at most, under each form of one model, and the
    mean of KL(first || form) over its tokens.  With each type of `caches` the first form reads the rows as a generation
    reads a prompt, 16 tokens after another.

    Raises InputError for an unknown type of cache, and where the model does not predict next tokens, has no tokenizer,
    or the text has fewer than two tokens.
    """
    for cache in caches:
        check_cache_type(cache)
    first, *_ = models.values()
    if (why := why_not(first)) is not None:
        raise InputError(f"no perplexity: {why}")
    ids = first.ids([text])[0][:MOST]
    if len(ids) < 2:
        raise InputError(f"a perplexity needs a text of two tokens or more; this one has {len(ids)}")
    width = min(WINDOW, first.spec.context or WINDOW)
    rows = [ids[start : start + width] for start in range(0, len(ids), width)]
    rows = [row for row in rows if len(row) > 1]
    forms: dict[str, Callable[[list[int]], Tensor]] = {form: partial(_without_cache, models[form]) for form in models}
    forms |= {f"cache {cache}": partial(_through_cache, first, cache) for cache in caches}
    loss, divergence = dict.fromkeys(forms, 0.0), dict.fromkeys(forms, 0.0)
    for row in rows:
        reference: Tensor | None = None
        for form, scores_of in forms.items():
            scores = scores_of(row)
            loss[form] -= float(scores.gather(1, torch.tensor(row[1:], device=scores.device)[:, None]).sum())
            reference = scores if reference is None else reference
            divergence[form] += float((reference.exp() * (reference - scores)).sum())
    tokens = sum(len(row) - 1 for row in rows)
    names = list(forms)
    return tuple(
        Quality(form, math.exp(loss[form] / tokens), None if form == names[0] else divergence[form] / tokens, tokens)
        for form in names
    )


def _without_cache(model: Model, row: list[int]) -> Tensor:
    """[T - 1, V]: the log-probabilities of all tokens of a row but the first, in one uncached forward."""
    return run(model, [row], None)[0][:-1]


def _through_cache(model: Model, cache: CacheType, row: list[int]) -> Tensor:
    """The same, read in pieces that see the earlier ones in the cache alone."""
    engine = Engine(model.module, chunk=PIECE, executor=model.executor, cache_type=cache)
    engine.add(Request(prompt=row[:-1], max_new_tokens=1, all_logits=True))
    pieces: list[Tensor] = []
    while engine.rows:
        pieces += [output.logits for output in engine.step() if output.logits is not None]
    return measured(model, torch.cat(pieces))


def why_not(model: Model) -> str | None:
    """The reason why a model has no perplexity; None where it has one."""
    if model.spec.layout != "decoder" or not isinstance(model.spec.head, LMHeadSpec):
        return f"this {model.spec.family} {model.spec.layout} does not predict the next token"
    return "the model has no tokenizer" if model.tokenizer is None else None
