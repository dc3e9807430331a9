"""The walk: every step follows from what is printed before it, to 1e-5, and it ends where the model ends."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import references
import tiny
from cli_models import CONTEXT, Captured, checkpoint, said
from triptych import ops
from triptych.attention import Rows
from triptych.count import count
from triptych.errors import InputError
from triptych.explain import EXAMPLES, TOLERANCE, ShownTensor, Walk, WalkStep, explain, explain_cache, worked
from triptych.explain.attention_steps import AttentionSteps
from triptych.explain.reference_ops import NOT_REFERENCE, REFERENCE, parsed
from triptych.explain.steps import PrintedTensors, number, relative_difference
from triptych.model import Model, create, load
from triptych.nn.positions import Rope
from triptych.program import Program, lower
from triptych.spec import LMHeadSpec, PoolingSpec
from triptych.text import DECODER, SEQ2SEQ, byte_tokenizer, word_tokenizer
from triptych.train import read_recipe

IDS = [3, 1, 4, 11, 5, 9, 2, 6]
SENTENCE = "She sat by the river bank"
FAMILIES = ["gpt2", "gpt2-layer-scale", "llama", "llama-mqa", "llama-biased", "llama-yarn", "llama-longrope",
            "mistral", "qwen2-window", "qwen3", "bert", "bert-pooler", "bert-classes", "bert-tokens", "bert-spans",
            "electra", "modernbert-classes", "t5", "t5-gated", "t5-v1.1", "t5-encoder", "bart", "bart-classes",
            "marian", "deberta", "deberta-v2-conv",
            "deberta-v3", "gpt-neox", "phi", "gemma2", "granite", "mixtral", "qwen3-moe"]  # fmt: skip


def reference(name: str) -> Model:
    return load(references.saved(name)[1])


@pytest.mark.parametrize("name", ["L0.2", "L2.example-2", "L4.shapes"])
def test_no_position_is_promised_where_none_is_read(name: str) -> None:
    walk = worked(name)
    assert not {"Rotation", "Position bias"} & set(titles(walk))
    assert "position" not in next(step.meaning for step in walk.steps if step.title == "Embedding")


def test_rows_beside_a_sink_are_not_said_to_sum_to_1() -> None:
    q, k, v = (ShownTensor(name, name, f"H {rows} K", torch.randn(2, 3, 4)) for name, rows in ("qT", "kS", "vS"))
    for sinks, told in ((None, "sum to 1."), (torch.tensor([0.5, -1.0]), "sum to 1 with what the sink takes.")):
        step = AttentionSteps(part="attn", prefix="", q=q, k=k, v=v, sinks=sinks)._softmax()
        (pattern,) = step.makes
        assert bool((pattern.value.sum(-1) < 0.999).all()) is (sinks is not None)
        assert told in step.meaning


def written(model: Model, text: Any) -> int:
    """The token a walk must end in: the next one, or the last of the six an encoder-decoder writes."""
    most = 1 if model.spec.encoder is None else 6
    return model.generate([text], max_new_tokens=most)[0].ids[-1]


def titles(walk: Walk) -> list[str]:
    return [step.title for step in walk.steps]


def made(walk: Walk, name: str) -> torch.Tensor:
    (found,) = [one.value for step in walk.steps for one in step.makes if one.name == name]
    return found


def changed(walk: Walk, number: int, where: str, index: int) -> Walk:
    """The walk with one printed tensor off by a little."""
    step = walk.steps[number]
    shown = list(getattr(step, where))
    value = shown[index].value
    off = torch.linspace(0.01, 0.02, value.numel()).reshape(value.shape)
    wrong = value + off if value.is_floating_point() else (value - 1).abs()
    shown[index] = replace(shown[index], value=wrong)
    steps = [*walk.steps[:number], replace(step, **{where: shown}), *walk.steps[number + 1 :]]
    return replace(walk, steps=steps)


# ---------------------------------------------------------------- every step, every family


@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_follows_and_the_last_is_what_generate_gives(name: str) -> None:
    model = reference(name)
    depth = max(len(stack.blocks) for stack in model.spec.stacks.values())
    for layer, head, row in ((0, 0, None), (depth - 1, 2, 3)):
        walk = explain(model, IDS, layer=layer, head=head, row=row)
        assert max(walk.errors) <= TOLERANCE, (walk.verdict, walk.errors)
        assert walk.agrees
        if isinstance(model.spec.head, LMHeadSpec):
            assert walk.token == written(model, IDS)


@pytest.mark.parametrize("position", tiny.POSITIONS)
def test_every_position_part(position: str) -> None:
    walk = explain(Model(tiny.decoder(position, "window")), IDS, head=2)
    assert walk.agrees, walk.verdict
    assert ("Rotation" in titles(walk)) == position.startswith("rope")
    assert ("Position bias" in titles(walk)) == (position in ("alibi", "disentangled", "t5"))


@pytest.mark.parametrize(
    "make",
    [*(partial(reference, name) for name in ("qwen3", "gpt-neox", "qwen3-moe")), tiny.encoder, tiny.encoder_decoder],
)
def test_one_printed_tensor_that_is_off_turns_it_red(make: Callable[[], Any]) -> None:
    """All of them, one at a time: nothing is printed that no step is checked against."""
    module = make()
    model = module if isinstance(module, Model) else Model(module)
    walk = explain(model, IDS[:5], layer=1, head=3)
    assert walk.agrees
    for i, step in enumerate(walk.steps):
        for where in ("uses", "makes"):
            for j, shown in enumerate(getattr(step, where)):
                off = changed(walk, i, where, j)
                assert not off.agrees, shown.name
                assert off.verdict.startswith("NOT")


def test_a_forward_that_turns_the_wrong_way_turns_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is lowered from the right forward; the numbers come from one that turns back."""
    model, right = reference("llama"), Rope.prepare

    def backwards(self: Rope, rows: Rows, x: torch.Tensor, random: Any = None) -> Any:
        at = right(self, rows, x, random)
        return at if rows.symbolic else replace(at, rotation=replace(at.rotation, sin=-at.rotation.sin))

    monkeypatch.setattr(Rope, "prepare", backwards)
    walk = explain(model, IDS)
    wrong = [step.title for step, error in zip(walk.steps, walk.errors, strict=True) if error > TOLERANCE]
    assert wrong == ["Rotation"]


def test_a_step_cannot_use_what_was_not_printed() -> None:
    walk = explain(reference("gpt2"), IDS)
    norm = titles(walk).index("Norm")
    with pytest.raises(KeyError, match="embed"):
        _ = replace(walk, steps=walk.steps[norm:]).errors


def test_the_walk_prints_the_forward_s_own_numbers() -> None:
    model = reference("llama")
    walk, sites = explain(model, IDS, layer=1, head=4), ["embed", "blocks.1.resid_pre", "blocks.1.resid_mid", "final"]
    trace = model.trace([IDS], read=[*sites, "blocks.1.attn.*", "blocks.1.mlp.*"])
    for site in [*sites, *(f"blocks.1.mlp.{leaf}" for leaf in ("in", "gate", "up", "act", "out"))]:
        assert torch.equal(made(walk, site), trace[site][0]), site
    for leaf in ("scores", "pattern"):
        assert torch.equal(made(walk, f"blocks.1.attn.{leaf}"), trace[f"blocks.1.attn.{leaf}"][0])
    assert torch.equal(made(walk, "blocks.1.attn.z"), trace["blocks.1.attn.z"][0].transpose(0, 1))
    assert torch.equal(made(walk, "logits"), trace.logits[0][-1])


def test_a_block_of_a_decoder_has_its_steps_in_order() -> None:
    assert titles(explain(reference("qwen3"), IDS, layer=1)) == [
        "Tokens", "Embedding", "Block 0", "Norm", "Projections", "Heads", "Norm of each head and rotation", "Scores",
        "Scale", "Mask", "Softmax", "Weighted sum", "Concatenation", "Output projection", "Residual", "Norm", "Widen",
        "Activation", "Narrow", "Residual", "Block 2", "Final norm", "Logits", "Candidates", "Next token",
    ]  # fmt: skip


def test_an_encoder_decoder_reads_its_source() -> None:
    model = reference("t5")
    walk = explain(model, IDS)
    assert {"No scale", "Position bias"} <= set(titles(walk))
    cross = [step for step in walk.steps if "cross-attention" in step.part]
    pattern = next(step.makes[0] for step in cross if step.title == "Softmax")
    target = len(made(walk, "decoder.ids"))
    assert pattern.value.shape == (references.H, target, len(IDS))
    assert pattern.focus == target - 1


# ---------------------------------------------------------------- it reads the program


def formulas(walk: Walk) -> dict[str, str]:
    return {f"{step.part}: {step.title}": step.formula for step in walk.steps}


def test_an_operation_added_to_a_forward_is_in_the_walk_and_one_removed_is_not() -> None:
    model = Model(tiny.decoder())
    before, block = explain(model, IDS), model.module.get_submodule("decoder.blocks.0")
    mlp: Any = block.mlp
    down = mlp.forward
    block.attn_norm.out.forward = lambda x: x * 0.5  # type: ignore[union-attr, assignment]
    mlp.forward = lambda x, ctx, taps: ops.softcap(down(x, ctx, taps), 3.0)
    walk = explain(model, IDS)
    assert walk.agrees, walk.verdict
    assert walk.token == written(model, IDS)
    assert formulas(before)["Block 0, attention: Output projection"].startswith("o = z W_oᵀ")
    assert formulas(walk)["Block 0, attention: Output projection"].startswith("o = 0.5 · (z W_oᵀ")
    assert "Softcap" not in titles(before)
    assert formulas(walk)["Block 0, MLP: Softcap"] == "o = 3 · tanh(y / 3)"
    assert len(walk.steps) == len(before.steps) + 1
    block.mlp_norm.pre.forward = lambda x: x  # type: ignore[union-attr, assignment]
    walk = explain(model, IDS)
    assert walk.agrees, walk.verdict
    assert "Block 0, MLP: Norm" in formulas(before)
    assert "Block 0, MLP: Norm" not in formulas(walk)


def test_a_program_that_lacks_an_operation_of_the_forward_turns_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk says what the program says, and the numbers of the forward refute it."""

    def without_silu(module: Any) -> Program:
        program = lower(module)
        entry = program.entries["decode"]
        dropped = {step.out[0]: step.inputs["x"] for step in entry.instructions if step.op == "silu"}
        steps = [
            replace(step, inputs={key: dropped.get(name, name) for key, name in step.inputs.items()})
            for step in entry.instructions
            if step.op != "silu"
        ]
        return replace(program, entries=program.entries | {"decode": replace(entry, instructions=tuple(steps))})

    model = reference("llama")
    assert formulas(explain(model, IDS))["Block 0, MLP: Activation"].startswith("a = silu(g) · u")
    monkeypatch.setattr("triptych.explain.forward_steps.lower", without_silu)
    walk = explain(model, IDS)
    assert formulas(walk)["Block 0, MLP: Activation"] == "a = g · u"
    assert walk.verdict == "NOT recomputed to 1e-05: Activation"


def test_a_block_outside_the_table_is_refused_with_the_reason() -> None:
    model = Model(tiny.decoder())
    block: Any = model.module.get_submodule("decoder.blocks.0")
    block.attn_norm.out.forward = torch.sin
    with pytest.raises(InputError, match=r"block 0 .*sin is no operation"):
        explain(model, IDS)
    assert explain(model, IDS, layer=1).agrees


def test_every_operation_of_the_table_is_recomputed_or_refused() -> None:
    """By a function or by its equation; the others are shown in several steps, as constants, or refused with their
    model."""
    by_equation = {name for name, operation in ops.OPERATIONS.items() if parsed(operation.equation) is not None}
    assert {"relu", "silu", "tanh", "scale", "shift", "softcap", "add", "multiply"} <= by_equation
    assert set(ops.OPERATIONS) - set(REFERENCE) - by_equation == set(NOT_REFERENCE)


# ---------------------------------------------------------------- where it ends


def test_an_encoder_fills_its_mask_or_gives_its_vector() -> None:
    model = load(checkpoint("encoder"))
    walk = explain(model, "the old [MASK] stands where", head=1)
    assert walk.agrees
    assert titles(walk)[-1] == "The word"
    (((word, chance), *_),) = model.fill(["the old [MASK] stands where"])[0]
    assert model.tokenizer.decode([walk.token]).strip() == word  # type: ignore[list-item]
    assert f"p {chance:.4f}" in walk.outcome
    assert dict(walk.facts)["Row"] == "3, [MASK]"
    walk = explain(model, "the old mill stands")
    assert torch.equal(made(walk, "pooled"), model.encode(["the old mill stands"])[0])
    assert dict(walk.facts)["Row"].endswith("stands")  # not the separator after it


@pytest.mark.parametrize("mode", ["mean", "first", "dense"])
def test_pooling(mode: Any) -> None:
    model = reference("bert-pooler")
    head = model.spec.head
    assert isinstance(head, PoolingSpec)
    model.module.spec = replace(model.spec, head=replace(head, mode=mode, normalize=True))
    model.module.head.spec = model.module.spec.head  # type: ignore[union-attr]
    assert explain(model, IDS).agrees


@pytest.mark.parametrize("panel", ["decoder", "encoder", "encoder-decoder"])
def test_the_models_of_the_quickstart(panel: str) -> None:
    specials = DECODER if panel == "decoder" else SEQ2SEQ
    tokenizer = word_tokenizer([SENTENCE], 90) if panel == "encoder" else byte_tokenizer(specials)
    ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
    ids |= {"decoder_start_token_id": tokenizer.pad_id} if panel == "encoder-decoder" else {}
    known = {key: value for key, value in ids.items() if value is not None}
    model = create(read_recipe(panel).model | known | {"vocab_size": tokenizer.vocab_size}, tokenizer)
    walk = explain(model, SENTENCE, layer=1)
    assert walk.agrees, walk.verdict
    if panel != "encoder":
        assert walk.token == written(model, SENTENCE)


def test_real_weights(smollm2_gguf: Path) -> None:
    model = load(smollm2_gguf, dequantize=True)
    for walk in (explain(model, SENTENCE, layer=29, head=8), explain_cache(model, SENTENCE, layer=7)):
        assert walk.agrees, walk.verdict
        assert walk.token == written(model, SENTENCE)


# ---------------------------------------------------------------- with the cache


@pytest.mark.parametrize("name", ["gpt2", "llama-mqa", "mistral", "qwen2-window", "qwen3", "t5", "t5-gated"])
def test_a_cached_step_computes_one_token_and_changes_nothing(name: str) -> None:
    model = reference(name)
    walk = explain_cache(model, IDS, layer=1, head=4)
    assert walk.agrees, (walk.verdict, walk.errors)
    assert walk.token == written(model, IDS)
    prefix = "decoder." if name.startswith("t5") else ""
    assert len(made(walk, f"{prefix}blocks.1.attn.q")) == 1
    source = len(IDS) if prefix else 0
    length = len(made(walk, "ids"))
    by_count, stored = made(walk, "bytes")[0].tolist()
    assert by_count == stored == count(model.spec).cache_bytes(length, dtype="fp32", source=source)


@pytest.mark.parametrize("make", [lambda: tiny.decoder("alibi", "window"), tiny.encoder_decoder])
def test_a_cached_tensor_that_is_off_turns_it_red(make: Callable[[], Any]) -> None:
    walk = explain_cache(Model(make()), IDS, head=2)
    assert walk.agrees
    for i, step in enumerate(walk.steps[1:], 1):  # the ids are only told
        for j, shown in enumerate(step.makes):
            assert not changed(walk, i, "makes", j).agrees, shown.name


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_comes_to_the_lecture_s_figures(name: str) -> None:
    walk = worked(name)
    assert walk.agrees, (walk.verdict, walk.errors)
    printed = [i for i, step in enumerate(walk.steps) if step.part in ("The lecture's figures", "Reference figures")]
    shapes = {"L0.2", "L2.example-2", "L2.2", "L4.6", "L4.14", "L4.15", "L4.shapes"}
    assert printed or name in shapes | {
        "L0.3",
        "L2.example-3",
        "L4.9",
        "L0.2.7",
        "L4.pairs",
    }  # recomputed, with no figures beside them
    own = [step.part == "The lecture's figures" for step in walk.steps if walk.steps.index(step) in printed]
    assert not any(own) or name not in {"L4.11", "L4.12.3", "L0.softmax", "L1.sat", "L1.tie"}  # not the lecture's
    for i in printed:
        assert not changed(walk, i, "makes", 0).agrees


def test_the_flops_of_l4_9_say_which_model_they_are_of() -> None:
    step, *_ = worked("L4.9").steps
    assert "36 layers × 32 heads" in step.formula
    assert "Qwen3-4B" in step.meaning
    assert step.makes[0].value[0, 0] == 36 * 32 * 4 * 2048**2 * 128


def test_the_shapes_of_the_lectures() -> None:
    """L2 example 2 and practice 2, L4's trace."""
    shapes = {"L2.example-2": (2, 3, 3), "L2.2": (16, 128, 128), "L4.shapes": (8, 10, 10)}
    widths = {"L2.example-2": (2, 3, 4), "L2.2": (16, 128, 64), "L4.shapes": (8, 10, 64)}
    for name, scores in shapes.items():
        walk = worked(name)
        assert made(walk, "blocks.0.attn.scores").shape == scores
        assert made(walk, "blocks.0.attn.q by head").shape == widths[name]


def test_an_example_is_found_however_it_is_written() -> None:
    assert worked("l2 1").title == worked("L2.1").title == worked("L2_1").title
    with pytest.raises(InputError, match=r"did you mean 'L2.example-2'\?\); they are L0.2, .*L4.9"):
        worked("L2.exmple-2")


# ---------------------------------------------------------------- what is printed


def test_what_is_left_out_is_counted() -> None:
    shown = ShownTensor("x", "x", "N D", torch.arange(90.0).reshape(10, 9), [f"t{i}" for i in range(10)], focus=8)
    part = shown.excerpt()
    assert part.rows == ("t0", "t1", "t2", "t8")
    assert (part.focus, part.gap) == (3, 3)
    assert part.values[3] == (72, 73, 74, 75)
    assert part.left_out == "… 5 more columns, 6 more rows"
    assert shown.excerpt(columns=2).left_out == "… 7 more columns, 6 more rows"
    assert ShownTensor("x", "x", "N D", torch.rand(2, 8)).excerpt().left_out == ""  # few columns are all printed
    square = ShownTensor("p", "p", "H T S", torch.rand(2, 12, 12), list("abcdefghijkl"), list("abcdefghijkl"), 1, 11)
    assert square.excerpt().columns == tuple("abcdefgl")
    assert square.excerpt().values[7][7] == float(square.value[1, 11, 11])
    assert square.excerpt().left_out == "… 4 more columns, 4 more rows"
    assert square.shape == "[H 2, T 12, S 12]"
    assert square.excerpt().with_gap("abcdefgl", "…") == list("abcdefg…l")
    assert shown.excerpt().with_gap("0123", "…") == list("0123…")  # behind the last that is printed


@pytest.mark.parametrize(("fitting", "columns"), [(9, "abcdefghi"), (8, "abcdefgi")])
def test_all_is_printed_where_one_column_or_row_would_be_left_out(fitting: int, columns: str) -> None:
    names = list("abcdefghi")
    part = ShownTensor("p", "p", "T S", torch.rand(9, 9), names, names, focus=8).excerpt(8, fitting)
    assert (part.rows, part.columns) == (tuple(names), tuple(columns))
    assert (part.more_rows, part.column_gap) == (0, None if fitting == 9 else 7)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (1.0, "1"),
        (0.12345, "0.1235"),
        (-1e-5, "-1.00e-05"),
        (float("-inf"), "-∞"),
        (12345.6, "1.23e+04"),
        (2_415_919_104, "2,415,919,104"),
    ],
)
def test_numbers(x: float, said: str) -> None:
    assert number(x) == said


def test_relative_difference() -> None:
    one = torch.tensor([1.0, -torch.inf])
    assert relative_difference(one, one.double()) == 0
    assert relative_difference(one, torch.tensor([1.0, 0.0])) == float("inf")
    assert relative_difference(one, torch.tensor([torch.nan, -torch.inf])) == float("inf")
    assert relative_difference(one, one[:1]) == float("inf")
    assert relative_difference(torch.tensor([100.0, 1.0]), torch.tensor([100.0, 2.0])) == pytest.approx(0.01)


# ---------------------------------------------------------------- the command


def printed(argv: list[str], capsys: Captured, code: int = 0) -> str:
    return said(argv, capsys, code)[0 if not code else 1]


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("cache", [False, True])
def test_on_the_screen(layout: str, cache: bool, capsys: Captured) -> None:
    if cache and layout == "encoder":
        return
    path = str(checkpoint(layout))
    argv = ["explain", path, "the old mill", "--layer", "1", "--head", "2", *["--cache"] * cache]
    out = printed(argv, capsys)
    told = json.loads(printed([*argv, "--json"], capsys))
    assert told["outcome"] in out
    assert re.search(r"lock +1, of blocks 0 to [12] *$", out, re.M)
    assert re.search(r"Head +2, of heads 0 to [25] *$", out, re.M)
    assert f"{len(told['steps'])} steps recomputed from what is printed" in out
    assert told["agrees"]
    for step in told["steps"]:
        assert step["title"] in out
        assert step["error"] <= TOLERANCE
        for shown in [*step["uses"], *step["makes"]]:
            assert len(shown["values"]) == len(shown["rows"])
            assert all(len(row) == len(shown["columns"]) for row in shown["values"])


def test_a_walk_that_does_not_follow_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.explain.reference_ops.softmax", lambda s, sinks=None: s.softmax(-2))
    out = said(["explain", "--example", "L2.1"], capsys, 1)[0]
    assert "the recomputation differs by" in out
    assert "NOT recomputed to 1e-05: Softmax" in out


@pytest.mark.parametrize(
    ("layout", "argv", "says"),
    [
        ("decoder", ["Mill", "--layer", "3"], "layer 3 is out of range; layers are 0 to 2"),
        ("decoder", ["Mill", "--layer", "-1"], "layer -1 is out of range; layers are 0 to 2"),
        ("decoder", ["Mill", "--head", "6"], "head 6 is out of range; heads are 0 to 5"),
        ("decoder", ["Mill", "--row", "9"], "row 9 is out of range; rows are 0 to 3"),
        ("decoder", [""], "the text is empty"),
        ("decoder", ["  "], "the text is empty"),
        ("encoder", [""], "the text is empty"),
        ("decoder", ["a" * (CONTEXT + 1)], f"{CONTEXT + 1} tokens and the model has {CONTEXT} positions"),
        ("encoder", ["a", "--cache"], "an encoder keeps no cache"),
        ("decoder", ["a", "--cache"], "two tokens"),
        ("decoder", ["a", "--cache", "--layer", "3"], "layers are 0 to 2"),
        ("decoder", ["a\udcff"], "UTF-8"),
    ],
)
def test_bad_input_is_one_line(layout: str, argv: list[str], says: str, capsys: Captured) -> None:
    err = printed(["explain", str(checkpoint(layout)), *argv], capsys, 1)
    assert says in err
    assert len(err.splitlines()) == 1
    assert "unexpected" not in err


@pytest.mark.parametrize("line", ["", "model", "model text --example L2.1", "m t --cache --row 1", "m t --head x"])
def test_usage(line: str, capsys: Captured) -> None:
    assert len(printed(["explain", *line.split()], capsys, 2).splitlines()) == 1


def test_models_a_walk_cannot_be_through() -> None:
    with pytest.raises(InputError, match="no head"):
        explain(reference("llama-base"), IDS)
    with pytest.raises(InputError, match="not dot products"):
        explain(Model(tiny.decoder("rope", mechanism="linear")), IDS)
    with pytest.raises(InputError, match="decodes nothing"):
        explain_cache(reference("bart-classes"), IDS)
    with pytest.raises(InputError, match="bfloat16 cannot hold numbers to 1e-5"):
        explain(Model(tiny.decoder().bfloat16()), IDS)


# ---------------------------------------------------------------- the page


def test_the_page_holds_every_step(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "walk.html"
    printed(["explain", str(checkpoint("encoder-decoder")), "the old mill", "--save", str(page)], capsys)
    html = page.read_text("utf-8")
    walk = explain(load(checkpoint("encoder-decoder")), "the old mill")
    assert html.count('<details class="step"') == len(walk.steps)
    assert 'class="tint-9"' in html  # a weight of nearly 1


def test_a_step_is_what_it_says() -> None:
    step = WalkStep("p", "t", "y = x + 1", "", [ShownTensor("y", "y", "D", torch.tensor([2.0]))], lambda g: g["x"] + 1)
    given = PrintedTensors()
    ids = ShownTensor("ids", "ids", "N", torch.ones(2, dtype=torch.long))
    given.add([ShownTensor("x", "x", "D", torch.tensor([1.5])), ids])
    assert (given["x"].dtype, given["ids"].dtype) == (torch.float64, torch.long)
    assert step.error(given) == 0.25  # of 2
