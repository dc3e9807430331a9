"""`triptych bench`: what is measured, the limits, refusals and peers.  No test says how fast anything is."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triptych_peers.converted import OnnxRuntime
from triptych_peers.llama import LlamaCpp

import triptych
from cli_models import CONTEXT, LLAMA, T5, Captured, answered, checkpoint, said
from programs import program
from triptych import measure, native
from triptych.checkpoints.convert import convert
from triptych.cli import main
from triptych.cli.bench import BenchPeer
from triptych.count import count
from triptych.errors import InputError
from triptych.machine import Usage
from triptych.measure import BenchReport, Rates, Settings, bench, bench_run, limits, peers
from triptych.measure.bench_results import Figure, Limit, MeasuredSide, PeerFigure
from triptych.measure.jobs import BenchJob, Ids, jobs, sound, texts
from triptych.measure.process import SameProcess, SeparateProcess
from triptych.measure.side import Options, Side, perform
from triptych.measure.triptych_side import Ours
from triptych.spec import MoESpec

RATES = Rates(read=2e9, fp32=3e9, bf16=5e9)
QUICK = Settings(new_tokens=3, requests=2, repeat=2)
needs_kernels = pytest.mark.skipif(native.library() is None, reason=f"native kernels: {native.why_not()}")


def quick(layout: str, **how: Any) -> BenchReport:
    settings = {"decoder": QUICK, "encoder": Settings(texts=4, repeat=2)}.get(layout, Settings(new_tokens=3, repeat=2))
    return bench(checkpoint(layout), settings=settings, apart=False, rates=RATES, threads=1, **how)


# ---------------------------------------------------------------- what is measured


FIGURES = {
    "decoder": [
        ("load", "s"), ("load to first token", "s"), ("prefill of 70", "tokens/s"), ("decode at 8", "tokens/s"),
        ("2 requests at once", "tokens/s"),
    ],
    "encoder": [
        ("load", "s"), ("load to first vector", "s"), ("encode 4 texts", "sentences/s"),
        ("of them tokens", "tokens/s"),
    ],
    "encoder-decoder": [
        ("load", "s"), ("load to first token", "s"), ("encoder", "s"), ("greedy, 3 tokens", "tokens/s"),
        ("greedy, seconds", "s"), ("beam 4, 3 tokens", "tokens/s"), ("beam 4, seconds", "s"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", FIGURES)
def test_the_figures_of_a_layout(layout: str) -> None:
    report = quick(layout)
    assert [(figure.name, figure.unit) for figure in report.figures] == FIGURES[layout]
    for figure in report.figures:
        assert len(figure.runs) == 2
        assert all(run > 0 for run in figure.runs)
        assert (figure.limit is None) == figure.name.startswith("load")
        assert figure.reached is None or figure.reached > 0
    assert report.sides[0].versions["torch"] == torch.__version__
    assert report.sides[0].dtype == "fp32"
    assert (report.threads, report.processor != "") == (1, True)
    again = json.loads(json.dumps(report.to_dict()))
    assert {"value", "unit", "runs", "limit", "reached", "peers"} <= again["figures"][-1].keys()
    assert (report.step_bytes is None) == (layout == "encoder")


def test_inputs_depend_on_seeds_alone_and_are_as_ragged_as_said() -> None:
    some = texts(512)
    assert some == texts(512)
    lengths = [len(text.split()) for text in some]
    assert max(lengths) == 198
    assert 20 <= sum(lengths) / 512 <= 26  # and two special tokens, and some words of several
    assert max(len(text.split()) for text in texts(512, longest=9)) == 9
    noise = sound(0.5)
    assert noise.shape == (8000,)
    assert np.array_equal(noise, sound(0.5))
    assert 0.01 < np.abs(noise).max() <= 1


def test_lengths_fit_the_model_where_none_are_given() -> None:
    spec = triptych.load(checkpoint("decoder")).spec
    for job in jobs(spec):
        assert max(map(len, job.rows)) + job.new + 1 < CONTEXT
    sent = json.dumps(asdict(jobs(spec)[1]))
    assert json.dumps(asdict(BenchJob.of(json.loads(sent)))) == sent


# ---------------------------------------------------------------- limits


def llama(**more: Any) -> triptych.Model:
    return triptych.create({**LLAMA, "vocab_size": 64, **more}, seed=0)


def stored(model: triptych.Model, *parts: str) -> int:
    """Bytes of the parameters under some names, each storage once."""
    every = dict(model.module.named_parameters(remove_duplicate=False))
    named = {id(p): p.nbytes for name, p in every.items() if name.startswith(parts)}
    return sum(named.values())


def test_a_step_reads_every_weight_but_the_table_of_embeddings() -> None:
    model = llama()
    assert limits.step_bytes(model.module) == stored(model, "decoder", "head") - 64 * 24 * 4
    tied = llama(tie_word_embeddings=True)
    assert limits.step_bytes(tied.module) == stored(tied, "decoder", "head")  # the head reads the whole table
    assert limits.step_bytes(tied.module.to(torch.bfloat16)) == limits.step_bytes(llama().module) / 2


@needs_kernels
@pytest.mark.parametrize(("form", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_a_step_reads_packed_weights_as_they_lie_in_memory(form: str, bits: float, tmp_path: Path) -> None:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = llama(**config, head_dim=16, tie_word_embeddings=True)
    model.save(tmp_path / "m")
    packed = triptych.load(tmp_path / "m", quantize=form)
    norms = 32 * (2 * LLAMA["num_hidden_layers"] + 1)
    matrices = stored(model, "decoder") // 4 - norms
    assert limits.step_bytes(packed.module) == matrices * bits / 8 + 4 * norms


@needs_kernels
@pytest.mark.parametrize(
    ("asked", "form"), [(None, "S8+fp32"), ("file", "S8+fp32"), ("none", "fp32"), ("int4", "U4+fp32")]
)
def test_a_packed_file_is_measured_as_it_is_loaded(asked: str | None, form: str, tmp_path: Path) -> None:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama(**config, head_dim=16).save(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "m.gguf", dtype="q8_0")
    ours = Ours(Options(model=str(tmp_path / "m.gguf"), threads=1, layout="decoder", quantize=asked))
    assert ours.dtype.split(",")[0] == form


def test_a_step_reads_the_experts_in_use_and_no_encoder() -> None:
    mixture = triptych.create(
        {**LLAMA, "model_type": "mixtral", "vocab_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
    )
    assert any(isinstance(part, MoESpec) for _, part in mixture.spec.walk())
    experts = sum(p.nbytes for name, p in mixture.module.named_parameters() if ".experts." in name)
    whole = stored(mixture, "decoder", "head") - 64 * 24 * 4
    assert limits.step_bytes(mixture.module) == whole - experts * 3 // 5
    both = triptych.create({**T5, "vocab_size": 64, "tie_word_embeddings": False, "decoder_start_token_id": 0})
    names = dict(both.module.named_parameters(remove_duplicate=False))
    kept = {name: p for name, p in names.items() if name.startswith(("decoder.", "head.")) and ".embed." not in name}
    once = {name for name in kept if ".cross.k." in name or ".cross.v." in name}
    assert len(once) == 2 * T5["num_decoder_layers"]
    assert limits.step_bytes(both.module) == sum(p.nbytes for name, p in kept.items() if name not in once)


def decode_limit(report: BenchReport, model: triptych.Model) -> float:
    """The limit of "decode at 8" worked out by hand: 3 tokens after 8, so that 9 lie in the cache in the middle."""
    layers, groups, width = (LLAMA[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    weights = stored(model, "decoder", "head") - model.spec.vocab * LLAMA["hidden_size"] * 4
    return report.rates.read / (weights + 9 * layers * groups * 2 * width * 4)


def test_the_limit_of_decoding_is_bandwidth_over_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = triptych.load(checkpoint("decoder"))
    report = bench(
        checkpoint("decoder"), settings=QUICK, apart=False, threads=1, rates=replace(RATES, fp32=1e15, bf16=1e15)
    )
    figure = report.figure("decode at 8")
    assert figure.limit.by == "read bandwidth"
    assert figure.limit.value == pytest.approx(decode_limit(report, model))
    assert figure.reached == pytest.approx(figure.value / figure.limit.value)
    monkeypatch.setattr(limits, "nbytes", lambda weight: weight.nbytes // 2)  # a control: a wrong count is seen
    job = next(job for job in jobs(model.spec, QUICK) if job.name == "decode at 8")
    wrong = limits.limits(
        job, count(model.spec), limits.Costs(limits.step_bytes(model.module), 4), report.rates, 1e15, "fp32 matmuls"
    )[0]
    assert wrong.value > 1.5 * decode_limit(report, model)


def test_the_slower_of_reading_and_computing_is_the_limit() -> None:
    spec = llama().spec
    job = BenchJob(kind="prefill", figures=(("prefill of 20", "tokens/s"),), rows=[[1] * 20])
    flops = count(spec).flops(20, logits=1)
    costs = limits.Costs(step=1000, cache_bytes=4)
    (computing,) = limits.limits(job, count(spec), costs, Rates(1e12, 1, 1), 1e9, "bf16 matmuls")
    (reading,) = limits.limits(job, count(spec), costs, Rates(1e3, 1, 1), 1e15, "bf16 matmuls")
    assert (computing.by, reading.by) == ("bf16 matmuls", "read bandwidth")
    assert computing.value == pytest.approx(20 * 1e9 / (sum(flops.values()) - flops["scores"] / 2))
    assert reading.value == pytest.approx(20.0)


def test_encoders_are_bound_by_the_tokens_of_their_texts() -> None:
    spec = triptych.load(checkpoint("encoder")).spec
    job = next(job for job in jobs(spec, Settings(texts=2)) if job.kind == "encode")
    sentences, tokens = limits.limits(job, count(spec), None, RATES, 1e9, "fp32 matmuls", lengths=[5, 11])
    work = sum(sum(count(spec).flops(n, logits=0).values()) for n in (5, 11))
    assert sentences.value == pytest.approx(2e9 / work)
    assert tokens.value == pytest.approx(16e9 / work)


def test_rates_are_bytes_and_operations_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_median_seconds", lambda call, device, repeat: [call(), 2.0][1])
    rates = limits.measure_rates(size=1 << 20, square=8)
    assert rates == Rates(read=2**19, fp32=8**3, bf16=8**3)
    monkeypatch.undo()
    real = limits.measure_rates(size=1 << 20, square=8, repeat=1)
    assert min(real.read, real.fp32, real.bf16) > 0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("layout", "settings", "says"),
    [
        ("encoder", {"new_tokens": 4}, "is an encoder, which new_tokens does not apply to; its options are texts"),
        ("encoder", {"prompt_tokens": [8]}, "is an encoder, which prompt_tokens does not apply to"),
        ("decoder", {"beams": 4}, "is a decoder, which beams does not apply to"),
        ("encoder-decoder", {"contexts": [8]}, "is an encoder-decoder, which contexts does not apply to"),
        ("decoder", {"prompt_tokens": [8, CONTEXT]}, f"{CONTEXT} tokens and 2 more need {CONTEXT + 2} positions"),
        ("decoder", {"contexts": [60], "new_tokens": 20}, "60 tokens and 22 more need 82 positions"),
        ("decoder", {"repeat": 0}, "repeat must be at least 1, not 0"),
        ("decoder", {"new_tokens": 0}, "new_tokens must be at least 1, not 0"),
        ("decoder", {"contexts": [8, 0]}, "contexts must be at least 1"),
        ("decoder", {"requests": 10**9}, "requests=1000000000 is more than 4,096, the most that is measured"),
        ("decoder", {"repeat": 10**9}, "repeat=1000000000 is more than 1,000"),
        ("decoder", {"new_tokens": CONTEXT}, f"new_tokens={CONTEXT} and the prompt need {CONTEXT + 3} positions"),
        ("encoder", {"texts": 10**9}, "texts=1000000000 is more than 1,048,576"),
        ("encoder-decoder", {"beams": 30_000}, "beams=30000 is more than 259"),
        ("encoder-decoder", {"new_tokens": 10**9}, "new_tokens=1000000000 is more than 65,536"),
    ],
)
def test_settings_that_do_not_fit(layout: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        bench(checkpoint(layout), settings=Settings(**settings), rates=RATES)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_peers_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, **how: Any) -> str:
        with pytest.raises(InputError) as error:
            bench(checkpoint("decoder"), against=[name], rates=RATES, apart=False, **how)
        return str(error.value)

    assert "did you mean 'llama.cpp'?" in refused("lama.cpp")
    monkeypatch.setattr(LlamaCpp, "needs", ("a_module_that_is_absent",))
    assert "llama.cpp cannot be measured: a_module_that_is_absent not installed; CMAKE_ARGS=" in refused("llama.cpp")
    monkeypatch.setattr(LlamaCpp, "needs", ())
    assert "llama.cpp computes with what the file has, not bf16" in refused("llama.cpp:bf16")
    assert "llama.cpp computes with what the file has, not bf16" in refused("llama.cpp", peer_dtype="bf16")
    assert "transformers takes fp32 or bf16, not int8" in refused("transformers", peer_dtype="int8")
    monkeypatch.setattr(OnnxRuntime, "needs", ())
    assert "onnxruntime takes fp32 or int8, not bf16" in refused("onnxruntime:bf16")
    with pytest.raises(InputError, match=r"llama\.cpp is measured on the CPU alone, not on cuda"):
        peers.check("llama.cpp", None, "cuda")


def test_every_peer_of_the_command_is_an_installed_adapter() -> None:
    for name in BenchPeer:
        adapter = peers.side(name)
        assert (adapter.name, bool(adapter.needs), bool(adapter.install)) == (name.value, True, True)


def test_images_are_not_measured(tmp_path: Path) -> None:
    vit = {"model_type": "vit", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1,
           "num_attention_heads": 3, "image_size": 20, "patch_size": 5}  # fmt: skip
    with pytest.raises(InputError, match="reads images"):
        jobs(triptych.create(vit).spec)


# ---------------------------------------------------------------- peers


class Twin(Ours):
    """A peer that does what we do."""

    name = "twin"


class Lazy(Twin):
    """A peer that skips every other token."""

    name = "lazy"

    def step(self) -> int:
        return super().step() // 2


class Mute(Twin):
    """A peer that reads prompts and decodes nothing."""

    name = "mute"

    def step(self) -> int:
        raise InputError("it decodes nothing")


class Broken(Twin):
    """A peer that is installed and does not start, as a library built for another machine."""

    name = "broken"

    def load(self) -> None:
        raise InputError("ImportError: it was built for another version")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of this file in the table."""
    usual = peers.side
    made: dict[str, type[Side]] = {cls.name: cls for cls in (Twin, Lazy, Mute, Broken)}
    monkeypatch.setattr(peers, "side", lambda name: made.get(name) or usual(name))


def test_a_peer_does_the_same_work_in_turn(beside: None) -> None:
    report = quick("decoder", against=["twin", "lazy", "mute"])
    assert [side.name for side in report.sides] == ["triptych", "twin", "lazy", "mute"]
    decode, prefill = report.figure("decode at 8"), report.figure("prefill of 70")
    for figure in (decode, prefill):
        ratio = figure.ratio("twin")
        assert ratio is not None
        assert len(figure.peers["twin"].runs) == 2
        pairs = [a / b for a, b in zip(figure.runs, figure.peers["twin"].runs, strict=True)]
        assert ratio == pytest.approx(sum(pairs) / 2)
    assert decode.ratio("lazy") is None
    assert decode.peers["lazy"].note == "not the same work: it counts 0 tokens, we count 3"
    assert decode.peers["mute"] == PeerFigure(note="it decodes nothing")
    assert prefill.ratio("mute") is not None


def test_a_peer_that_does_not_start_leaves_the_others_their_figures(
    beside: None, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    report = quick("decoder", against=["broken", "twin"])
    assert report.sides[1] == MeasuredSide("broken", {}, "")
    decode = report.figure("decode at 8")
    assert decode.peers["broken"] == PeerFigure(note="ImportError: it was built for another version")
    assert decode.ratio("twin") is not None
    monkeypatch.setattr(measure, "bench", lambda *_, **__: report)
    shown = " ".join(said(["bench", "m.gguf", "--against", "llama.cpp"], capsys)[0].split())
    assert "broken not measured; the reason is below" in shown
    assert "broken: ImportError: it was built for another version" in shown

    monkeypatch.setattr(Ours, "load", Broken.load)
    with pytest.raises(InputError, match="triptych: ImportError"):
        quick("decoder", against=["twin"])


def test_only_the_kinds_that_are_asked_for_are_measured(beside: None) -> None:
    report = quick("decoder", against=["twin:bf16"], kinds=("together",))
    assert [figure.name for figure in report.figures] == ["2 requests at once"]
    assert [side.dtype for side in report.sides] == ["fp32", "bf16"]
    assert report.figures[0].ratio("twin:bf16") is not None


def test_vectors_are_compared_with_a_peer_s(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quick("encoder", against=["twin"]).agreement["twin"] == (pytest.approx(1.0), pytest.approx(1.0))
    monkeypatch.setattr(Twin, "encode", lambda self, some: -Ours.encode(self, some))
    assert quick("encoder", against=["twin"]).agreement["twin"][0] == pytest.approx(-1.0)


def test_ratios_say_how_many_times_as_fast() -> None:
    rate = Figure("decode", "tokens/s", (30.0, 10.0, 20.0), Limit(40.0, "x"), {"p": PeerFigure((10.0, 10.0))})
    assert (rate.value, rate.reached, rate.ratio("p")) == (20.0, 0.5, 2.0)  # pairs 3 and 1
    seconds = Figure("load", "s", (2.0,), Limit(1.0, "x"), {"p": PeerFigure((6.0,)), "q": PeerFigure(note="no")})
    assert (seconds.reached, seconds.ratio("p"), seconds.ratio("q"), seconds.ratio("r")) == (0.5, 3.0, None, None)


@pytest.mark.heavy
def test_the_work_of_a_peer_on_torch_is_ours() -> None:
    """The adapter of transformers on a decoder: the same prompts, and as many tokens."""
    pytest.importorskip("transformers")
    path = checkpoint("decoder")
    options = Options(model=str(path), threads=1, layout="decoder", dtype="fp32")
    ours, theirs = Ours(options), peers.side("transformers")(options)
    spec = triptych.load(path).spec
    for job in jobs(spec, replace(QUICK, requests=3)):
        assert perform(theirs, job)["counts"] == perform(ours, job)["counts"], job.name
    # greedy from the same ids: the same tokens
    rows: list[Ids] = [[5, 6, 7, 8]]
    for side in (ours, theirs):
        side.start(rows, 4)
    chosen: list[int] = []
    for _ in range(3):
        chosen.append(int(theirs.chosen[0, 0]))  # type: ignore[attr-defined]
        ours.step()
        theirs.step()
    assert ours.engine.rows[0].new[:3] == chosen


# ---------------------------------------------------------------- processes, and other work on the machine


def test_the_time_of_measured_processes_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.machine.usage", lambda: Usage(at=10.0, processors=2, busy=8.0, own=1.0))
    runs = bench_run._Runs(SameProcess(Twin(Options(model="", threads=1, layout="decoder"))))
    monkeypatch.setattr(SameProcess, "cpu_seconds", lambda self: 2.0)
    use = bench_run.processor_use([runs, runs])
    assert use == Usage(at=10.0, processors=2, busy=8.0, own=5.0)
    assert use.by_others(Usage(at=8.0, processors=2, busy=4.0, own=4.0)) == pytest.approx(1.5)
    monkeypatch.setattr("triptych.machine.usage", lambda: None)
    assert bench_run.processor_use([runs]) is None


@pytest.mark.parametrize(
    ("others", "usable", "threads", "busy"), [(0.1, 2, 2, False), (0.3, 2, 2, True), (0.9, 2, 1, False),
                                              (None, 2, 2, False), (9.0, 64, 8, False), (60.0, 64, 8, True)]
)  # fmt: skip
def test_a_busy_machine_is_told(others: float | None, usable: int, threads: int, busy: bool) -> None:
    line = bench_run.verdict(others, usable, threads)
    assert (line is not None) == busy
    assert line is None or "the machine is busy" in line


@pytest.mark.heavy
def test_a_process_of_its_own_gives_the_same(capsys: Captured) -> None:
    argv = ["bench", str(checkpoint("decoder")), "--new-tokens", "3", "--requests", "2", "--repeat", "1"]
    report = answered([*argv, "--threads", "1"], capsys)
    assert [(figure["name"], figure["unit"]) for figure in report["figures"]] == FIGURES["decoder"]
    assert report["sides"][0]["memory"] > 0
    assert report["rates"]["read"] > 1e8


@pytest.mark.heavy
def test_what_fails_in_a_process_is_said_in_one_line(tmp_path: Path) -> None:
    side = SeparateProcess("triptych", Options(model=str(tmp_path), threads=1, layout="decoder"))
    with pytest.raises(InputError, match=r"config\.json"):
        side.ask("facts")
    assert side.ask("versions")["versions"]["torch"] == torch.__version__  # it goes on
    side.process.kill()
    side.process.wait()
    with pytest.raises(InputError, match="the process of triptych ended"):
        side.ask("versions")
    side.close()


def test_the_command_shows_figures_limits_and_notes(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked: dict[str, Any] = {}
    figure = Figure(
        "decode at 8", "tokens/s", (250.0,), Limit(500.0, "read bandwidth"), {"llama.cpp": PeerFigure((100.0,))}
    )
    lacks = Figure("8 requests at once", "tokens/s", (900.0,), None, {"llama.cpp": PeerFigure(note="one request")})
    report = BenchReport(
        model="m.gguf", layout="decoder", device="cpu", processor="P", cores=2, threads=2, repeat=5, rates=RATES,
        step_bytes=96_400_000, figures=(figure, lacks), notes=("the machine is busy",),
        sides=tuple(
            MeasuredSide(name, {name: "1.2"}, "U4+fp32", 3 << 20) for name in ("triptych", "llama.cpp")
        ),
    )  # fmt: skip

    def answer(model: str, **how: Any) -> BenchReport:
        asked.update(how, model=model)
        return report

    monkeypatch.setattr(measure, "bench", answer)
    argv = ["bench", "m.gguf", "--against", "llama.cpp", "--quantize", "file", "--context", "8", "--repeat", "3"]
    out = " ".join(said(argv, capsys)[0].split())
    shown = ["reads 2.0 GB/s", "96.4 MB read", "decode at 8 250 tokens/s 500 50% read bandwidth", "at most 3.0 MiB"]
    for words in [*shown, "llama.cpp 100 tokens/s 2.50", "llama.cpp: one request", "the machine is busy"]:
        assert words in out
    assert asked["against"] == ["llama.cpp"]
    assert asked["settings"] == Settings(contexts=[8], repeat=3)
    assert (asked["quantize"], asked["dtype"]) == ("file", None)
    assert answered([*argv], capsys)["figures"][0]["peers"]["llama.cpp"]["ratio"] == 2.5
    assert main(["bench", "m", "--against", "pytorch"]) == 2


# ---------------------------------------------------------------- the table of peers


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """bench/peers.py, whose measurements are stubs: ours 300, the peers 100, the limit 400, of 30 GB/s."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = program("bench/peers.py")

    def stub(model: Path, *, against: list[str], kinds: Sequence[str], rates: Rates, **how: Any) -> BenchReport:
        theirs = {name: PeerFigure((100.0,)) for name in against}
        names = [("decode at 8", "decode"), ("decode at 512", "decode"), ("8 requests at once", "together")]
        figures = tuple(
            Figure(name, "tokens/s", (300.0,), Limit(400.0, "read bandwidth"), theirs)
            for name, kind in names
            if kind in kinds
        )
        return BenchReport(
            model=str(model), layout="decoder", device="cpu", processor="P", cores=2, threads=2, repeat=1, rates=rates,
            step_bytes=1, sides=tuple(MeasuredSide(name, {}, "U4") for name in ("triptych", *against)),
            figures=figures,
        )  # fmt: skip

    monkeypatch.setattr(module, "bench", stub)
    monkeypatch.setattr(module, "measure_rates", lambda device: Rates(3e10, 2e11, 4e11))
    for name in BenchPeer:
        monkeypatch.setattr(peers.side(name), "needs", ())
    return module


def rows_of(script: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """The rows of the table that the script prints."""
    monkeypatch.setattr(sys, "argv", ["peers.py", *argv])
    script.main()
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]


def test_the_table_of_peers_grows_row_by_row(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    argv = ["--smollm2", "m.gguf", "--results", str(tmp_path / "r" / "kept.json"), "--threads", "1", "--rows"]
    (first, _, third, _) = rows_of(script, capsys, monkeypatch, *argv, "decode")
    assert first == (
        "| decode, SmolLM2 Q4_1, U4 | decode at 8, tokens/s | 300 | 400 | 75% | llama.cpp | 100 | 3.00 | 2.2 | met |"
    )
    assert "decode at 512" in third
    more = rows_of(script, capsys, monkeypatch, *argv, "requests,decode-transformers")
    assert len(more) == 4 + 2 + 3
    assert "| 3.00 | 12 | missed |" in more[4]
    assert more[-1].startswith("| ours | 8 requests at once, tokens/s | 300 |")  # over one request
    assert "| ours, one request | 300 | 1.00 | 2.5 | missed |" in more[-1]
    monkeypatch.setattr(script, "measure_rates", lambda device: Rates(6e10, 2e11, 4e11))
    assert "| 3.00 | 3 | met |" in rows_of(script, capsys, monkeypatch, *argv, "decode")[0]  # memory is fast here


def test_the_table_of_peers_refuses_in_one_line(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    argv = ["--results", str(tmp_path / "kept.json"), "--threads", "1", "--rows", "decode"]
    assert not rows_of(script, capsys, monkeypatch, *argv)  # no --smollm2: said on standard error
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="error: device 'cuda' cannot be used"):
            rows_of(script, capsys, monkeypatch, *argv, "--device", "cuda")
    with pytest.raises(SystemExit):
        rows_of(script, capsys, monkeypatch, "--rows", "decoding")
    every = {peer for row in script.LISTED.values() for peer in row.against}
    assert {peer.partition(":")[0] for peer in every} == {name.value for name in BenchPeer}
