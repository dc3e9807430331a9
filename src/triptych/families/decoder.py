"""Parts that decoder-only families share: layers with a window, what stands around blocks, the model of a stack."""

from collections.abc import Callable, Mapping, Sequence

from triptych import spec
from triptych.mapping import ConfigKeys
from triptych.spec.norms import Norm
from triptych.spec.positions import Absolute, PositionSpec

Windows = Sequence[int | None]  # how many keys each layer sees, None for all


def windows(keys: ConfigKeys, size: int | None, slides: Callable[[int], bool]) -> Windows:
    """The window of each layer, by `layer_types`; without that key, `size` where `slides(layer)`."""
    layers = keys.count("num_hidden_layers")
    if keys.get("layer_types", None) is None:
        return [size if slides(i) else None for i in range(layers)]
    types = keys.strings("layer_types")
    known = {"full_attention": None, "sliding_attention": size}
    if len(types) != layers or not set(types) <= known.keys() or ("sliding_attention" in types and size is None):
        raise keys.error(
            f"layer_types must name full_attention or, with a sliding_window, sliding_attention {layers} times"
        )
    return [known[name] for name in types]


def stack(
    keys: ConfigKeys,
    blocks: Sequence[spec.BlockSpec | spec.ParallelBlockSpec],
    norm: Norm,
    position: PositionSpec | Absolute | None = None,
    *,
    kinds: dict[str, spec.KindSpec] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> spec.StackSpec:
    """Blocks between an embedding, with this `scale` and `dropout`, and a last norm.  Without `kinds` every token sees
    those before it, and `position` is that of all layers, or of the embedding."""
    absolute = position if isinstance(position, Absolute) else None
    relative = None if isinstance(position, Absolute) else position
    width = blocks[0].attn.out.outputs
    return spec.StackSpec(
        embed=spec.EmbedSpec(
            vocab=keys.int("vocab_size"), width=width, position=absolute, scale=scale, dropout=dropout
        ),
        kinds=kinds or {"self": spec.KindSpec(mask=spec.causal(), position=relative)},
        blocks=tuple(blocks),
        final_norm=norm,
    )


def kind(size: int | None, windows: Windows) -> str:
    """The name of a layer's kind: `self`, or `window` in a model where only some layers have one."""
    return "self" if size is None or None not in windows else "window"


def model(
    keys: ConfigKeys,
    name: str | Mapping[str, bool],
    stack: spec.StackSpec,
    *,
    context: int | None = None,
    tied: bool = False,
    bias: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> spec.ModelSpec:
    """The model of class `{name}ForCausalLM`, or without its head of `{name}Model`.  `name` may be a table of the
    classes, the default first, and of whether each has the head.

    `context` is `max_position_embeddings` when None, `tied` the default of `tie_word_embeddings`; `bias`, `scale` and
    `softcap` are the head's.
    """
    vocab = stack.words.vocab
    classes = {f"{name}ForCausalLM": True, f"{name}Model": False} if isinstance(name, str) else name
    lm = keys.architecture(classes, default=next(iter(classes)))
    tied = keys.bool("tie_word_embeddings", default=tied) and lm
    proj = spec.LinearSpec(inputs=stack.width, outputs=vocab, bias=bias)
    return spec.ModelSpec(
        family=keys.str("model_type"),
        decoder=stack,
        head=spec.LMHeadSpec(proj=proj, scale=scale, softcap=softcap) if lm else None,
        ties={"head.proj.weight": "decoder.embed.tokens.weight"} if tied else {},
        ids=keys.special_ids(vocab),
        context=context or keys.int("max_position_embeddings"),
        init_std=keys.float("initializer_range", default=0.02),
    )
