"""Programs: every family has one, its sites are the probe's, and the interpreter computes what the modules compute."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
import references
import tiny
from triptych import nn, ops
from triptych.attention import Rows
from triptych.count import count
from triptych.errors import ConfigError
from triptych.nn.feedforward import GLU
from triptych.nn.linear import RMSNorm
from triptych.probe import sites
from triptych.program import Program, interpret, interpret_logits, lower
from triptych.spec import to_json

MODULES = {
    "rope": lambda: tiny.decoder(), "interleaved": lambda: tiny.decoder("rope-partial-interleaved"),
    "window": lambda: tiny.decoder(mask="window"), "t5 buckets": lambda: tiny.decoder("t5"),
    "alibi": lambda: tiny.decoder("alibi"), "disentangled": lambda: tiny.decoder("disentangled"),
    "learned": lambda: tiny.decoder("learned"), "sinusoidal": lambda: tiny.decoder("sinusoidal"),
    "additive": lambda: tiny.decoder(mechanism="additive"), "linear": lambda: tiny.decoder(mechanism="linear"),
    "mixture": lambda: tiny.mixture(), "attention only": lambda: tiny.attention_only(),
    "encoder": lambda: tiny.encoder(), "disentangled encoder": lambda: tiny.encoder("disentangled"),
    "encoder-decoder": lambda: tiny.encoder_decoder(),
}  # fmt: skip
RAGGED = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9]]


@cache
def program_of(name: str) -> tuple[nn.Transformer, Program]:
    module = MODULES[name]()
    return module, lower(module)


def weights(module: nn.Transformer) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))


def through_json(program: Program) -> Program:
    return Program.from_json(json.loads(json.dumps(program.to_json())))


@pytest.mark.parametrize("name", MODULES)
def test_the_interpreter_gives_the_bits_of_the_modules(name: str) -> None:
    module, program = program_of(name)
    assert not program.unlowered
    inputs, rows = nn.flat(RAGGED, torch.device("cpu"))
    source = nn.flat([[7, 7, 2], [9, 4, 4, 1, 3], [8]], torch.device("cpu")) if module.spec.encoder else None
    source = source if module.decoder is not None else None
    with torch.no_grad():
        expected = module(nn.Batch(inputs=inputs, rows=rows, source=source))
        hidden = interpret(through_json(program), weights(module), inputs, rows, source=source)
        assert torch.equal(hidden, expected)
        assert torch.equal(interpret_logits(program, weights(module), hidden, rows), module.unembed(expected, rows))


@pytest.mark.parametrize("name", [n for n in MODULES if "encoder" not in n])
def test_one_entry_serves_a_cache(name: str) -> None:
    module, program = program_of(name)
    caches = [module.decoder.cache(3) for _ in range(2)]
    with torch.inference_mode():
        for start, stop in ((0, -1), (-1, None)):  # all but the last token of each row, then that one
            parts = [row[start:stop] for row in RAGGED]
            past = tuple(caches[0].lengths)
            inputs, rows = torch.tensor([t for p in parts for t in p]), Rows(tuple(map(len, parts)), past)
            expected = module(nn.Batch(inputs=inputs, rows=rows, cache=caches[0]))
            assert torch.equal(interpret(program, weights(module), inputs, rows, cache=caches[1]), expected)
    assert caches[0].lengths == caches[1].lengths == [7, 2, 4]


@pytest.mark.parametrize("name", references.VARIANTS)
def test_every_family_has_a_program_with_the_sites_of_its_probe(name: str) -> None:
    """Lowered from the parts' own forwards: each tap is in it, in the order in which they fire."""
    model = parity.ours(name)
    program = lower(model.module)
    assert not program.unlowered, program.unlowered
    assert set(program.sites) == set(sites(model.spec))
    widths = {site.name: site.width for site in sites(model.spec).values() if not site.per_key}
    values = {name: info for entry in program.entries.values() for name, info in entry.values.items()}
    for site, width in widths.items():
        if site in values:
            numbers = [dim for dim in values[site].shape if isinstance(dim, int)]
            assert torch.Size(numbers).numel() == width, site
    assert to_json(model.spec)
    assert through_json(program) == program


@pytest.mark.parametrize("name", references.VARIANTS)
def test_the_interpreter_agrees_in_every_family(name: str) -> None:
    model = parity.ours(name)
    module, program = model.module, lower(model.module)
    rows, targets = parity.rows_of(model), parity.targets_of(model)
    inputs, where = module.flat(rows)
    source = None
    if targets is not None:
        source, (inputs, where) = (inputs, where), nn.flat(targets, torch.device("cpu"))
    with torch.no_grad():
        expected = module(nn.Batch(inputs=inputs, rows=where, source=source))
        hidden = interpret(program, weights(module), inputs, where, source=source)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def sizes(tokens: int, source: int, model: Any) -> dict[str, int]:
    spans = [kind.position.span for stack in model.stacks.values() for kind in stack.kinds.values()
             if hasattr(kind.position, "span")]  # fmt: skip
    longest = source if not model.decoder else tokens
    reached = min(2 * longest - 1, 2 * spans[0]) if spans else 0
    return {"N": tokens, "S": tokens, "M": source, "B": 1, "T": tokens, "R": reached, "P": 0}


FEATURES = ("whisper", "vit", "vision")  # their first part reads features, whose number is not that of tokens


@pytest.mark.parametrize("name", [n for n in references.VARIANTS if n.partition("-")[0] not in FEATURES])
def test_the_flops_are_those_that_count_gives(name: str) -> None:
    """`count` lowers one block of each kind, and here every layer is lowered; `test_count.py` has torch's numbers."""
    spec = references.read(name)
    module = nn.new(spec)
    program, tokens = lower(module), 11
    total = sum(sum(program.flops(entry, sizes(tokens, tokens, spec)).values()) for entry in program.entries)
    source = tokens if spec.layout == "encoder-decoder" else 0
    assert total == sum(count(spec).flops(tokens, source=source).values())


def test_an_edit_at_one_site_does_not_reach_another_that_passes_the_same_tensor() -> None:
    module, program = program_of("rope")
    inputs, rows = nn.flat(RAGGED, torch.device("cpu"))
    read: list[Tensor] = []
    with torch.no_grad():
        plain = interpret(program, weights(module), inputs, rows)
        edits = {"blocks.0.resid_post": lambda x: x + 1, "blocks.1.resid_pre": lambda x: read.append(x) or x}
        assert not torch.equal(interpret(program, weights(module), inputs, rows, edits=edits), plain)
        late = {"blocks.1.resid_pre": lambda x: x + 1, "blocks.0.resid_post": lambda x: read.append(x) or x}
        interpret(program, weights(module), inputs, rows, edits=late)
    assert torch.allclose(read[0], read[1] + 1)


# ---------------------------------------------------------------- controls: what must not be lowered


def unlowered(monkeypatch: pytest.MonkeyPatch, part: type, forward: Any) -> dict[str, str]:
    monkeypatch.setattr(part, "forward", forward)
    module = tiny.decoder()
    program = lower(module)
    inputs, rows = nn.flat(RAGGED, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"decoder\.blocks\.0 runs as a module"), torch.no_grad():
        interpret(program, weights(module), inputs, rows)
    assert {step.op for step in program.entries["decode"].instructions if step.out[0].startswith("t")} >= {"module"}
    return program.unlowered


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda part, x: part.down(torch.sin(part.up(x))), "sin is no operation"),
        (lambda part, x: part.down(part.up(x)) if x.sum() > 0 else x, "is no operation"),
        (lambda part, x: part.down(part.up(x)) * len(x.tolist()), "tolist is no operation"),
    ],
    ids=["a function outside the table", "a branch on a value", "numbers of a value"],
)
def test_what_cannot_be_lowered_is_named(
    result: Callable[[GLU, Tensor], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = unlowered(monkeypatch, GLU, lambda self, x, ctx, taps: result(self, x))
    assert set(reasons) == {"decoder.blocks.0", "decoder.blocks.1"}
    assert reason in reasons["decoder.blocks.0"]


def test_another_forward_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program follows the forward, whatever the spec says: nothing is written twice."""
    usual = lower(tiny.decoder())
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: ops.rms_norm(x, self.weight, 0.0, 1e-6) * 2.0)
    module = tiny.decoder()
    changed = lower(module)
    assert len(changed.entries["decode"].instructions) > len(usual.entries["decode"].instructions)
    inputs, rows = nn.flat(RAGGED, torch.device("cpu"))
    with torch.no_grad():
        expected = module(nn.Batch(inputs=inputs, rows=rows))
        assert torch.equal(interpret(changed, weights(module), inputs, rows), expected)
        assert not torch.equal(interpret(usual, weights(module), inputs, rows), expected)


def test_a_missing_tap_is_a_missing_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: GLU, x: Tensor, ctx: nn.Context, taps: nn.Taps) -> Tensor:
        return self.down(ops.ACTIVATIONS[self.spec.act](self.gate(x)) * self.up(x))

    monkeypatch.setattr(GLU, "forward", forward)
    module = tiny.decoder()
    assert {site.rpartition(".")[2] for site in set(sites(module.spec)) - set(lower(module).sites)} == {
        "gate", "up", "act"
    }  # fmt: skip


def test_json_that_is_not_a_program_is_refused() -> None:
    _, program = program_of("rope")
    good = program.to_json()
    with pytest.raises(ConfigError, match="version 7 is not 1"):
        Program.from_json(good | {"version": 7})
    for change, message in (
        (lambda entry: entry["instructions"][0].update(op="evil"), "unknown operation 'evil'"),
        (lambda entry: entry["instructions"][0]["inputs"].update(ids="nowhere"), "'nowhere' is used before"),
        (lambda entry: entry.update(outputs=["nothing"]), "'nothing' is given by no instruction"),
    ):
        bad = json.loads(json.dumps(good))
        change(bad["entries"]["decode"])
        with pytest.raises(ConfigError, match=message):
            Program.from_json(bad)


def test_lowering_leaves_the_model_as_it_was() -> None:
    module = tiny.decoder().train()
    for part in module.decoder.blocks[0].eval().children():  # type: ignore[union-attr]  # frozen, but for its MLP
        part.train(isinstance(part, nn.feedforward.GLU))
    before = {name: p.clone() for name, p in module.named_parameters()}
    flags = {name: part.training for name, part in module.named_modules()}
    assert set(flags.values()) == {True, False}
    lower(module)
    assert flags == {name: part.training for name, part in module.named_modules()}
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
