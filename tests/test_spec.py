"""The spec by itself: masks by their definition, shapes and names, JSON both ways, refusals."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import references
from triptych import families, spec
from triptych.errors import ConfigError, InputError
from triptych.spec import positions
from triptych.spec.json import PARTS
from triptych.spec.masks import Mask, Points

T, S = 11, 13


def seen(mask: Mask, q: range | list[int] = range(T), k: range | list[int] = range(S), **more: Any) -> np.ndarray:
    """`[T, S]`: the mask by its own definition."""
    queries, keys = np.array(q)[:, None], np.array(k)[None, :]
    documents = {side: more.get(side) for side in ("q_documents", "k_documents")}
    shaped = {
        "q_documents": None if documents["q_documents"] is None else np.array(documents["q_documents"])[:, None],
        "k_documents": None if documents["k_documents"] is None else np.array(documents["k_documents"])[None, :],
    }
    found = mask.visible(
        Points(position=queries, document=shaped["q_documents"]), Points(position=keys, document=shaped["k_documents"])
    )
    return np.broadcast_to(found, (len(q), len(k)))


# ---------------------------------------------------------------- masks


def test_each_mask_by_a_loop() -> None:
    """Two nested loops over plain integers, written from the words of the design."""
    rules = {
        spec.full(): lambda q, k: True,
        spec.causal(): lambda q, k: k <= q,
        spec.window(4): lambda q, k: 0 <= q - k < 4,
        spec.window(4, ahead=2): lambda q, k: q - k < 4 and k - q <= 2,
        spec.prefix(3): lambda q, k: k < 3,
        spec.keys(5): lambda q, k: k < 5,
        spec.causal() | spec.prefix(3): lambda q, k: k <= q or k < 3,
        spec.causal() & spec.window(4) & spec.keys(6): lambda q, k: k <= q and q - k < 4 and k < 6,
        spec.block_sparse(3): lambda q, k: q // 3 == k // 3,
        spec.block_sparse(3, local=2): lambda q, k: abs(q // 3 - k // 3) < 2,
        spec.block_sparse(2, first=2): lambda q, k: q // 2 == k // 2 or k < 4,
        spec.block_sparse(2, every=3): lambda q, k: q // 2 == k // 2 or k // 2 in (2, 5),
        spec.block_sparse(1, powers=True): lambda q, k: abs(q - k) in (0, 1, 2, 4, 8, 16),
        spec.block_sparse(2, powers=True, first=1): lambda q, k: abs(q // 2 - k // 2) in (0, 1, 2, 4, 8) or k < 2,
    }
    for mask, rule in rules.items():
        expected = np.array([[rule(q, k) for k in range(S)] for q in range(T)])
        assert np.array_equal(seen(mask), expected), mask


def test_a_window_counts_the_query_itself() -> None:
    both = spec.causal() & spec.window(4)
    assert list(seen(both).sum(1)) == [min(q + 1, 4) for q in range(T)]
    assert list(seen(spec.window(1)).sum(1)) == [1] * T
    assert seen(spec.window(4, ahead=2))[6].nonzero()[0].tolist() == [3, 4, 5, 6, 7, 8]


def test_masks_follow_positions_and_not_places() -> None:
    shuffled = [5, 0, 9, 3]
    assert np.array_equal(seen(spec.causal(), k=shuffled), seen(spec.causal())[:, shuffled])
    assert np.array_equal(seen(spec.causal() & spec.window(3), q=[7, 8]), seen(spec.causal() & spec.window(3))[7:9])


def test_padding_blocks_a_whole_column() -> None:
    """The lectures' 4x4 causal mask, then with the last key padding."""
    four = range(4)
    assert np.array_equal(seen(spec.causal(), four, four), np.tril(np.ones((4, 4), bool)))
    padded = seen(spec.causal() & spec.keys(3), four, four)
    assert not padded[:, 3].any()
    assert np.array_equal(padded[:, :3], np.tril(np.ones((4, 3), bool)))


def test_documents() -> None:
    ids = [0, 0, 0, 1, 1]
    found = seen(spec.causal() & spec.same_document(), range(5), range(5), q_documents=ids, k_documents=ids)
    expected = [[q >= k and ids[q] == ids[k] for k in range(5)] for q in range(5)]
    assert found.tolist() == expected
    assert seen(spec.same_document()).all()  # one document a row when nothing says otherwise


def test_dense_is_what_it_is_given() -> None:
    array = np.random.default_rng(0).random((T, S)) < 0.5
    assert np.array_equal(seen(spec.dense(array) & spec.causal()), array & seen(spec.causal()))


# Recipes of masks as plain data: the checked constructors draw random numbers, which strategies may not.
ATOMS = st.one_of(
    st.sampled_from([("full",), ("causal",)]),
    st.tuples(st.just("window"), st.integers(1, 6), st.integers(0, 3)),
    st.tuples(st.sampled_from(["prefix", "keys"]), st.integers(0, 5)),
    st.tuples(st.just("block_sparse"), st.integers(1, 4)),
)
RECIPES = st.recursive(ATOMS, lambda inner: st.tuples(st.sampled_from(["&", "|"]), inner, inner), max_leaves=5)


def made(recipe: tuple[Any, ...]) -> Mask:
    name, *arguments = recipe
    if name in ("&", "|"):
        a, b = map(made, arguments)
        return a & b if name == "&" else a | b
    mask: Mask = getattr(spec, name)(*arguments)
    return mask


@given(RECIPES, RECIPES, RECIPES)
def test_the_algebra(one: tuple[Any, ...], two: tuple[Any, ...], three: tuple[Any, ...]) -> None:
    a, b, c = made(one), made(two), made(three)
    assert np.array_equal(seen(a & b), seen(a) & seen(b))
    assert np.array_equal(seen(a | b), seen(a) | seen(b))
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert a & a == a | a == a
    assert a & spec.full() == spec.full() & a == a
    assert a | spec.full() == spec.full()
    assert np.array_equal(seen(a & (b | c)), seen((a & b) | (a & c)))
    back = spec.from_json(json.loads(json.dumps(spec.to_json(a))))
    assert back == a
    assert hash(back) == hash(a)


@pytest.mark.parametrize(
    "make",
    [
        lambda: spec.window(0),
        lambda: spec.window(3, ahead=-1),
        lambda: spec.block_sparse(0),
        lambda: spec.block_sparse(2, local=0),
        lambda: spec.block_sparse(2, every=-1),
        lambda: spec.block_sparse(-2, powers=True),
    ],
)
def test_impossible_masks(make: Any) -> None:
    with pytest.raises(InputError, match=r"must be (>=|an integer of at least) "):
        make()


# ---------------------------------------------------------------- names and shapes


def stack(**changes: Any) -> spec.StackSpec:
    norm = spec.RMSNormSpec(width=6)
    block = spec.BlockSpec(
        attn=spec.attention(6, 4, kv_heads=2, head_width=5, value_width=7, bias=True, out_bias=False, sinks=True),
        mlp=spec.glu(6, 9, "silu"),
        attn_norm=spec.NormsSpec(pre=norm, out=norm),
        mlp_norm=spec.NormsSpec(post=spec.LayerNormSpec(width=6)),
    )
    embed = spec.EmbedSpec(
        vocab=11, width=6, position=spec.LearnedSpec(length=8, width=6, offset=2), token_types=3, norm=norm
    )
    kinds = {"self": spec.KindSpec(mask=spec.causal(), position=spec.T5BucketsSpec(heads=4, buckets=10))}
    parts: dict[str, Any] = {"embed": embed, "kinds": kinds, "blocks": (block, block), "final_norm": norm}
    return spec.StackSpec(**parts | changes)


def test_every_parameter_has_a_name_and_a_shape() -> None:
    model = spec.ModelSpec(
        family="x", decoder=stack(), head=spec.LMHeadSpec(proj=spec.LinearSpec(inputs=6, outputs=11))
    )
    shapes = model.shapes()
    block = "decoder.blocks.1"
    assert {name: shape for name, shape in shapes.items() if not name.startswith("decoder.blocks.0")} == {
        "decoder.embed.tokens.weight": (11, 6),
        "decoder.embed.token_types.weight": (3, 6),
        "decoder.embed.position.weight": (10, 6),
        "decoder.embed.norm.weight": (6,),
        "decoder.kinds.self.position.weight": (10, 4),
        f"{block}.attn.q.weight": (20, 6),
        f"{block}.attn.q.bias": (20,),
        f"{block}.attn.k.weight": (10, 6),
        f"{block}.attn.k.bias": (10,),
        f"{block}.attn.v.weight": (14, 6),
        f"{block}.attn.v.bias": (14,),
        f"{block}.attn.out.weight": (6, 28),
        f"{block}.attn.sinks": (4,),
        f"{block}.mlp.gate.weight": (9, 6),
        f"{block}.mlp.up.weight": (9, 6),
        f"{block}.mlp.down.weight": (6, 9),
        f"{block}.attn_norm.pre.weight": (6,),
        f"{block}.attn_norm.out.weight": (6,),
        f"{block}.mlp_norm.post.weight": (6,),
        f"{block}.mlp_norm.post.bias": (6,),
        "decoder.final_norm.weight": (6,),
        "head.proj.weight": (11, 6),
    }
    walked = {f"{name}.{leaf}" for name, part in model.walk() for leaf in part.tensors()}
    assert walked == set(shapes)


def test_a_tied_parameter_is_stored_once() -> None:
    head = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=6, outputs=11))
    tie = {"head.proj.weight": "decoder.embed.tokens.weight"}
    model = spec.ModelSpec(family="x", decoder=stack(), head=head, ties=tie)
    assert "head.proj.weight" not in model.shapes()
    assert model.vocab == 11
    for bad in ({"head.proj.weight": "decoder.final_norm.weight"}, {"head.proj.bias": "decoder.embed.tokens.weight"}):
        with pytest.raises(ConfigError, match=r"tie head\.proj"):
            replace(model, ties=bad)


def test_layouts() -> None:
    encoder = stack(kinds={"self": spec.KindSpec(mask=spec.full())})
    cross, norm = spec.attention(6, 2, kind="cross"), spec.RMSNormSpec(width=6)
    crossed = tuple(replace(b, cross=cross, cross_norm=spec.NormsSpec(pre=norm)) for b in stack().blocks)
    assert spec.ModelSpec(family="x", encoder=encoder).layout == "encoder"
    assert spec.ModelSpec(family="x", decoder=stack()).layout == "decoder"
    assert spec.ModelSpec(family="x", encoder=encoder, decoder=stack(blocks=crossed)).layout == "encoder-decoder"
    with pytest.raises(ConfigError, match="cross-attention in every block"):
        spec.ModelSpec(family="x", encoder=encoder, decoder=stack())
    with pytest.raises(ConfigError, match="needs an encoder"):
        spec.ModelSpec(family="x")


CANNOT_TELL = "buckets of distances cannot tell those up to 5"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec.attention(6, 4), "does not divide into 4 heads"),
        (lambda: spec.attention(6, 4, kv_heads=3, head_width=2), "do not divide into 3"),
        (lambda: spec.attention(6, 0), "0 heads"),
        (lambda: replace(spec.attention(6, 2), k=spec.LinearSpec(inputs=6, outputs=5)), "cannot share"),
        (lambda: replace(spec.attention(6, 2), out=spec.LinearSpec(inputs=5, outputs=6)), "out takes 5"),
        (
            lambda: spec.ParallelBlockSpec(
                attn=spec.attention(6, 2),
                mlp=spec.mlp(6, 9, "relu"),
                mlp_norm=spec.NormsSpec(post=spec.LayerNormSpec(width=6)),
            ),
            "no place",
        ),
        (lambda: spec.moe(6, 9, "silu", experts=2, top_k=3), "3 of 2 experts"),
        (lambda: replace(spec.moe(6, 9, "silu", experts=2, top_k=1), experts=3), "scores 2"),
        (lambda: replace(stack().blocks[0], cross=spec.attention(6, 2)), "cross and cross_norm come together"),
        (lambda: replace(stack().blocks[0], mlp=None), "mlp and mlp_norm come together"),
        (lambda: spec.DisentangledSpec(width=6, span=8, max_distance=5), f"8 {CANNOT_TELL}"),
        (lambda: spec.DisentangledSpec(width=6, span=1, max_distance=5), f"1 {CANNOT_TELL}"),
        (lambda: spec.DisentangledSpec(width=6, span=4, terms=()), "terms of distances must be c2p, p2c or both"),
        (lambda: stack(kinds={"other": spec.KindSpec(mask=spec.full())}), "'self' is not one of"),
    ],
)
def test_parts_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---------------------------------------------------------------- JSON


def test_every_part_goes_through_json() -> None:
    norm, line = spec.RMSNormSpec(width=6, offset=1.0), spec.LinearSpec(inputs=6, outputs=11, bias=True)
    examples = [
        stack(),
        spec.SinusoidalSpec(width=6, layout="halves"),
        spec.AlibiSpec(heads=3),
        spec.DisentangledSpec(width=6, span=4, max_distance=9, terms=("p2c",), norm=spec.LayerNormSpec(width=6)),
        *(
            spec.RopeSpec(width=4, pairing="interleaved", scaling=scaling)
            for scaling in (
                None,
                positions.Interpolate(factor=2.0),
                positions.NTK(factor=3.0),
                positions.YaRN(factor=4.0, original_length=9, truncate=False),
                positions.Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=9),
                positions.LongRope(short=(1.0, 1.5), long=(2.0, 2.5), original_length=9, max_length=18),
            )
        ),
        spec.MaskedLMHeadSpec(transform=spec.TransformSpec(dense=line, act="gelu", norm=norm), proj=line),
        spec.ClassHeadSpec(pool="mean", classes=line, dropout=0.1),
        spec.SpanHeadSpec(transform=spec.TransformSpec(dense=line, act="relu"), ends=line),
        spec.ReplacedHeadSpec(transform=spec.TransformSpec(dense=line, act="gelu"), proj=line),
        spec.TokenHeadSpec(classes=line),
        spec.PoolingSpec(mode="dense", normalize=True, dense=line),
        spec.LMHeadSpec(proj=line, scale=0.5, softcap=30.0),
        spec.NormsSpec(pre=norm, out=spec.ScaleSpec(factor=0.5)),
        spec.SpecialIds(pad=0, eos=(1, 2), start=3),
        spec.attention(6, 2, mechanism=spec.AdditiveSpec(width=3), scale=1.0),
        spec.attention(6, 2, mechanism=spec.LinearKernelSpec()),
        spec.FramesSpec(
            conv1=spec.ConvSpec(inputs=3, outputs=6, kernel=3),
            conv2=spec.ConvSpec(inputs=6, outputs=6, kernel=3, stride=2),
            position=spec.LearnedSpec(length=5, width=6),
        ),
        spec.PatchesSpec(
            channels=3, image=(8, 8), patch=4, width=6, position=spec.LearnedSpec(length=5, width=6), dropout=0.1
        ),
        spec.mlp(6, 9, "relu", dropout=0.1),
        replace(
            stack().blocks[0],
            branch=spec.BranchSpec(
                conv=spec.ConvSpec(inputs=6, outputs=6, kernel=3), act="tanh", norm=norm, dropout=0.1
            ),
        ),
        spec.ParallelBlockSpec(
            attn=spec.attention(6, 2), mlp=spec.moe(6, 5, "silu", experts=4, top_k=3, normalize=True), norm=norm
        ),
        spec.causal() & spec.window(3) | spec.prefix((1, 2)),
        spec.block_sparse(4, local=2) & spec.keys(3) & spec.same_document() | spec.full() & spec.causal(),
        spec.ModelSpec(family="x", decoder=stack(), ids=spec.SpecialIds(bos=1), naming="old"),
    ]
    used: set[str] = set()
    for example in examples:
        data = json.loads(json.dumps(spec.to_json(example)))
        used |= set(json.dumps(data).split('"part": "'))
        assert spec.from_json(data) == example
    written = {text.partition('"')[0] for text in used}
    made_on_the_way = {"Full", "Table"}  # the unit of `&`, and what Embed derives from its own fields
    assert PARTS.keys() - written <= made_on_the_way


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"part": "RMSNrom", "width": 3}, r"spec: unknown part 'RMSNrom' \(did you mean 'RMSNorm'\?\)"),
        ({"part": "RMSNorm", "wdith": 3}, r"RMSNorm has no field 'wdith' \(did you mean 'width'\?\)"),
        ({"part": "RMSNorm"}, "width"),
        ({"part": ["RMSNorm"]}, "unknown part"),
        ({"part": "Dense", "array": [[1]]}, "unknown part 'Dense'"),
        ({"part": "Points", "position": 1}, "unknown part 'Points'"),
        ({"part": "Kind", "mask": {"part": "Windw"}}, r"spec\.mask: unknown part"),
        ({"part": "And", "parts": [{"part": "Causal"}, {"part": "Nope"}]}, r"spec\.parts\.1: unknown part"),
    ],
)
def test_json_refusals_name_the_place(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec.from_json(data)


def test_a_dense_mask_has_no_json() -> None:
    with pytest.raises(ConfigError, match="Dense has no JSON form"):
        spec.to_json(spec.causal() & spec.dense(np.ones((2, 3), bool)))


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "bert", "t5-gated"])
def test_specs_of_families_are_their_json(name: str) -> None:
    hf = json.loads((references.saved(name)[1] / "config.json").read_text())
    model = families.read_config(hf)
    assert spec.from_json(json.loads(json.dumps(spec.to_json(model)))) == model


def test_widths_that_do_not_meet_are_named(unchecked: None) -> None:
    """Not in the forward, with a shape error of torch: where the spec is made."""
    good = stack()
    wrong = replace(good.blocks[0], mlp=spec.mlp(good.width + 1, 9, "relu"))
    with pytest.raises(
        ConfigError, match=r"blocks\.0\.mlp: reads \d+ and writes \d+ numbers a token, in a stack of width"
    ):
        replace(good, blocks=(wrong,))
    with pytest.raises(ConfigError, match="act='swiglu' must be 'relu' or"):
        spec.mlp(8, 9, "swiglu")
