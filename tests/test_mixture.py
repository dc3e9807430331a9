"""A mixture of experts against every expert computed on every token, and what it costs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych import spec
from triptych.attention import Rows
from triptych.count import count
from triptych.nn import NO_TAPS, Context, build

D, F, E, TOP, N = 6, 9, 5, 3, 7


def made(*, normalize: bool = False, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = build(spec.moe(D, F, "silu", experts=E, top_k=TOP, normalize=normalize))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def ours(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, Context(Rows((len(x),)), own=(), cross=()), NO_TAPS)


def by_hand(module: torch.nn.Module, x: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Shazeer et al. 2017, equations 2 to 5 without noise, token by token."""
    out = []
    for token in x:
        shares = torch.softmax(module.router.weight @ token, 0)
        chosen = sorted(range(E), key=lambda e: -float(shares[e].detach()))[:TOP]
        whole = sum(shares[e] for e in chosen) if normalize else 1.0
        total = torch.zeros_like(token)
        for e in chosen:
            expert = module.experts[e]
            gate = torch.nn.functional.silu(expert.gate.weight @ token)
            total = total + shares[e] / whole * (expert.down.weight @ (gate * (expert.up.weight @ token)))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("normalize", [False, True])
def test_grouped_by_expert_is_token_by_token(normalize: bool) -> None:
    module, x = made(normalize=normalize), torch.randn(N, D)
    expected = by_hand(module, x, normalize)
    assert torch.allclose(ours(module, x), expected, atol=1e-5)
    assert not torch.allclose(by_hand(module, x, not normalize), expected, atol=1e-3)


def test_gradients_are_those_of_the_sum_by_hand() -> None:
    module, x = made().double(), torch.randn(N, D).double()
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(ours(module, x).square().sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad(by_hand(module, x, False).square().sum(), parameters, allow_unused=True)
    for name, a, b in zip(names, found, expected, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.allclose(a, b), name


def test_a_token_costs_its_experts_and_no_other() -> None:
    module, x = made(), torch.randn(N, D)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ours(module, x)
    assert counter.get_total_flops() == 2 * N * D * E + TOP * 3 * 2 * N * D * F


def test_a_token_s_output_is_its_own() -> None:
    """Whatever else is in the batch, and in whatever order."""
    module, x = made(), torch.randn(N, D)
    together, order = ours(module, x), torch.randperm(N)
    assert torch.allclose(torch.cat([ours(module, token[None]) for token in x]), together, atol=1e-5)
    assert torch.allclose(ours(module, x[order]), together[order], atol=1e-5)


def test_bf16_stays_bf16_and_near() -> None:
    module, x = made(), torch.randn(N, D)
    exact = ours(module, x)
    rounded = ours(module.bfloat16(), x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_active_parameters_by_hand() -> None:
    norm = spec.RMSNormSpec(width=D)
    block = spec.BlockSpec(
        attn=spec.attention(D, 2),
        mlp=spec.moe(D, F, "silu", experts=E, top_k=TOP),
        attn_norm=spec.NormsSpec(pre=norm),
        mlp_norm=spec.NormsSpec(pre=norm),
    )
    embed = spec.EmbedSpec(vocab=11, width=D)
    stack = spec.StackSpec(embed=embed, kinds={"self": spec.KindSpec(mask=spec.causal())}, blocks=(block, block))
    found = count(spec.ModelSpec(family="x", decoder=stack))
    assert found.total - found.active == 2 * (E - TOP) * 3 * D * F
    assert found.parameters["mlp"] == 2 * (D * E + E * 3 * D * F)
    assert found.to_dict(5)["parameters"]["active"] == found.active


def test_autocast_leaves_the_stream_as_it_is() -> None:
    module, x = made(), torch.randn(N, D)
    exact = ours(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = ours(module, x)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()
