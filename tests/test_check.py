"""`check` passes sound models of every layout and fails each kind of broken one, naming where."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import references
import tiny
from cli_models import BLOCKS, Captured, answered, checkpoint, said
from triptych import nn
from triptych.check import Finding, Report, SiteDifference, check, comparison, max_abs_diff, paths, peer
from triptych.check.quality import TEXT, quality
from triptych.checkpoints.convert import convert
from triptych.errors import ConfigError, InputError
from triptych.generate import Engine
from triptych.model import Model, create, load
from triptych.native import library, why_not
from triptych.probe import sites
from triptych.probe.apply_plan import ProbeTaps
from triptych.spec import full

UNCHANGED_PAST, READING = (
    "earlier outputs do not depend on the last token",
    "reading every site does not change the output",
)
EVERYWHERE = {"row in a batch = row alone", READING, "saved, loaded = itself"}
CACHED = {UNCHANGED_PAST, "cached = uncached", "prefill in chunks = in one"}
TOLD, MARGIN = "bf16 against fp32", "margin of greedy text"


def failed(report: Report) -> set[str]:
    return {finding.name for finding in report.findings if finding.passed is False}


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_sound_models_pass(layout: str) -> None:
    report = check(checkpoint(layout), against="transformers")
    assert not failed(report), report
    assert report.passed
    assert report.first_difference is None
    cached = set() if layout == "encoder" else CACHED | {MARGIN}
    assert {finding.name for finding in report.findings} == EVERYWHERE | cached | {TOLD, "transformers"}
    assert max(finding.difference for finding in report.findings if finding.limit is not None) < 1e-4
    assert next(finding for finding in report.findings if finding.name == TOLD).difference > 1e-4


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-base", "bert-no-pooler", "bert-classes", "bert-spans", "electra", "whisper", "vit"]
)
def test_models_without_a_tokenizer_or_a_head_pass(name: str) -> None:
    report = check(references.saved(name)[1])
    assert report.passed, report
    assert report.findings[-1].name == "transformers"


def test_what_was_given_up_is_given_up_in_the_copy_too(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}}
    for file in references.saved("llama")[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | own))
    assert check(tmp_path, ignore=["auto_map"]).passed
    with pytest.raises(ConfigError, match="auto_map is set"):
        check(tmp_path)


def test_layers_go_from_the_embedding_up() -> None:
    report = check(checkpoint("encoder-decoder"))
    sites = [layer.site for layer in report.layers]
    assert sites[0] == "encoder.embed"
    assert sites[-1] == "decoder.final"
    assert "decoder.blocks.1.resid_post" in sites


def test_the_report_as_plain_data() -> None:
    report = Report("m", 0.1, (Finding("a", 0.2, 0.1),), (SiteDifference("embed", 0.0), SiteDifference("final", 0.3)))
    told = report.to_dict()
    assert told["findings"] == [{"name": "a", "difference": 0.2, "limit": 0.1, "note": "", "passed": False}]
    assert (told["passed"], told["first_difference"]) == (False, "final")


def test_not_a_number_does_not_pass() -> None:
    assert Finding("a", float("nan"), 1.0).passed is False


def test_apart() -> None:
    rows = [torch.tensor([[0.0, -torch.inf], [1.0, 2.0]]), torch.tensor([[3.0]])]
    other = [torch.tensor([[0.0, -torch.inf], [1.0, 2.5]]), torch.tensor([[2.75]])]
    assert max_abs_diff(rows, rows) == 0
    assert max_abs_diff(rows, other) == 0.5


def test_the_margin_of_greedy_text_is_twice_the_largest_difference() -> None:
    model = load(checkpoint("decoder"))
    found = {one.name: one for one in check(model, against="none").findings}
    ways = (found[name].difference for name in (paths.ALONE, paths.CACHED, paths.CHUNKED))
    margin = found[MARGIN]
    assert margin.difference == pytest.approx(2 * max(ways), rel=1e-6)
    assert margin.passed is None
    assert MARGIN not in {one.name for one in check(checkpoint("encoder"), against="none").findings}


# ---------------------------------------------------------------- broken on purpose


def test_a_changed_weight_is_found_where_it_is() -> None:
    """Nothing but the peer can know; the first site above it is named."""
    model = load(checkpoint("decoder"))
    model.module.get_parameter("decoder.blocks.1.mlp.down.weight").detach()[0] += 0.5
    report = check(model)
    assert failed(report) == {"transformers"}
    assert report.first_difference == "blocks.1.resid_post"


def test_a_decoder_that_sees_the_future() -> None:
    spec = tiny.decoder(blocks=2).spec
    kinds = {name: replace(kind, mask=full()) for name, kind in spec.decoder.kinds.items()}
    broken = Model(nn.new(replace(spec, decoder=replace(spec.decoder, kinds=kinds)), 0))
    # A prompt is read in pieces only where every mask hides what comes later.
    assert failed(check(broken, against="none")) == CACHED - {"prefill in chunks = in one"}


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_every_site_is_read_and_counted(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ALL", (paths.reading,))
    model = load(checkpoint(layout))
    (reading,) = check(model, against="none").findings
    assert reading.note == f"{len(sites(model.spec))} sites, bit-equal"


@pytest.mark.parametrize("threshold", [float("nan"), -1e-4, float("inf"), "1e-4"])
def test_a_threshold_that_passes_everything_is_refused(threshold: Any, unchecked: None) -> None:
    with pytest.raises(InputError, match=r"threshold=.* must be "):
        check(Model(tiny.decoder()), threshold=threshold)


def shifted(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def logits(self: Engine, *rest: Any) -> torch.Tensor:
        scores = real(self, *rest)
        return scores if self.chunk == 5 else scores + torch.linspace(0.0, 0.1, scores.shape[-1])

    return logits


def test_a_cache_that_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "logits", shifted(Engine.logits))
    assert failed(check(checkpoint("decoder"), against="none")) == CACHED - {UNCHANGED_PAST}


def test_a_batch_that_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = comparison.run

    def leaking(model: Model, rows: list[list[int]], *rest: Any) -> list[torch.Tensor]:
        found = real(model, rows, *rest)
        return found if len(rows) == 1 else [found[0], found[1] + 0.01, *found[2:]]

    monkeypatch.setattr(comparison, "run", leaking)
    assert failed(check(checkpoint("encoder"), against="none")) == {"row in a batch = row alone"}


def test_a_reading_that_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ProbeTaps.__call__

    def touching(self: ProbeTaps, site: str, value: torch.Tensor, rows: Any) -> torch.Tensor:
        found = real(self, site, value, rows)
        return found + 1e-6 if site == "resid_mid" else found

    monkeypatch.setattr(ProbeTaps, "__call__", touching)
    assert failed(check(checkpoint("encoder"), against="none")) == {READING}


def test_a_copy_that_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = paths.load

    def wrong(path: Path, **options: Any) -> Model:
        model = real(path, **options)
        model.module.get_parameter("encoder.final_norm.weight").detach()[0] += 1e-3
        return model

    model = load(checkpoint("encoder-decoder"))
    monkeypatch.setattr(paths, "load", wrong)
    assert failed(check(model, against="none")) == {"saved, loaded = itself"}


# ---------------------------------------------------------------- the peer


def test_a_model_with_no_twin_says_so() -> None:
    made = Model(tiny.decoder())
    assert "no such model" in check(made).skipped[0]
    with pytest.raises(InputError, match="no such model"):
        check(made, against="transformers")


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    assert "not installed (pip install transformers)" in check(checkpoint("encoder")).skipped[0]
    with pytest.raises(InputError, match="pip install transformers"):
        check(checkpoint("encoder"), against="transformers")


def test_an_unknown_peer() -> None:
    with pytest.raises(InputError, match="'pytorch' must be 'transformers' or 'none'"):
        check(checkpoint("encoder"), against="pytorch")  # type: ignore[arg-type]


# ---------------------------------------------------------------- the quality of packed forms


SHORT = TEXT[:300]
needs_kernels = pytest.mark.skipif(library() is None, reason=why_not() or "")


def test_perplexity_and_divergence_are_what_they_are_called() -> None:
    model = load(checkpoint("decoder"))
    other = load(checkpoint("decoder"))
    other.module.get_parameter("decoder.embed.tokens.weight").detach().mul_(1.5)
    plain, changed = quality({"plain": model, "changed": other}, SHORT)
    ids = model.ids([SHORT])[0]
    width = min(256, model.spec.context or 256)
    loss = total = 0.0
    for start in range(0, len(ids), width):
        row = ids[start : start + width]
        if len(row) > 1:
            scores = model.logits([row])[0][:-1].double().log_softmax(-1)
            loss -= float(scores[range(len(row) - 1), row[1:]].sum())
            total += len(row) - 1
    assert plain.tokens == changed.tokens == total
    assert math.isclose(plain.perplexity, math.exp(loss / total), rel_tol=1e-4)
    assert plain.kl is None
    assert changed.kl > 1e-3  # control: the same weights have none
    assert abs(quality({"plain": model, "same": model}, SHORT)[1].kl or 0.0) < 1e-9


@needs_kernels
def test_a_packed_model_is_measured_beside_fp32(tmp_path: Path, capsys: Captured) -> None:
    tokenizer = load(checkpoint("decoder")).tokenizer
    create(BLOCKS | {"vocab_size": tokenizer.vocab_size}, tokenizer, seed=3).save(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "x.gguf", dtype="q8_0")
    found = answered(["check", str(tmp_path / "x.gguf"), "--against", "none", "--quantize", "int4"], capsys)["quality"]
    assert [one["form"] for one in found] == ["fp32", "packed", "int4"]
    assert found[0]["tokens"] == found[2]["tokens"] > 100
    assert 0 < found[1]["kl"] < found[2]["kl"]
    assert "KL to fp32" in said(["check", str(tmp_path / "x.gguf"), "--against", "none"], capsys)[0]


def test_what_has_no_perplexity_is_said(unchecked: None) -> None:
    model = load(checkpoint("decoder"))
    memory = Model(model.module, model.tokenizer)
    with pytest.raises(InputError, match=r"no perplexity: .* does not predict the next token"):
        check(checkpoint("encoder"), against="none", text="A text.")
    with pytest.raises(InputError, match="no perplexity: the model is not in a file"):
        check(memory, against="none", quantize=["int8"])
    with pytest.raises(InputError, match="needs a text of two tokens or more"):
        quality({"fp32": load(checkpoint("decoder"))}, "")
