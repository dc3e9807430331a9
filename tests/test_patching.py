"""Patching and ablation find the parts of circuits written by hand, and nothing else; every family can be ablated."""

import math
import re
from typing import Any

import pytest
import torch

import circuits_by_hand as planted
import cli_models
import references
import tiny
from circuits_by_hand import CLEAN, CORRUPT, A, B, C
from parity import TARGETS, headless, ours, rows_of
from test_twins import rounded_by_place
from triptych import ops
from triptych.cli.ablate import AblatedPart
from triptych.errors import InputError, ProbeError
from triptych.model import Model, load
from triptych.page.interventions import patch_page
from triptych.probe import Ablations, PatchGrid, put, zero
from triptych.probe.ablation import Replaced
from triptych.probe.prompts import Place
from triptych.spec import ClassHeadSpec, MoESpec, PatchesSpec, PoolingSpec

NAMES = ("decoder", "additive", "alibi", "mixture", "encoder", "encoder-decoder")
MODELS = {name: tiny.MODELS[name] for name in NAMES}
FAMILIES = {kind: name for name, (kind, *_) in reversed(references.VARIANTS.items())}  # the first variant of each
ANSWER = (7, 8)


def options(model: Model) -> dict[str, Any]:
    """What a model needs to be measured: an encoder without a mask says where."""
    return {"at": 2} if model.spec.layout == "encoder" else {}


# ---------------------------------------------------------------- a circuit written by hand


def cell(grid: PatchGrid, row: str, column: int) -> float:
    return float(grid.restored[grid.rows.index(row), column])


def test_patching_one_head_at_one_position_restores_the_answer_and_no_other_does_anything() -> None:
    model = planted.induction()
    grid = model.patch(CLEAN, CORRUPT, answer=(B, C), heads=True)
    expected = torch.zeros_like(grid.values)
    expected[grid.rows.index("blocks.0.attn.z head 0"), 2] = 1  # reads A before B
    expected[grid.rows.index("blocks.1.attn.z head 1"), 4] = 1  # copies B to the end
    assert torch.allclose(grid.restored, expected, atol=1e-5)
    assert grid.clean == pytest.approx(10, abs=1e-4)
    assert grid.corrupt == pytest.approx(0, abs=1e-4)
    assert grid.fired[grid.rows.index("blocks.0.attn.z head 0")].tolist() == [False, False, True, False, False]


def test_a_circuit_with_another_weight_is_not_restored() -> None:
    """The control of the test above: without the head's output weights the same patch does nothing."""
    model = planted.induction()
    dict(model.module.named_parameters())["decoder.blocks.1.attn.out.weight"].detach().mul_(0.5)
    grid = model.patch(CLEAN, CORRUPT, answer=(B, C), heads=True, metric="logit-difference")
    assert grid.clean == pytest.approx(5, abs=1e-4)
    dict(model.module.named_parameters())["decoder.blocks.0.attn.out.weight"].detach().zero_()
    grid = model.patch(CLEAN, CORRUPT, answer=(B, C), heads=True)
    assert grid.values.abs().max() < 1e-4


def test_the_grid_of_the_residual_stream_follows_the_answer_from_its_token_to_the_end() -> None:
    grid = planted.induction().patch(CLEAN, CORRUPT, answer=(B, C))
    assert grid.rows == ("blocks.0.resid_pre", "blocks.1.resid_pre")
    assert torch.allclose(grid.restored, torch.tensor([[0, 1, 0, 0, 0], [0, 0, 1, 0, 0.0]]), atol=1e-5)


def test_ablation_finds_the_two_heads_of_the_circuit() -> None:
    model = planted.induction()
    ablated = model.ablate([CLEAN], answer=(B, C), how="zero")
    assert {name for name, effect in ablated.largest(6) if abs(effect) > 1e-3} == {
        "blocks.0.attn.z head 0", "blocks.1.attn.z head 1"
    }  # fmt: skip
    resampled = model.ablate([CLEAN], answer=(B, C), how="resample", reference=[CORRUPT])
    assert {name for name, effect in resampled.largest(6) if abs(effect) > 1e-3} == {
        "blocks.0.attn.z head 0", "blocks.1.attn.z head 1"
    }  # fmt: skip


# ---------------------------------------------------------------- against edits by hand


@pytest.mark.parametrize("name", MODELS)
def test_a_grid_is_the_same_as_patching_by_hand(name: str) -> None:
    """One run a cell with `put` on the values of a trace, beside the flat batch of all runs."""
    model, clean, corrupt = Model(MODELS[name]()), [3, 4, 5, 6], [3, 9, 5, 6]
    both = model.spec.layout == "encoder-decoder"
    site = "decoder.blocks.1.cross.v" if both else "blocks.1.attn.v"
    target = [[0]] if both else None
    grid = model.patch(clean, corrupt, answer=ANSWER, site=site, heads=True, batch_tokens=9, **options(model))
    values = model.trace([clean], target, read=[site])[site][0]
    at = 0 if both else options(model).get("at", 3)
    for r, row in enumerate(grid.rows):
        head = int(row.split()[-1])
        for position in range(4):
            edit = put(site, values[position, head], at=position, heads=head)
            logits = model.logits([corrupt], target, edit=[edit], allow_null=True)[0][at]
            assert float(grid.values[r, position]) == pytest.approx(float(logits[7] - logits[8]), abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_patching_all_that_enters_a_stack_is_the_clean_run(name: str) -> None:
    model = Model(MODELS[name]())
    site = "encoder.embed" if model.spec.layout == "encoder-decoder" else "embed"
    how = {"answer": ANSWER, "site": site, "positions": None, **options(model)}
    grid = model.patch([3, 4, 5, 6], [3, 9, 5, 2], **how)
    assert float(grid.restored) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("metric", "answer"), [("kl", None), ("probability", 7), ("log-probability", 7), ("logit", 7)])
def test_metrics(metric: str, answer: int | None) -> None:
    model = Model(tiny.decoder())
    clean, corrupt = (model.logits([row])[0][-1].double() for row in ([3, 4, 5], [3, 9, 5]))
    grid = model.patch([3, 4, 5], [3, 9, 5], answer=answer, metric=metric)
    log_p, log_q = clean.log_softmax(-1), corrupt.log_softmax(-1)
    expected = {
        "kl": (0.0, float((log_p.exp() * (log_p - log_q)).sum())),
        "probability": (float(log_p.exp()[7]), float(log_q.exp()[7])),
        "log-probability": (float(log_p[7]), float(log_q[7])),
        "logit": (float(clean[7]), float(corrupt[7])),
    }[metric]
    assert (grid.clean, grid.corrupt) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("metric", "clean", "corrupt", "tells"),
    [
        ("kl", 0.0, -3e-7, "rough"),
        ("kl", 0.0, 2e-5, "yes"),
        ("logit", 12.5, 12.5 + 2e-6, "rough"),
        ("logit", 12.5, 12.6, "yes"),
        ("probability", 1e-7, 2e-7, "yes"),
        ("logit", 2.0, 2.0, "no"),
    ],
)
def test_shares_of_the_least_difference_are_given_and_named_rough(
    metric: str, clean: float, corrupt: float, tells: str
) -> None:
    values = torch.tensor([[clean, corrupt]])
    grid = PatchGrid(metric, ("blocks.0.resid_pre",), ("0 a", "1 b"), values, values > 0, clean, corrupt)
    assert grid.tells_apart == (tells != "no")
    assert bool(grid.restored.isnan().all()) == (tells == "no")
    html = patch_page(grid, [])
    assert ("little more than rounding" in html) == ("little more than rounding" in str(grid)) == (tells == "rough")
    assert ("Each cell is a run of the corrupt prompt" in html) == (tells != "no")


def test_a_metric_may_be_a_function() -> None:
    model = Model(tiny.decoder())
    grid = model.patch([3, 4, 5], [3, 9, 5], answer=ANSWER)
    own = model.patch([3, 4, 5], [3, 9, 5], metric=lambda logits: logits[:, 7] - logits[:, 8])
    assert torch.equal(own.values, grid.values)
    with pytest.raises(InputError, match="one number a row"):
        model.patch([3, 4, 5], [3, 9, 5], metric=lambda logits: logits.sum())


@pytest.mark.parametrize("name", MODELS)
def test_mean_and_resampled_heads_are_those_of_a_trace(name: str) -> None:
    model, text, other = Model(MODELS[name]()), [3, 4, 5, 6], [9, 8, 7, 1, 2]
    both = model.spec.layout == "encoder-decoder"
    site, target = ("decoder.blocks.1.cross.z" if both else "blocks.1.attn.z"), ([[0]] if both else None)
    z = model.trace([other], target, read=[site])[site][0]
    at = 0 if both else options(model).get("at", 3)
    plain = model.logits([text], target)[0][at].log_softmax(-1)
    for how, value in (("mean", z.mean(0)), ("resample", z[: 1 if both else 4])):
        ablated = model.ablate([text], how=how, within=site, heads=[2], reference=[other], **options(model))
        new = value[2] if how == "mean" else value[:, 2:3]
        changed = model.logits([text], target, edit=[put(site, new, heads=[2])])[0][at].log_softmax(-1)
        assert float(ablated.values) == pytest.approx(float((plain.exp() * (plain - changed)).sum()), abs=1e-5)


def test_a_block_without_what_it_adds_passes_its_input_on() -> None:
    model = Model(tiny.decoder())
    stream = model.trace([[3, 4, 5]], read=["blocks.1.resid_pre"])["blocks.1.resid_pre"][0]
    skipped = model.logits([[3, 4, 5]], edit=[put("blocks.1.resid_post", stream)])[0][-1].log_softmax(-1)
    plain = model.logits([[3, 4, 5]])[0][-1].log_softmax(-1)
    ablated = model.ablate([[3, 4, 5]], "blocks", within="blocks.1.*")
    assert float(ablated.values) == pytest.approx(float((plain.exp() * (plain - skipped)).sum()), abs=1e-5)


def test_chunks_change_nothing_but_the_last_bits() -> None:
    model = Model(tiny.decoder())
    whole = model.patch([3, 4, 5, 6], [3, 9, 5, 6], answer=ANSWER, heads=True)
    cut = model.patch([3, 4, 5, 6], [3, 9, 5, 6], answer=ANSWER, heads=True, batch_tokens=1)
    assert torch.allclose(whole.values, cut.values, atol=1e-5)


def test_positions_that_correspond_are_stated() -> None:
    model, clean, corrupt = planted.induction(), [*CLEAN[:4], A], [planted.START, B, planted.X, B, C, A]
    with pytest.raises(InputError, match=r"have 5 and 6 tokens; state which positions correspond, align="):
        model.patch(clean, corrupt, answer=(B, C))
    grid = model.patch(clean, corrupt, answer=(B, C), heads=True, align=[(0, 0), (1, 2), (2, 3), (3, 4), (4, 5)])
    assert [int(column.split()[0]) for column in grid.columns] == [0, 2, 3, 4, 5]
    assert cell(grid, "blocks.1.attn.z head 1", 4) == pytest.approx(1, abs=1e-5)
    assert cell(grid, "blocks.0.attn.z head 1", 2) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_estimate_patching_where_the_model_is_nearly_linear(name: str) -> None:
    """Between prompts whose embeddings differ by little, first order is what patching gives; by much, it is not."""
    model = Model(MODELS[name]())
    stack = "encoder" if model.spec.encoder is not None else "decoder"
    table = dict(model.module.named_parameters())[f"{stack}.embed.tokens.weight"]

    def apart(step: float) -> float:
        """The largest error of an estimate, as a share of the largest effect."""
        with torch.no_grad():
            table[9] = table[4] + step * table[9]
        how = {"answer": ANSWER, "site": ["*.z", "*resid_pre", "*mlp.out"], **options(model)}
        real = model.patch([3, 4, 5, 6], [3, 9, 5, 6], **how)
        estimated = model.patch([3, 4, 5, 6], [3, 9, 5, 6], gradient=True, **how)
        assert estimated.estimated
        assert torch.equal(real.values.isnan(), estimated.values.isnan())
        effect = (real.values - real.corrupt).abs().nan_to_num().max()
        return float((real.values - estimated.values).abs().nan_to_num().max() / effect)

    with torch.no_grad():
        kept = table.clone()
    far = apart(1.0)
    table.detach().copy_(kept)
    assert apart(1e-3) < 0.05
    assert far > 0.1


# ---------------------------------------------------------------- every family


def family_options(model: Model) -> dict[str, Any]:
    target = TARGETS[1] if model.spec.layout == "encoder-decoder" else None
    pooled = isinstance(model.spec.head, ClassHeadSpec)
    return {"target": target} | ({} if pooled else {"at": 1})


def seeing_all(model: Model) -> dict[str, Any]:
    """Options that measure at a position which sees every other: the last; in an encoder each of them does."""
    options = family_options(model)
    return options if model.spec.layout == "encoder" else {"target": options["target"]}


PARTS: tuple[AblatedPart, ...] = ("heads", "attention", "mlp", "blocks", "neurons", "positions")
REPLACED: tuple[Replaced, ...] = ("zero", "mean", "resample")


def among(how: Replaced, other: Any) -> dict[str, Any]:
    """The reference text of a replacement that has one."""
    return {} if how == "zero" else {"reference": [other]}


def check_that_no_site_is_dead(model: Model, rows: list[Any], how: Replaced, **options: Any) -> None:
    """Each standard ablation in each block changes the logits.

    A neuron may be off in the text, and then nothing is replaced, or, in the last block, at the measured position.
    Decoders beside an encoder read the same target with both texts, so that up to the first cross-attention there is
    nothing to resample; nor is there where every picture has the class token.
    """
    row, other = rows
    stacks = model.spec.stacks
    prefix = "decoder." if len(stacks) > 1 else ""
    last = f"{prefix}blocks.{len(stacks.get('decoder', stacks.get('encoder')).blocks) - 1}."
    same = ("decoder.embed", "decoder.blocks.0.attn") if len(stacks) > 1 else ()
    if isinstance(model.spec.reads.embed, PatchesSpec):
        same = (*same, "embed position 0", "encoder.embed position 0")
    blocks = [block for stack in model.spec.stacks.values() for block in stack.blocks]
    mixtures = any(isinstance(block.mlp, MoESpec) for block in blocks)
    for part in PARTS:
        if mixtures and part == "neurons":
            continue
        units = {"units": [0, 2]} if part == "neurons" else {}
        ablated = model.ablate([row], part, how=how, **among(how, other), **options, **units)
        dead = [name for name in ablated.dead if part != "neurons" or not name.startswith(last)]
        known = same if how == "resample" else ()
        unchanged = [name for name in ablated.unchanged if part != "neurons" and not name.startswith(known)]
        moved = [unit.name for unit in ablated.units if unit.name.startswith(known)]
        moved = [name for name in moved if name not in ablated.unchanged]
        assert not dead, f"{part}, {how}: {dead}"
        assert not moved, f"{part}, {how}: {moved}"
        assert not unchanged, f"{part}, {how}: {unchanged}"
        if part != "positions":
            touched = {re.sub(r"(blocks\.\d+).*", r"\1", site) for unit in ablated.units for site in unit.sites}
            assert len(touched) == len(blocks), f"{part}: {touched}"


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("name", MODELS)
def test_every_standard_ablation_changes_the_logits(name: str, how: Replaced) -> None:
    model = Model(MODELS[name]())
    check_that_no_site_is_dead(model, [[3, 4, 5, 6], [9, 8, 7, 1, 2]], how, **seeing_all(model))


@pytest.mark.heavy
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_standard_ablation_changes_the_logits_in_every_family(name: str, how: Replaced) -> None:
    """No site that the standard ablations replace is dead, in any layer of any family."""
    model = ours(name)
    if headless(model):
        pytest.skip("it has no logits")
    rows = sorted(rows_of(model), key=len)
    options = {"metric": lambda logits: logits.double().pow(2).sum(-1)}  # kl is 0 where there is one score
    check_that_no_site_is_dead(model, [rows[0], rows[-1]], how, **seeing_all(model), **options)


@pytest.mark.heavy
def test_a_standard_ablation_reports_nothing_that_both_texts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """In families of two stacks, whose decoder reads one target with both, however products round."""
    monkeypatch.setattr(ops, "linear", rounded_by_place)
    for name in FAMILIES.values():
        if ours(name).spec.layout == "encoder-decoder":
            test_every_standard_ablation_changes_the_logits_in_every_family(name, "resample")


def test_a_site_that_nothing_reads_is_declared_dead() -> None:
    """The control: a head without output weights, and positions behind the measured one; no other site."""
    model = Model(tiny.decoder())
    weight = dict(model.module.named_parameters())["decoder.blocks.1.attn.out.weight"]
    weight.detach()[:, 3 * tiny.K : 4 * tiny.K] = 0
    for how in REPLACED:
        ablated = model.ablate([[3, 4, 5, 6]], how=how, **among(how, [9, 8, 7, 1]))
        assert ablated.dead == ("blocks.1.attn.z head 3",)
        assert ablated.unchanged == ()
        assert ablated.to_dict()["dead"] == ["blocks.1.attn.z head 3"]
    seen = model.ablate([[3, 4, 5, 6]], "positions", at=1)
    assert seen.dead == ("embed position 2", "embed position 3")


def test_a_site_is_dead_or_unchanged_where_it_is_so_in_every_text() -> None:
    """The third position is in one of the texts alone."""
    model, texts = Model(tiny.decoder()), [[3, 4], [5, 6, 7]]
    ablated = model.ablate(texts, "positions")
    assert ablated.fired.tolist() == ablated.moved.tolist() == [[True, True], [True, True], [False, True]]
    assert (ablated.unchanged, ablated.dead) == ((), ())
    ablated = model.ablate(texts, "positions", at=1)
    assert (ablated.unchanged, ablated.dead) == ((), ("embed position 2",))


def test_an_output_weight_of_zero_leaves_neurons_dead_and_the_mlp_unchanged() -> None:
    model = Model(tiny.decoder())
    dict(model.module.named_parameters())["decoder.blocks.0.mlp.down.weight"].detach().zero_()
    neurons = model.ablate([[3, 4, 5]], "neurons", units=[0, 5])
    assert neurons.dead == ("blocks.0.mlp.act neuron 0", "blocks.0.mlp.act neuron 5")
    assert model.ablate([[3, 4, 5]], "mlp").unchanged == ("blocks.0.mlp.out",)


def test_a_site_that_does_almost_nothing_is_not_dead() -> None:
    """Less than what runs in one batch differ by: only the same run without the change tells."""
    model = Model(tiny.decoder())
    weight = dict(model.module.named_parameters())["decoder.blocks.1.attn.out.weight"]
    weight.detach()[:, 3 * tiny.K : 4 * tiny.K] *= 1e-6
    ablated = model.ablate([[3, 4, 5, 6]])
    whole = model.logits([[3, 4, 5, 6]])[0][-1]
    changed = model.logits([[3, 4, 5, 6]], edit=[zero("blocks.1.attn.z", heads=3)])[0][-1]
    assert 0 < float((whole - changed).abs().max()) < 64 * 2**-23 * float(whole.abs().max())
    assert ablated.dead == ()


# ---------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def words() -> Model:
    return load(cli_models.checkpoint("decoder"))


PATCH: dict[str, Any] = {"clean": "abc", "corrupt": "axc", "answer": ("a", "b")}
ABLATE: dict[str, Any] = {"texts": ["abc"], "part": "heads"}
NAN: dict[str, Any] = {"metric": lambda logits: logits[:, 0] * math.nan, "answer": None}


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        (PATCH, {"answer": (" longer", 3)}, InputError, r"is 7 tokens .*an answer is one"),
        (PATCH, {"answer": (3, 3)}, InputError, "same token"),
        (PATCH, {"answer": (3, 4, 5)}, InputError, "takes two answers"),
        (PATCH, {"answer": (3, 100000)}, InputError, "not a token id from 0 to"),
        (PATCH, {"answer": None, "metric": "logit"}, InputError, "takes one answer; 0 were given"),
        (PATCH, {"metric": "accuracy"}, InputError, "metric 'accuracy' is not one of"),
        (PATCH, {"corrupt": "abc"}, InputError, "are the same"),
        (PATCH, {"corrupt": "abcd"}, InputError, "tokens; state which positions correspond"),
        (PATCH, {"corrupt": ""}, InputError, "at least one token"),
        (PATCH, {"at": 99}, InputError, "the row has positions 0 to"),
        (PATCH, {"at": -1}, InputError, "the row has positions 0 to"),
        (PATCH, {"positions": [99]}, InputError, "the row has positions 0 to"),
        (PATCH, {"positions": []}, InputError, "must be a list of at least one"),
        (PATCH, {"positions": "some"}, InputError, "must be 'all'"),
        (PATCH, {"align": [(0, 99)]}, InputError, "corrupt position"),
        (PATCH, {"align": [(0,)]}, InputError, "not a pair"),
        (PATCH, {"align": [(0, 0), (1, 0)]}, InputError, "given twice"),
        (PATCH, {"align": []}, InputError, "align=.* at least one"),
        (PATCH, {"site": "blocks.1.attn.zz"}, ProbeError, "did you mean 'blocks.1.attn.z'"),
        (PATCH, {"site": "blocks.9.attn.z"}, ProbeError, "its blocks are 0 to 2"),
        (PATCH, {"site": "logits"}, ProbeError, "logits are what is measured"),
        (PATCH, {"site": "blocks.*.attn.scores", "align": [(0, 0)]}, ProbeError, "over keys too"),
        (PATCH, {"site": "*.mlp.out", "heads": True}, ProbeError, "has no heads"),
        (PATCH, {"heads": [6]}, ProbeError, r"has heads 0\.\.5, not 6"),
        (PATCH, {"heads": 3}, InputError, "heads=3 must be True or False or a list"),
        (PATCH, {"heads": ["a"]}, InputError, "must be True or False or a list of integers"),
        (PATCH, {"site": []}, InputError, "site=.* at least one"),
        (PATCH, {"site": 3}, InputError, "site=3 must be a string or a list of strings"),
        (PATCH, {"answer": 1.5}, InputError, "the answer 1.5 is not a token id"),
        (PATCH, {"positions": 2}, InputError, "or a list of integers"),
        (PATCH, {"positions": [1.5]}, InputError, "or a list of integers"),
        (PATCH, {"align": "0:0"}, InputError, "must be a list"),
        (PATCH, {"heads": []}, InputError, "heads=.* at least one"),
        (PATCH, {"positions": [0], "site": "embed"}, ProbeError, "nothing was changed"),
        (PATCH, {"max_bytes": 10}, ProbeError, "over max_bytes=10"),
        (PATCH, NAN, InputError, "must be finite"),
        (PATCH, {"batch_tokens": 0}, InputError, "at least 1"),
        (PATCH, {"target": "x"}, InputError, "a target is for encoder-decoders"),
        (ABLATE, {"texts": "abc"}, InputError, "list of at least one"),
        (ABLATE, {"texts": []}, InputError, "list of at least one"),
        (ABLATE, {"reference": []}, InputError, "reference=.* list of at least one"),
        (ABLATE, {"within": 3}, InputError, "within=3 must be a string"),
        (ABLATE, {"at": 3}, InputError, "the row has positions 0 to 2"),
        (ABLATE, {"part": "layers"}, InputError, "must be 'heads' or 'attention'"),
        (ABLATE, {"how": "noise"}, InputError, "must be 'zero' or 'mean' or 'resample'"),
        (ABLATE, {"how": "resample"}, InputError, "nothing to resample from"),
        (ABLATE, {"within": "blocks.7.*"}, ProbeError, "its blocks are 0 to 2"),
        (ABLATE, {"within": "blocks.1.mlp.*"}, ProbeError, "leaves no heads"),
        (ABLATE, {"heads": [6]}, ProbeError, r"has heads 0\.\.5, not 6"),
        (ABLATE, {"heads": []}, InputError, "at least one"),
        (ABLATE, {"units": [1]}, InputError, "is for the ablation of neurons"),
        (ABLATE, {"part": "neurons", "units": [37]}, ProbeError, r"has neurons 0\.\.36, not 37"),
        (ABLATE, {"part": "neurons", "max_runs": 5}, InputError, "111 units and 1 texts are 111 runs, over max_runs=5"),
        (ABLATE, {"positions": [3]}, InputError, "the row has positions 0 to 2"),
        (ABLATE, {"part": "positions", "positions": []}, InputError, "at least one"),
        (ABLATE, {"part": "positions", "positions": [3]}, InputError, "the row has positions 0 to 2"),
        (ABLATE, {"answer": "ab"}, InputError, "an answer is one"),
    ],
)
def test_what_cannot_be_patched_or_ablated_is_one_line(
    words: Model, unchecked: None, options: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        (words.patch if options is PATCH else words.ablate)(**options | change)
    assert "\n" not in str(raised.value)


def test_a_model_without_logits_or_experts_without_neurons_are_refused() -> None:
    with pytest.raises(ProbeError, match="mixtures of experts"):
        Model(tiny.mixture()).ablate([[3, 4]], "neurons")
    pooled = next(name for name in FAMILIES.values() if isinstance(ours("bert-pooler").spec.head, PoolingSpec))
    assert pooled
    with pytest.raises(InputError, match="no head that gives logits"):
        ours("bert-pooler").ablate([[3, 4]])
    with pytest.raises(InputError, match="0 mask tokens; give at="):
        Model(tiny.encoder()).patch([3, 4], [3, 5], answer=ANSWER)


def test_an_ablation_that_changes_nothing_is_an_error_or_named() -> None:
    model = Model(tiny.encoder_decoder())
    ablated = model.ablate([[3, 4]], "positions", how="mean")
    assert ablated.unchanged == ("decoder.embed position 0",)  # one token is its own mean
    with pytest.raises(ProbeError, match="no ablation changed a value"):
        model.ablate([[3, 4]], "positions", how="mean", within="decoder.*")


def test_results_are_printed_and_plain_data() -> None:
    model = Model(tiny.encoder_decoder())
    grid = model.patch([3, 4, 5], [3, 9, 5], answer=ANSWER)
    assert str(grid).splitlines()[0].startswith("logit-difference (7 - 8): clean")
    assert len(str(grid).splitlines()) == 2 + len(grid.rows)
    data = grid.to_dict()
    assert data["values"][0][-1] is None  # type: ignore[index]
    assert math.isfinite(grid.best(1)[0][2])
    ablated = model.ablate([[3, 4]], "mlp")
    assert isinstance(ablated, Ablations)
    assert len(ablated.to_dict()["effect"]) == 4  # type: ignore[arg-type]
    assert "zero ablation" in str(ablated)


def test_a_place_is_the_product_of_its_axes() -> None:
    value = torch.zeros(4, 3, 2)
    changed = Place((1, 2), (0,), (1,)).put("blocks.0.attn.z", 1.0)(value)
    assert changed.nonzero().tolist() == [[1, 0, 1], [2, 0, 1]]
    scores = Place((1,), (2,)).put("blocks.0.attn.scores", 1.0)(torch.zeros(3, 4, 5))
    assert scores.nonzero().tolist() == [[2, 1, i] for i in range(5)]


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_family_is_patched_by_runs_and_by_a_gradient(name: str) -> None:
    """All that enters the first stack is the clean run; a gradient gives finite estimates at the sites of a block."""
    model = ours(name)
    if headless(model):
        pytest.skip("it has no logits")
    rows, how = rows_of(model), family_options(model)
    clean = rows[0]
    corrupt = clean.flip(0) if isinstance(clean, torch.Tensor) else [12, *clean[1:]]
    stack = "encoder." if model.spec.layout == "encoder-decoder" else ""
    score: Any = {"metric": lambda logits: logits.pow(2).sum(-1)}
    grid = model.patch(clean, corrupt, site=f"{stack}embed", positions=None, **how, **score)
    assert grid.clean != pytest.approx(grid.corrupt, rel=1e-6)
    assert float(grid.values) == pytest.approx(grid.clean, rel=1e-3)
    sites = [f"{stack}blocks.1.{leaf}" for leaf in ("resid_pre", "attn.q", "attn.v", "attn.z", "attn.out", "mlp.out")]
    estimate = model.patch(clean, corrupt, site=sites, positions=None, gradient=True, **how, **score)
    assert bool(estimate.values.isfinite().all())
    assert bool((estimate.values != estimate.corrupt).any())
