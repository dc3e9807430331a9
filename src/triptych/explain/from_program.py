"""Builds the steps of an explanation from a program: their order, inputs, results and equations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import NULL_CACHE, EncoderOutput, Rows, rope_angles
from triptych.program import Entry, Instruction
from triptych.spec.masks import Full
from . import reference_ops, step_texts
from .attention_steps import AttentionSteps, position_bias
from .expressions import (
    AppliedOp,
    ComputedValue,
    computed,
    constant_name,
    evaluate,
    formula,
    parameter_symbol,
)
from .stack_run import StackRun
from .steps import PrintedTensors, ShownTensor, WalkStep, exact

OUT = "Text out"  # the last part of every walk
CONSTANTS = ("embedding", "rotation_cos", "rotation_sin", "sinusoids")  # printed as what they give these tokens


@dataclass
class StepBuilder:
    """The steps of one stack.

    cached    of a decoding step, the tokens whose keys it reads, the new one included, by position.
    names     value of the program -> name under which it is printed.
    symbols   printed name -> its letter.
    shown     printed name -> tensor.
    """

    at: StackRun
    cached: Mapping[int, str] | None = None
    names: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    shown: dict[str, ShownTensor] = field(default_factory=dict)

    def beginning(self) -> list[WalkStep]:
        """The embedding, and the blocks before the chosen one."""
        at, part = self.at, self.at.part("text in")
        steps = self.steps(self.computed(at.entry, at.embed, together=True), part)
        entered = self.names[f"{at.prefix}embed"]
        if at.layer:
            steps.append(self.blocks(part, 0, at.layer, entered, f"{at.block}resid_pre"))
            entered = f"{at.block}resid_pre"
        self.enter(f"{at.block}resid_pre", entered, "x")
        return steps

    def inside(self) -> list[WalkStep]:
        """The chosen block; what cross-attention makes of the source stands before its scores."""
        at, steps = self.at, self.at.inside
        if at.source is None:
            return self.steps(self.computed(at.entry, steps))
        self.enter("memory", at.memory, "encoder")
        outputs = set(at.program.entries["cross_kv"].outputs)
        first = next((i for i, step in enumerate(steps) if outputs & set(step.inputs.values())), len(steps))
        values = self.computed(at.entry, steps[:first]) + self.computed("cross_kv", at.crossed)
        return self.steps(values + self.computed(at.entry, steps[first:]))

    def ending(self) -> list[WalkStep]:
        """The blocks after the chosen one, and the final norm."""
        at, steps = self.at, []
        part, last = at.part("output") if at.prefix else OUT, len(at.stack.blocks) - 1
        end, own = f"{at.prefix}blocks.{last}.resid_post", f"{at.block}resid_post"
        if at.layer < last:
            steps.append(self.blocks(part, at.layer + 1, last + 1, self.names[own], end))
            self.enter(end, end, "x")
        final = self.computed(at.entry, at.final, together=True)
        return [*steps, *self.steps(final, part)]

    @property
    def output(self) -> str:
        """The name under which the stack's output was printed."""
        return self.names[f"{self.at.prefix}final"]

    def enter(self, label: str, name: str, symbol: str) -> None:
        """Make a value that is printed elsewhere known to the following steps."""
        self.names[label] = name
        self.symbols.setdefault(name, symbol)

    def computed(self, entry: str, steps: Sequence[Instruction], together: bool = False) -> list[ComputedValue]:
        return computed(self.at.program.entries, entry, steps, self.names, together)

    # ------------------------------------------------------------ grouping

    def steps(self, values: Sequence[ComputedValue], part: str = "") -> list[WalkStep]:
        """A step for each value; values of one sublayer by the same operations from earlier steps share one."""
        groups: list[tuple[str, tuple[str, ...], list[ComputedValue]]] = []  # sublayer, operations and values
        group_of: dict[str, int] = {}
        sub, steps = "attn", list[WalkStep]()
        for value in values:
            rest = value.name.removeprefix(self.at.block)
            sub = rest.partition(".")[0] if rest != value.name and "." in rest else sub
            form = tuple(applied.op for applied in value.value.chain() if not applied.constant)
            last_group = max((group_of.get(name, -1) for name in value.value.reads()), default=-1)
            places = [i for i, group in enumerate(groups) if group[:2] == (sub, form) and i > last_group]
            if not places or form[0] in ("attend", "add"):
                places = [len(groups)]
                groups.append((sub, form, []))
            groups[places[0]][2].append(value)
            group_of[value.name] = places[0]
        for sub, form, group in groups:
            name = part or self.at.part(f"block {self.at.layer}, {step_texts.SUBLAYERS.get(sub, sub)}")
            if "attend" in form:
                steps += self.attend(group[0], name)
            elif "experts" in form:
                steps += self.experts(group[0], name)
            else:
                steps.append(self.step(group, name, sub))
        return steps

    def step(self, group: Sequence[ComputedValue], part: str, sub: str) -> WalkStep:
        """Values that one step makes: the same operations, in the same sublayer."""
        makes = [self.value(member) for member in group]
        title = step_texts.title(group[0])
        texts, definitions, uses = [], dict[str, None](), dict[str, ShownTensor]()
        for member, shown in zip(group, makes, strict=True):
            text, defined = formula(member.value, self.symbols)
            again_read = any(self.symbols.get(name) == shown.symbol for name in member.value.reads())
            texts.append(f"{shown.symbol} {'←' if again_read else '='} {text}")
            definitions |= dict.fromkeys(defined)
            uses |= {use.name: use for use in self.uses(member.value, shown)}
        if [applied.op for applied in group[0].value.chain()] == ["split_heads"]:
            texts = texts[:1]  # the same for queries, keys and values
        self.print_all(makes)
        equation, meaning = ",  ".join([*texts, *definitions]), step_texts.meaning(title, group, makes, sub)
        return WalkStep(
            part, title, equation, meaning, makes, lambda g: [evaluate(member.value, g) for member in group],
            list(uses.values()),
        )  # fmt: skip

    def print_all(self, makes: Sequence[ShownTensor]) -> None:
        self.symbols |= {printed.name: printed.symbol for printed in makes}
        self.shown |= {printed.name: printed for printed in makes}

    # ------------------------------------------------------------ tensors

    def value(self, computed: ComputedValue) -> ShownTensor:
        """A value as it is printed: with heads, heads first."""
        at, site = self.at, computed.name.removesuffix(" by head")
        if computed.value.op == "merge_heads":
            value = torch.cat(list(self.shown[next(computed.value.reads())].value), dim=-1)
        elif site in at.reads:
            value = at.read(site)
            flat = len(at.program.entries[computed.entry].values[computed.label].shape) == 2
            value = value.flatten(1) if flat else value
        else:
            value = at.value(computed.entry, computed.label)
        value = value.transpose(0, 1) if value.dim() == 3 else value
        letters = step_texts.AXES.get(step_texts.leaf(computed)) or ("H T K" if value.dim() == 3 else "N D")
        shown = at.by_token(computed.name, step_texts.symbol(computed), value, letters)
        if computed.entry == "cross_kv" and at.source is not None:
            shown = replace(shown, labels=at.source.labels, focus=None)
        return replace(shown, head=self.at.head * len(value) // self.at.heads) if value.dim() == 3 else shown

    def uses(self, value: AppliedOp, result: ShownTensor) -> list[ShownTensor]:
        """The parameters and constants that an expression reads."""
        out, width = result.letters.split()[-1], self.at.width
        shown: list[ShownTensor] = []
        for applied in value.chain():
            if applied.op in CONSTANTS or applied.constant:
                shown += [self.constant(applied)] if applied.op in CONSTANTS else []
                continue
            source, axis = applied.inputs.get("x"), "D"
            if isinstance(source, str) and source in self.shown:
                axis = self.shown[source].letters.split()[-1]
            elif applied.op == "linear":
                axis = "D" if self.at.weights[applied.step.weights["weight"]].shape[1] == width else "E"
            letters = {"linear": f"{out} {axis}", "conv1d": "D D kernel"}.get(applied.op, out)
            for key, name in applied.step.weights.items():
                own = letters if key == "weight" else letters.split()[0]
                shown.append(self.at.parameter(name, parameter_symbol(name, applied.op), own))
            out = axis if applied.op == "linear" else out
        return shown

    def constant(self, applied: AppliedOp) -> ShownTensor:
        at, name, step = self.at, constant_name(applied), applied.step
        if applied.op in ("embedding", "sinusoids"):
            symbol = "P" if applied.op == "sinusoids" else formula(applied, self.symbols)[0]
            return at.by_token(name, symbol, at.value(at.entry, step.out[0]))
        ends = torch.full_like(at.places, at.first + len(at.ids))
        cos, sin = rope_angles(step.attributes["spec"], at.places, ends)
        symbol, angles = ("cos", cos) if applied.op == "rotation_cos" else ("sin", sin)
        return at.by_token(name, symbol, angles, "N K/2")

    # ------------------------------------------------------------ steps of more than one formula

    def attend(self, computed: ComputedValue, part: str) -> list[WalkStep]:
        """Attention, by the attributes of its instruction: scores, scale, bias, mask, softmax and weighted sum."""
        at, how, step = self.at, computed.value.step.attributes, computed.value.step
        q, k, v = (self.shown[name] for name in (computed.value.inputs[key] for key in "qkv") if isinstance(name, str))
        crossed = how["keys"] == "cross"
        steps, k_pos = [], at.places
        if self.cached is not None and not crossed:
            steps = [self.extension(self.cached, how["ports"], k, v, part)]
            k, v = steps[0].makes
            k_pos = torch.tensor(list(self.cached))
        ports = {name.rpartition(".")[2]: name for name in how["ports"]}
        forward = {}
        if computed.name in at.reads:
            scores, pattern = at.read(ports["scores"]), at.read(ports["pattern"])
            if self.cached is not None:  # a column for each position there, also of those a window has dropped
                scores, pattern = scores[..., k_pos], pattern[..., k_pos]
            forward = {"scores": scores, "pattern": pattern, "z": at.read(computed.name).transpose(0, 1)}
        bias = computed.value.inputs.get("bias")
        attending = AttentionSteps(
            part=part, prefix=ports["scores"].removesuffix("scores"), q=q, k=k, v=v, mask=how["mask"],
            scale=how["scale"], softcap=how["softcap"],
            sinks=None if "sinks" not in step.weights else at.weights[step.weights["sinks"]].cpu(),
            bias=position_bias(at, bias, q, k, k_pos) if isinstance(bias, AppliedOp) else None,
            q_pos=None if crossed and isinstance(how["mask"], Full) else at.places, k_pos=None if crossed else k_pos,
            head=at.head, forward=forward, out=computed.name,
        )  # fmt: skip
        steps += attending.steps()
        self.print_all(steps[-1].makes)
        return steps

    def extension(
        self, cached: Mapping[int, str], ports: Sequence[str], k: ShownTensor, v: ShownTensor, part: str
    ) -> WalkStep:
        """The cache's keys and values, and the new ones after them."""
        makes, joined = [], []
        for leaf, new in (("k", k), ("v", v)):
            site = next(name for name in ports if name.endswith(f"{leaf}_ctx"))
            value, labels = self.at.read(site).transpose(0, 1), list(cached.values())
            makes.append(replace(new, name=site, value=value, labels=labels, focus=len(cached) - 1))
            joined.append((f"{self.at.block}attn.{leaf} cached", new.name))
        equation = "k = [k of the cache; k new],  v = [v of the cache; v new]"
        meaning = "The new key and value follow those in the cache; nothing of the earlier tokens is computed again."
        return WalkStep(
            part, "Cache", equation, meaning, makes, lambda g: [torch.cat([g[old], g[new]], 1) for old, new in joined]
        )

    def experts(self, computed: ComputedValue, part: str) -> list[WalkStep]:
        """A mixture of experts: which experts each token goes to, and the weighted sum of their outputs."""
        experts = next(part for part in computed.value.chain() if part.op == "experts")
        how, entered, router = experts.step.attributes, experts.inputs["x"], experts.inputs["scores"]
        assert isinstance(entered, str)
        assert isinstance(router, str)
        scores, under, top = self.shown[router].value, router.removesuffix("router"), int(how["top_k"])
        weights, best = scores.softmax(-1).topk(top)
        weights = weights / weights.sum(-1, keepdim=True) if how["normalize"] else weights
        names = [str(i) for i in range(top)]
        chosen, shares = (
            replace(self.at.by_token(f"{under}{name}", letter, value, "N top"), columns=names)
            for name, letter, value in (("chosen", "e", best), ("weights", "w", weights))
        )
        choice = WalkStep(
            part, "Choice",
            f"e, w = the {top} largest of softmax({self.symbols[router]})" + ",  w ← w / Σ w" * how["normalize"],
            f"Each token goes through {top} of {how['count']} experts.", [chosen, shares],
            lambda g: reference_ops.choice(g[router], top, how["normalize"]),
        )  # fmt: skip
        makes = self.value(computed)
        weighted = f"Σ w · expert_e({self.symbols[entered]})"
        text, definitions = formula(computed.value, self.symbols | {experts.step.out[0]: weighted})

        def mixed(g: PrintedTensors) -> Tensor:
            x, out = g[entered], torch.zeros_like(g[entered])
            for number in g[chosen.name].unique().tolist():
                token, place = (g[chosen.name] == number).nonzero(as_tuple=True)
                out[token] += g[shares.name][token, place, None] * self.expert(how["expert"], number, x[token])
            return evaluate(computed.value, g, {experts.step.out[0]: out})

        equation = ",  ".join([f"{makes.symbol} = {text}", *definitions])
        meaning = "The outputs of the chosen experts, weighted and added; an expert is an MLP like any other."
        uses = self.uses(computed.value, makes)
        self.print_all([makes])
        return [choice, WalkStep(part, "Experts", equation, meaning, [makes], mixed, uses)]

    def expert(self, entry: Entry, number: int, x: Tensor) -> Tensor:
        """The output of one expert for some tokens, by its own program."""
        values = {entry.inputs[0]: x}
        for step in entry.instructions:
            names = {key: name.replace(".experts.0.", f".experts.{number}.") for key, name in step.weights.items()}
            weights = {key: exact(self.at.weights[name].cpu()) for key, name in names.items()}
            inputs = {key: values[label] for key, label in step.inputs.items()}
            values[step.out[0]] = reference_ops.run(step.op, inputs | weights, step.attributes)
        return values[entry.outputs[0]]

    def blocks(self, part: str, first: int, end: int, before: str, after: str) -> WalkStep:
        """Blocks that are not shown step by step, run once more as modules."""
        at = self.at
        block_range, adding = f"blocks {first} to {end - 1}", f"{end - first} blocks that add"
        if end == first + 1:
            block_range, adding = f"block {first}", "One block that adds"

        @torch.inference_mode()
        def once_more(g: PrintedTensors) -> Tensor:
            rows, x, memory = Rows((len(at.ids),)), g.data[before].to(at.module.device), None
            if at.source is not None:
                memory = EncoderOutput(g.data[at.memory].to(at.module.device), Rows((len(at.source.ids),)))
            ctx = at.stack.context(x, rows, NULL_CACHE.begin(rows, ""), memory)
            for i in range(first, end):
                x = at.stack.blocks[i](x, ctx, i, nn.NO_TAPS)
            return x.cpu()

        meaning = f"{adding} to the residual stream in the same way; --layer shows another one."
        shown = at.by_token(after, "x", at.read(after))
        self.shown[after] = shown
        return WalkStep(part, block_range.capitalize(), f"x ← {block_range} of x", meaning, [shown], once_more)
