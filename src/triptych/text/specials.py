"""The special tokens of a vocabulary by their purpose, and how they are put around a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from triptych.arguments import checked_methods
from triptych.errors import TextError, shown


@checked_methods
@dataclass(frozen=True)
class Specials:
    """The texts of the special tokens a tokenizer has; `None` where it has none.

    The fields are named as for BERT, GPT and T5: begin and end of a text, padding, unknown, mask, classification and
    separator.
    """

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None
    mask: str | None = None
    cls: str | None = None
    sep: str | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Specials:
        """From the `bos_token`, `eos_token`, ... of a `tokenizer_config.json` or `special_tokens_map.json`.

        Raises TextError for one that is neither a text nor an object with its text under `content`.
        """
        return cls(**{f.name: _content(f"{f.name}_token", config.get(f"{f.name}_token")) for f in fields(cls)})

    def config(self) -> dict[str, str]:
        """The keys of `tokenizer_config.json` for the tokens that exist."""
        return {f"{name}_token": text for name, text in self.named().items()}

    def named(self) -> dict[str, str]:
        """Field name -> text of the tokens that exist, in the order of the fields."""
        return {f.name: text for f in fields(self) if (text := getattr(self, f.name)) is not None}


@checked_methods
@dataclass(frozen=True)
class SpecialsLayout:
    """The special tokens of a new vocabulary, and the field names of those put before and after each text."""

    specials: Specials
    before: str | None = None
    after: str | None = None

    def apply(self, backend: Backend) -> None:
        """Make `backend` put the tokens `before` and `after` around every text."""
        named = self.specials.named()
        surround(backend, self.before and named[self.before], self.after and named[self.after])


#: What a new decoder, encoder and encoder-decoder need.  The tokens are those of GPT, BERT and T5.
DECODER = SpecialsLayout(Specials(eos="<|endoftext|>"))
ENCODER = SpecialsLayout(
    Specials(pad="[PAD]", unk="[UNK]", mask="[MASK]", cls="[CLS]", sep="[SEP]"), before="cls", after="sep"
)
SEQ2SEQ = SpecialsLayout(Specials(pad="<pad>", eos="</s>", unk="<unk>"), after="eos")
#: What a new Whisper needs beside its tokens of the prompt; nothing is put around a transcript.
SPEECH = SpecialsLayout(Specials(pad="<pad>", eos="<|endoftext|>", unk="<unk>"))


def surround(backend: Backend, before: str | None, after: str | None) -> None:
    """Make `backend` put the special token `before` ahead of every text and `after` behind it.

    A second text has `after` behind it too, and is of token type 1, as in BERT.
    """
    single = [piece for piece in (before, "$A", after) if piece]
    second = [f"{piece}:1" for piece in ("$B", after) if piece]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(token, backend.token_to_id(token)) for token in (before, after) if token],
    )


def _content(key: str, token: object) -> str | None:
    """A token is written as its text, or as an object that has it under `content`."""
    if token is None:
        return None
    text: object = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise TextError(f"{key} is {shown(token)}, not a token; write its text")
    return text
