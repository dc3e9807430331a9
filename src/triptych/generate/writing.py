"""Text out of a run: whole when its rows have ended, or piece by piece; cut before the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from triptych.errors import InputError
from triptych.generate.beam import beam_search
from triptych.generate.engine import State, stream
from triptych.generate.sampling import Sampling
from triptych.probe import Trace
from triptych.text import Tokenizer
from triptych.text.detokenize import TextStream

OnToken = Callable[[int, int], None]  # (row of the batch, id)


@dataclass(frozen=True)
class Generation:
    """What one prompt became: the new `text` and `ids`, why it ended, and the trace of the whole batch if asked."""

    text: str
    ids: list[int]
    reason: str  # "end", "stop" or "length"
    trace: Trace | None = None


@dataclass(frozen=True)
class Writing:
    """A run and where its rows end: after one of the ids in `ends`, or when one of the texts in `stop` has come.

    Without a tokenizer there are ids alone, and no text to stop at.
    """

    state: State
    tokenizer: Tokenizer | None
    ends: Sequence[int]
    stop: Sequence[str] = ()

    def whole(
        self, sampling: Sampling, *, max_new_tokens: int, chunk: int | None = None, on_token: OnToken | None = None
    ) -> list[Generation]:
        """What each row became; `on_token` is called for every token as it comes."""
        new: list[list[int]] = [[] for _ in self.state.rows]
        steps = stream(
            self.state, max_new_tokens=max_new_tokens, sampling=sampling, eos=self.ends, chunk=chunk,
            stop=(lambda _, ids: self._cut(ids) is not None) if self.stop else None,
        )  # fmt: skip
        for step in steps:
            for request, token in step:
                new[request].append(token)
                if on_token is not None:
                    on_token(request, token)
        trace = None if self.state.session is None else self.state.session.close()
        return [self._generation(ids, trace) for ids in new]

    def searched(self, beams: int, *, max_new_tokens: int, length_penalty: float = 1.0) -> list[Generation]:
        """The best of `beams` hypotheses for each row."""
        if self.state.session is not None:
            raise InputError("beams and probes do not go together: a hypothesis may be dropped after it was read")
        found = beam_search(
            self.state, beams=beams, max_new_tokens=max_new_tokens, eos=self.ends, length_penalty=length_penalty
        )
        return [self._generation(best[0].tokens, None) for best in found]

    def pieces(
        self,
        detokenizer: TextStream,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        chunk: int | None = None,
        on_token: OnToken | None = None,
    ) -> Iterator[str]:
        """The text of a single row, piece by piece as it becomes certain."""
        steps = stream(self.state, max_new_tokens=max_new_tokens, sampling=sampling, eos=self.ends, chunk=chunk)
        held, shown = "", 0
        unsure = max((len(text) for text in self.stop), default=1) - 1  # so many letters may begin a stop string
        for [(_, token)] in steps:
            if on_token is not None:
                on_token(0, token)
            held += detokenizer.put(token) if token not in self.ends else ""
            if (before := before_stop(held, self.stop)) is not None:
                held = before
                break
            if (certain := len(held) - unsure) > shown:
                yield held[shown:certain]
                shown = certain
        else:
            held += detokenizer.flush()
        if held[shown:]:
            yield held[shown:]

    def _cut(self, ids: Sequence[int]) -> str | None:
        """The text of `ids` before the first stop string; None while none has come."""
        assert self.tokenizer is not None
        return before_stop(self.tokenizer.decode(ids), self.stop)

    def _generation(self, ids: list[int], trace: Trace | None) -> Generation:
        if self.stop and (text := self._cut(ids)) is not None:
            return Generation(text, ids, "stop", trace)
        ended = bool(ids) and ids[-1] in self.ends
        text = "" if self.tokenizer is None else self.tokenizer.decode(ids[: len(ids) - ended])
        return Generation(text, ids, "end" if ended else "length", trace)


def before_stop(text: str, stop: Sequence[str]) -> str | None:
    """`text` up to the first of the texts in `stop`; None where it holds none of them."""
    found = [text.find(end) for end in stop if end in text]
    return text[: min(found)] if found else None
