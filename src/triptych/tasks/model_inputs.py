"""Converts texts, token ids, audio and images to the rows a model reads.

`sentences` cuts texts that are too long, and `windows` splits them; elsewhere `Transformer.forward` refuses a row that
is longer than the model's context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.arguments import check_ids, integer, listed, readable
from triptych.checkpoints import read_json
from triptych.checkpoints.header import KEY, SentenceSettings
from triptych.errors import InputError, TextError, shown
from triptych.generate import Executor, Generation
from triptych.media import audio
from triptych.media.image import Preparation, read_image
from triptych.nn import InputRow, Transformer
from triptych.probe import Trace
from triptych.spec import EmbedSpec, FramesSpec, ModelSpec, PatchesSpec
from triptych.text import Encoded, RenderedPrompt, Tokenizer

WINDOW = 384  # tokens of a question with its context, unless the model reads fewer
Texts = (
    Sequence[str | RenderedPrompt | Sequence[int] | Tensor | NDArray[Any] | Path]
    | Tensor
    | NDArray[Any]
    | Mapping[str, Any]
)
"""Rows to read: texts or token ids, `[B, T]` tensors, or what a transformers tokenizer returns (`input_ids` with
`attention_mask`); for other models files, frames of sound `[T, M]` or pixels `[C, H, W]`."""


@dataclass(frozen=True)
class ModelInputs:
    """The input slot of the spec says what a model reads; its tokenizer and the files in `path` say how to make it."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    path: Path | None
    hf: Mapping[str, Any] = field(default_factory=dict)  # the config with Hugging Face's keys

    def rows(self, inputs: Texts, mask: Tensor | None = None) -> Sequence[InputRow]:
        """The rows the model reads: the ids of texts; or frames and pixels, of files or as they are."""
        if self.reads_text:
            return self.ids(inputs, mask)
        if mask is not None:
            raise InputError("a mask is for token ids; give frames or images as a list, each of its own length")
        return self._files(inputs)

    def ids(self, texts: Texts, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]:
        """Token ids of each row: texts through the tokenizer, lists as they are, `[B, T]` tensors and tokenizer outputs
        without what their mask hides.

        `target` rows are for the decoder beside an encoder.  Raises InputError for ids outside the vocabulary, and for
        a rectangular tensor that may hold padding and comes without a mask.
        """
        if isinstance(texts, Mapping):
            texts, mask = _tokenizer_output(texts, mask)
        if isinstance(texts, np.ndarray) and texts.dtype.kind not in "biu":
            texts = texts.tolist()
        if isinstance(texts, str):
            raise InputError("give a list of texts, not one string: [text]")
        if isinstance(texts, Tensor | np.ndarray):
            texts = _rectangle(texts)
        elif not isinstance(texts, Sequence):
            raise InputError(f"rows must be a list of texts or of lists of token ids, not {type(texts).__name__}")
        if not len(texts):
            raise InputError("there are no rows; give at least one text or one list of token ids")
        vocab = self.spec.vocab if target else self.spec.source_vocab
        if isinstance(texts, Tensor) or mask is not None:
            if any(isinstance(row, str) for row in texts):
                raise InputError("a mask is for padded rows of ids; texts have no padding, so leave it out")
            texts = self.unpadded(texts, mask)
        words = [row for row in texts if isinstance(row, str)]
        encoded = iter(self.words.encode_batch(words) if words else ())  # by several threads
        return [
            check_ids(next(encoded), vocab, f"row {i}: the tokenizer's ids")
            if isinstance(row, str)
            else self._row(i, row, vocab)
            for i, row in enumerate(texts)
        ]

    def prompts(self, prompts: Texts, prefix: str | Sequence[int]) -> tuple[list[list[int]], Sequence[InputRow] | None]:
        """The ids that the decoder continues, and the sources beside it: None for a decoder alone.

        `prefix` is what a decoder beside an encoder continues, after its start token.
        """
        if self.spec.layout != "encoder-decoder":
            if prefix:
                raise InputError("decoder_prefix is for encoder-decoders; put it at the end of the prompt")
            self._check_text()
            return self.ids(prompts), None
        start = self.spec.start_id()
        ids = self.words.encode(prefix, special=False) if isinstance(prefix, str) else prefix
        head = check_ids(ids, self.spec.vocab, "decoder_prefix")
        sources = self.rows(prompts)
        return [[start, *head] for _ in sources], sources

    @property
    def sentence_settings(self) -> SentenceSettings:
        """The checkpoint's settings for texts whose vectors are compared."""
        return SentenceSettings.of(self.hf.get(KEY, {}), f"{self.path or 'config'}: {KEY}")

    def sentences(self, texts: Texts, *, cut: bool = True) -> Sequence[InputRow]:
        """The rows of `texts` as sentence-transformers prepares them; without `cut` long ones are refused."""
        settings = self.sentence_settings
        if settings == SentenceSettings() or isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray):
            return self.rows(texts)
        if settings.do_lower_case:
            texts = [text.lower() if isinstance(text, str) else text for text in texts]
        around = self.words.encode("")
        rows = zip(texts, self.ids(texts), strict=True)
        return [settings.truncated(ids, around, cut=cut) if isinstance(text, str) else ids for text, ids in rows]

    def render(self, messages: Sequence[Mapping[str, str]]) -> RenderedPrompt:
        """The prompt that the chat template renders of `messages`, with the assistant's turn opened.

        Raises TextError without a chat template, InputError for anything but messages.
        """
        template = self.words.chat
        if template is None:
            name = self.path or "this model"
            raise TextError(f"{name} has no chat template; use generate(), or triptych generate on the command line")
        every = list(messages) if isinstance(messages, Sequence) else []
        if not every or not all(map(_is_message, every)):
            raise InputError(
                f'messages must be a list of {{"role": ..., "content": ...}} with texts, not {shown(messages)}'
            )
        return template.render([dict(message) for message in messages], add_generation_prompt=True)

    def labelled(self, inputs: Texts, second: Sequence[str] | None = None) -> Sequence[Encoded | Tensor]:
        """Rows for a head over classes: texts, pairs of them where there is a `second`, or images."""
        if not self.reads_text:
            if second is not None:
                raise InputError(f"second= is for pairs of texts, and this {self.spec.family} model reads images")
            return self._files(inputs)
        if second is None:
            return [Encoded(ids, [0] * len(ids), [], []) for ids in self.ids(inputs)]
        firsts = _strings(inputs)
        if isinstance(second, str) or len(second) != len(firsts):
            raise InputError(f"second= must be a list with one text for each of the {len(firsts)} rows")
        return [self._encoded(*pair)[0] for pair in zip(firsts, second, strict=True)]

    def placed(self, texts: Texts) -> list[Encoded]:
        """Texts with the place of each token in them.  Raises InputError for anything but a list of texts."""
        return [self._encoded(text)[0] for text in _strings(texts)]

    def windows(
        self, question: str, context: str, window: int | None = None, overlap: int | None = None
    ) -> list[Encoded]:
        """The question beside its context: in rows of at most `window` tokens that share `overlap` tokens of the
        context, where this is longer.

        A window has 384 tokens unless given, or what the model reads, and the overlap is 128, but at most half of a
        window and half of the context in it (as in transformers 4, where it is `doc_stride`).

        Raises InputError for a question that leaves no room, and for numbers out of range.
        """
        for name, text in (("question", question), ("context", context)):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"the {name} has no tokens to answer {'with' if name == 'context' else 'it'}")
        limit = self._window(window, WINDOW)
        needed = len(self.ids([question])[0]) + 2  # the question and the separators around the context
        if needed >= limit:
            raise InputError(f"the question needs {needed} of a window's {limit} positions; shorten it, or widen that")
        shared = min(128, limit // 2, (limit - needed) // 2) if overlap is None else integer("overlap", overlap, 0)
        return self._encoded(question, context, max_length=limit, overlap=shared)

    def text_windows(self, text: str, window: int | None = None, overlap: int | None = None) -> list[Encoded]:
        """A text with the place of each token in it, in rows of at most `window` tokens that share `overlap` tokens
        where it is longer; by default as many as the model reads, and a quarter of that.

        Raises InputError for numbers out of range.
        """
        limit = self._window(window)
        shared = limit // 4 if overlap is None else integer("overlap", overlap, 0)
        return self._encoded(*_strings([text]), max_length=limit, overlap=shared)

    def _window(self, window: int | None, default: int = 1 << 30) -> int:
        """Tokens of a window.  Raises InputError for more than the model reads at once."""
        most = 1 << 30 if self.spec.context is None else self.spec.context
        if window is None:
            return min(most, default)
        if integer("window", window, 1) > most:
            raise InputError(f"window={window}, and the model reads at most {most} tokens at once")
        return window

    @property
    def reads_text(self) -> bool:
        """Whether the model reads token ids, not sound or images."""
        return isinstance(self.spec.reads.embed, EmbedSpec)

    @property
    def words(self) -> Tokenizer:
        """The tokenizer.  Raises TextError where there is none."""
        self._check_text()
        if not isinstance(self.tokenizer, Tokenizer):
            raise TextError(f"{self.path or 'this model'} has no tokenizer; give token ids")
        return self.tokenizer

    def _check_text(self) -> None:
        if self.spec.decoder is None and not self.reads_text:
            raise InputError(f"a {self.spec.family} encoder reads and writes no text; use classify() or encode()")

    def generation_config(self) -> dict[str, Any]:
        """The settings of generation in the files: the generation config, and the config where older ones keep it."""
        return {**self.hf, **self.side_file("generation_config.json")}

    def side_file(self, name: str) -> dict[str, Any]:
        """A small JSON file beside the weights, empty where there is none."""
        file = None if self.path is None else self.path / name
        return read_json(file) if file is not None and file.is_file() else {}

    def _encoded(
        self, text: str, second: str | None = None, *, max_length: int | None = None, overlap: int = 0
    ) -> list[Encoded]:
        """The rows of a text or a pair, of which longer ones are divided."""
        rows = self.words.encode_with_offsets(text, second, max_length=max_length, overlap=overlap)
        for row in rows:
            check_ids(row.ids, self.spec.source_vocab, "the tokenizer's ids")
        return rows

    def _row(self, i: int, row: object, vocab: int) -> list[int]:
        if isinstance(row, RenderedPrompt):
            return check_ids(self.words.encode(row), vocab, f"row {i}: the tokenizer's ids")
        if isinstance(row, bytes | bytearray | memoryview):  # whose items are integers, and no ids
            raise InputError(f"row {i} is bytes; decode them to a text first: row.decode()")
        if isinstance(row, Path) or (isinstance(row, Tensor) and row.is_floating_point()):
            raise InputError(f"row {i}: this model reads texts or token ids, not what this {type(row).__name__} holds")
        if isinstance(row, Mapping) and "role" in row:
            raise InputError(f"row {i} is a message; model.chat(messages) answers it")
        if isinstance(row, Sequence) and row and isinstance(row[0], str):
            raise InputError(f"row {i} is a list of texts; give one text in its place, not a list")
        if not isinstance(row, Iterable) or not getattr(row, "ndim", 1):
            raise InputError(f"row {i} is {shown(row)}, not a text or a list of token ids; give rows as [[5, 6, 7]]")
        return check_ids(row, vocab, f"row {i}")

    def unpadded(self, values: object, mask: Tensor | None, what: str = "ids") -> list[list[int]]:
        """The rows of ids, or of labels, `[B, T]` without those that `mask` hides.

        Raises InputError for what is no such rectangle or mask, and for ids that may be padding without a mask.
        """
        ids = _rectangle(values, what)
        if mask is not None:
            mask = _rectangle(mask, "mask")
            if mask.shape != ids.shape:
                raise InputError(f"mask is {list(mask.shape)} and {what} are {list(ids.shape)}")
            return _kept(ids.tolist(), mask.tolist())
        if what == "ids" and (n := self._padding(ids)):
            raise InputError(
                f"{n} of {ids.numel()} ids are the pad id {self.spec.ids.pad} and no mask was given; pass mask=, or "
                "rows as lists"
            )
        return list(ids.tolist())

    def _padding(self, ids: Tensor) -> int:
        """The number of ids that may be padding.

        Where the pad id also ends a text, a row may end (or begin) with one: padding to the longest row leaves at least
        one row without any, so the rows are whole if all of them end alike, with no more than one.
        """
        pad = self.spec.ids.pad
        if pad is None:
            return 0
        counted = ids[:, 1:] if pad == self.spec.ids.start else ids
        is_pad = counted == pad
        if pad in self.spec.ids.eos and ids.shape[1]:
            edges = [side.int().cumprod(1).sum(1) for side in (is_pad, is_pad.flip(1))]  # runs at each end of the rows
            if all(int(run.max()) <= 1 and int(run.min()) == int(run.max()) for run in edges):
                return 0
        return int(is_pad.sum())

    def _files(self, inputs: Any) -> list[Any]:
        """Frames and pixels: a path is opened, anything else is left for the input part to check."""
        if isinstance(inputs, str | Path):
            raise InputError(f"give a list of files or tensors, not one: [{str(inputs)!r}]")
        if not isinstance(inputs, Sequence | Tensor):
            raise InputError(f"rows must be a list of files or tensors, not {type(inputs).__name__}")
        if not len(inputs):
            raise InputError("there are no rows; give at least one file or tensor")
        what = "pixels [C, H, W]" if isinstance(self.spec.reads.embed, PatchesSpec) else "mel frames [T, M]"
        for i, row in enumerate(inputs):
            if not isinstance(row, str | Path | Tensor):
                raise InputError(
                    f"row {i}: this model reads files, or {what} as a float tensor, not {type(row).__name__}"
                )
        return [self._opened(row) if isinstance(row, str | Path) else row for row in inputs]

    def _opened(self, path: str | Path) -> Tensor:
        """A WAV file as one window of frames [T, M], or an image as pixels [C, H, W]."""
        slot = self.spec.reads.embed
        if isinstance(slot, PatchesSpec):
            how = Preparation.of(self.side_file("preprocessor_config.json"), slot.image)
            return torch.from_numpy(read_image(path, how))
        assert isinstance(slot, FramesSpec)
        window = slot.stride * slot.position.length
        frames = audio.log_mel(audio.padded(audio.read_wav(path), window), slot.conv1.inputs)
        if len(frames) > window:
            seconds = window * audio.HOP / audio.RATE
            raise InputError(f"{path} is longer than the {seconds:g} s this model reads at once; use transcribe()")
        return torch.from_numpy(frames)


def _tokenizer_output(output: Mapping[str, Any], mask: Tensor | None) -> tuple[Any, Any]:
    """`input_ids` and `attention_mask` of a transformers tokenizer."""
    if "input_ids" not in output:
        raise InputError(
            f"a mapping must have input_ids, as a transformers tokenizer returns it, not {shown(list(output))}; give a "
            "list of texts"
        )
    if more := output.keys() & {"position_ids", "inputs_embeds", "decoder_input_ids"}:
        raise InputError(f"{min(more)} cannot be given here; give input_ids, and attention_mask where they are padded")
    if "labels" in output:
        raise InputError("labels are not rows; give them as model.loss(input_ids, labels=..., mask=attention_mask)")
    types = output.get("token_type_ids")
    if types is not None and any(any(row) for row in _rows(types, "token_type_ids")):
        raise InputError("pairs of texts (token_type_ids) cannot be read here; use classify(texts, second=...)")
    own = output.get("attention_mask")
    if own is not None and mask is not None:
        raise InputError("there are two masks; give mask= or attention_mask, not both")
    ids = output["input_ids"]
    if isinstance(ids, Sequence):  # rows of any length, from a tokenizer without return_tensors
        rows = _rows(ids, "input_ids")
        masks = [[1] * len(row) for row in rows] if own is None else _rows(own, "attention_mask")
        if list(map(len, rows)) != list(map(len, masks)):
            raise InputError("attention_mask and input_ids are of different shapes")
        return _kept(rows, masks), mask
    return ids, mask if own is None else own


def _rows(values: object, what: str) -> list[list[Any]]:
    try:
        return [list(listed(row, what)) for row in listed(values, what)]
    except InputError:
        problem = f"{what} must hold a list of ids for each text, not {shown(values)}"
        raise InputError(f"{problem}; give the tokenizer a list of texts") from None


def _kept(rows: Sequence[Sequence[Any]], masks: Sequence[Sequence[object]]) -> list[list[Any]]:
    """The ids that are not hidden.  Raises InputError for a mask of other values than 0 and 1."""
    if any(flag not in (0, 1) for mask in masks for flag in mask):
        raise InputError("a mask is of 0 and 1, 1 for each id that counts, and this one has other values")
    return [list(compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]


def _is_message(message: object) -> bool:
    """Whether this is a message of one text, or of none where it has more, as the calls of tools."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or (len(message) > 2 and message.get("content", 0) is None)


def _rectangle(ids: Any, what: str = "ids") -> Tensor:
    """A `[B, T]` tensor of integers.  Raises InputError for anything else."""
    readable(ids, what)
    try:
        if isinstance(ids, np.ndarray):  # in any order of its bytes and rows
            ids = ids.astype(ids.dtype.newbyteorder("="), order="C")
        tensor = ids if isinstance(ids, Tensor) else torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{what} must be an integer tensor [B, T], not {shown(ids)}") from None
    boolean = tensor.dtype == torch.bool and what != "mask"
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex() or boolean:
        raise InputError(f"{what} must be an integer tensor [B, T], not {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _strings(texts: Texts) -> Sequence[str]:
    """Raises InputError for anything but a list of texts: places in a text need the text itself."""
    strings = [text for text in texts if isinstance(text, str)] if isinstance(texts, Sequence) else []
    if isinstance(texts, str) or not strings or len(strings) != len(texts):
        raise InputError("give a list of texts: [text]")
    return strings


@runtime_checkable
class TaskModel(Protocol):
    """The part of a `triptych.Model` that the tasks, which are its methods, need."""

    module: Transformer
    tokenizer: Tokenizer | None
    executor: Executor

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def inputs(self) -> ModelInputs: ...
    @property
    def labels(self) -> list[str]: ...
    @property
    def generate(self) -> Callable[..., list[Generation]]: ...
    @property
    def trace(self) -> Callable[..., Trace]: ...
    def check_words(self, what: str) -> None: ...
