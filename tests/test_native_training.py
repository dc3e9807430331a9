"""The native functions of a training step: each level of instructions against autograd in fp64, and the calls that
torch must compute instead."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tiny
from native_models import needs_native
from triptych import nn, ops
from triptych.attention import attend, attend_reference, dispatch, kernel_native
from triptych.attention.request import prepare
from triptych.native import library
from triptych.native.loader import LEVELS
from triptych.ops import native_training
from triptych.spec.masks import causal, keys, window
from triptych.train import objectives

pytestmark = needs_native

FLOATS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # of the largest number of a result
WAYS = (*LEVELS[:3], "avx512 without pairs")


def serve_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve every call of their dtypes outside of compiled code, whatever it costs."""
    allowed = native_training.torch.compiler.is_compiling
    monkeypatch.setattr(
        native_training, "kernels_for", lambda dtype: library() if dtype in FLOATS and not allowed() else None
    )
    monkeypatch.setattr(native_training, "FEWEST", 1)


@pytest.fixture(params=WAYS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One way to compute, which serves every call whatever it costs."""
    kernels = library()
    assert kernels is not None
    way = request.param
    if kernels.use(way.split()[0]) != way.split()[0]:
        kernels.use(LEVELS[-1])
        pytest.skip(f"this processor lacks {way}")
    if "without" in way:
        ctypes.c_void_p.in_dll(kernels.functions, "train_pairs_in_use").value = None
    serve_all(monkeypatch)
    yield way
    kernels.use(LEVELS[-1])


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best level serves every call whatever it costs."""
    serve_all(monkeypatch)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def difference(results: Any, expected: Any) -> float:
    """The largest difference, of the largest number of its tensor; infinity where one is NaN."""
    pairs = zip(results, expected, strict=True)
    pairs = [(x.detach().double(), y.detach()) for x, y in pairs]
    largest = max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-2)) for x, y in pairs)
    return largest if largest == largest else float("inf")


# -- attention --------------------------------------------------------------------------------------------------------

#: Rows, heads, groups, queries, keys, width, width of values.
SHAPES = ((2, 4, 2, 70, 70, 20, 12), (1, 2, 2, 1, 3, 8, 8), (2, 3, 1, 33, 65, 64, 49), (1, 2, 2, 130, 200, 17, 34))
MASKS: dict[str, Callable[[int, int, int], Any]] = {
    "all": lambda rows, queries, count: None,
    "causal": lambda rows, queries, count: causal(),
    "keys": lambda rows, queries, count: keys([count - 1, *[max(1, count // 3)] * (rows - 1)]),
    "window": lambda rows, queries, count: causal() & window(9),
    "nothing": lambda rows, queries, count: torch.arange(queries)[:, None] % 2 + torch.zeros(count) > 0,
}
BIASES = {"none": None, "of heads": (1, 1, 1), "of rows": (0, 1, 1), "of distances": (1, 0, 0)}


def attended(
    shape: tuple[int, ...], mask: str, bias: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], str]:
    """The output and the gradients by the kernel, those of the definition in fp64, and what made the former."""
    rows, heads, groups, queries, count, width, value_width = shape
    q, k = drawn(rows, heads, queries, width, dtype=dtype), drawn(rows, groups, count, width, dtype=dtype)
    inputs = [q, k, drawn(rows, groups, count, value_width, dtype=dtype)]
    if BIASES[bias] is not None:
        each, per_query, per_head = BIASES[bias]
        inputs.append(drawn(1 if each else rows, heads if per_head else 1, queries if per_query else 1, count))
    options = {"mask": MASKS[mask](rows, queries, count), "scale": 0.3}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = attend(*inputs[:3], bias=inputs[3] if inputs[3:] else None, path="native", **options)
    expected = attend_reference(*exact[:3], bias=exact[3] if inputs[3:] else None, **options)
    gradient = torch.randn(out.shape).to(dtype)
    results = [out, *torch.autograd.grad(out, inputs, gradient)]
    name = type(out.grad_fn).__name__
    return results, [expected, *torch.autograd.grad(expected, exact, gradient.double())], name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_and_its_gradient_are_those_of_the_definition(
    level: str, mask: str, bias: str, dtype: torch.dtype
) -> None:
    for shape in SHAPES:
        results, expected, name = attended(shape, mask, bias, dtype)
        assert name == "_AttentionBackward"
        assert difference(results, expected) < FLOATS[dtype], shape


@pytest.mark.parametrize("wrong", ["causal", "scale", "bias", "group"])
def test_a_wrong_call_of_the_kernel_would_be_noticed(wrong: str, best: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = kernel_native._call

    def spoiled(function: Any, kernels: Any, request: Any, is_causal: bool, lse: Tensor, **tensors: Any) -> None:
        if wrong == "scale":
            request = replace(request, scale=1.1 * request.scale)
        if wrong == "bias":
            tensors.pop("d_bias", None)
        if wrong == "group":
            tensors["k"] = tensors["k"][:, :1].expand(-1, 2, -1, -1)
        call(function, kernels, request, is_causal and wrong != "causal", lse, **tensors)

    monkeypatch.setattr(kernel_native, "_call", spoiled)
    results, expected, _ = attended(SHAPES[0], "causal", "of heads", torch.float32)
    assert difference(results, expected) > 1e-2


def test_vectors_may_lie_apart(best: None) -> None:
    """Rows of a flat batch, a transposed last dimension, and a gradient that is one number for all."""
    flat = drawn(2, 40, 3 * 2 * 16)
    q, k, v = (x.unflatten(2, (2, 16)).transpose(1, 2) for x in flat.chunk(3, dim=2))
    turned = drawn(2, 2, 16, 40).mT
    for values in (v, turned):
        exact = [x.detach().double().requires_grad_() for x in (q, k, values)]
        out = attend(q, k, values, mask=causal(), path="native")
        attend_reference(*exact, mask=causal()).sum().backward()
        results = torch.autograd.grad(out.sum(), (q, k, values))
        assert difference(results, [x.grad for x in exact]) < FLOATS[torch.float32]


@pytest.mark.parametrize("where", ["q", "k", "v", "gradient", "bias"])
def test_nan_reaches_all_that_reads_it_and_nothing_else(level: str, where: str) -> None:
    tensors = {"q": drawn(2, 2, 20, 8), "k": drawn(2, 2, 20, 8), "v": drawn(2, 2, 20, 8), "bias": drawn(2, 2, 20, 20)}
    spoiled = {name: x.detach().clone() for name, x in tensors.items()} | {"gradient": torch.randn(2, 2, 20, 8)}
    spoiled[where][0, 1, 7] = float("nan")
    inputs = [spoiled[name].requires_grad_() for name in ("q", "k", "v", "bias")]
    out = attend(*inputs[:3], bias=inputs[3], path="native")
    results = [out.detach(), *torch.autograd.grad(out, inputs, spoiled["gradient"])]
    reference = attend_reference(*inputs[:3], bias=inputs[3])
    expected = [reference, *torch.autograd.grad(reference, inputs, spoiled["gradient"])]
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
    assert not results[0][1].isnan().any()


def test_threads_change_no_bit(best: None) -> None:
    before = torch.get_num_threads()
    inputs = [drawn(3, 4, 70, 16, dtype=torch.bfloat16) for _ in range(3)]
    bias, gate = drawn(1, 4, 70, 70), drawn(3, 4, 70, 16, dtype=torch.bfloat16)
    weight = drawn(16)
    runs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = ops.gated("silu", attend(*inputs, mask=causal(), bias=bias, path="native").contiguous(), gate)
            out = ops.rms_norm(out.float(), weight, 0.0, 1e-5)
            runs.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, bias, gate, weight])])
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


def test_auto_takes_it_for_a_training_step_alone(best: None) -> None:
    q = torch.randn(4, 2, 60, 16)

    def name(q: Tensor, **options: Any) -> str:
        return dispatch.choose(prepare(q, q, q, **options)[0]).name

    trained = q.clone().requires_grad_()
    assert name(trained, mask=causal()) == "native"
    assert name(q, mask=causal()) != "native"
    for options in ({"dropout": 0.1}, {"softcap": 5.0}, {"sinks": torch.zeros(2)}):
        assert name(trained, **options) != "native"
    assert name(trained.double()) == name(torch.randn(4, 1, 513, 8, requires_grad=True)) != "native"
    assert "more than 512 keys" in kernel_native.native_cannot(prepare(*[torch.randn(1, 1, 513, 8)] * 3)[0])


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [False, True], ids=["alone", "gated"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", native_training.KERNELS)
def test_an_activation_and_its_gradient_are_those_of_fp64(
    level: str, name: str, dtype: torch.dtype, gate: bool
) -> None:
    plain = native_training.ACTIVATIONS[name]
    for count in (1, 7, 16, 1000, 40001):
        x, other = ((6 * torch.randn(count)).to(dtype).requires_grad_() for _ in range(2))
        inputs = (x, other) if gate else (x,)
        y = ops.gated(name, x, other) if gate else ops.activated(name, x)
        exact = [one.detach().double().requires_grad_() for one in inputs]
        expected = plain(exact[0]) * exact[1] if gate else plain(exact[0])
        gradient = torch.randn(count).to(dtype)
        results = [y, *torch.autograd.grad(y, inputs, gradient)]
        assert type(results[0].grad_fn).__name__ == "_ActivationBackward"
        assert difference(results, [expected, *torch.autograd.grad(expected, exact, gradient.double())]) < FLOATS[dtype]


def test_another_activation_would_be_noticed(best: None) -> None:
    x = torch.randn(1000, requires_grad=True)
    results = [ops.activated("gelu_tanh", x)]
    assert difference(results, [torch.nn.functional.gelu(x.detach().double())]) > 2 * FLOATS[torch.float32]


@pytest.mark.parametrize("name", native_training.KERNELS)
def test_activations_keep_nan_and_the_ends_of_the_line(level: str, name: str) -> None:
    x = torch.tensor([float("nan"), 1e30, -1e30, 0.0, -0.0, 100.0, -100.0], requires_grad=True)
    y = ops.activated(name, x)
    assert y[0].isnan()
    assert torch.equal(y[1:], torch.tensor([1e30, -0.0, 0.0, -0.0, 100.0, -0.0]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_rotation_and_its_gradient_are_those_of_fp64(level: str, dtype: torch.dtype) -> None:
    """Of all of a vector, of its first part, and of widths that fill no register; a wrong pairing differs."""
    for width, turned in ((64, 64), (20, 20), (50, 36), (6, 2)):
        x, cos, sin = drawn(9, 3, width, dtype=dtype), torch.randn(9, 1, turned), torch.randn(9, 1, turned)
        y = ops.rotate(x, ops.Rotation(cos, sin, "half"))
        exact = x.detach().double().requires_grad_()
        expected = ops.rotate(exact, ops.Rotation(cos.double(), sin.double(), "half"))
        gradient = torch.randn(y.shape).to(dtype)
        results = [y, *torch.autograd.grad(y, x, gradient)]
        assert type(y.grad_fn).__name__ == "_RotatedBackward"
        assert difference(results, [expected, *torch.autograd.grad(expected, exact, gradient.double())]) < FLOATS[dtype]
        other = ops.rotate(exact, ops.Rotation(cos.double(), sin.double(), "interleaved"))
        assert turned == 2 or difference([y], [other]) > 0.1


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_and_its_gradient_are_those_of_fp64(level: str, offset: float) -> None:
    """Over one and several pieces of tokens; another offset differs."""
    for tokens, width in ((1, 1), (3, 7), (300, 33), (128, 64)):
        x, weight = drawn(tokens, width), drawn(width)
        y = ops.rms_norm(x, weight, offset, 1e-3)
        exact = [one.detach().double().requires_grad_() for one in (x, weight)]
        expected = ops.rms_norm(*exact, offset, 1e-3)
        gradient = torch.randn(y.shape)
        results = [y, *torch.autograd.grad(y, (x, weight), gradient)]
        assert type(y.grad_fn).__name__ == "_NormedBackward"
        assert difference(results, [expected, *torch.autograd.grad(expected, exact, gradient.double())]) < 2e-5
        assert difference([y], [ops.rms_norm(*exact, offset + 0.5, 1e-3)]) > 1e-2
        frozen = torch.autograd.grad(ops.rms_norm(x, weight.detach(), offset, 1e-3), x, gradient)
        assert torch.equal(frozen[0], results[1])


# -- where torch computes ---------------------------------------------------------------------------------------------


def both(q: Tensor) -> Tensor:
    """Attention, a norm, a rotation and an activation of q [B, H, T, 4]."""
    out = attend(q, q, q, mask=causal()).contiguous()
    flat = out.flatten(0, 2)[:, None]
    flat = ops.rms_norm(flat, torch.ones(4).to(flat), 0.5, 1e-5)
    turn = torch.arange(4.0).to(q.dtype).expand(len(flat), 1, 4).contiguous()
    return ops.gated("gelu", ops.rotate(flat, ops.Rotation(turn.cos(), turn.sin(), "half")).view(out.shape), q)


def test_torch_func_and_other_modes_of_differentiation_get_torch(best: None) -> None:
    q = torch.randn(3, 2, 5, 4)
    learned = q.clone().requires_grad_()
    exact = q.double().requires_grad_()
    (expected,) = torch.autograd.grad(both(exact).sum(), exact)
    gradient = torch.func.grad(lambda q: both(q).sum())
    assert difference([gradient(q)], [expected]) < 2e-5
    assert difference([torch.func.vmap(gradient)(q[:, None])[:, 0]], [expected]) < 2e-5
    assert torch.func.hessian(lambda q: both(q).sum())(q[:1]).isfinite().all()
    rows = torch.autograd.functional.jacobian(lambda q: both(q).sum((1, 2, 3)), learned, vectorize=True)
    assert difference([rows.sum(0)], [expected]) < 2e-5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(learned, torch.ones_like(q))
        assert torch.autograd.forward_ad.unpack_dual(both(dual)).tangent is not None


def test_a_gradient_can_be_differentiated(best: None) -> None:
    def twice(q: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(both(q).square().sum(), q, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), q)[0]

    q = torch.randn(2, 2, 9, 4)
    assert difference([twice(q.clone().requires_grad_())], [twice(q.double().requires_grad_())]) < 1e-4


COMPILED = """
import torch
from triptych import ops
from triptych.attention import dispatch
from triptych.attention.request import prepare
from triptych.spec.masks import causal

q = torch.randn(2, 2, 150, 64, requires_grad=True)
request = prepare(q, q, q, mask=causal())[0]
assert dispatch.choose(request).name == "native"
run = dispatch.choose(request).plan(request)

def block(q):
    return ops.gated("gelu", run(q, q, q, None, None).contiguous(), q)

out = torch.compile(block, backend="aot_eager", fullgraph=True)(q)
assert type(out.grad_fn).__name__ == "CompiledFunctionBackward"
(gradient,) = torch.autograd.grad(out.sum(), q)
(native,) = torch.autograd.grad(block(q).sum(), q)
print(float((gradient - native).abs().max() / native.abs().max()) < 2e-5)
"""


def test_compiled_code_gets_torch() -> None:
    """A block is compiled, and runs what was planned outside of it."""
    if native_training.kernels_for(torch.float32) is None:
        pytest.skip("no kernels of a training step are in use")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "error::UserWarning"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_recomputation_gives_the_same_bits(best: None) -> None:
    q = torch.randn(2, 2, 30, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(both(q).sum(), q)
    (again,) = torch.autograd.grad(checkpoint(both, q, use_reentrant=False).sum(), q)
    assert torch.equal(plain, again)


def test_the_variable_switches_them_off() -> None:
    code = (
        "import torch; from triptych import ops; from triptych.attention import attend, why;"
        "q = torch.randn(2, 2, 128, 64, requires_grad=True);"
        "print(type(ops.ACTIVATIONS['gelu'](q).grad_fn).__name__, bool(why(q, q, q)['native']))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for value, expected in (("none", "GeluBackward0 True"), ("portable", "GeluBackward0 True")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=environment | {"TRIPTYCH_KERNELS": value}, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == expected, done.stderr


# -- models -----------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Transformer]] = {
    "decoder": tiny.decoder, "t5": lambda: tiny.decoder("t5"), "alibi": lambda: tiny.decoder("alibi", "window"),
    "encoder": tiny.encoder, "both": tiny.encoder_decoder, "mixture": tiny.mixture,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_by_the_same_gradients(name: str, best: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several lengths, beside a copy of the model in fp64."""
    module = MODELS[name]().train()
    rows = [[3, 4, 5, 6, 7, 8, 9], [5, 3], [7, 6, 5, 4]]
    if module.encoder is not None and module.decoder is not None:
        examples = [objectives.seq2seq(row[::-1], row, 1) for row in rows]
    else:
        examples = [objectives.causal(row) for row in rows]
    batch = objectives.collate(examples)
    calls: list[Any] = []
    call = kernel_native._call

    def counted(*arguments: Any, **tensors: Any) -> None:
        calls.append(arguments)
        call(*arguments, **tensors)

    monkeypatch.setattr(kernel_native, "_call", counted)
    objectives.loss(module, batch)[0].backward()
    assert len(calls) >= 2
    results = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module.double()
    objectives.loss(module, batch)[0].backward()
    assert difference(results, [p.grad for p in module.parameters() if p.grad is not None]) < 1e-4
