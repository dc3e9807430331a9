"""Runs the decoding steps of an engine in fixed shapes: replayed as CUDA graphs on a GPU, compiled where asked.

A step runs all slots of the cache, those without a row doing nothing, and reads keys up to a bucket: a power of two of
positions.  So a step of a given cache has one shape per bucket, and after each bucket has run once nothing is captured
or compiled any more until the cache grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import Tensor

from triptych.attention import Cache, CrossCache, Rows
from triptych.attention.store import Store
from triptych.errors import ConfigError, InputError
from triptych.nn import Transformer
from triptych.program.changes import Structure
from triptych.program.lower import lower
from triptych.program.static_plan import NotStatic, StaticPlan, bucket_of, check_static

Run = Callable[[Tensor, int], Tensor]
WARM_UPS = 2  # runs before a capture: libraries choose their kernels and allocate in them


def compiled(run: Run) -> Run:
    """`torch.compile` for fixed shapes, without a break in the graph."""
    made: Run = torch.compile(run, fullgraph=True, dynamic=False)
    return made


class StaticStep:
    """The executor of fixed shapes over one cache.  One thread uses it at a time.

    compiler      what makes a function of a step faster, such as `compiled`; None runs it as it is.
    why_modules   why the last call gave None; None after a call that ran.
    """

    def __init__(
        self, module: Transformer, cache: Cache, cross: CrossCache | None = None, *,
        compiler: Callable[[Run], Run] | None = None,
    ) -> None:  # fmt: skip
        self.module, self.cache, self.cross, self.compiler = module, cache, cross, compiler
        self.why_modules: str | None = None
        self.structure: Structure | None = None
        self.plan: StaticPlan | None = None
        self.seen: list[Tensor] = []
        self.replays: dict[int, Callable[[], Tensor]] = {}

    def logits(
        self, ids: Sequence[int], rows: Rows, chosen: Sequence[int], prompts: Sequence[int] | None = None
    ) -> Tensor | None:
        """Run one token `ids[i]` of each of `rows`, which continue the cache -> the logits of tokens `chosen`, [C, V].
        Those of `prompts` are computed like all others.

        None where the modules must run.  The caller has begun no step of the cache; this begins and finishes one.
        Raises as `Cache.begin`.
        """
        try:
            self._check(ids, rows)
            step = self.cache.begin(rows, "")
            self._bind()
        except NotStatic as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        numbers = torch.zeros_like(self.inputs, device="cpu")
        slots = list(rows.slots)
        sources = ((0,) * len(ids),) * 2 if self.cross is None else self.cross.of(slots)
        numbers[:, slots] = torch.tensor([tuple(ids), rows.past, (1,) * len(ids), *sources])
        self.inputs.copy_(numbers)
        out = self._replay(bucket_of(max(rows.ends), self.cache.capacity))()
        step.finish()
        return out[torch.tensor([slots[i] for i in chosen], device=out.device)]

    def warm_up(self, slots: int, length: int) -> None:
        """Capture and compile what rows of up to `length` tokens in so many slots need, so that no later step does.

        Raises InputError where the model has no step of fixed shapes, and for an encoder-decoder.
        """
        if self.cross is not None:
            raise InputError("the step of an encoder-decoder depends on its sources; its first requests warm it up")
        more = slots - len(self.cache.lengths)
        if more > 0:
            self.cache.free(self.cache.add(more + len(self.cache.free_slots)))
        self.cache.room(length)
        try:
            self._bind()
        except NotStatic as reason:
            raise InputError(f"this model has no step of fixed shapes: {reason}") from None
        self.inputs.zero_()
        end = 1
        while end < 2 * length:
            self._replay(bucket_of(min(end, length), self.cache.capacity))()
            end *= 2

    def _check(self, ids: Sequence[int], rows: Rows) -> None:
        if rows.longest != 1 or len(ids) != len(rows):
            raise NotStatic("a row has several new tokens")
        if min(ids) < 0 or max(ids) >= self.module.spec.vocab:
            raise NotStatic("an id lies outside the vocabulary")
        limit = self.module.spec.context
        if limit is not None and max(rows.ends) > limit:
            raise NotStatic("a row is longer than the model's context")
        if self.cross is not None:
            lacking = self.cross.pending is not None or any(slot not in self.cross.lengths for slot in rows.slots)
            if lacking:
                raise NotStatic("the source is not projected yet")

    # -- what a step is bound to ----------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Make the plan anew where the module, a parameter or a store is another one than before."""
        if self.structure is None or not self.structure.same():
            self.structure, self.seen = Structure(self.module), []
        tensors = [x for store in self._stores() for x in (store.k, store.v)]
        same = len(tensors) == len(self.seen) and all(map(is_, tensors, self.seen))
        if same and self.plan is not None and self.plan.numbers.same():
            return
        reason = self.structure.refusal()
        if reason is not None:
            raise NotStatic(reason)
        try:
            with torch.inference_mode(False), torch.no_grad():
                program = lower(self.module)
            check_static(program, self.module)
            self.plan = plan = StaticPlan(program, self.module, self.cache, self.cross)
        except (ConfigError, InputError) as problem:
            raise NotStatic(str(problem)) from None
        self.run: Run = plan.run if self.compiler is None else self.compiler(plan.run)
        self.inputs = torch.zeros(5, len(self.cache.lengths), dtype=torch.long, device=self.module.device)
        self.replays, self.seen = {}, tensors

    def _stores(self) -> list[Store]:
        return self.cache.stores if self.cross is None else [*self.cache.stores, *self.cross.stores]

    def _replay(self, bucket: int) -> Callable[[], Tensor]:
        """One step on `self.inputs`: a CUDA graph where the model is on a GPU."""
        if bucket not in self.replays:
            if self.module.device.type == "cuda":
                self.replays[bucket] = self._captured(bucket)
            else:
                self.replays[bucket] = lambda: self.run(self.inputs, bucket)
        return self.replays[bucket]

    def _captured(self, bucket: int) -> Callable[[], Tensor]:
        """A CUDA graph of one step; what runs before its capture writes to no store, since no slot is in use."""
        inputs = self.inputs.clone()
        self.inputs.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.run(self.inputs, bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.run(self.inputs, bucket)
        self.inputs.copy_(inputs)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
