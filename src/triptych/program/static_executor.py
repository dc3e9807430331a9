"""Runs the decoding steps of an engine in fixed shapes: replayed as CUDA graphs on a GPU, compiled where asked.

A step runs all slots of the cache, those without a row doing nothing, and reads keys up to a bucket: a power of two of
positions.  So a step of a given cache has one shape per bucket, and after each bucket has run once nothing is captured
or compiled any more until the cache grows.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor

from triptych.attention import Cache, CrossCache, Rows
from triptych.errors import ConfigError, InputError
from triptych.nn import Transformer
from .lower import lower
from .module_changes import ModuleFingerprint, ModuleGuard, refusal, unseen_changes
from .native_calls import Largest
from .native_reads import StepReads
from .not_served import NotServed, check_rows
from .program import Program
from .static_plan import StaticPlan, bucket_of, check_static

Run = Callable[[Tensor, int, bool], Tensor]
Replay = Callable[[], tuple[Tensor, Tensor]]
WARM_UPS = 2  # runs before a capture: libraries choose their kernels and allocate in them
ONE_CAPTURE = threading.Lock()  # a capture waits for the whole device, which another one's stream would not allow
VERSIONS = 256  # compiled for one function: each bucket of each plan is one


def compiled(run: Run) -> Run:
    """`torch.compile` for fixed shapes, without a break in the graph."""
    made: Run = torch.compile(run, fullgraph=True, dynamic=False)

    def call(inputs: Tensor, bucket: int, all_slots_used: bool) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS):
            return made(inputs, bucket, all_slots_used)

    return call


def best_of(logits: Tensor) -> Tensor:
    """[..., V] -> [2, ...] in float64: the token with the largest logit, and that logit.  One tensor, so that one copy
    brings both to the host; ids below 2^53 are exact in it."""
    best = logits.max(-1)
    return torch.stack((best.indices.double(), best.values.double()))


class StaticStep:
    """The executor of fixed shapes over one cache.  One thread uses it at a time.

    cache         one without pages, whose slots stay at their addresses.
    compiler      what makes a function of a step faster, such as `compiled`; None runs it as it is.
    why_modules   why the last call gave None; None after a call that ran.
    guard         says in which steps the module is looked at; in all, without one.
    captures      how many functions of a step were captured or prepared.
    """

    def __init__(
        self, module: Transformer, cache: Cache, cross: CrossCache | None = None, *,
        compiler: Callable[[Run], Run] | None = None, guard: ModuleGuard | None = None,
    ) -> None:  # fmt: skip
        if cache.pages is not None:
            raise InputError("a step of fixed shapes needs a cache without pages: decoder.cache(page=None)")
        self.module, self.cache, self.cross, self.compiler = module, cache, cross, compiler
        self.why_modules: str | None = None
        self.guard = guard
        self.captures = 0
        self.fingerprint: ModuleFingerprint | None = None
        self.program: Program | None = None
        self.plan: StaticPlan | None = None
        self.store_tensors: list[Tensor] = []
        self.replays: dict[tuple[int, bool], Replay] = {}
        self._best: tuple[Tensor, list[int]] | None = None  # of the last call, and the slots that were chosen

    def logits(
        self, ids: Sequence[int], rows: Rows, chosen: Sequence[int], prompts: Sequence[int] | None = None,
        reads: StepReads | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Run one token `ids[i]` of each of `rows`, which continue the cache -> the logits of tokens `chosen`, [C, V].
        Those of `prompts` are computed like all others, and nothing is read.  `best` then has the likeliest tokens.

        None where the modules must run.  The caller has begun no step of the cache; this begins and finishes one.
        Raises as `Cache.begin`.
        """
        self._best = None
        try:
            if rows.longest != 1 or len(ids) != len(rows):
                raise NotServed("a row has several new tokens")
            check_rows(ids, rows, self.module.spec.vocab, self.module.spec.longest_row, self.cross)
            if self.cache.longest is not None:  # at once: a plan and its graphs hold for one size of the stores
                self.cache.ensure_capacity(self.cache.longest)
            step = self.cache.begin(rows, "")
            self._bind()
        except NotServed as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        numbers = torch.zeros_like(self.inputs, device="cpu")
        slots = list(rows.slots)
        sources = ((0,) * len(ids),) * 2 if self.cross is None else self.cross.of(slots)
        numbers[:, slots] = torch.tensor([tuple(ids), rows.past, (1,) * len(ids), *sources])
        self.inputs.copy_(numbers, non_blocking=True)  # from memory that is not pinned: it is read before this returns
        all_slots_used = self.compiler is None and len(slots) == len(self.cache.lengths)
        out, best = self._replay(bucket_of(rows.end, self.cache.capacity), all_slots_used)()
        step.finish()
        chosen_slots = [slots[i] for i in chosen]
        self._best = best, chosen_slots
        run = slice(chosen_slots[0], chosen_slots[0] + len(chosen_slots)) if chosen_slots else slice(0)
        if chosen_slots == list(range(run.start or 0, run.stop)):
            return out[run].clone()  # the next step writes to `out`
        return out[torch.tensor(chosen_slots, device=out.device)]

    def best(self) -> Largest | None:
        """The likeliest token after each chosen one of the last call, and its logit; None where that did not run."""
        if self._best is None:
            return None
        pairs, slots = self._best
        tokens, logits = pairs.tolist()
        return [int(tokens[slot]) for slot in slots], [logits[slot] for slot in slots]

    def warm_up(self, slots: int, length: int) -> None:
        """Capture and compile what rows of up to `length` tokens in so many slots need, so that no later step does.

        Raises InputError where the model has no step of fixed shapes, and for an encoder-decoder.
        """
        if self.cross is not None:
            raise InputError("the step of an encoder-decoder depends on its sources; its first requests warm it up")
        more = slots - len(self.cache.lengths)
        if more > 0:
            self.cache.free(self.cache.add(more + len(self.cache.free_slots)))
        self.cache.ensure_capacity(length)
        try:
            self._bind()
        except NotServed as reason:
            raise InputError(f"this model has no step of fixed shapes: {reason}") from None
        self.inputs.zero_()  # no slot is in use, and nothing is written
        forms = [False]
        if self.compiler is None and not any(self.cache.lengths):  # this one writes to the first place of every slot
            forms = [True] if slots == 1 else [True, False]
        end = 1
        while end < 2 * length:
            for all_slots_used in forms:
                self._replay(bucket_of(min(end, length), self.cache.capacity), all_slots_used)()
            end *= 2

    # -- what a step is bound to ----------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Make the plan anew where the module, a parameter or a store is another one than before."""
        stores = self.cache.stores if self.cross is None else [*self.cache.stores, *self.cross.stores]
        tensors = [x for store in stores for x in (store.k, store.v)]
        same = len(tensors) == len(self.store_tensors) and all(map(is_, tensors, self.store_tensors))
        due = self.guard is None or self.guard.due()
        if same and self.plan is not None and not due:
            return
        if self.fingerprint is None or not self.fingerprint.same(self.module):
            self.fingerprint, self.program, same = ModuleFingerprint(self.module), None, False
        if same and self.plan is not None and self.plan.versions.same():
            return
        self.plan, self.store_tensors, self.replays = None, [], {}
        reason = refusal(self.module) or unseen_changes(self.module)
        if reason is not None:
            raise NotServed(reason)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.program = self.program or lower(self.module)
            check_static(self.program, self.module)
            self.plan = plan = StaticPlan(self.program, self.module, self.cache, self.cross)
        except (ConfigError, InputError) as problem:
            raise NotServed(str(problem)) from None
        self.run: Run = plan.run if self.compiler is None else self.compiler(plan.run)
        self.inputs = torch.zeros(5, len(self.cache.lengths), dtype=torch.long, device=self.module.device)
        self.store_tensors = tensors

    def _replay(self, bucket: int, all_slots_used: bool) -> Replay:
        """One step on `self.inputs`, and the best tokens: a CUDA graph where the model is on a GPU.  There is one for
        each bucket, and another where all slots are in use: it need not keep what a slot without a row holds."""
        how = bucket, all_slots_used
        if how not in self.replays:
            self.captures += 1
            on_gpu = self.module.device.type == "cuda"
            step = partial(_step, self.run, self.inputs, *how)  # not a method: the step would keep itself
            self.replays[how] = self._captured(step) if on_gpu else step
        return self.replays[how]

    def _captured(self, step: Replay) -> Replay:
        """A CUDA graph of one step.  What runs before its capture writes what the step itself writes.

        Other threads may use the GPU meanwhile.  The memory that cuBLAS works in belongs to the process, which may free
        it: it is freed before the capture, so that the graph gets its own, and after it, so that nobody else uses that.
        """
        with ONE_CAPTURE, torch.cuda.device(self.module.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = step()
            torch._C._cuda_clearCublasWorkspaces()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return out

        return replay


def _step(run: Run, inputs: Tensor, bucket: int, all_slots_used: bool) -> tuple[Tensor, Tensor]:
    out = run(inputs, bucket, all_slots_used)
    return out, best_of(out)
