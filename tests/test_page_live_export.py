"""What a page carries of a model, and what it refuses."""

import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from cli_models import Captured, checkpoint, said
from test_page import Reader
from triptych import nn
from triptych.cli import main
from triptych.errors import InputError, TriptychError
from triptych.model import Model, create, load
from triptych.nn.feedforward import GLU
from triptych.page import render
from triptych.page.live import live_page, live_section
from triptych.page.live_export import check_size, export
from triptych.page.render import check_place
from triptych.page.sections import LiveSection, defined
from triptych.program import interpret, interpret_logits
from triptych.spec import ModelSpec


def logits(model: Model, weights: dict[str, Tensor], row: list[int]) -> Tensor:
    inputs, rows = model.module.flat([row])
    program = export(model).lowered
    with torch.no_grad():
        return interpret_logits(program, weights, interpret(program, weights, inputs, rows), rows)


def test_the_int8_weights_are_close_to_the_model_and_not_the_model() -> None:
    model = Model(tiny.decoder())
    exported = export(model)
    whole = dict(model.module.named_parameters(remove_duplicate=False))
    row = [7, 3, 11, 40, 5]
    gap = float((logits(model, exported.weights, row) - logits(model, whole, row)).abs().max())
    assert 0 < gap < 0.3


def test_the_bytes_are_codes_then_scales_and_stand_for_the_weights() -> None:
    model = Model(tiny.decoder())
    exported = export(model)
    name = "decoder.blocks.0.mlp.down.weight"  # [24, 37]: a whole group of 32 columns and a part of one
    place, (rows, columns) = exported.tensors[name], (24, 37)
    assert place["kind"] == "int8"
    assert place["shape"] == [rows, columns]
    at, padded = place["offset"], 64
    codes = torch.frombuffer(bytearray(exported.data[at : at + rows * padded]), dtype=torch.int8).view(rows, padded)
    end = at + rows * padded
    halves = torch.frombuffer(bytearray(exported.data[end : end + rows * padded // 16]), dtype=torch.float16)
    numbers = codes * halves.float().view(rows, padded // 32).repeat_interleave(32, dim=1)
    assert torch.equal(numbers[:, :columns], exported.weights[name])
    assert not codes[:, columns:].any()
    original = model.module.get_parameter(name)
    steps = original[:, :32].abs().amax(1) / 127
    assert bool(((exported.weights[name] - original)[:, :32].abs().amax(1) <= 0.51 * steps).all())


def test_a_tied_matrix_is_carried_once() -> None:
    model = Model(tiny.encoder_decoder())
    assert sum("embed.tokens" in name or "head.proj" in name for name in export(model).tensors) == 1


def test_the_module_is_left_as_it_was() -> None:
    module = tiny.decoder().train()
    before = {name: value.clone() for name, value in module.named_parameters()}
    export(Model(module))
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.named_parameters())


def test_too_many_parameters_are_refused_with_the_way_out() -> None:
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
              "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 64}  # fmt: skip
    spec: ModelSpec = create(config).spec
    with pytest.raises(
        InputError, match=r"34,\d{3},\d{3} parameters, about 47 MiB.*15,000,000.*inspect MODEL TEXT --save"
    ):
        check_size(spec)


def test_hooks_and_replaced_forwards_are_refused() -> None:
    module = tiny.decoder()
    module.decoder.blocks[1].register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"decoder\.blocks\.1 has a hook"):
        export(Model(module))


def test_an_operation_that_the_page_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(defined("operation"), "rotate")
    with pytest.raises(InputError, match="decode: a page has no operation 'rotate'"):
        export(Model(tiny.decoder()))


def test_a_mask_that_the_page_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(defined("mask"), "Window")
    with pytest.raises(InputError, match="decode: a page has no mask Window"):
        export(Model(tiny.decoder(mask="window")))


def test_a_part_without_a_program_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GLU, "forward", lambda self, x, *rest: torch.sin(x))
    with pytest.raises(InputError, match=r"decoder\.blocks\.0 cannot run in a page: .*sin is no operation"):
        export(Model(tiny.decoder()))


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match="needs the model's tokenizer, and this checkpoint has none"):
        live_section(Model(tiny.decoder()))


def test_numbers_that_are_not_finite_are_refused() -> None:
    module: nn.Transformer = tiny.decoder()
    module.get_parameter("decoder.blocks.0.attn.q.weight").detach()[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"decoder\.blocks\.0\.attn\.q\.weight: .*not finite"):
        export(Model(module))


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_the_command_writes_a_page(layout: str, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "model.html"
    answer = json.loads(said(["page", str(checkpoint(layout)), "--out", str(out), "--json"], capsys)[0])
    assert answer == {"out": str(out), "bytes": out.stat().st_size}
    reader = Reader(out.read_text(encoding="utf-8"))
    data: dict[str, Any] = json.loads(reader.inside("script")[0])
    (live,) = [section for section in data["sections"] if section["kind"] == "live"]
    assert live["layout"] == layout
    assert "http" not in {tag for tag, _ in reader.tags}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("missing/model.html", "No such directory"),
        ("model.txt", "must end in .html or .htm"),
        ("folder.html", "it is a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(
    out: str, message: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "folder.html").mkdir()
    assert main(["page", "no/such/model", "--out", str(tmp_path / out)]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused_first(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(TriptychError, match="Permission denied"):
        check_place(tmp_path / "model.html")


def test_nothing_of_the_data_closes_its_script() -> None:
    page = live_page(load(checkpoint("decoder")), "</script><img src=x onerror=alert(1)>", "</script><b>")
    reader = Reader(page)
    assert len(reader.inside("script")) == 3
    assert "img" not in {tag for tag, _ in reader.tags}
    assert "</script><b>" in json.dumps(json.loads(reader.inside("script")[0]))


BESIDE = ("live_chapters.js", "live_chapter_facts.js", "live_linear_bytes.js")


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_a_page_carries_under_four_thousand_lines_of_script(layout: str) -> None:
    """Beside the chapters and the bytes of WebAssembly, without blank lines and comments; a thousand are for what
    moves: the matrices of an attention, painted masks, and points in a plane."""
    assert 2000 < script_lines(live_page(load(checkpoint(layout)), "t")) < 4000


def steps(*names: str) -> list[dict[str, str]]:
    return [{"step": name} for name in names]


#: What decides about the scripts of a tokenizer, as families have them; the last has the most that a page can carry.
TOKENIZERS = {
    "Unigram, as T5": ("Unigram", steps("charsmap"), steps("metaspace"), steps("Metaspace")),
    "Unigram, as Marian": ("Unigram", [], steps("metaspace"), steps("Replace", "ByteFallback", "Fuse")),
    "byte-level BPE": ("BPE", [], steps("bytes"), steps("ByteLevel")),
    "BPE, as Llama": ("BPE", steps("prepend"), [], steps("Replace", "ByteFallback", "Fuse", "Strip")),
    "BPE, as Mistral": ("BPE", [], steps("metaspace"), steps("Replace", "ByteFallback", "Fuse", "Strip")),
    "WordPiece": ("WordPiece", steps("around", "lower"), [], steps("WordPiece")),
    "words": ("WordLevel", [], [], steps("spaces")),
    "BPE with a charsmap": ("BPE", steps("charsmap"), steps("metaspace"), steps("ByteFallback")),
}
#: By the sets of scripts that the families of the references and the parts of specs come to; beside each, the head.
TEXT_MODELS: dict[str, tuple[str, Callable[[], Model]]] = {
    "mixture": ("LMHead", lambda: Model(tiny.mixture())),
    "mixture, window": ("LMHead", lambda: Model(tiny.mixture(mask="window"))),
    "shared biases": ("LMHead", lambda: Model(tiny.encoder_decoder())),
    "learned": ("LMHead", lambda: Model(tiny.decoder("learned"))),
    "rope": ("LMHead", lambda: Model(tiny.decoder("rope"))),
    "rope, window": ("LMHead", lambda: Model(tiny.decoder("rope", "window"))),
    "sinusoids": ("LMHead", lambda: Model(tiny.decoder("sinusoidal"))),
    "alibi": ("LMHead", lambda: Model(tiny.decoder("alibi"))),
    "disentangled": ("LMHead", lambda: Model(tiny.decoder("disentangled", "window"))),
    "additive": ("LMHead", lambda: Model(tiny.decoder("rope", mechanism="additive"))),
    "additive, window": ("LMHead", lambda: Model(tiny.decoder("rope", "window", mechanism="additive"))),
    "encoder": ("MaskedLMHead", lambda: Model(tiny.encoder())),
    "encoder, disentangled": ("MaskedLMHead", lambda: Model(tiny.encoder("disentangled"))),
}


def live_section_of(model: Model, head: str, kind: str, *tokenizer: list[dict[str, str]]) -> LiveSection:
    """A section with as much of the model and its tokenizer as decides about the scripts."""
    parts = dict(zip(("normalize", "split", "decode"), tokenizer, strict=True))
    content = {"layout": model.spec.layout, "head": head, "program": export(model).program}
    return LiveSection("Run the model", "", content | {"tokenizer": parts | {"model": {"type": kind}}})


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_so_do_pages_of_every_model_with_every_tokenizer(name: str) -> None:
    head, build = TEXT_MODELS[name]
    model = build()
    for kind, tokenizer in TOKENIZERS.items():
        lines = script_lines(render("t", [live_section_of(model, head, *tokenizer)]))
        assert 2000 < lines < 3990, f"{kind}: {lines} lines"


def test_a_page_has_no_scripts_that_its_model_does_not_need() -> None:
    model = Model(tiny.decoder("alibi"))
    section = live_section_of(model, "LMHead", *TOKENIZERS["byte-level BPE"])
    assert section.scripts == ("live_biases.js", "live_writing.js", "tokenizer_bpe.js")
    wordpiece = live_section_of(model, "TokenHead", "WordLevel", [], [], steps("WordPiece"))
    assert wordpiece.scripts == ("live_biases.js", "tokenizer_words.js")


def test_the_parts_of_both_stacks_and_what_goes_on() -> None:
    exported = export(Model(tiny.encoder_decoder()))
    parts = exported.parts()
    first = {one["stack"]: one for one in reversed(parts) if not one["mlp"]}
    assert [first[stack]["part"].rpartition(".")[2] for stack in ("encoder", "decoder", "cross")] == [
        "attn", "attn", "cross",
    ]  # fmt: skip
    assert {one["heads"] for one in parts if one["mlp"]} == {1}
    assert {one["heads"] for one in parts if not one["mlp"]} == {tiny.H}
    entries = exported.program["entries"]
    assert (entries["encode"]["continues"], entries["decode"]["continues"]) == (False, True)
    sees_all = export(Model(tiny.encoder())).program["entries"]["encode"]["continues"]
    assert (sees_all, export(Model(tiny.decoder())).program["entries"]["decode"]["continues"]) == (False, True)


def script_lines(page: str) -> int:
    """Lines of code of the scripts of a page; raises where one of them is too long to be read."""
    scripts = Reader(page).inside("script")[1:]
    folder = resources.files("triptych.page")
    beside = [(folder / name).read_text(encoding="utf-8") for name in BESIDE]
    assert all(one.strip() in "".join(scripts) for one in beside)
    assert max(map(len, code(scripts))) <= 120
    return len(code(scripts)) - len(code(beside))


def code(texts: list[str]) -> list[str]:
    lines = [line for text in texts for line in text.splitlines()]
    return [line for line in lines if line.strip() and not line.strip().startswith("//")]


def test_no_script_has_long_lines() -> None:
    folder = resources.files("triptych.page")
    scripts = {one.name: one.read_text(encoding="utf-8") for one in folder.iterdir() if one.name.endswith(".js")}
    scripts.pop("live_linear_bytes.js")  # the bytes of a module
    assert len(scripts) > 40
    longest = {name: max(map(len, text.splitlines())) for name, text in scripts.items()}
    assert max(longest.values()) <= 120, longest


def test_only_a_page_that_runs_a_model_may_compile_webassembly() -> None:
    assert "wasm-unsafe-eval" not in render("t", [])
    assert "wasm-unsafe-eval" in live_page(load(checkpoint("decoder")), "t")
