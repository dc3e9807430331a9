"""`load` a checkpoint, `create` a new model, and the `Model` that carries either: thin methods over the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych import audio, families, nn
from triptych import generate as running
from triptych.checkpoints import LoadReport, open_source, read_json, write_directory
from triptych.errors import InputError, TextError
from triptych.header import read_header
from triptych.image import Preparation, read_image
from triptych.nn import Row
from triptych.probe import Edit, Plan, Read, Session, Trace
from triptych.spec import ClassHead, Embed, Frames, Patches, Pooling, TokenHead
from triptych.spec import Model as Spec
from triptych.text import Encoded, RenderedPrompt, Tokenizer
from triptych.weights import read_weights, to_checkpoint

# How a checkpoint is used, which no config says: it travels with the weights.
BESIDE = ("generation_config.json", "preprocessor_config.json")

Texts = Sequence[str | RenderedPrompt | Sequence[int] | Tensor | Path] | Tensor
"""Rows to read: texts or token ids; for other models files, frames of sound `[T, M]` or pixels `[C, H, W]`."""


@dataclass(frozen=True)
class Generation:
    """What one prompt became: the new `text` and `ids`, why it ended, and the trace of the whole batch if asked."""

    text: str
    ids: list[int]
    reason: str  # "end", "stop" or "length"
    trace: Trace | None = None


class Model:
    """A module with what belongs to it: its spec, its tokenizer, and the config it is written back with."""

    def __init__(
        self,
        module: nn.Transformer,
        tokenizer: Tokenizer | None = None,
        hf: dict[str, Any] | None = None,
        path: Path | None = None,
        report: LoadReport | None = None,
    ) -> None:
        self.module, self.tokenizer, self.hf = module, tokenizer, hf
        self.path, self.report = path, report

    @property
    def spec(self) -> Spec:
        return self.module.spec

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.module.parameters())
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        return (
            f"Model({self.spec.family} {self.spec.layout}, {size:,} parameters, {dtype}, from {self.path or 'memory'})"
        )

    def ids(self, texts: Texts, mask: Tensor | None = None, *, target: bool = False) -> list[list[int]]:
        """Token ids of each row: texts through the tokenizer, lists as they are, `[B, T]` tensors by their mask.

        `target` rows are for the decoder beside an encoder.  Raises InputError for a rectangular tensor that holds the
        pad id and comes without a mask.
        """
        if isinstance(texts, str):
            raise InputError("give a list of texts, not one string: [text]")
        vocab = self.spec.vocab if target else self.spec.source_vocab
        if isinstance(texts, Tensor):
            return self._unpadded(texts, mask, vocab)
        return [self._row(i, row, vocab) for i, row in enumerate(texts)]

    def source(self, rows: Texts, mask: Tensor | None = None) -> Sequence[Row]:
        """The rows the model reads: the ids of texts; or frames and pixels, of files or as they are."""
        if isinstance(self.spec.reads.embed, Embed):
            return self.ids(rows, mask)
        if mask is not None:
            raise InputError("a mask is for token ids; give frames or images as a list, each of its own length")
        return self._files(rows)

    def _files(self, rows: Any) -> list[Any]:
        """Frames and pixels: what stands under a path opened, the rest as it is, for the input part to judge."""
        if isinstance(rows, str | Path):
            raise InputError(f"give a list of files or tensors, not one: [{str(rows)!r}]")
        return [self._opened(row) if isinstance(row, str | Path) else row for row in rows]

    def check_words(self, what: str) -> None:
        """Raise InputError where the model reads sound or images and `what` needs words."""
        if not isinstance(self.spec.reads.embed, Embed):
            raise InputError(f"{what} is through the words of a text, and this {self.spec.family} model reads none")

    def _opened(self, path: str | Path) -> Tensor:
        """A WAV file as one window of frames [T, M], or an image as pixels [C, H, W]."""
        slot = self.spec.reads.embed
        if isinstance(slot, Patches):
            how = Preparation.of(self._told("preprocessor_config.json"), slot.image)
            return torch.from_numpy(read_image(path, how))
        assert isinstance(slot, Frames)
        window = slot.stride * slot.position.length
        frames = audio.log_mel(audio.padded(audio.read_wav(path), window), slot.conv1.inputs)
        if len(frames) > window:
            seconds = window * audio.HOP / audio.RATE
            raise InputError(f"{path}: is longer than the {seconds:g} s this model hears at once; use transcribe()")
        return torch.from_numpy(frames)

    @torch.inference_mode()
    def logits(
        self,
        rows: Texts,
        target: Texts | None = None,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """One uncached pass: `[T_i, V]` a row.  Encoder-decoders take the source, then the decoder's rows."""
        return self._forward(rows, target, mask, target_mask, nn.NO_TAPS)

    def trace(
        self,
        rows: Texts,
        target: Texts | None = None,
        *,
        read: Sequence[Read | str] = (),
        edit: Sequence[Edit] = (),
        max_bytes: int = 1 << 30,
    ) -> Trace:
        """One uncached pass that keeps what `read` names and applies `edit`; the logits are in `.logits`.

        Raises ProbeError for unknown sites, reads of more than `max_bytes`, reads that never fired and edits that
        changed nothing.
        """
        plan = Plan.of(self.spec, read, edit)
        first = self.source(rows)
        second = None if target is None else self.ids(target, target=True)
        read_from = [self.module.length(row) for row in first]
        lengths, sources = (read_from, []) if second is None else ([len(row) for row in second], read_from)
        plan.check_bytes(lengths, sources, max_bytes)
        session = Session(plan)
        wants_grad = any(r.grad for reads in plan.reads.values() for r in reads)
        with torch.set_grad_enabled(wants_grad):
            session.trace.logits = self._forward(first, second, None, None, session.taps)
        return session.close()

    def generate(
        self,
        prompts: Texts,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        decoder_prefix: str | Sequence[int] = (),
        beams: int = 0,
        length_penalty: float = 1.0,
        chunk: int | None = None,
        read: Sequence[Read | str] = (),
        edit: Sequence[Edit] = (),
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Continue each prompt (or, for an encoder-decoder, write the target of each source).

        `temperature=0` is greedy and ignores the other sampling settings but the repetition penalty.  `beams` above 0
        searches instead of sampling.  `chunk` runs prompts that many tokens at a time.  `on_token(row, id)` is called
        for every token as it comes.  Raises InputError for an empty or over-long prompt.
        """
        session = Session(Plan.of(self.spec, read, edit)) if read or edit else None
        rows, sources = self._prompts(prompts, decoder_prefix)
        state = running.start(self.module, rows, sources=sources, session=session)
        if beams:
            if session is not None:
                raise InputError("beams and probes do not go together: a hypothesis may be dropped after it was read")
            found = running.beam_search(
                state, beams=beams, max_new_tokens=max_new_tokens, eos=self.end_ids, length_penalty=length_penalty
            )
            return [self._generation(best[0].tokens, stop, None) for best in found]
        how = running.Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed,
        )  # fmt: skip
        new: list[list[int]] = [[] for _ in rows]
        ended = (lambda _, ids: self._cut(ids, stop) is not None) if stop else None
        steps = running.stream(
            state, max_new_tokens=max_new_tokens, sampling=how, eos=self.end_ids, stop=ended, chunk=chunk
        )
        for step in steps:
            for request, token in step:
                new[request].append(token)
                if on_token is not None:
                    on_token(request, token)
        trace = None if session is None else session.close()
        return [self._generation(ids, stop, trace) for ids in new]

    def stream(
        self,
        prompt: str | RenderedPrompt | Sequence[int] | Tensor,
        *,
        on_token: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The text of one generation, piece by piece as it becomes certain; options as in `generate`."""
        tokenizer, stop = self._tokenizer(), options.pop("stop", ())
        max_new_tokens, chunk = options.pop("max_new_tokens", 64), options.pop("chunk", None)
        rows, sources = self._prompts([prompt], options.pop("decoder_prefix", ()))
        state = running.start(self.module, rows, sources=sources)
        ended = (lambda _, ids: self._cut(ids, stop) is not None) if stop else None
        steps = running.stream(
            state,
            max_new_tokens=max_new_tokens,
            sampling=running.Sampling(**options),
            eos=self.end_ids,
            stop=ended,
            chunk=chunk,
        )
        held, shown, pieces = "", 0, tokenizer.stream()
        longest = max((len(s) for s in stop), default=0)
        for step in steps:
            token = step[0][1]
            if on_token is not None:
                on_token(0, token)
            if token in self.end_ids:
                break
            held += pieces.put(token)
            cut = min((held.find(s) for s in stop if s in held), default=-1)
            if cut >= 0:
                held = held[:cut]
                break
            certain = max(shown, len(held) - max(longest - 1, 0))  # the rest may be the beginning of a stop string
            if certain > shown:
                yield held[shown:certain]
                shown = certain
        else:
            held += pieces.flush()
        if held[shown:]:
            yield held[shown:]

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> Iterator[str]:
        """Stream the assistant's next message; `messages` are `{"role": ..., "content": ...}`.

        Raises TextError when the model has no chat template.
        """
        return self.stream(self.render(messages), **options)

    def render(self, messages: Sequence[dict[str, str]]) -> RenderedPrompt:
        """The prompt the chat template makes of `messages`, with the assistant's turn opened."""
        template = self._tokenizer().chat
        if template is None:
            raise TextError(f"{self.path or 'this model'} has no chat template; use generate()")
        return template.render(list(messages), add_generation_prompt=True)

    def encode(
        self, texts: Texts, *, pooling: str | None = None, normalize: bool | None = None, batch_tokens: int = 4096
    ) -> Tensor:
        """One vector a text, `[B, D]`.  Pooling and normalization are the checkpoint's unless given."""
        how = self.spec.head if isinstance(self.spec.head, Pooling) else Pooling()
        if pooling is not None:
            if pooling not in ("mean", "first", "dense"):
                raise InputError(f"pooling={pooling!r} must be 'mean', 'first' or 'dense'")
            if pooling == "dense" and how.dense is None:
                raise InputError("this checkpoint has no pooler; use pooling='mean' or 'first'")
            how = replace(how, mode=pooling)  # type: ignore[arg-type]
        if normalize is not None:
            how = replace(how, normalize=normalize)
        return running.encode(self.module, self.source(texts), how, batch_tokens=batch_tokens)

    def fill(self, texts: Texts, *, top: int = 5) -> list[list[list[tuple[str, float]]]]:
        """For each text, for each mask in it, the `top` likeliest words and their probabilities."""
        tokenizer = self._tokenizer()
        if tokenizer.mask_id is None:
            raise InputError("this tokenizer has no mask token, so there is nothing to fill")
        found = running.fill(self.module, self.ids(texts), tokenizer.mask_id, top=top)
        return [[[(tokenizer.decode([i]).strip(), p) for i, p in mask] for mask in row] for row in found]

    def classify(self, texts: Texts, *, second: Sequence[str] | None = None) -> list[list[tuple[str, float]]]:
        """The labels of each text, or image, with their probabilities, best first.

        `second` are the other halves of pairs (premise and hypothesis, query and passage).  A model with one label, or
        whose labels may hold together, gives each a probability of its own; a regression gives its score.
        """
        rows: Sequence[Encoded | Tensor]
        if not isinstance(self.spec.reads.embed, Embed):
            rows = self._files(texts)
        elif second is None:
            rows = [Encoded(ids, [0] * len(ids), [], []) for ids in self.ids(texts)]
        else:
            rows = [self._tokenizer().places(a, b)[0] for a, b in zip(_strings(texts), second, strict=True)]
        return running.classify(self.module, rows, self.labels, problem=(self.hf or {}).get("problem_type"))

    def tag(self, texts: Sequence[str]) -> list[list[running.Tag]]:
        """What is said of each token of each text: its likeliest label, or whether it was replaced (ELECTRA)."""
        rows = [self._tokenizer().places(text)[0] for text in _strings(texts)]
        return running.tag(self.module, rows, texts, self.labels)

    def answer(self, question: str, context: str, *, longest: int = 15, top: int = 1) -> list[running.Answer]:
        """The `top` likeliest pieces of `context` of at most `longest` tokens, best first.

        A context longer than the model reads at once is read in windows that overlap by half of their length.  Raises
        InputError for a question that leaves no room for it.
        """
        most, overlap, asked = self.spec.context, 0, len(self.ids([question])[0]) + 2  # and what stands between the two
        if most is not None:
            if asked >= most:
                raise InputError(f"the question needs {asked} of the model's {most} positions; shorten it")
            overlap = (most - asked) // 2
        windows = self._tokenizer().places(question, context, longest=most, overlap=overlap)
        return running.answer(self.module, windows, context, longest=longest, top=top)

    @property
    def labels(self) -> list[str]:
        """The names of the classes, from the config; `LABEL_0`, `LABEL_1`, ... where it has none."""
        head = self.spec.head
        if not isinstance(head, ClassHead | TokenHead):
            return []
        names = (self.hf or {}).get("id2label") or {}
        return [str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(head.classes.outputs)]

    def transcribe(
        self,
        sound: str | Path | audio.Samples,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = True,
        temperatures: Sequence[float] = running.TEMPERATURES,
        seed: int = 0,
        on_segment: Callable[[running.Segment], None] | None = None,
    ) -> running.Transcript:
        """What is said in a WAV file, or in `[T]` samples at 16 kHz, of any length; see `generate.transcribe`.

        Raises InputError for a model that does not hear, a file that is no sound, a language or task it does not know.
        """
        tokenizer = self._tokenizer()
        words = running.Words.of(tokenizer, self._told("generation_config.json") or self.hf or {}, self.spec.vocab)
        hearing = running.Hearing(self.module, tokenizer, words, task, timestamps, temperatures, seed)
        samples = sound if isinstance(sound, np.ndarray) else audio.read_wav(sound)
        return running.transcribe(hearing, samples, language=language, on_segment=on_segment)

    def save(self, path: str | Path) -> None:
        """Write an HF-layout directory - config, safetensors, tokenizer - whole or not at all."""
        tensors, config = to_checkpoint(self.module, self.hf)
        files = {} if self.tokenizer is None else self.tokenizer.files()
        files |= {name: json.dumps(told, indent=2).encode() for name in BESIDE if (told := self._told(name))}
        write_directory(Path(path), tensors, config, files)

    def _told(self, name: str) -> dict[str, Any]:
        """A small file beside the weights, empty where there is none."""
        file = None if self.path is None else self.path / name
        return read_json(file) if file is not None and file.is_file() else {}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: the config's, and the tokenizer's."""
        stops = () if self.tokenizer is None else tuple(self.tokenizer.stop_ids)
        return tuple(dict.fromkeys((*self.spec.ids.eos, *stops)))

    def _row(self, i: int, row: str | RenderedPrompt | Sequence[int] | Tensor | Path, vocab: int) -> list[int]:
        if isinstance(row, str | RenderedPrompt):
            return self._tokenizer().encode(row)
        if isinstance(row, Path) or (isinstance(row, Tensor) and row.is_floating_point()):
            raise InputError(f"row {i}: this model reads texts or token ids, not what this {type(row).__name__} holds")
        ids = [int(token) for token in row]
        for token in ids:
            if not 0 <= token < vocab:
                raise InputError(f"row {i}: token id {token} is outside the vocabulary of {vocab}")
        return ids

    def _unpadded(self, ids: Tensor, mask: Tensor | None, vocab: int) -> list[list[int]]:
        if ids.dim() != 2 or ids.is_floating_point():
            raise InputError(f"ids must be an integer tensor [B, T], not {ids.dtype} {list(ids.shape)}")
        if mask is not None:
            if mask.shape != ids.shape:
                raise InputError(f"mask is {list(mask.shape)} and ids are {list(ids.shape)}")
            kept = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
            return [self._row(i, row, vocab) for i, row in enumerate(kept)]
        pad = self.spec.ids.pad
        counted = ids[:, 1:] if pad == self.spec.ids.start else ids
        if pad is not None and (n := int((counted == pad).sum())):
            raise InputError(
                f"{n} of {ids.numel()} ids are the pad id {pad} and no mask was given; pass mask=, or rows as lists"
            )
        return [self._row(i, row, vocab) for i, row in enumerate(ids.tolist())]

    def _forward(
        self, rows: Texts, target: Texts | None, mask: Tensor | None, target_mask: Tensor | None, taps: nn.Taps
    ) -> list[Tensor]:
        both = self.spec.layout == "encoder-decoder"
        if both != (target is not None):
            wants = "a source and a target" if both else "rows only"
            raise InputError(f"this {self.spec.layout} model takes {wants}")
        given, where = self.module.flat(self.source(rows, mask))
        if target is None:
            out = self.module(given, where, taps=taps)
        else:
            into, where_into = running.flat(self.ids(target, target_mask, target=True), self.device)
            out = self.module(into, where_into, source=(given, where), taps=taps)
            where = where_into
        return list(out) if isinstance(self.spec.head, ClassHead | Pooling) else where.split(out)

    def _prompts(
        self, prompts: Texts, prefix: str | Sequence[int]
    ) -> tuple[Sequence[Sequence[int]], Sequence[Row] | None]:
        if self.spec.layout != "encoder-decoder":
            if prefix:
                raise InputError("decoder_prefix is for encoder-decoders; put it at the end of the prompt")
            return self.ids(prompts), None
        if self.spec.ids.start is None:
            raise InputError("the config has no decoder_start_token_id, so the decoder has nothing to begin with")
        head = self._tokenizer().encode(prefix, special=False) if isinstance(prefix, str) else list(prefix)
        rows = self.source(prompts)
        return [[self.spec.ids.start, *head] for _ in rows], rows

    def _cut(self, ids: list[int], stop: Sequence[str]) -> str | None:
        """The text before the first stop string, when one has come."""
        full = self._tokenizer().decode(ids)
        cut = min((full.find(s) for s in stop if s in full), default=-1)
        return full[:cut] if cut >= 0 else None

    def _generation(self, ids: list[int], stop: Sequence[str], trace: Trace | None) -> Generation:
        ended = bool(ids) and ids[-1] in self.end_ids
        cut = self._cut(ids, stop) if stop else None
        if cut is not None:
            return Generation(cut, ids, "stop", trace)
        shown = "" if self.tokenizer is None else self.tokenizer.decode(ids)
        return Generation(shown, ids, "end" if ended else "length", trace)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TextError(f"{self.path or 'this model'} has no tokenizer; give token ids")
        return self.tokenizer


def _strings(texts: Texts) -> Sequence[str]:
    """Raises InputError for anything but a list of texts: ids have no place in one."""
    if isinstance(texts, str | Tensor) or not all(isinstance(text, str) for text in texts):
        raise InputError("give a list of texts: [text]")
    return texts  # type: ignore[return-value]


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    ignore: Sequence[str] = (),
    offline: bool = False,
) -> Model:
    """Load a model from a directory, a `.gguf` file, or `hub:org/name`.

    Weights keep their stored dtype unless `dtype` is given; fp16 on a CPU becomes fp32, packed GGUF blocks fp32, and
    T5's fp16 anywhere, even when asked for, bf16 or fp32 (`report.notes` says so).
    `ignore` names config keys and tensor patterns to give up.  Every other key and tensor must be understood and used.
    Raises CheckpointError, ConfigError or TextError saying what is wrong and where.
    """
    header = read_header(path, ignore=ignore, offline=offline)
    source = header.source or open_source(header.path)  # without weights: its error says what is there instead
    tokenizer = header.tokenizer()  # first: what building it needed is free again when the weights come
    module, report = read_weights(header.spec, source, dtype, torch.device(device), ignore)
    return Model(module, tokenizer, header.hf, header.path, report)


def create(hf: dict[str, Any], tokenizer: Tokenizer | None = None, *, seed: int = 0) -> Model:
    """A fresh model from a config dict in HF's own keys, e.g. `{"model_type": "llama", "hidden_size": 128, ...}`."""
    return Model(nn.new(families.read_config(hf, where="config"), seed), tokenizer, hf)
