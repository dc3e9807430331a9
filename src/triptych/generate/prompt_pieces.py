"""Prompts that an engine reads in pieces of time: a forward of some of their ids stops between its layers, so that rows
that decode beside it keep their pace however long a prompt is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from triptych.program.native_executor import TOKENS, NativeStep
from triptych.program.native_pieces import CallInPieces
from triptych.program.not_served import NotServed
from .request import LiveRow
from .step_runner import ForwardResult, NextTokens, StepRunner

SMALL = 64  # positions up to which prompts are read in one step: it takes less time than others notice


class PromptPieces:
    """At most one forward of prompts that is under way, of one runner.

    rows          those whose ids it reads; they run in nothing else until it is done.
    ids           how many ids of them.
    seconds       that it has taken so far, or took.
    in_last_step  seconds of it in the last step; 0 where it did not run.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.rows: Sequence[LiveRow] = ()
        self.ids, self.seconds, self.in_last_step = 0, 0.0, 0.0
        self._tokens: NextTokens | None = None
        self._call: CallInPieces | None = None

    def share(
        self,
        rows: Sequence[LiveRow],
        budget: int,
        fill: Callable[[LiveRow, Sequence[LiveRow]], bool] | None,
        whole: bool,
    ) -> dict[LiveRow, int]:
        """The number of ids that each row runs in the next step (`StepRunner.token_counts`), without what is read in
        pieces, which begins here unless the forward of a step is to be `whole`."""
        decoding = {row: 1 for row in rows if row.decodes and row not in self.rows}
        self.in_last_step = 0.0
        if self.rows:
            return decoding
        share = self.runner.token_counts(rows, budget, fill)
        prompts = {row: count for row, count in share.items() if row not in decoding}
        at_once = sum(row.cached + count for row, count in prompts.items()) <= SMALL
        if whole or at_once or any(map(_runs_whole, prompts)):
            return share
        return decoding if self.begin(prompts) else share

    def begin(self, share: Mapping[LiveRow, int]) -> bool:
        """Begin to read so many ids of these rows, or as many as one forward takes; they have no probe and no draft.
        False where the executor cannot stop in the middle of a forward."""
        runner, counts, left = self.runner, dict[LiveRow, int](), TOKENS
        for row, count in share.items():
            if left and not row.cached <= runner.switch < len(row.ids):  # LongRoPE's other factors: all of it at once
                counts[row] = min(count, left)
                left -= counts[row]
        if not counts or not isinstance(runner.executor, NativeStep):
            return False
        runner.run(None, [*counts], counts, False, begin=self._begin)
        self.rows = [] if self._call is None else [*counts]
        return self._call is not None

    def _begin(self, tokens: NextTokens) -> None:
        executor = self.runner.executor
        assert isinstance(executor, NativeStep)
        self._call = executor.begin_in_pieces(tokens.ids, tokens.rows, tokens.wanted, tokens.prompts)
        self._tokens, self.ids = tokens, len(tokens.ids)

    def go_on(self, seconds: float | None) -> ForwardResult | None:
        """Run what is under way for about so many seconds, to its end with None -> its result once it is done."""
        call, tokens, runner = self._call, self._tokens, self.runner
        if call is None or tokens is None:
            return None
        assert isinstance(runner.executor, NativeStep)
        before = call.seconds
        try:
            done = runner.executor.go_on(call, seconds)
        except NotServed:
            self.drop()
            return None
        self.in_last_step, self.seconds = call.seconds - before, call.seconds
        if not done:
            return None
        for row, end in zip(self.rows, tokens.rows.ends, strict=True):
            row.cached = end
        self.rows, self._call = (), None
        return ForwardResult(tokens.due, call.out, tokens.places, {}, None, {})

    def drop(self) -> None:
        """Forget what is under way, so that its ids are read again: with a window from the beginning, as the keys that
        they replaced are lost."""
        for row in self.rows:
            if self.runner.cache.smallest_window is not None and row.cached:
                self.runner.begin_again(row)
        self.rows, self._call = (), None


def _runs_whole(row: LiveRow) -> bool:
    """Whether more is wanted of a forward of a prompt than its last logits."""
    return row.request.probe is not None or row.source is not None or row.request.score_from is not None
