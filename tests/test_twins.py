"""Patching and ablation report what a change does and nothing else, however products round; and their runs, which skip
the blocks below their change, give what runs of all blocks give."""

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
import tiny
from native_models import packed
from triptych import ops
from triptych.errors import ProbeError
from triptych.model import Model
from triptych.native import library
from triptych.nn import Transformer
from triptych.nn.inputs import Frames
from triptych.nn.packed_weight import PackedWeight
from triptych.probe import Ablations, PatchGrid, sites, twin_runs
from triptych.probe.sites import prefix_of
from triptych.spec import FramesSpec

CLEAN, CORRUPT = [3, 1, 4, 1, 5, 9, 2], [3, 1, 7, 1, 5, 9, 2]
TARGET = [1, 8, 2, 6]
MODELS: dict[str, Callable[[], Transformer]] = {
    "decoder": lambda: tiny.decoder(blocks=4),
    "encoder": tiny.encoder,
    "encoder-decoder": tiny.encoder_decoder,
    "mixture": tiny.mixture,
    "attention only": tiny.attention_only,
}


def grid(model: Model, **options: Any) -> PatchGrid:
    answer = {"answer": (5, 6)} if model.spec.head is not None else {}
    target = {"target": TARGET} if model.spec.layout == "encoder-decoder" else {}
    at = {"at": 2} if model.spec.layout == "encoder" else {}
    return model.patch(CLEAN, CORRUPT, **answer, **target, **at, **options)


def in_full(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PatchGrid:
    """Every run with all of its blocks."""
    with monkeypatch.context() as patched:
        patched.setattr(twin_runs, "begins", from_the_start)
        return grid(model, **options)


def from_the_start(spec: Any, changed: Any) -> Any:
    return tuple((prefix_of(spec, name), 0) for name in spec.stacks)


def blocks_run(model: Model, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens went through how many blocks: the sum over blocks."""
    counted = 0
    kinds = {type(block) for stack in (model.module.encoder, model.module.decoder) if stack for block in stack.blocks}
    with monkeypatch.context() as patched:
        for kind in kinds:

            def forward(self: Any, x: Tensor, *rest: Any, own: Any = kind.forward) -> Tensor:
                nonlocal counted
                counted += len(x)
                return own(self, x, *rest)

            patched.setattr(kind, "forward", forward)
        call()
    return counted


def assert_same(one: PatchGrid, other: PatchGrid) -> None:
    """To the rounding of products in batches of other sizes."""
    assert (one.rows, one.columns) == (other.rows, other.columns)
    torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-4, equal_nan=True)
    moved = (other.values - other.corrupt).abs() > 1e-3  # where more than rounding changed
    assert bool(moved.any())
    assert bool(one.fired[moved].all())


SITES = [{}, {"site": ["*.z", "*mlp.out"]}, {"heads": True, "positions": None}, {"site": "*"}]


@pytest.mark.parametrize("options", SITES, ids=["streams", "outputs", "heads", "every site"])
@pytest.mark.parametrize("name", MODELS)
def test_grids_are_those_of_whole_runs(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "attention only" and "site" in options and options["site"] != "*":
        options = {"site": "*.z"}
    if options.get("site") == "*":  # scores and patterns are over keys, which have no columns of their own
        options = {"site": ["*embed", "*.attn.*", "*.cross.*"][: 3 if name == "encoder-decoder" else 2]}
    model = Model(MODELS[name]())
    own = grid(model, **options)
    assert_same(own, in_full(model, monkeypatch, **options))
    assert_same(grid(model, **options, batch_tokens=20), own)


@pytest.mark.parametrize("rows", [1, 7])
def test_blocks_below_a_change_run_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, seven positions: the runs of block i need 4 - i blocks; the clean prompt and the twin, one forward
    each, need all."""
    model = Model(tiny.decoder(blocks=4))
    n = len(CLEAN)
    at_once = {"batch_tokens": rows * n}
    whole = blocks_run(model, lambda: in_full(model, monkeypatch, **at_once), monkeypatch)
    spared = blocks_run(model, lambda: grid(model, **at_once), monkeypatch)
    assert whole == 2 * rows * 4 * n + 4 * n * 4 * n
    assert spared == 2 * rows * 4 * n + (4 + 3 + 2 + 1) * n * n


def test_ablations_share_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tiny.decoder(blocks=4))
    ablated = lambda: model.ablate([CLEAN], "heads", answer=5)  # noqa: E731
    own = ablated()
    with monkeypatch.context() as patched:
        patched.setattr(twin_runs, "begins", from_the_start)
        whole = ablated()
    torch.testing.assert_close(own.values, whole.values, atol=1e-4, rtol=1e-4)


def test_models_that_may_compute_something_else_run_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that changes what a block gives at each call, which one known result cannot stand for."""
    model = Model(tiny.decoder(blocks=4))
    calls = 0

    def hook(module: Any, args: Any, out: Tensor) -> None:
        nonlocal calls
        calls += 1

    handle = model.module.decoder.blocks[0].register_forward_hook(hook)
    grid(model, batch_tokens=1)
    assert calls == 2 + 4 * len(CLEAN)  # the clean prompt, the corrupt one and each of its changes
    handle.remove()
    model.module.train()
    count = blocks_run(model, lambda: grid(model), monkeypatch)
    assert count == blocks_run(model, lambda: in_full(model, monkeypatch), monkeypatch)


def test_a_block_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: runs that begin one block too late lose what they change."""
    model = Model(tiny.decoder(blocks=4))
    whole, begins = in_full(model, monkeypatch), twin_runs.begins
    late = lambda spec, sites: tuple((prefix, min(first + 1, 4)) for prefix, first in begins(spec, sites))  # noqa: E731
    monkeypatch.setattr(twin_runs, "begins", late)
    with pytest.raises(AssertionError):
        assert_same(grid(model), whole)


# ---------------------------------------------------------------- what can change nothing, and what hardly does

A, B = 3, 4  # two tokens of the same vector, or of vectors that differ in one number
PAIRS = 29  # of each model: 203 in all
READERS: dict[str, Callable[[], Transformer]] = {
    "gpt2": lambda: tiny.decoder("learned"),
    "llama": lambda: tiny.decoder("rope", "window"),
    "bert": tiny.encoder,
    "t5": tiny.encoder_decoder,
    "whisper": lambda: copy.deepcopy(parity.ours("whisper").module),
    "mixture": tiny.mixture,
    "packed": lambda: with_dense_table(packed()),
}


def with_dense_table(module: Transformer) -> Transformer:
    table = module.decoder.embed.tokens
    table.weight = torch.nn.Parameter(table.weight.dense())
    return module


def reader(name: str, change: float = 0.0) -> Model:
    """A model that reads tokens A and B alike, but that the largest number of B's vector is greater by this part; one
    that hears does not read channel 0 of its frames."""
    if name == "packed" and library() is None:
        pytest.skip("packed weights need the native kernels")
    module = READERS[name]()
    stack = module.decoder or module.encoder
    table = stack.embed.tokens.weight
    with torch.no_grad():
        table[B] = table[A]
        table[B, table[A].abs().argmax()] *= 1 + change
        if module.encoder is not None and isinstance(module.encoder.embed, Frames):
            module.encoder.embed.conv1.weight[:, 0] = 0
    return Model(module)


@pytest.fixture(params=["as torch rounds", "by place and size"])
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Dense products as torch rounds them here, and as it may elsewhere: by the place of a row and the size of the
    batch."""
    if request.param == "by place and size":
        monkeypatch.setattr(ops, "linear", rounded_by_place)
    return str(request.param)


def rounded_by_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.nn.functional.linear(x, weight, bias)
    if isinstance(weight, PackedWeight) or not isinstance(out, Tensor):  # our kernels; a symbol
        return out
    up = (7 * torch.arange(len(out)) + len(out)) % 3 == 0
    return out.nextafter(out.new_tensor(torch.inf)).where(up.view(-1, *[1] * (out.dim() - 1)), out)


class Pair:
    """Two prompts that differ in one place alone: A in the clean one and B in the corrupt one.

    `change` is how much a model that hears reads another number; `further` makes a text longer.
    """

    def __init__(self, model: Model, number: int, change: float) -> None:
        self.draw = draw = Random(f"pair {number}")
        row = self._row(draw.randrange(2, 10))
        self.place, self.further = draw.randrange(len(row)), self._row(draw.randrange(3))
        clean, corrupt = ([*row[: self.place], token, *row[self.place + 1 :]] for token in (A, B))
        self.clean, self.corrupt, self.options = self._read(model, clean, corrupt, change)

    def _row(self, length: int) -> list[int]:
        return [self.draw.randrange(5, 30) for _ in range(length)]

    def _read(self, model: Model, clean: Any, corrupt: Any, change: float) -> tuple[Any, Any, dict[str, Any]]:
        both = model.spec.layout == "encoder-decoder"
        if both and isinstance(model.spec.reads.embed, FramesSpec):
            clean = parity.rows_of(model)[self.draw.randrange(3)]
            corrupt = clean.clone()
            corrupt[:, 0] = self.draw.random()
            frame = int(corrupt[:, 1].abs().argmax())
            corrupt[frame, 1] *= 1 + change
            self.place = frame // model.spec.reads.embed.stride
        if both:
            return clean, corrupt, {"target": [0, *self._row(self.draw.randrange(4))]}
        return clean, corrupt, {"at": self.draw.randrange(self.place, len(clean))}


def resampled(model: Model, pair: Pair, part: Any) -> Ablations:
    """The corrupt prompt's values in the clean one; in a decoder the other may be longer."""
    other = [*pair.corrupt, *pair.further] if model.spec.layout == "decoder" else pair.corrupt
    return model.ablate([pair.clean], part, how="resample", reference=[other], **pair.options)


def paths(model: Model, pair: Pair) -> PatchGrid:
    """From a head of the first block to the logits, or to heads of the second."""
    names = [name.removesuffix(".z") for name in sites(model.spec) if name.endswith(".z")]
    sender = next(name for name in names if "cross" not in name)
    read: dict[str, Any] = {"into": pair.draw.choice(["q", "k", "v"])}
    receivers: Any = [(sender.replace(".0.", ".1."), 1), (sender.replace(".0.", ".1."), 0)]
    if model.spec.layout != "encoder-decoder" and pair.draw.random() < 0.5:
        receivers, read = "logits", {}
    senders = [(sender, head) for head in range(sites(model.spec)[f"{sender}.z"].heads or 1)]
    return model.path_patch(pair.clean, pair.corrupt, senders, receivers, **read, **pair.options)


def check_that_nothing_is_reported(model: Model, number: int) -> None:
    pair = Pair(model, number, 0.0)
    site = pair.draw.choice(["*resid_pre", "*.z", "*mlp.out", "*.attn.v", ["*.attn.q", "*embed"]])
    with pytest.raises(ProbeError, match="nothing was changed"):
        model.patch(pair.clean, pair.corrupt, site=site, positions=pair.draw.choice(["all", None]), **pair.options)
    with pytest.raises(ProbeError, match="no ablation changed a value"):
        resampled(model, pair, pair.draw.choice(["heads", "attention", "mlp", "positions"]))
    grid = paths(model, pair)
    assert not grid.fired.any()
    assert (grid.values == grid.corrupt).all()
    assert not grid.tells_apart


def check_that_one_number_is_reported(model: Model, number: int, change: float) -> bool:
    """Also that it changes the metric, by however little; give whether it does along a path, which may round it off."""
    pair = Pair(model, number, change)
    grid = model.patch(pair.clean, pair.corrupt, site=["*embed", "*resid_pre"], **pair.options)
    column = [name.split()[-2] for name in grid.columns].index(str(pair.place))
    assert (grid.fired & ((grid.values - grid.corrupt).abs() > 0))[:, column].any()
    ablated = resampled(model, pair, "positions")
    moved = [unit.name for unit, of_unit in zip(ablated.units, ablated.fired & ablated.moved, strict=True) if of_unit]
    assert any(name.endswith(f"embed position {pair.place}") for name in moved)
    carried = paths(model, pair)
    assert carried.fired.any()
    return bool((carried.values != carried.corrupt).any())


NUMBERS = [range(3), pytest.param(range(3, PAIRS), marks=pytest.mark.heavy)]


@pytest.mark.parametrize("numbers", NUMBERS, ids=["few", "many"])
@pytest.mark.parametrize("name", READERS)
def test_pairs_in_which_nothing_can_change_report_nothing(name: str, numbers: range, rounding: str) -> None:
    model = reader(name)
    for number in numbers:
        check_that_nothing_is_reported(model, number)


# What a change of this part of one number is: more in a mixture, so that four times the margin would leave it.
LEAST = dict.fromkeys(READERS, 1e-5) | {"mixture": 3e-4}


@pytest.mark.parametrize("numbers", NUMBERS, ids=["few", "many"])
@pytest.mark.parametrize("name", READERS)
def test_pairs_in_which_one_number_changes_report_it(name: str, numbers: range, rounding: str) -> None:
    model = reader(name, LEAST[name])
    assert sum(check_that_one_number_is_reported(model, number, LEAST[name]) for number in numbers) > 0


def check_that_nothing_moves_before(place: int, model: Model, how: str) -> None:
    """Prompts that differ at this place: no position before it has another value, though it has other neighbours."""
    for n in range(6):
        clean, corrupt = ([3 + n, 1, 4, 1, 5, 9, token, 8] for token in (2 + n, 20 + n))
        if how == "patch":
            assert not model.patch(clean, corrupt, site=["*resid_pre", "*mlp.out", "*.z"]).fired[:, :place].any()
        elif how == "paths":
            found = model.path_patch(clean, corrupt, [(0, head) for head in range(tiny.H)], "logits", at=place - 1)
            assert (found.values == found.corrupt).all()
        else:
            with pytest.raises(ProbeError, match="no ablation changed a value"):
                model.ablate([clean], how, how="resample", reference=[corrupt], positions=range(place))


@pytest.mark.parametrize("how", ["patch", "paths", "heads", "mlp"])
def test_a_mixture_whose_experts_get_other_batches_reports_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the margin all of this is reported."""
    monkeypatch.setattr(ops, "linear", rounded_by_place)
    model = Model(tiny.mixture())
    check_that_nothing_moves_before(6, model, how)
    monkeypatch.setattr(twin_runs, "margin_of", lambda *rest: 0.0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_that_nothing_moves_before(6, model, how)


def test_a_longer_corrupt_prompt_reports_nothing_where_both_are_the_same(rounding: str) -> None:
    model, aligned = Model(tiny.decoder()), [(i, i) for i in range(6)]
    found = model.patch([3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 9, 8, 10], align=aligned).fired
    assert not found[:, :4].any()
    assert found[:, 4].any()


def test_prompts_alike_up_to_the_measured_position_report_one_metric(rounding: str) -> None:
    found = Model(tiny.decoder()).patch([3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 9, 8], at=2, answer=(7, 8))
    assert found.clean == found.corrupt
    assert not found.tells_apart


def test_the_mean_over_one_token_reports_nothing(rounding: str) -> None:
    """It is the token's own value, which is therefore taken from the twin."""
    with pytest.raises(ProbeError, match="no ablation changed a value"):
        Model(tiny.decoder()).ablate([[3]], "heads", how="mean")


def alone(run: twin_runs.TwinRuns, parts: Any) -> list[twin_runs.TwinRuns]:
    """For each run one forward of a single row."""
    return [twin_runs.TwinRuns(run.model, run.run, [[*part]], 4096) for part in parts]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_values_of_a_batch_of_another_size_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with what the other prompt has alone, instead of at the place of the run, rounding is reported."""
    monkeypatch.setattr(ops, "linear", rounded_by_place)
    model, observe = reader(name), twin_runs.TwinRuns.observe

    def observe_alone(self: twin_runs.TwinRuns, run: Any, parts: Any, *wrap: Any) -> Any:
        if wrap:  # for the twin
            return observe(self, run, parts, *wrap)
        every = [observe(one, run, [part]) for one, part in zip(alone(self, parts), parts, strict=True)]
        return [taken[0] for taken, _ in every], every[0][1]

    monkeypatch.setattr(twin_runs.TwinRuns, "observe", observe_alone)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_that_nothing_is_reported(model, 0)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_twin_of_another_size_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of paths: what a receiver reads, beside what it reads in a forward of one row, is another number."""
    monkeypatch.setattr(ops, "linear", rounded_by_place)
    model, twin = reader(name), twin_runs.TwinRuns.twin

    def twin_alone(self: twin_runs.TwinRuns, parts: Any = ()) -> Any:
        twin(self)
        return [twin(one, [part])[0] for one, part in zip(alone(self, parts), parts, strict=True)]

    pairs = [Pair(model, number, 0.0) for number in range(4)]
    assert not any(paths(model, pair).fired.any() for pair in pairs)
    monkeypatch.setattr(twin_runs.TwinRuns, "twin", twin_alone)
    assert any(paths(model, Pair(model, number, 0.0)).fired.any() for number in range(4))
