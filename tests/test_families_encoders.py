"""What the configs of encoders and encoder-decoders mean: leftovers of old files, two spellings of one thing."""

from typing import Any

import pytest

import references
import triptych
from references import CONTEXT, D, L, read, stored
from triptych import families, spec
from triptych.errors import ConfigError, InputError


def test_positions_of_roberta_begin_after_the_padding_id() -> None:
    for pad in (0, 1, 5):
        model = read("roberta", pad_token_id=pad)
        assert model.encoder.embed.position == spec.LearnedSpec(length=CONTEXT - pad - 1, width=D, offset=pad + 1)
        assert model.context == CONTEXT - pad - 1
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        read("roberta", max_position_embeddings=2)


@pytest.mark.parametrize(
    ("name", "decoder"), [("bert", "cls.predictions.decoder.bias"), ("roberta", "lm_head.decoder.bias")]
)
def test_a_masked_head_of_its_own_has_one_bias_under_two_names(name: str, decoder: str) -> None:
    hf, names = stored(f"{name}-untied")
    model = families.read_config(hf, stored=names)
    assert not model.ties
    spare = references.SPARE[name]
    plan = families.plan(model, "hf", names)
    assert plan.ignored.keys() == {spare}
    assert [load.source for load in plan.loads if load.ours == ("head.proj.bias",)] == [decoder]
    old = families.plan(model, "hf", names.keys() - {decoder})  # before transformers 5 the two were one
    assert [load.source for load in old.loads if load.ours == ("head.proj.bias",)] == [spare]
    written = [load.source for load in families.save_plan(model) if load.ours == ("head.proj.bias",)]
    assert sorted(written) == sorted([decoder, spare])


@pytest.mark.parametrize("name", ["bert", "roberta", "electra-generator"])
def test_a_tied_masked_head_stores_each_number_once(name: str) -> None:
    names = [load.source for load in families.save_plan(read(name))]
    assert len(names) == len(set(names)) == len(stored(name)[1])


def test_a_pooler_beside_a_head_that_does_not_read_it_is_left() -> None:
    for name, prefix in (("roberta", "roberta."), ("bert-tokens", "bert."), ("electra", "electra.")):
        names = stored(name)[1]
        plan = families.plan(
            read(name), "hf", names.keys() | {f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias"}
        )
        assert len(plan.ignored) == 2


def test_modernbert_configs_before_transformers_5() -> None:
    new, names = stored("modernbert")
    old = {key: value for key, value in new.items() if key not in ("layer_types", "rope_parameters")}
    old |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    old |= {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": True}
    model = families.read_config(new, stored=names)
    assert families.read_config(old, stored=names) == model
    stack = model.encoder
    assert [block.attn.kind for block in stack.blocks] == ["self", "window", "window"]
    assert stack.kinds["window"].mask == spec.window(4, ahead=3)
    assert stack.kinds["self"].position == spec.RopeSpec(width=4, theta=160_000.0)
    assert stack.kinds["window"].position == spec.RopeSpec(width=4, theta=10_000.0)
    turned = families.read_config(old | {"global_rope_theta": 8e4, "local_rope_theta": 7e3}, stored=names)
    assert turned.encoder.kinds["self"].position == spec.RopeSpec(width=4, theta=8e4)
    assert turned.encoder.kinds["window"].position == spec.RopeSpec(width=4, theta=7e3)
    with pytest.raises(ConfigError, match="layer_types must name"):
        read("modernbert", layer_types=["full_attention"] * (L - 1))
    with pytest.raises(ConfigError, match=r"'chunked_attention' .* is not understood"):
        read("modernbert", rope_parameters={**new["rope_parameters"], "chunked_attention": {}})


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("bart", {"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False}),
        ("mbart", {"normalize_before": True, "normalize_embedding": True, "add_final_layer_norm": True}),
        ("marian", {"normalize_before": False, "normalize_embedding": False, "static_position_embeddings": True}),
    ],
)
def test_old_configs_may_say_again_how_the_family_is_built(name: str, old: dict[str, bool]) -> None:
    more = {"add_bias_logits": False, "classif_dropout": 0.0, "num_hidden_layers": 2, "extra_pos_embeddings": 2}
    assert read(name, **old, **more) == read(name)
    for key, value in old.items():
        with pytest.raises(ConfigError, match=f"{key} is {str(not value).lower()}, which no {name} is"):
            read(name, **{key: not value})
    with pytest.raises(ConfigError, match="is_encoder_decoder is false"):
        read(name, is_encoder_decoder=False)


def test_bart_without_a_bias_of_the_logits() -> None:
    hf, names = stored("bart")
    model = families.read_config(hf, stored=names.keys() - {"final_logits_bias"})
    assert isinstance(model.head, spec.LMHeadSpec)
    assert not model.head.proj.bias
    assert families.plan(model, "hf", names.keys() - {"final_logits_bias"}).ignored == {}


def test_embeddings_of_bart_when_nothing_is_tied() -> None:
    hf, names = stored("bart-untied")
    assert families.read_config(hf, stored=names).ties == {}
    tables = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    old = families.read_config(
        hf, stored=names.keys() - tables
    )  # before transformers 5 both sides shared one all the same
    assert old.ties == {"decoder.embed.tokens.weight": "encoder.embed.tokens.weight"}
    assert not families.plan(old, "hf", names.keys() - tables).ignored


def test_vocabularies_of_marian() -> None:
    two = read("marian-two")
    assert (two.encoder.embed.vocab, two.vocab) == (references.V, references.V + 2)
    assert two.ties == {"head.proj.weight": "decoder.embed.tokens.weight"}
    assert read("marian-untied").ties == {}
    for change in ({"decoder_vocab_size": references.V + 2}, {"tie_word_embeddings": False}):
        with pytest.raises(ConfigError, match="share_encoder_decoder_embeddings"):
            read("marian", **change)


def test_mt5_scales_no_head() -> None:
    tied, published = read("mt5"), read("mt5-published")
    assert isinstance(tied.head, spec.LMHeadSpec)
    assert tied.head.scale is None
    assert "head.proj.weight" in tied.ties
    assert published.ties == {"decoder.embed.tokens.weight": "encoder.embed.tokens.weight"}
    assert published == read("mt5-published", tie_word_embeddings=False)  # as the files of 2020 say it


def test_source_and_target_are_checked_against_their_own_vocabularies() -> None:
    model = triptych.load(references.saved("marian-two")[1])
    last = references.V + 1
    assert model.logits([[5, 3]], [[0, last]])[0].shape == (2, references.V + 2)
    with pytest.raises(InputError, match=f"token id {last} is outside the vocabulary of {references.V}"):
        model.logits([[5, last]], [[0, 3]])


LEFT_BY_PRE_TRAINING = {
    "deberta.embeddings.position_embeddings.weight",
    *(f"mask_predictions.{leaf}" for leaf in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")),
    *(f"mask_predictions.classifier.{leaf}" for leaf in ("weight", "bias")),
}


def test_debertas_as_published() -> None:
    """Their configs name no class and no head; their files hold the heads of pre-training by the authors' names."""
    hf, tensors = stored("deberta-v3")
    names = set(tensors)
    theirs = {name for name in names if name.startswith("lm_predictions.")}
    published = {key: value for key, value in hf.items() if key not in ("architectures", "legacy")}
    bare = families.read_config(published | {"pos_att_type": "p2c|c2p"}, stored=names)
    assert isinstance(bare.head, spec.PoolingSpec)
    unread = families.plan(bare, "hf", names | LEFT_BY_PRE_TRAINING).ignored.keys()
    assert unread == theirs | LEFT_BY_PRE_TRAINING
    masked = families.read_config(published | {"architectures": ["DebertaV2ForMaskedLM"]}, stored=names)
    assert masked == read("deberta-v3")
    assert {load.source for load in families.save_plan(masked)} == names
    untold = families.read_config(hf | {"tie_word_embeddings": False}, stored=names)
    assert untold.ties == {"head.proj.weight": "encoder.embed.tokens.weight"}  # it has no matrix of its own


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deberta", {"pos_att_type": "c2p|p2p"}, "pos_att_type must name c2p, p2c or both, not 'c2p|p2p'"),
        ("deberta", {"pos_att_type": None}, "pos_att_type must name c2p, p2c or both, not None"),
        ("deberta", {"talking_head": True}, "talking_head is set: scores of different heads are mixed"),
        ("deberta", {"position_buckets": 6}, "'position_buckets' .* is not understood"),
        ("deberta-v2", {"norm_rel_ebd": "rms"}, "norm_rel_ebd 'rms' is not one of 'none', 'layer_norm'"),
        ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size 4 in 1 groups: odd ones in one group"),
        ("deberta-v2", {"conv_kernel_size": 3, "conv_groups": 2}, "conv_kernel_size 3 in 2 groups"),
        ("deberta-v2", {"position_buckets": 20}, "20 buckets of distances cannot tell those up to 9 apart"),
        ("deberta-v3", {"embedding_size": 15}, r"tie head\.proj\.weight"),
        ("deberta-v2-classes", {"pooler_hidden_size": 9}, "pooler_hidden_size must be hidden_size"),
    ],
)
def test_debertas_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(name, **changes)
    assert "\n" not in str(caught.value)
