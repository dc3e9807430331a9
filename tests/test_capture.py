"""What a trace keeps: parts, types and reductions of values, its bytes before it runs, gradients, and its file."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from triptych.attention import pattern_statistics, row_scores
from triptych.errors import CheckpointError, InputError, ProbeError
from triptych.generate import MAX_ROWS
from triptych.model import Model
from triptych.probe import Read, Statistics, Trace, put, sites, zero
from triptych.probe.trace_recording import Attended
from triptych.probe.trace_values import Computations

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8]]
SOURCES = [[5, 6, 7], [9], [10, 11, 12, 13]]
PATTERN, STREAM = "blocks.0.attn.pattern", "blocks.0.resid_post"
MODELS = tiny.MODELS


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.decoder())


def traced(model: Model, **how: Any) -> Trace:
    both = model.spec.layout == "encoder-decoder"
    return model.trace(*((SOURCES, ROWS) if both else (ROWS,)), **how)


# ---------------------------------------------------------------- parts, types, reductions


def test_layers_and_positions_may_count_from_the_end(model: Model) -> None:
    whole = model.trace(ROWS, read="blocks.*.attn.z")
    last = model.trace(ROWS, read=Read("blocks.*.attn.z", layers=-1, at=-1, heads=[2]))
    assert list(last) == ["blocks.1.attn.z"]
    assert last.positions("blocks.1.attn.z") == [(7,), (2,), (4,)]
    for row in range(3):
        assert torch.equal(last["blocks.1.attn.z"][row], whole["blocks.1.attn.z"][row][-1:, [2]])
    ends = model.trace(ROWS, read=Read(STREAM, at=slice(-2, None)))
    assert ends.positions(STREAM) == [(6, 7), (1, 2), (3, 4)]
    both = model.trace(ROWS, read=Read(STREAM, at=[0, -1]))
    assert both.positions(STREAM) == [(0, 7), (0, 2), (0, 4)]
    assert list(model.trace(ROWS, read=Read("*.resid_post", layers=slice(0, 1)))) == [STREAM]


def test_values_are_kept_in_another_dtype(model: Model) -> None:
    plain, half = (model.trace(ROWS, read=[Read("*", dtype=dtype)]) for dtype in (None, "bf16"))
    for site in plain:
        for a, b in zip(plain[site], half[site], strict=True):
            assert b.dtype == torch.bfloat16
            assert torch.equal(a.bfloat16(), b), site
    shared = sum({x.data_ptr(): x.nbytes for site in plain for x in plain[site]}.values())
    assert half.nbytes <= shared * 0.51
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, half.logits, strict=True))


@pytest.mark.parametrize("piece", [1 << 20, 50], ids=["whole", "pieces"])
def test_reductions(model: Model, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scores, "PIECE", piece)
    names = {"z": "blocks.1.attn.z", "pattern": PATTERN, "stream": STREAM}
    plain = model.trace(ROWS, read=list(names.values()))

    def read(site: str, reduce: str, **how: Any) -> list[torch.Tensor]:
        return model.trace(ROWS, read=Read(names[site], reduce=reduce, **how))[names[site]]

    for row in range(3):
        z, pattern, stream = (plain[site][row] for site in names.values())
        for got, wanted in (
            (read("z", "norm"), z.norm(dim=-1)),
            (read("z", "mean"), z.mean(0, keepdim=True)),
            (read("z", "mean_heads", heads=[1, 4]), z[:, [1, 4]].mean(1, keepdim=True)),
            (read("stream", "norm", at=[1, 2]), stream[1:3].norm(dim=-1)),
            (read("stream", "mean", at=[1, 2]), stream[1:3].mean(0, keepdim=True)),
            (read("pattern", "mean"), pattern.mean(1, keepdim=True)),
            (read("pattern", "mean_heads"), pattern.mean(0, keepdim=True)),
        ):
            torch.testing.assert_close(got[row], wanted, atol=1e-6, rtol=1e-5)


def test_a_mean_in_half_precision_is_of_exact_sums(model: Model, tmp_path: Path) -> None:
    """A sum of many values overflows fp16, and loses digits in bf16."""
    edit = put(STREAM, torch.full((tiny.D,), 30_000.0))
    for dtype, site, near in (("fp16", STREAM, 0.0), ("bf16", PATTERN, 4e-3)):
        read = Read(site, reduce="mean", dtype=dtype)
        found = model.trace(ROWS, read=read, edit=edit)
        plain = model.trace(ROWS, read=Read(site, reduce="mean"), edit=edit)
        assert model.trace_size(ROWS, read=read).total == found.nbytes
        found.save(tmp_path / "x.safetensors")
        for a, b, c in zip(found[site], plain[site], Trace.load(tmp_path / "x.safetensors")[site], strict=True):
            assert a.dtype == (torch.float16 if dtype == "fp16" else torch.bfloat16)
            torch.testing.assert_close(a.float(), b, atol=near, rtol=0)
            assert torch.equal(a, c)


@pytest.mark.parametrize("piece", [1 << 20, 50], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "linear"])
def test_statistics_are_read_beside_the_pattern(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scores, "PIECE", piece)
    model = Model(MODELS[name]())
    found = traced(model, read=["*.pattern", Read("*.pattern", reduce=Statistics(top=2))])
    for site in sites(model.spec):
        if not site.endswith("pattern"):
            continue
        for row, (pattern, got) in enumerate(zip(found[site], found.statistics(site), strict=True)):
            wanted = pattern_statistics(pattern, torch.tensor(found.positions(site)[row]), top=2)
            for (measure, a), (same, b) in zip(got.items(), wanted.items(), strict=True):
                assert measure == same
                if measure != "top_keys":  # of equal weights either key may come first
                    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_statistics_of_an_edited_pattern_are_of_what_goes_on(model: Model) -> None:
    edit = zero(PATTERN, heads=2)
    found = model.trace(ROWS, read=[Read(PATTERN, reduce=Statistics()), PATTERN], edit=edit)
    got = found.statistics(PATTERN)[0]
    assert not got.entropy[2].any()
    wanted = pattern_statistics(found[PATTERN][0], torch.arange(8))
    torch.testing.assert_close(got.distance, wanted.distance)


def test_a_model_gives_statistics_with_marked_tokens(model: Model) -> None:
    labels = [[0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1], [0, 0, 0, 0, 1]]
    found = model.statistics(ROWS, layers=0, heads=[1, 3], at=slice(1, None), delimiters=[1, 8], documents=labels)
    pattern = model.trace(ROWS, read=Read(PATTERN, heads=[1, 3], at=slice(1, None)))[PATTERN]
    for row, got in enumerate(found.statistics(PATTERN)):
        marked = torch.tensor([token in (1, 8) for token in ROWS[row]])
        same = torch.tensor(labels[row])[1:, None] == torch.tensor(labels[row])
        torch.testing.assert_close(got.delimiters, pattern[row][..., marked].sum(-1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got.own_document, (pattern[row] * same).sum(-1), atol=1e-6, rtol=1e-5)
        assert tuple(got.entropy.shape) == (2, len(ROWS[row]) - 1)
    crossed = Model(tiny.encoder_decoder()).statistics(SOURCES, ROWS, delimiters=[9])
    assert crossed.statistics("decoder.blocks.0.cross.pattern")[1].delimiters.allclose(torch.ones(()))
    assert len(crossed.statistics("encoder.blocks.0.attn.pattern")) == 3


@pytest.mark.parametrize("reduce", ["mean", "norm", "mean_heads", Statistics()], ids=str)
@pytest.mark.parametrize("name", ["decoder", "alibi", "encoder-decoder"])
def test_reductions_while_generating_are_those_of_one_forward(name: str, reduce: Any) -> None:
    module = MODELS[name]()
    model, both = Model(module), module.spec.layout == "encoder-decoder"
    pattern = isinstance(reduce, Statistics) or reduce == "mean_heads"
    prefix = "decoder." if both else ""
    site = f"{prefix}blocks.1.attn.{'pattern' if pattern else 'z'}"
    read = Read(site, reduce=reduce)
    written = model.generate(SOURCES if both else ROWS, max_new_tokens=5, read=read)
    for row, done in enumerate(written):
        grown = [*((model.spec.ids.start,) if both else ROWS[row]), *done.ids][:-1]
        whole = model.trace(*(([SOURCES[row]], [grown]) if both else ([grown],)), read=read)
        for name_of in whole:
            a, b = whole[name_of][0], done.trace[name_of][row]
            if not name_of.endswith("top_keys"):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=name_of)


# ---------------------------------------------------------------- made when looked at

LONG = [[(7 * i) % 40 for i in range(48)], [3, 1, 4], [(5 * i) % 40 for i in range(33)]]


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder", "linear"])
def test_patterns_made_when_looked_at_are_those_of_the_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long rows, whose queries and keys take less memory; whatever became of the weights since."""
    model = Model(MODELS[name]())
    rows = (LONG, LONG[::-1]) if name == "encoder-decoder" else (LONG,)
    lazy = model.trace(*rows, read="*")
    later = {site for site, of in lazy.records.items() if any(record.later for record in of.values())}
    assert {site.rpartition(".")[2].partition("_")[0] for site in later} <= {"scores", "pattern", "act", "resid"}
    assert any(site.endswith("pattern") for site in later) == (name != "linear")
    with monkeypatch.context() as patched:
        patched.setattr(Attended, "lasts", lambda layer, row: False)
        patched.setattr(Computations, "kept_as", lambda computations, value, rows: value)
        eager = model.trace(*rows, read="*")
    assert lazy.nbytes == eager.nbytes == model.trace_size(*rows, read="*").total
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.zero_()
    for site in eager:
        assert lazy.positions(site) == eager.positions(site)
        assert all(torch.equal(a, b) for a, b in zip(lazy[site], eager[site], strict=True)), site
        assert all(a is b for a, b in zip(lazy[site], lazy[site], strict=True)), site  # made once
    assert lazy.nbytes == eager.nbytes


def test_what_is_not_looked_at_is_not_computed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model.trace(LONG[:1], read="*.pattern")
    monkeypatch.setattr(row_scores.RowScores, "pieces", lambda scores: 1 / 0)
    assert model.trace(LONG[:1], read="*.pattern").nbytes == made.nbytes
    with pytest.raises(ZeroDivisionError):
        model.trace(LONG[:1], read=Read("*.pattern", heads=[1]))  # some heads alone are computed at once


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_known_before(name: str, dtype: torch.dtype) -> None:
    """Of every site alone, of all with shared values once, of parts and of reductions."""
    model = Model(MODELS[name]().to(dtype))
    rows = (SOURCES, ROWS) if model.spec.layout == "encoder-decoder" else (ROWS,)
    statistics = [] if name == "linear" else [Read("*.pattern", reduce=Statistics(top=2))]
    heads = [Read("*.z", heads=[0, 3], at=slice(1, 3), dtype="fp32"), Read("*.z", reduce="mean")]
    for read in (["*"], ["*.attn.*"], heads, [Read("*", items=[0, 2])], [Read("*.q", reduce="norm")], statistics):
        if read:
            size, found = model.trace_size(*rows, read=read), model.trace(*rows, read=read)
            assert size.total == found.nbytes, read
            assert sum(size.sites.values()) >= size.total
    assert model.trace_size(*rows, read="*").total < sum(model.trace_size(*rows, read="*").sites.values())
    assert "bytes in all" in str(size)


def test_sites_that_pass_one_tensor_share_it(model: Model) -> None:
    found = model.trace(ROWS, read=["blocks.0.resid_post", "blocks.1.resid_pre", "*.k_rot", "*.k_ctx"])
    for one, other in (("blocks.0.resid_post", "blocks.1.resid_pre"), ("blocks.0.attn.k_rot", "blocks.0.attn.k_ctx")):
        assert [x.data_ptr() for x in found[one]] == [x.data_ptr() for x in found[other]]
    edited = model.trace(
        ROWS, read=["*.resid_post", "*.resid_pre"], edit=put("blocks.1.resid_pre", torch.zeros(tiny.D))
    )
    assert not edited["blocks.1.resid_pre"][0].any()
    assert edited["blocks.0.resid_post"][0].any()


def test_over_the_limit_it_is_refused_before_anything_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    size = model.trace_size(ROWS, read="*").total
    assert model.trace(ROWS, read="*", max_bytes=size).nbytes == size
    monkeypatch.setattr(Model, "_forward", None)
    with pytest.raises(ProbeError, match=rf"keep {size:,} bytes, over max_bytes={size - 1:,} \(.*layers=, heads=, at="):
        model.trace(ROWS, read="*", max_bytes=size - 1)
    monkeypatch.setattr("triptych.machine.free_memory", lambda: 2 * size - 2)
    with pytest.raises(ProbeError, match=f"over half of the free memory, {size - 1:,}"):
        model.trace(ROWS, read="*")
    with pytest.raises(ProbeError, match="over half of the free memory"):
        model.generate([[1] * 40], read="*", max_new_tokens=9, max_rows=MAX_ROWS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"read": partial(Read, STREAM, dtype="int8")}, "dtype int8 is not one of|dtype 'int8' is not one of"),
        ({"read": partial(Read, STREAM, reduce="median")}, "reduce='median' is not one of mean, norm"),
        ({"read": partial(Read, STREAM, reduce=Statistics())}, "Statistics are of a pattern"),
        ({"read": partial(Read, "blocks.0.attn.scores", reduce="mean")}, "scores hold -inf"),
        ({"read": partial(Read, PATTERN, reduce="norm")}, "a norm is of a vector"),
        ({"read": partial(Read, STREAM, reduce="mean_heads")}, "has no heads"),
        ({"read": partial(Read, PATTERN, reduce=Statistics(), dtype="bf16")}, "leave dtype= out"),
        ({"read": partial(Read, STREAM, reduce="mean", grad=True)}, "leave reduce= out"),
        ({"read": partial(Read, STREAM, dtype="bf16"), "grad": True}, "leave dtype= out"),
        ({"read": partial(Read, "*.z", layers=2)}, "layers=2: .* of layers 0 to 1"),
        ({"read": partial(Read, "*.z", layers=[])}, "of layers 0 to 1"),
        ({"read": partial(Read, "*.z", layers="a")}, "must be an integer"),
        ({"read": partial(Read, "logits", layers=0)}, "names no site of a block"),
        ({"read": partial(Read, PATTERN, heads=[])}, "chooses nothing"),
        ({"read": partial(Read, PATTERN, at=True)}, "integer, a slice or a list"),
        ({"read": partial(Read, STREAM, at=-9)}, "never fired"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(model: Model, how: dict[str, Any], message: str) -> None:
    read = how["read"]
    with pytest.raises(ProbeError, match=message) as caught:
        model.trace(ROWS, **how | {"read": read() if isinstance(read, partial) else read})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_marks_that_do_not_fit_are_refused(model: Model) -> None:
    for how, message in (
        ({"documents": [[0]]}, "labels of 1 rows for 3 rows"),
        ({"documents": [[0], [0], [0]]}, "row 0 has 8 tokens and 1 labels"),
        ({"delimiters": []}, "give a list of token ids"),
        ({"delimiters": 3.5}, "give a list of token ids"),
    ):
        with pytest.raises(InputError, match=message):
            model.statistics(ROWS, **how)
    with pytest.raises(ProbeError, match="top=-1: give a number"):
        model.statistics(ROWS, top=-1)
    with pytest.raises(ProbeError, match=r"no site .*did you mean"):
        model.statistics(ROWS, site="blocks.0.attn.patern")
    with pytest.raises(ProbeError, match="no statistics were read at"):
        model.trace(ROWS, read=PATTERN).statistics(PATTERN)
    with pytest.raises(ProbeError, match="no site"):
        Model(tiny.decoder(mechanism="linear")).statistics(ROWS)


def test_a_generation_does_not_know_where_a_row_ends(model: Model) -> None:
    with pytest.raises(ProbeError, match="count from 0 in a generation"):
        model.generate(ROWS, read=Read(STREAM, at=-1), max_new_tokens=2)


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder"])
def test_gradients_of_everything_that_was_read(name: str) -> None:
    model = Model(MODELS[name]())
    prefix = "decoder." if name == "encoder-decoder" else ""
    found = traced(model, read=[f"{prefix}blocks.0.*"], grad=True)
    with pytest.raises(ProbeError, match="no gradient yet; call backward"):
        found.gradients(f"{prefix}blocks.0.resid_post")
    sum(logits.logsumexp(-1).sum() for logits in found.logits).backward()  # type: ignore[union-attr]
    for site in found:
        gradients = found.gradients(site)
        assert [gradient.shape for gradient in gradients] == [value.shape for value in found[site]]
        assert any(gradient.abs().sum() > 0 for gradient in gradients), site  # one key alone has a constant weight
    with pytest.raises(ProbeError, match="read without grad=True"):
        traced(model, read=f"{prefix}blocks.0.attn.z").gradients(f"{prefix}blocks.0.attn.z")


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "linear"])
def test_a_trace_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, file = Model(MODELS[name]()), tmp_path / "trace.safetensors"
    statistics = [] if name == "linear" else [Read("*.pattern", reduce=Statistics())]
    reads = ["*", Read("*.z", reduce="mean"), Read("*.q", at=[0, 2], dtype="bf16"), *statistics]
    for read in (reads[:1], reads[1:2], reads[2:]):
        found = traced(model, read=read)
        found.save(file)
        again = Trace.load(file)
        assert sorted(again) == sorted(found)
        assert again.tokens == found.tokens == (SOURCES if name == "encoder-decoder" else ROWS)
        assert again.targets == (ROWS if name == "encoder-decoder" else [])
        assert again.nbytes <= found.nbytes
        for site in found:
            assert again.positions(site) == found.positions(site)
            assert again.items(site) == found.items(site)
            assert all(torch.equal(a, b) for a, b in zip(found[site], again[site], strict=True)), site
        assert all(torch.equal(a, b) for a, b in zip(found.logits, again.logits, strict=True))


def test_a_trace_of_a_generation_is_saved(model: Model, tmp_path: Path) -> None:
    found = model.generate(ROWS, max_new_tokens=4, read=["*", Read(PATTERN, reduce=Statistics())])[0].trace
    assert isinstance(found, Trace)
    found.save(tmp_path / "trace.safetensors")
    again = Trace.load(tmp_path / "trace.safetensors")
    for site in found:
        assert all(torch.equal(a, b) for a, b in zip(found[site], again[site], strict=True)), site
        assert again.positions(site) == found.positions(site)


def test_a_damaged_file_is_refused_in_one_line(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "trace.safetensors"
    model.trace(ROWS, read=STREAM).save(file)
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def with_trace(change: Callable[[dict[str, Any]], object]) -> bytes:
        contents = json.loads(header["__metadata__"]["triptych.trace"])
        change(contents)
        metadata = header["__metadata__"] | {"triptych.trace": json.dumps(contents)}
        text = json.dumps(header | {"__metadata__": metadata}).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    row = {"item": 0, "tensor": "0", "positions": [[0, 1 << 40]], "how": "tokens"}
    broken = {
        "empty": b"",
        "cut": whole[:-5],
        "no trace": with_trace(lambda c: None).replace(b"triptych.trace", b"triptych.other"),
        "a tensor that is not there": with_trace(lambda c: c["logits"].append("99")),
        "an unknown key": with_trace(lambda c: c.update(code="import os")),
        "a wrong type": with_trace(lambda c: c.update(tokens=3)),
        "endless positions": with_trace(lambda c: c["sites"][STREAM].append(row)),
        "another version": with_trace(lambda c: c.update(version=2)),
    }
    for name, content in broken.items():
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            Trace.load(file)
        assert str(file) in str(caught.value), name
        assert "\n" not in str(caught.value), name
    with pytest.raises(CheckpointError):
        Trace.load(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match="cannot write"):
        model.trace(ROWS, read=STREAM).save(file / "inside" / "a file")
