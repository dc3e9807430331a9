"""Heads and the whole model, as data.

The three layouts are one definition: an encoder, a decoder, or both, and a head.  They differ only by the masks of
their attention and by whether the blocks have cross-attention.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from triptych.errors import ConfigError, InputError
from .norms import Norm
from .part import Part, Shapes, check_fields, check_widths
from .parts import Activation, EmbedSpec, LinearSpec, StackSpec
from .positions import LearnedSpec


class TransformSpec(Part):
    """The transform of a head before its last matrix: `norm(act(dense(x)))`."""

    dense: LinearSpec
    act: Activation
    norm: Norm | None = None


class LMHeadSpec(Part):
    """Next-token logits: `softcap(proj(scale * transform(x)))`."""

    transform: TransformSpec | None = None
    proj: LinearSpec
    scale: float | None = None
    softcap: float | None = None


class MaskedLMHeadSpec(Part):
    """BERT's: the token at each place, `proj(transform(x))`."""

    transform: TransformSpec
    proj: LinearSpec


class ClassHeadSpec(Part):
    """One label a row, from its first token, its last, or their mean: `classes(transform(pooled))`."""

    pool: Literal["first", "last", "mean"] = "first"
    transform: TransformSpec | None = None
    classes: LinearSpec
    dropout: float = 0.0


class TokenHeadSpec(Part):
    """One label a token: `classes(transform(x))`."""

    transform: TransformSpec | None = None
    classes: LinearSpec
    dropout: float = 0.0


class SpanHeadSpec(Part):
    """Where an answer begins and where it ends, two scores a token: `ends(transform(x))`."""

    transform: TransformSpec | None = None
    ends: LinearSpec
    dropout: float = 0.0


class ReplacedHeadSpec(Part):
    """ELECTRA's (Clark et al. 2020): one score a token, above zero where it was put in another's place."""

    transform: TransformSpec
    proj: LinearSpec


class PoolingSpec(Part):
    """One vector a row: the mean of its tokens, its first token, or `act(dense(first))` (BERT's pooler).

    A `dense` that the mode does not use is carried so that the checkpoint stays whole.
    """

    mode: Literal["mean", "first", "dense"] = "mean"
    normalize: bool = False
    dense: LinearSpec | None = None
    act: Activation = "tanh"


Head = LMHeadSpec | MaskedLMHeadSpec | ClassHeadSpec | TokenHeadSpec | SpanHeadSpec | ReplacedHeadSpec | PoolingSpec


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Token ids with a meaning; `start` is what a decoder of an encoder-decoder begins with."""

    pad: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    start: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class ModelSpec(Part):
    """A whole transformer.

    `ties` maps an aliased parameter to the one it shares storage with; the alias has no tensor of its own.
    `context` is the longest row the positions were made for, None when they have no end.  `naming` tells
    checkpoints apart that call the same tensors by other names, in a family that has such.
    """

    family: str
    encoder: StackSpec | None = None
    decoder: StackSpec | None = None
    head: Head | None = None
    ties: dict[str, str] = field(default_factory=dict)
    ids: SpecialIds = SpecialIds()
    context: int | None = None
    naming: str = ""
    init_std: float = 0.02

    def _agree(self) -> None:
        if self.encoder is None and self.decoder is None:
            raise ConfigError("model: needs an encoder, a decoder or both")
        if self.encoder is not None and self.decoder is not None:
            for i, block in enumerate(self.decoder.blocks):
                if block.cross is None:
                    raise ConfigError("model: a decoder beside an encoder needs cross-attention in every block")
                for part in (block.cross.k, block.cross.v):
                    check_widths(f"decoder.blocks.{i}.cross", self.encoder.outputs, part)
        if self.head is not None:
            check_widths("head", (self.decoder or self.reads).outputs, *dict(self.head.walk()).values())
        if isinstance(self.head, LMHeadSpec | MaskedLMHeadSpec) and self.head.proj.outputs != self.vocab:
            raise ConfigError(f"head.proj: scores {self.head.proj.outputs} tokens of a vocabulary of {self.vocab}")
        known = super().shapes()
        for alias, source in self.ties.items():
            if known.get(alias) is None or known.get(alias) != known.get(source):
                raise ConfigError(
                    f"tie {alias} = {source}: shapes {known.get(alias)} and {known.get(source)} must be equal"
                )

    @property
    def layout(self) -> Literal["encoder", "decoder", "encoder-decoder"]:
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        return "encoder" if self.decoder is None else "decoder"

    def start_id(self) -> int:
        """The id that the decoder beside an encoder begins with.  Raises InputError where the config names none."""
        if self.ids.start is None:
            raise InputError(
                f"the config has no decoder_start_token_id below {self.vocab} for the decoder to begin with"
            )
        return self.ids.start

    @property
    def stacks(self) -> dict[str, StackSpec]:
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def reads(self) -> StackSpec:
        """The stack whose input slot the source enters: the encoder's where there is one."""
        return next(iter(self.stacks.values()))

    @property
    def source_vocab(self) -> int:
        """Of what is read first: an encoder-decoder's source, else the same as `vocab`; 0 for sound and images."""
        embed = self.reads.embed
        return embed.vocab if isinstance(embed, EmbedSpec) else 0

    @property
    def vocab(self) -> int:
        """V of the decoder, or of an encoder alone; 0 where none reads token ids."""
        embed = (self.decoder or self.reads).embed
        return embed.vocab if isinstance(embed, EmbedSpec) else 0

    @cached_property
    def source_context(self) -> int | None:
        """The longest row of the stack the source enters."""
        embed = self.reads.embed
        return self._longest(self.reads) if isinstance(embed, EmbedSpec) else embed.position.length

    @cached_property
    def longest_row(self) -> int | None:
        """The longest row of the decoder, or of an encoder alone; None when there is no end."""
        return self.source_context if self.decoder is None else self._longest(self.decoder)

    def _longest(self, stack: StackSpec) -> int | None:
        """`context`, or the length of the stack's learned table of positions where that is less or alone."""
        position, context = stack.embed.position, self.context
        if not isinstance(position, LearnedSpec):
            return context
        return position.length if context is None else min(context, position.length)

    def shapes(self) -> Shapes:
        """Every stored parameter, ties counted once."""
        return {name: shape for name, shape in super().shapes().items() if name not in self.ties}
