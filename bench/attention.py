"""Window attention beside torch's attention with a dense mask, in one run: `python bench/attention.py`.

Both give the same numbers (checked before timing).  Prints the median of n calls, forward and forward + backward.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention import attend
from triptych.spec.masks import causal, window


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of one call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def both_ways(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    upstream = torch.ones_like(q)
    return {
        "forward": lambda: attention(q, k, v),
        "forward + backward": lambda: torch.autograd.grad(attention(*leaves), leaves, upstream),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, {options.dtype}, T {options.length}, window {options.window}, "
        f"{options.heads} heads of {options.width}, median of {options.repeats}"
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, options.heads, options.length, options.width, dtype=dtype) for _ in range(3))
    mask = causal() & window(options.window)
    positions = torch.arange(options.length)
    distance = positions[:, None] - positions
    dense = (distance >= 0) & (distance < options.window)
    ours = both_ways(lambda q, k, v: attend(q, k, v, mask=mask), q, k, v)
    peer = both_ways(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense), q, k, v)
    torch.testing.assert_close(
        ours["forward"](), peer["forward"](), atol=1e-4 if dtype == torch.float32 else 0.05, rtol=0
    )
    for name in ours:
        here, there = seconds(ours[name], options.repeats), seconds(peer[name], options.repeats)
        print(f"{name:20} ours {here * 1e3:9.1f} ms   dense mask {there * 1e3:9.1f} ms   ratio {there / here:5.1f}")


if __name__ == "__main__":
    main()
