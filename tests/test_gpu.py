"""On one GPU: the families, generation and caches give what the CPU gives, and nothing is captured after a warm-up.

Without a GPU all of these are skipped (marker `gpu`).  TF32 is off, so that fp32 means the same on both sides.
"""

import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch

import parity
import references
import tiny
import triptych
from cli_models import Captured, checkpoint
from native_models import decoders, llama
from test_cache_types import LIMITS, LOSSY
from test_static_step import MODELS, STEPS, StaticRun, StaticSide, check_that_changes_are_seen, printed_by
from triptych import nn
from triptych.attention import CacheType, Rows, kernel_dense
from triptych.cli import main
from triptych.errors import InputError
from triptych.generate import Engine, Executor, PromptLookup, Request, Sampling, Speculation
from triptych.generate.beam import beam_search
from triptych.generate.sampling import sample
from triptych.model import Model
from triptych.program import lower
from triptych.program.static_executor import StaticStep

pytestmark = pytest.mark.gpu

WITHIN = 1e-3  # of log-probabilities, in fp32
PROMPTS = [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]]
NEW = 20


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """No TF32: convolutions have it by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@cache
def on_gpu(name: str) -> Model:
    return triptych.load(references.saved(name)[1], device="cuda")


def gap(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors on any devices."""
    return max(float((x.float().cpu() - y.float().cpu()).abs().max()) for x, y in zip(a, b, strict=True))


# -- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("name", references.VARIANTS)
def test_a_family_gives_what_it_gives_on_the_cpu(name: str) -> None:
    cpu, gpu = parity.ours(name), on_gpu(name)
    assert all(p.is_cuda for p in gpu.module.parameters())
    rows, targets = parity.rows_of(cpu), parity.targets_of(cpu)
    module, source = gpu.module, None
    inputs, where = module.flat(rows)
    if targets is not None:
        source, (inputs, where) = (inputs, where), nn.flat(targets, torch.device("cuda"))
    with torch.no_grad():
        hidden = module(nn.Batch(inputs=inputs, rows=where, source=source))
        found = where.split(hidden) if parity.headless(gpu) else gpu.logits(rows, targets)
    expected = parity.mine(cpu, rows, targets)
    assert gap([parity.measured(x.cpu(), cpu) for x in found], [parity.measured(x, cpu) for x in expected]) <= WITHIN


@pytest.mark.heavy
@pytest.mark.parametrize("name", decoders())
def test_graphs_of_a_family_give_the_logits_of_its_modules(name: str) -> None:
    module = on_gpu(name).module
    if not any(step.op == "experts" for step in lower(module).instructions()):
        assert StaticRun(module).gap(STEPS) <= WITHIN


@pytest.mark.heavy
@pytest.mark.parametrize("name", decoders())
def test_a_family_writes_the_same_ids_above_a_margin(name: str) -> None:
    """Each token that the GPU writes has, on the CPU, a logit within WITHIN of the largest."""
    cpu, module = parity.ours(name), on_gpu(name).module
    if module.spec.layout != "decoder":
        pytest.skip("reads a source")
    for executor in ("auto", "modules"):
        engine = Engine(module, executor=executor)
        rows = engine.add(*(Request(prompt=row, max_new_tokens=NEW, number=i) for i, row in enumerate(PROMPTS)))
        while engine.rows:
            engine.step()
        if [row.new for row in rows] == written(cpu.module, "modules"):
            continue
        assert "long" not in name, "LongRoPE's factors change in the middle, which logits of the whole row do not have"
        for row, logits in zip(rows, cpu.logits([row.ids for row in rows]), strict=True):
            first = len(row.request.prompt)
            before = logits[first - 1 : -1].float().log_softmax(-1)
            chosen = before.gather(1, torch.tensor(row.ids[first:])[:, None])[:, 0]
            assert float((before.amax(-1) - chosen).max()) <= WITHIN


# -- fixed shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_logits_of_the_modules(name: str) -> None:
    assert StaticRun(MODELS[name]().cuda()).gap(STEPS) <= WITHIN


@pytest.mark.parametrize("cache_type", LOSSY)
def test_graphs_read_what_a_cache_of_another_type_keeps(cache_type: CacheType) -> None:
    module = tiny.decoder(mask="window").cuda()
    assert StaticRun(module, cache_type=cache_type).gap(STEPS) <= LIMITS[cache_type]


def written(module: nn.Transformer, executor: Executor, sampling: Sampling | None = None) -> list[list[int]]:
    engine = Engine(module, executor=executor)
    how = sampling or Sampling()
    rows = engine.add(
        *(Request(prompt=row, max_new_tokens=NEW, number=i, sampling=how) for i, row in enumerate(PROMPTS))
    )
    while engine.rows:
        engine.step()
    return [row.new for row in rows]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)])
@pytest.mark.parametrize("position", ["rope", "alibi", "learned", "t5"])
def test_any_executor_writes_what_the_cpu_writes(position: str, sampling: Sampling) -> None:
    cpu = tiny.decoder(position, "window")
    gpu = deepcopy(cpu).cuda()
    expected = written(cpu, "modules", sampling)
    assert written(gpu, "modules", sampling) == expected
    assert written(gpu, "static", sampling) == expected
    assert written(gpu, "auto", sampling) == expected


def test_auto_is_static_on_a_gpu_and_says_why_a_mixture_is_not() -> None:
    engine = Engine(tiny.decoder().cuda())
    assert isinstance(engine.runner.executor, StaticStep)
    engine.add(Request(prompt=[3], max_new_tokens=5))
    engine.step()
    engine.step()
    assert engine.why_modules is None
    mixture = Engine(tiny.mixture().cuda())
    mixture.add(Request(prompt=[3, 1], max_new_tokens=5))
    mixture.step()
    mixture.step()
    assert str(mixture.why_modules).startswith("experts run")


def test_nothing_is_captured_after_the_warm_up() -> None:
    module = tiny.decoder().cuda()
    engine = Engine(module, executor="static")
    engine.warm_up(3, 60)
    step = engine.runner.executor
    assert isinstance(step, StaticStep)
    before, plan = step.captures, step.plan
    assert before == len(step.replays) == 2
    for _ in range(2):
        engine.add(*(Request(prompt=row, max_new_tokens=NEW, number=i) for i, row in enumerate(PROMPTS)))
        while engine.rows:
            engine.step()
            assert engine.why_modules in (None, "a row has several new tokens")
    assert step.captures == before
    assert step.plan is plan
    engine.add(*(Request(prompt=[3], max_new_tokens=NEW, number=i) for i in range(4)))  # a fourth slot: the control
    engine.step()
    engine.step()
    assert step.captures > before


def test_a_slot_at_rest_keeps_its_numbers_through_a_capture() -> None:
    """What runs before a capture must write to no store, though `inputs` hold rows already."""
    side = StaticRun(tiny.decoder().cuda()).side(True)
    assert isinstance(side, StaticSide)
    with torch.inference_mode():
        side.step([1, 2, 3, 4, 5], Rows((2, 1, 2), (0, 0, 0), (0, 1, 2)), None)
        before = [x.clone() for store in side.cache.stores for x in (store.k, store.v)]
        side.step([6, 7], Rows((1, 1), (2, 2), (0, 2)), None)
    after = [x for store in side.cache.stores for x in (store.k, store.v)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1], new[1])
        assert torch.equal(old[0, :, :2], new[0, :, :2])
        assert not torch.equal(old[0, :, 2], new[0, :, 2])


COMPILE = """
import torch
import tiny
from triptych.generate import Engine, Request

module = tiny.decoder(mask="window").cuda()
texts = []
for executor in ("modules", "compiled"):
    engine = Engine(module, executor=executor)
    if executor == "compiled":
        engine.warm_up(3, 64)
        print(engine.runner.executor.captures)
        torch.compiler.set_stance("fail_on_recompile")
    rows = engine.add(*(Request(prompt=[3, 1 + i], max_new_tokens=20 + 9 * i, number=i) for i in range(3)))
    while engine.rows:
        engine.step()
    texts.append([row.new for row in rows])
print(engine.why_modules, engine.runner.executor.captures)
assert texts[0] == texts[1]
"""


@pytest.mark.heavy
def test_nothing_is_compiled_after_the_warm_up() -> None:
    """In a process of its own, since the checks of types that tests put around functions cannot be compiled."""
    assert printed_by(COMPILE) == ["1", "None", "1"]


HALF = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_for_unlike_lengths_gives_what_the_modules_give(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    counted = kernel_dense.attend_slots

    def noted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return counted(*arguments)

    monkeypatch.setattr(kernel_dense, "attend_slots", noted)
    module = llama(**HALF).cuda().to(dtype)
    many = ((300, 1, 40), *((1, 1, 1),) * 5, (1, 0, 1), *((1, 1, 1),) * 3)
    assert StaticRun(module).gap(many) <= (0.1 if dtype == torch.bfloat16 else 0.02)
    assert calls


def test_a_graph_works_in_memory_of_its_own() -> None:
    """Other users of graphs free the memory of cuBLAS, which then holds other numbers."""
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 64, "initializer_range": 0.05, "vocab_size": 4096}  # fmt: skip
    engine = Engine(llama(**wide).cuda().to(torch.bfloat16), executor="static")
    texts = []
    for _ in range(2):
        (row,) = engine.add(Request(prompt=PROMPTS[0], max_new_tokens=NEW))
        while engine.rows:
            engine.step()
        texts.append(row.new)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        others = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 26) for _ in range(4)]
    assert all(x.isnan().all() for x in others)
    assert texts[0] == texts[1]


def test_changed_weights_and_hooks_are_seen_by_a_graph() -> None:
    check_that_changes_are_seen(tiny.decoder().cuda(), WITHIN)


def test_two_engines_in_two_threads_write_what_one_writes() -> None:
    module = tiny.decoder(mask="window").cuda()
    expected, results = written(module, "modules"), {}

    def work(number: int) -> None:
        results[number] = [written(module, "static") for _ in range(3)]

    threads = [threading.Thread(target=partial(work, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [expected] * 3, 1: [expected] * 3}


# -- what people do with models ---------------------------------------------------------------------------------------


def test_beams_streams_batches_and_guesses_are_those_of_the_cpu() -> None:
    path = checkpoint("decoder")
    cpu, gpu = triptych.load(path), triptych.load(path, device="cuda")
    prompts = ["the old mill", "a", "river bends the old"]
    for options in ({}, {"draft": "ngram"}, {"beams": 3}, {"temperature": 0.9, "seed": 5}, {"chunk": 3}):
        one = [written.ids for written in cpu.generate(prompts, max_new_tokens=16, **options)]
        other = [written.ids for written in gpu.generate(prompts, max_new_tokens=16, **options)]
        assert one == other, options
    assert "".join(gpu.stream(prompts[0], max_new_tokens=16)) == cpu.generate(prompts[:1], max_new_tokens=16)[0].text
    many = [written.ids for written in gpu.generate(prompts * 5, max_new_tokens=8, max_rows=4)]
    assert many == [written.ids for written in cpu.generate(prompts * 5, max_new_tokens=8, max_rows=4)]


def test_a_source_is_read_once_and_searched_on_the_gpu() -> None:
    cpu = tiny.encoder_decoder()
    gpu = deepcopy(cpu).cuda()
    requests = [Request(prompt=[0], source=[5, 6, 7, 8 + i], max_new_tokens=12, number=i) for i in range(3)]
    found = [
        [best[0].tokens for best in beam_search(Engine(module, executor=executor), requests, beams=4)]
        for module, executor in ((cpu, "modules"), (gpu, "modules"), (gpu, "static"))
    ]
    assert found[0] == found[1] == found[2]


def test_guessed_tokens_change_nothing() -> None:
    module = tiny.decoder().cuda()
    engine = Engine(module, speculation=Speculation(PromptLookup(), 3))
    rows = engine.add(*(Request(prompt=row * 2, max_new_tokens=NEW, number=i) for i, row in enumerate(PROMPTS)))
    while engine.rows:
        engine.step()
    plain = Engine(module, executor="modules")
    expected = plain.add(*(Request(prompt=row * 2, max_new_tokens=NEW, number=i) for i, row in enumerate(PROMPTS)))
    while plain.rows:
        plain.step()
    assert [row.new for row in rows] == [row.new for row in expected]


@pytest.mark.parametrize("layout", ["encoder", "decoder"])
def test_vectors_and_words_are_those_of_the_cpu(layout: str) -> None:
    path = checkpoint(layout)
    cpu, gpu = triptych.load(path), triptych.load(path, device="cuda")
    texts = ["the ship came in", "mill", "the old mill stands where the river bends"]
    if layout == "encoder":
        assert gap([gpu.encode(texts, pooling="mean")], [cpu.encode(texts, pooling="mean")]) <= WITHIN
        masked = ["the old [MASK] stands"]
        words = [[[word for word, _ in mask] for mask in row] for row in gpu.fill(masked, top=3)]
        assert words == [[[word for word, _ in mask] for mask in row] for row in cpu.fill(masked, top=3)]
    else:
        assert gap(gpu.logits(texts), cpu.logits(texts)) <= WITHIN


def test_a_request_that_does_not_fit_the_gpu_is_refused_with_the_bytes() -> None:
    module = llama(max_position_embeddings=(1 << 31) - 1).cuda()
    with pytest.raises(InputError, match=r"would take [\d,]+ bytes, and [\d,]+ are free"):
        Model(module).generate([[1, 2, 3]], max_new_tokens=1 << 30)


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "{decoder}", "the old", "--max-new-tokens", "5"],
        ["generate", "{encoder-decoder}", "the old", "--max-new-tokens", "5"],
        ["fill", "{encoder}", "the old [MASK] stands"],
        ["encode", "{encoder}", "the old mill", "--pooling", "mean"],
        ["inspect", "{decoder}", "the old mill"],
    ],
)  # fmt: skip
def test_commands_run_on_a_gpu(arguments: list[str], capsys: Captured) -> None:
    layouts = ("decoder", "encoder", "encoder-decoder")
    words = [word.format(**{layout: checkpoint(layout) for layout in layouts}) for word in arguments]
    assert main([*words, "--device", "cuda"]) == 0, capsys.readouterr().err


def test_a_gpu_that_is_full_is_one_line(capsys: Captured) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    try:
        assert main(["generate", str(checkpoint("decoder")), "the", "--max-new-tokens", "3", "--device", "cuda"]) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not enough memory" in error


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, top_p=0.95, seed=3), Sampling(temperature=0.7, top_k=9)]
)
def test_sampling_stays_on_the_gpu_and_draws_what_the_cpu_draws(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(5)) * 3
    wanted = sample(logits, sampling, range(64), [[1]] * 64)
    copied: list[int] = []
    to_cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copied.append(self.numel()) or to_cpu(self))
    drawn = sample(logits.cuda(), sampling, range(64), [[1]] * 64)
    assert all(count <= 64 for count in copied), "scores were copied to the CPU"
    assert sum(a != b for a, b in zip(drawn, wanted, strict=True)) <= 1, "but for one number at the edge of a token"
