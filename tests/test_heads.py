"""Head roles: planted heads are named, random models have none, and a broken score or null goes red."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import planted_heads as planted
import triptych
from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe import HeadTable, role_scores, zero
from triptych.probe.role_definitions import Labels, View, label
from triptych.probe.role_scores import at_offset, mean_weight
from triptych.probe.role_texts import HeadSample
from triptych.spec import AlibiSpec, LinearKernelSpec, RMSNormSpec, RopeSpec
from triptych.train import Pairs
from triptych_lectures.labs import induction
from triptych_lectures.labs.small_models import block
from triptych_lectures.labs.small_models import decoder as small_decoder

LLAMA = {
    "model_type": "llama", "vocab_size": 90, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def named(table: HeadTable) -> dict[tuple[int, int], str]:
    return {at[1:]: row.role for at, row in table.main().items() if row is not None}


@pytest.fixture(scope="module")
def table() -> HeadTable:
    links = {"marked": planted.links()}
    return planted.decoder().heads(planted.texts(), delimiters=planted.DELIMITERS, links=links)


def test_planted_heads_are_named(table: HeadTable) -> None:
    assert named(table) == planted.NAMES | {(0, 4): "diffuse", (1, 4): "diffuse"}
    offsets = {(row.layer, row.head): row.offset for row in table.find("offset")}
    assert offsets == {(0, 1): -2, (1, 3): -5}
    assert all(row.score > 0.99 for row in table.find("induction"))


PREVIOUS, SECOND, FIFTH = planted.offset(-1), planted.offset(-2), planted.offset(-5)
VARIANTS: dict[str, tuple[dict[str, Any], dict[tuple[int, int], str]]] = {
    "other depths": (
        {"plants": ((PREVIOUS, planted.delimiter, planted.first), (planted.nothing,) * 3,
                    (planted.induction, planted.marked, SECOND))},
        {(0, 0): "previous", (0, 1): "delimiter", (0, 2): "first", (2, 0): "induction", (2, 1): "marked",
         (2, 2): "offset"},
    ),
    "one head a layer": ({"plants": ((PREVIOUS,), (planted.induction,))}, {(0, 0): "previous", (1, 0): "induction"}),
    "two heads that read one key": (
        {"plants": ((PREVIOUS, SECOND, planted.first, planted.first),
                    (planted.induction, planted.induction, FIFTH, planted.nothing)), "share": 2},
        {(0, 0): "previous", (0, 1): "offset", (0, 2): "first", (0, 3): "first", (1, 0): "induction",
         (1, 1): "induction", (1, 2): "offset"},
    ),
    "by rotation alone": (
        {"plants": ((PREVIOUS, planted.turned(-2), planted.duplicate), (planted.induction, planted.turned(-1),
                    planted.turned(-5))), "position": RopeSpec(width=planted.TURNED)},
        {(0, 0): "previous", (0, 1): "offset", (0, 2): "duplicate", (1, 0): "induction", (1, 1): "previous",
         (1, 2): "offset"},
    ),
    "beside ALiBi": ({"position": AlibiSpec(heads=5)}, planted.NAMES),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", VARIANTS)
def test_planted_heads_are_named_in_other_models(name: str, seed: int) -> None:
    how, expected = VARIANTS[name]
    texts, links = planted.texts(seed=seed), {"marked": planted.links(seed=seed)}
    table = planted.decoder(**how).heads(texts, delimiters=planted.DELIMITERS, links=links, ablate=0, seed=seed)
    assert {at: role for at, role in named(table).items() if role != "diffuse"} == expected


def test_one_delimiter_must_be_nearly_all_that_a_head_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 tokens a head may like one by chance, which no draw of other tokens shows below 1 in 40."""
    monkeypatch.setattr(planted, "DELIMITERS", [5])
    table = planted.decoder().heads(planted.texts(), delimiters=[5], roles=["delimiter"], ablate=0)
    assert [(row.layer, row.head) for row in table.find("delimiter")] == [(0, 2)]
    assert min(row.threshold for row in table) >= 0.75


def test_ablation_tells_the_heads_that_matter(table: HeadTable) -> None:
    """The induction head writes what it reads, and takes it from the head that supplies the token before."""
    effects = {one.role: one for one in table.together}
    for role in ("induction", "previous"):
        assert effects[role].effect > 1
        assert effects[role].beyond_random
        assert len(effects[role].random) > 1
    assert not effects["marked"].beyond_random  # its values are 0
    (row,) = table.find("induction")
    assert row.effect is not None
    assert row.random_effect == 0


def test_one_other_set_of_heads_is_no_comparison() -> None:
    """Of two heads one has the role, so that there is a single other head to remove."""
    two = planted.decoder(plants=((PREVIOUS,), (planted.induction,)))
    (one,) = two.heads(planted.texts(), roles=["induction"]).together
    assert one.effect > 1
    assert len(one.random) == 1
    assert not one.beyond_random


def test_planted_heads_of_the_other_layouts() -> None:
    table = planted.encoder().heads(planted.texts(), delimiters=planted.DELIMITERS, ablate=0)
    assert named(table) == {(0, 0): "next", (0, 1): "offset", (0, 2): "delimiter", (0, 3): "diffuse"}
    both = planted.encoder_decoder().heads(planted.texts(), planted.texts(seed=9), delimiters=planted.DELIMITERS)
    mains = {at: row.role for at, row in both.main().items() if row is not None}
    assert mains["cross", 0, 0] == "alignment"
    assert mains["cross", 0, 1] == "first"
    assert mains["encoder", 0, 1] == mains["decoder", 0, 1] == "offset"


def random_models(seed: int) -> dict[str, Model]:
    norm = RMSNormSpec(width=24)
    deep = small_decoder(60, [block(24, 4, hidden=48)] * 8, inside=RopeSpec(width=6), final_norm=norm)
    alibi = small_decoder(60, [block(24, 4, hidden=48)] * 2, inside=AlibiSpec(heads=4), final_norm=norm)
    return {
        "small weights": triptych.create(LLAMA, seed=seed),
        "large weights": triptych.create(LLAMA | {"initializer_range": 0.5}, seed=seed),
        "deep": Model(nn.new(deep, seed)),
        "ALiBi": Model(nn.new(alibi, seed)),
    }


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.heavy), pytest.param(2, marks=pytest.mark.heavy)]
)
def test_a_random_model_has_no_role(seed: int) -> None:
    for name, model in random_models(seed).items():
        table = model.heads(seed=seed, ablate=0)
        assert len(table.rows) > 20
        assert not table.roles, (name, table)


BERT_LIKE = {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "max_position_embeddings": 64,
             "initializer_range": 0.3}  # fmt: skip
GPT2_LIKE = {"model_type": "gpt2", "n_positions": 64, "initializer_range": 0.5}
HARD: dict[str, tuple[dict[str, Any], int, bool]] = {  # the config, a seed that had a role, whether tokens are marked
    "a token and a place": (GPT2_LIKE | {"vocab_size": 50, "n_embd": 64, "n_layer": 4, "n_head": 4}, 100, True),
    "places that are far": (
        GPT2_LIKE | {"vocab_size": 50, "n_embd": 96, "n_layer": 6, "n_head": 12, "initializer_range": 1.0}, 30, False),
    "last layers that read evenly": (
        BERT_LIKE | {"vocab_size": 400, "dim": 64, "hidden_dim": 128, "n_layers": 6, "n_heads": 8}, 12, False),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("name", HARD)
def test_large_random_weights_are_no_role(name: str) -> None:
    config, seed, marked = HARD[name]
    rows = np.random.default_rng(seed).integers(8, 50, (6, 30)).tolist()
    how = {"texts": rows, "delimiters": [9, 10, 11], "boundaries": [9]} if marked else {}
    table = triptych.create(config, seed=seed).heads(seed=seed, ablate=0, **how)
    assert not table.roles, table


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_random_models_of_other_families_have_no_role(seed: int) -> None:
    """With and without texts of their own; the whole family-wise level is 1%."""
    sizes = {"vocab_size": 70 + seed, "max_position_embeddings": 64, "initializer_range": (0.02, 0.1, 0.3)[seed % 3]}
    body = {"hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2 + seed % 3, "num_attention_heads": 6}
    t5 = {"vocab_size": 70, "d_model": 48, "d_kv": 8, "d_ff": 70, "num_layers": 2, "num_heads": 6,
          "decoder_start_token_id": 0}  # fmt: skip
    configs = (
        sizes | body | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 9},
        sizes | body | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        t5 | {"model_type": "t5"},
    )
    texts = np.random.default_rng(seed).integers(8, 60, (6, 30)).tolist()
    for config in configs:
        both = {"targets": texts} if config["model_type"] == "t5" else {}
        for how in ({}, {"texts": texts, "delimiters": [9, 10, 11], "boundaries": [9], **both}):
            table = triptych.create(config, seed=seed).heads(seed=seed, ablate=0, **how)  # type: ignore[arg-type]
            assert not table.roles, (config["model_type"], table)


def test_without_its_null_a_random_model_has_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with thresholds of 0 the best of many heads is taken for one with a role."""
    monkeypatch.setattr(role_scores, "FLOOR", -10.0)
    model = random_models(0)["large weights"]
    monkeypatch.setattr(role_scores, "FAMILY", 0.9)
    assert model.heads(ablate=0).roles


def test_shuffled_patterns_have_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the weights of each query in another order."""
    scores = Labels.scores

    def shuffled(self: Labels, patterns: Tensor) -> Tensor:
        order = torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))
        return scores(self, patterns[order])

    monkeypatch.setattr(Labels, "scores", shuffled)
    links = {"marked": planted.links()}
    table = planted.decoder().heads(planted.texts(), delimiters=planted.DELIMITERS, links=links, ablate=0)
    assert set(table.roles) <= {"diffuse"}  # which no order changes


def test_a_seed_gives_the_same_table() -> None:
    model = triptych.create(LLAMA)
    one, same, other = (model.heads(seed=seed, ablate=1).to_dict() for seed in (3, 3, 4))
    assert json.dumps(one) == json.dumps(same)
    assert one["heads"] != other["heads"]


def test_a_link_in_a_planted_head_is_ranked_first() -> None:
    text, query, key = planted.links()[0]
    table = planted.decoder().link(text, query, key)
    assert [(row.layer, row.head) for row in table.above] == [(1, 1)]
    assert table.rows[0].weight > 0.99
    assert not planted.decoder().link(text, text[12], text[3]).above


def test_a_link_of_a_random_model_is_not_above_its_null() -> None:
    model = triptych.create(LLAMA | {"initializer_range": 0.5})
    assert not any(model.link(list(range(5, 25)), 24, key).above for key in (7, 12, 18))


def test_a_link_from_target_to_source() -> None:
    source, target = planted.texts(1, 12)[0], planted.texts(1, 12, seed=9)[0]
    table = planted.encoder_decoder().link(source, f"{target[4]}@1", f"{source[5]}@1", target)
    assert {row.stack for row in table.rows} == {"cross"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": []}, "names no role"),
        ({"roles": ["inducton"]}, "did you mean 'induction'"),
        ({"roles": "first"}, "roles=.first. must be a list of strings"),
        ({"texts": "one string"}, "not one string"),
        ({"texts": []}, "there are no rows"),
        ({"targets": [[1]]}, "targets are for encoder-decoders"),
        ({"ablate": -1}, "ablate=-1"),
        ({"delimiters": ","}, "delimiters=',' must be a list of integers"),
        ({"delimiters": 3}, "delimiters=3 must be a list of integers"),
        ({"boundaries": [1.5]}, "must be a list of integers"),
        ({"delimiters": [90]}, "delimiters: token id 90 is outside the vocabulary"),
        ({"links": [1]}, "must be a dict"),
        ({"seed": True}, "seed=True"),
        ({"links": {"first": [([1, 2], 2, 1)]}}, "another role"),
        ({"links": {"mine": []}}, "must be a list"),
        ({"links": {"mine": [([1, 2], 2)]}}, "is no"),
        ({"links": {"mine": [([1, 2], 1, 2)]}}, "exchange the two"),
        ({"links": {"mine": [([1, 2], 2, 9)]}}, "there is no word '9'"),
    ],
)
def test_what_cannot_be_scored_is_one_line(change: dict[str, Any], message: str, unchecked: None) -> None:
    with pytest.raises(InputError, match=message) as caught:
        triptych.create(LLAMA).heads(**change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3, 2], 2, 1), "2@1 for the first"),
        (([1, 2, 3, 2], "2@3", 1), "2 times"),
        (([1, 2, 3], 1, 3), "write 3:1"),
        (([1, 2, 3], 3, 3), "same place|does not stand after"),
        (([1, 2, 3], 3, 7), "its words are 1, 2, 3"),
        (("words", "a", "b"), "no tokenizer"),
        (([[1, 2]], 2, 1), r"text=\[\[1, 2\]\] must be a string or a list of integers"),
        (([1, 2], 2, 1, [1]), "a target is for encoder-decoders"),
        (([1, 99], 99, 1), "99"),
    ],
)
def test_what_cannot_be_linked_is_one_line(arguments: tuple[Any, ...], message: str, unchecked: None) -> None:
    with pytest.raises(InputError, match=message) as caught:
        triptych.create(LLAMA).link(*arguments)
    assert "\n" not in str(caught.value)


def test_a_model_without_attention_weights_has_no_links_and_no_roles() -> None:
    softmax = block(24, 6, 37)
    linear = replace(softmax, attn=replace(softmax.attn, mechanism=LinearKernelSpec()))
    model = Model(nn.new(small_decoder(90, [linear])))
    with pytest.raises(InputError, match="no layer that links these words has attention weights"):
        model.link([1, 2, 3], 3, 1)
    with pytest.raises(InputError, match="no layer of this model has attention weights"):
        model.heads([[1, 2, 3]])


@pytest.mark.heavy
def test_the_figures_of_smollm2(smollm2_gguf: Path) -> None:
    """The table of docs/concepts/heads.md: the roles are there, and of these four only induction is a cause."""
    roles = ["previous", "first", "induction", "delimiter"]
    table = triptych.load(smollm2_gguf).heads(roles=roles, ablate=1)
    best = {role: [(row.layer, row.head) for row in heads] for role, heads in table.roles.items()}
    expected = {
        "previous": ((16, 0), 15),
        "first": ((18, 8), 148),
        "induction": ((18, 6), 11),
        "delimiter": ((1, 1), 12),
    }
    for role, (head, count) in expected.items():
        assert head in best[role][:2]
        assert len(best[role]) == pytest.approx(count, rel=0.2)
    effects = {one.role: one for one in table.together}
    assert [role for role in roles if effects[role].beyond_random] == ["induction"]
    assert effects["induction"].effect == pytest.approx(9.0, rel=0.15)
    assert effects["induction"].effect > 8 * max(effects["induction"].random)


@pytest.mark.heavy
def test_the_heads_of_minilm(minilm_dir: Path) -> None:
    """An encoder of real weights: heads that read the token before, the one after, the same word and [CLS], each as its
    own pattern shows; the same layers with random weights have none of these."""
    model, roles = triptych.load(minilm_dir), ["previous", "next", "duplicate", "first"]
    table = model.heads(roles=roles, ablate=0)
    best = {role: [(row.layer, row.head) for row in heads] for role, heads in table.roles.items()}
    assert (best["previous"][0], best["next"][0]) == ((0, 2), (1, 8))
    assert set(best["duplicate"]) == {(2, 9), (1, 1)}
    assert best["first"][0] == (1, 11)
    pattern = model.trace(["The old man sat by the river and watched the boats."], read="*.pattern")
    before, after = (pattern[f"blocks.{layer}.attn.pattern"][0][head] for layer, head in ((0, 2), (1, 8)))
    assert float(before.diagonal(-1).mean()) > 0.9
    assert float(after.diagonal(1).mean()) > 0.4
    assert float(pattern["blocks.1.attn.pattern"][0][11, :, 0].mean()) > 0.7
    control = Model(nn.new(model.spec, 0), model.tokenizer).heads(roles=roles, ablate=0)
    assert not control.roles


@pytest.mark.heavy
def test_an_induction_head_of_a_trained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of attention, trained on sequences that are repeated: one head copies, and nothing does without it."""
    noise = np.random.default_rng(0)
    sizes = induction.InductionLab(steps=700)
    data = Pairs(tuple(sizes._repeated(noise) for _ in range(sizes.steps * sizes.rows)))
    model, _ = sizes._train(2, data, 0)
    tests = [sizes._repeated(noise) for _ in range(32)]
    assert induction._copied(model, tests) > 0.9
    (head,) = model.heads(roles=["induction"], seed=1).find("induction")
    assert head.score >= 0.8
    assert head.effect > 3 > 10 * head.random_effect
    assert induction._copied(model, tests, [zero(f"blocks.{head.layer}.attn.z", heads=[head.head])]) < 0.25


@pytest.mark.heavy
def test_the_link_from_bank_to_river_in_smollm2(smollm2_gguf: Path) -> None:
    """No head passes 1%; the first ones are those of which the link is the cause."""
    table = triptych.load(smollm2_gguf).link("She sat by the river bank", "bank", "river")
    assert {(row.layer, row.head) for row in table.rows[:3]} == {(4, 0), (9, 7), (4, 2)}
    assert not table.above
    assert table.effect > 1 > 50 * max(table.random)


# ---------------------------------------------------------------- one definition of a head's score

HALF = 12


def view() -> View:
    """A row that is repeated, and one in which nothing is, as a decoder reads them."""
    repeated, control = [*range(HALF), *range(HALF)], list(range(2 * HALF))
    samples = [HeadSample(repeated, None, "repeated", half=HALF), HeadSample(control, None, "control")]
    rows = [sample.ids for sample in samples]
    visible = [np.tril(np.ones((len(row), len(row)), bool)) for row in rows]
    return View("decoder", samples, rows, rows, visible)


@pytest.mark.parametrize(("role", "offset", "sample"), [("previous", -1, 1), ("induction", 1 - HALF, 0)])
def test_the_score_of_a_role_is_the_mean_weight_on_its_keys(role: str, offset: int, sample: int) -> None:
    one = view()
    labels = label(role, one, {}, np.random.default_rng(0))
    patterns = [torch.rand(3, 2 * HALF, 2 * HALF).tril().softmax(-1) for _ in one.samples]
    flat = torch.cat([pattern.flatten(1) for pattern in patterns], 1).T.contiguous()
    scores = labels.scores(flat)[0, 0]
    reads = torch.zeros(2 * HALF, 2 * HALF, dtype=torch.bool)
    for query in labels.queries[sample]:
        reads |= at_offset(range(query, query + 1), offset, 2 * HALF)
    own = mean_weight(patterns[sample], reads)
    torch.testing.assert_close(scores, own)
    assert not torch.allclose(scores, mean_weight(patterns[sample], reads.roll(1, 1)))  # the keys beside


def test_several_keys_of_a_query_add_up_and_queries_without_keys_do_not_count() -> None:
    pattern = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.3, 0.2]])
    reads = torch.tensor([[False, False, False], [True, True, False], [False, True, True]])
    torch.testing.assert_close(mean_weight(pattern, reads), torch.tensor((1.0 + 0.5) / 2))
    torch.testing.assert_close(mean_weight(torch.stack([pattern, 2 * pattern]), reads), torch.tensor([0.75, 1.5]))
