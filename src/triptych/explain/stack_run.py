"""One stack of a model in one forward: its part of the program, and what was read at its sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe import Trace
from triptych.probe.prompts import name_tokens
from triptych.program import Instruction, Program, interpret_value
from .steps import ShownTensor

PORTS = ("scores", "pattern")


@dataclass(kw_only=True, eq=False)
class StackRun:
    """One stack in one forward, and what of it is followed: a layer, a head, a row.

    Its instructions are `embed`, up to the embedding, `inside`, those of the chosen block, `crossed`, those of its
    cross-attention's source, and `final`, after the last block.  `prefix` begins the names of its sites, `block` those
    of the chosen block.  The `trace` is set when it has been run.

    Raises InputError where the block is not in the program or its scores are no dot products.
    """

    model: Model
    program: Program
    name: str  # encoder or decoder
    ids: Sequence[int]
    layer: int  # the last one of a stack with fewer
    head: int
    focus: int
    source: StackRun | None = None  # the encoder that a decoder reads
    memory: str = ""  # the name under which its output was printed
    first: int = 0  # the position of its first token
    trace: Trace = field(init=False)

    def __post_init__(self) -> None:
        name, program, self.module = self.name, self.program, self.model.module
        depth = len(self.stack.blocks)
        self.labels, self.layer = name_tokens(self.model, self.ids), min(self.layer, depth - 1)
        self.prefix = f"{name}." if self.module.spec.layout == "encoder-decoder" else ""
        self.entry = "encode" if name == "encoder" else "decode"
        self.block, steps = f"{self.prefix}blocks.{self.layer}.", program.entries[self.entry].instructions
        last = f"{self.prefix}blocks.{depth - 1}."
        reason = program.unlowered.get(f"{name}.blocks.{self.layer}")
        if reason is not None:
            raise InputError(f"block {self.layer} of the {name} cannot be shown step by step: {reason}")
        at = {step.out[0]: i for i, step in enumerate(steps)}
        names = [(step.out[0], f"{step.attributes.get('module')}.") for step in steps]
        end = max(i for i, (label, module) in enumerate(names) if label.startswith(last) or module == last) + 1
        self.inside = steps[at[f"{self.block}resid_pre"] + 1 : at[f"{self.block}resid_post"] + 1]
        attends = [step for step in self.inside if step.op == "attend"]
        if any(step.attributes["mechanism"] != "dot_product" for step in attends):
            raise InputError("the scores of this model are not dot products; explain shows only those")
        other = program.entries.get("cross_kv") if name == "decoder" else None
        self.crossed = () if other is None else _of_block(other.instructions, self.block)
        self.embed, self.final = steps[: at[f"{self.prefix}embed"] + 1], steps[end:]
        self.final_site = f"{last}resid_post"
        values = program.entries[self.entry].values
        self.width = int(values[f"{self.prefix}embed"].shape[-1])
        self.heads = int(values[attends[0].inputs["q"]].shape[1])  # of the chosen block

    @property
    def reads(self) -> list[str]:
        """The sites that a walk prints."""
        sites = [f"{self.block}resid_pre", self.final_site]
        sites += [step.out[0] for step in (*self.embed, *self.inside, *self.crossed, *self.final) if step.op == "site"]
        for step in self.inside:
            sites += [port for port in step.attributes.get("ports", ()) if port.rpartition(".")[2] in PORTS]
        return sites

    @property
    def stack(self) -> nn.Stack:
        stack = self.module.encoder if self.name == "encoder" else self.module.decoder
        assert stack is not None
        return stack

    @property
    def places(self) -> Tensor:
        """The position of each token."""
        return torch.arange(self.first, self.first + len(self.ids))

    def part(self, name: str) -> str:
        """The title of a part of the walk, with the stack's name where there are two."""
        return f"{self.name.capitalize()}: {name}" if self.prefix else name[0].upper() + name[1:]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return {name: one.detach() for name, one in self.module.named_parameters(remove_duplicate=False)}

    def read(self, site: str) -> Tensor:
        return self.trace[site][0].cpu()

    def value(self, entry: str, label: str) -> Tensor:
        """A value of the program, as the forward had it at a site, or made from those by the program's operations."""
        device, rows = self.module.device, Rows((len(self.ids),), (self.first,))
        values = {site: self.trace[site][0].to(device) for site in self.reads}
        values["positions"] = self.places.to(device)
        values["row_ends"] = torch.full_like(values["positions"], self.first + len(self.ids))
        values["ids"] = torch.tensor(list(self.ids), device=device)
        values["token_types"] = torch.zeros_like(values["ids"])
        with torch.inference_mode():
            return interpret_value(self.program, entry, label, self.weights, rows, values).cpu()

    def by_token(self, name: str, symbol: str, value: Tensor, letters: str = "N D") -> ShownTensor:
        """A tensor with a row for each token, or with heads first and then a row for each token."""
        return ShownTensor(name, symbol, letters, value, self.labels, focus=self.focus)

    def parameter(self, name: str, symbol: str, letters: str) -> ShownTensor:
        return ShownTensor(name, symbol, letters, self.weights[name].cpu())


def _of_block(steps: Sequence[Instruction], block: str) -> list[Instruction]:
    """The instructions that lead to the sites of a block."""
    maker = {step.out[0]: step for step in steps}
    needed_values: set[str] = {label for label in maker if label.startswith(block)}
    for step in reversed(steps):
        if step.out[0] in needed_values:
            needed_values |= set(step.inputs.values())
    return [step for step in steps if step.out[0] in needed_values]
