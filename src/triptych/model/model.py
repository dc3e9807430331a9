"""`load`, `create`, and `Model` but for its logits and traces (`logits_and_traces.py`) and training (`training.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych import families, machine, nn, tasks
from triptych import generate as running
from triptych.arguments import checked, checked_methods, integer
from triptych.attention import CacheType, check_cache_type
from triptych.checkpoints import open_source
from triptych.checkpoints.adapter_files import read_adapter
from triptych.checkpoints.adapters import with_base
from triptych.checkpoints.convert import Conversion, save
from triptych.checkpoints.header import BESIDE, check_new, read_header
from triptych.checkpoints.load_weights import compute_dtype, read_weights, usable_device
from triptych.errors import ConfigError, InputError, nearest
from triptych.families.named_configs import NAMED
from triptych.generate import Engine
from triptych.probe import Edits, Plan, Reads, heads, link
from triptych.probe.trace_size import check_fires, check_size, limit_of, trace_size
from triptych.quantize import packing_for
from triptych.spec import ModelSpec as Spec
from triptych.tasks import Texts
from triptych.text import RenderedPrompt, Tokenizer
from .training import ModelTraining


@checked_methods
class Model(ModelTraining):
    """A transformer with its tokenizer and config, and what one does with it: generate, encode, trace, train, save.

    `triptych.load` and `triptych.create` make one.

    module      the PyTorch module (`triptych.nn.Transformer`), to which hooks, `compile` and optimizers apply.
    tokenizer   its tokenizer, or None: rows are then lists of token ids.
    hf          the config as a dict with Hugging Face's keys, with which `save` writes the model back; or None.
    path        the file or directory that it came from, or None.
    report      how each tensor was stored and loaded (`report.notes` are lines to print), or None for a new model.

    Rows of one call may have any lengths, without padding.  A row is a text, or a list of token ids; audio and image
    models take paths or tensors.
    """

    heads = heads
    link = link
    encode = tasks.encode
    fill = tasks.fill
    classify = tasks.classify
    tag = tasks.tag
    entities = tasks.entities
    answer = tasks.answer
    search = tasks.search
    summarize = tasks.summarize
    translate = tasks.translate
    answer_in_words = tasks.answer_in_words
    transcribe = tasks.transcribe
    note_on_vectors = tasks.note_on_vectors

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
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        decoder_prefix: str | Sequence[int] = (),
        beams: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        chunk: int | None = None,
        rules: Sequence[running.Rule] = (),
        schema: object = None,
        constraint: running.Constraint | None = None,
        logprobs: int | None = None,
        read: Reads = (),
        edit: Edits = (),
        max_bytes: int | None = None,
        allow_null: bool = False,
        max_rows: int = running.MAX_ROWS,
        draft: Model | str | None = None,
        draft_tokens: int = 4,
        matmul: tasks.Matmul = "auto",
        cache: CacheType = "auto",
        on_token: Callable[[int, int], None] | None = None,
        on_progress: running.OnProgress | None = None,
    ) -> list[running.Generation]:
        """Continue each prompt (or, for an encoder-decoder, write the target of each source); one `Generation` each, in
        the order of `prompts`.

        At most `max_new_tokens` tokens are generated; a row ends earlier at an end token, one of the model's own or of
        `stop_ids`, which is the last of `.ids` and not in `.text`; or at the first of the texts in `stop`, which is in
        neither text nor result.  `temperature=0` is greedy and ignores the other sampling settings
        but the repetition penalty; `generate.Sampling` defines `top_k`, `top_p`, `min_p` and `repetition_penalty`.  A
        `seed` that is not given is 0.  `decoder_prefix` is the start of an encoder-decoder's output.  `rules` change
        the logits of each row before its next token is chosen (`generate.Rule`).  `schema`, a JSON schema as a dict or
        a text, or a pydantic model class, makes every text JSON of that schema; `constraint` is a
        `generate.Constraint` of another kind.  `logprobs=N` gives the
        log-probabilities of the chosen and the N likeliest tokens.  `beams` above 0 searches for the likeliest text
        instead of sampling: hypotheses are ranked by their log-probability over length ** `length_penalty`, and with
        `early_stopping` the search stops when `beams` of them have ended.  `chunk` processes prompts that many tokens
        at a time.  `on_token(row, id)` is called for every token as it comes, after a search
        for those of the best text, and `on_progress` after each step.

        `read` and `edit` are those of `trace`, with absolute positions; what was read is in `.trace` of each result.

        At most `max_rows` prompts run at once, fewer where memory is short; others join as these end.  `draft` guesses
        up to `draft_tokens` tokens that one step then verifies: a smaller model of the same vocabulary, or "ngram",
        which looks for the newest ids earlier in the text.  In fp32 and with packed weights neither these nor the other
        rows of the batch change what is written; dense bf16 weights are rounded otherwise in steps of more than 32
        tokens, and other tokens of like probability may be chosen.  `matmul` is what the
        tokens of prompts are multiplied with packed weights in: "bf16"; "stored", by integers, as generated tokens are;
        "auto", bf16 on a processor with AMX.

        `cache` is what keys and values are kept in: "auto", the dtype that the model computes in, "fp32", "fp16",
        "bf16" or "int8", a scale for each 32 numbers.  Every query reads what is kept, so that neither `chunk` nor
        `draft` changes anything there.

        Raises InputError for an empty or over-long prompt, for one whose cache does not fit the memory, for settings
        out of range and for those that do not go together, before anything runs; ProbeError for reads of more than
        `max_bytes` and as `trace`.
        """
        plan = Plan.of(self.spec, read, edit)
        requests = tasks.generation_requests(
            self.inputs, prompts, decoder_prefix, plan, allow_null=allow_null, rules=rules,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed, max_new_tokens=max_new_tokens, stop=running.stop_strings(stop), stop_ids=stop_ids,
            logprobs=logprobs, constraint=running.constraint_of(schema, constraint, running.stop_strings(stop)),
        )  # fmt: skip
        if integer("beams", beams, 0):
            guesses = None if draft_tokens == 4 else draft_tokens
            single = {"logprobs": logprobs, "draft": draft, "draft_tokens": guesses}
            running.check_beam_settings(
                requests[0].sampling,
                [name for name, value in single.items() if value is not None],
                seeded=seed is not None,
            )
        elif length_penalty != 1 or early_stopping:
            raise InputError(
                f"{'early_stopping' if early_stopping else 'length_penalty'} is for beams; give beams= too"
            )
        sources = [self.module.length(request.source) for request in requests if request.source is not None]
        lengths = [len(request.prompt) + max_new_tokens for request in requests]
        size = trace_size(plan, lengths, sources, self.module.dtype.itemsize, new=max_new_tokens, beams=beams)
        check_fires(plan, [max(length - 1, 1) for length in lengths], sources, allow_null=allow_null)
        check_size(size, limit_of(max_bytes), max_bytes)
        if beams:
            engine = self._engine(
                stop, chunk=running.BUDGET if chunk is None else chunk, matmul=matmul, cache_type=cache
            )
            return running.search(
                engine, requests, self.tokenizer, beams=beams, length_penalty=length_penalty,
                early_stopping=early_stopping, max_rows=integer("max_rows", max_rows, 1), on_token=on_token,
                on_progress=on_progress,
            )  # fmt: skip
        engine = self._engine(
            stop, chunk=chunk, budget=running.BUDGET, matmul=matmul, cache_type=cache,
            reuse=running.share_a_beginning([request.prompt for request in requests]),
            speculation=tasks.speculation(self, draft, draft_tokens, cache),
        )  # fmt: skip
        scheduler = running.Scheduler(engine, max_rows=max_rows)
        return running.generate(scheduler, requests, self.tokenizer, on_token=on_token, on_progress=on_progress)

    def stream(
        self,
        prompt: str | RenderedPrompt | Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        decoder_prefix: str | Sequence[int] = (),
        chunk: int | None = None,
        rules: Sequence[running.Rule] = (),
        schema: object = None,
        constraint: running.Constraint | None = None,
        edit: Edits = (),
        allow_null: bool = False,
        cache: CacheType = "auto",
        on_token: Callable[[int, int], None] | None = None,
        engine: Engine | None = None,
    ) -> Iterator[str]:
        """The text of one generation, piece by piece as it becomes certain; options and errors as in `generate`.

        With an `engine` of `Model.engine`, which has a `chunk` and a `cache` of its own, what an earlier text computed
        of the same beginning is not computed again.
        """
        detokenizer, strings = self.inputs.words.stream(), running.stop_strings(stop)
        (request,) = tasks.generation_requests(
            self.inputs, [prompt], decoder_prefix, Plan.of(self.spec, (), edit), allow_null=allow_null,
            rules=rules, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, max_new_tokens=max_new_tokens, stop_ids=stop_ids,
            constraint=running.constraint_of(schema, constraint, running.stop_strings(stop)),
        )  # fmt: skip
        check_cache_type(cache)
        for name, changed in (("chunk", chunk is not None), ("cache", cache != "auto")):
            if engine is not None and changed:
                raise InputError(f"{name} is a setting of the engine; give it to Model.engine")
        if engine is not None and (engine.module is not self.module or engine.rows):
            raise InputError("the engine is of another model, or runs another text; finish or close that one first")
        own = self._engine(chunk=chunk, budget=running.BUDGET, cache_type=cache) if engine is None else engine
        scheduler = running.Scheduler(own, max_rows=1)
        row = scheduler.submit(request)  # what cannot be run is refused before the first piece
        return running.pieces(scheduler, row, detokenizer, strings, on_token)

    def engine(
        self,
        *,
        chunk: int | None = None,
        stop: str | Sequence[str] = (),
        draft: Model | str | None = None,
        draft_tokens: int = 4,
        matmul: tasks.Matmul = "auto",
        cache: CacheType = "auto",
    ) -> running.Engine:
        """An engine for one text after another (`stream`, `chat`): it keeps what it computed, and a prompt that begins
        like an earlier one is computed from where they differ.  Options as in `generate`.

        Raises InputError for a draft and a `matmul` that cannot be used, and for an unknown type of cache.
        """
        return self._engine(
            stop, chunk=chunk, budget=running.BUDGET, matmul=matmul, reuse=True, cache_type=cache,
            speculation=tasks.speculation(self, draft, draft_tokens, cache),
        )  # fmt: skip

    def _engine(self, stop: str | Sequence[str] = (), **settings: Any) -> running.Engine:
        decode = self.inputs.words.decode if running.stop_strings(stop) else None
        return running.Engine(self.module, decode=decode, executor=self.executor, tokenizer=self.tokenizer, **settings)

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Iterator[str]:
        """Stream the assistant's next message; `messages` are `{"role": ..., "content": ...}`, options as in `stream`.

        Raises TextError when the model has no chat template, InputError for anything but messages.
        """
        return self.stream(self.render(messages), **options)

    def render(self, messages: Sequence[Mapping[str, str]]) -> RenderedPrompt:
        """The prompt that the chat template renders of `messages`, up to where the assistant's turn begins.  Its
        `.text` contains the special tokens; `generate` and `stream` take it as a prompt.

        Raises TextError when the model has no chat template, InputError for anything but messages.
        """
        return self.inputs.render(messages)

    def save(self, path: str | Path) -> Conversion:
        """Write a directory in Hugging Face's layout (config, safetensors, tokenizer), or a file where `path` ends in
        .gguf; whole or not at all.

        A GGUF file gets packed matrices as they are, a directory plain numbers; `notes` of the result say so (see
        `checkpoints.convert.save`).  A model that is there already is replaced.  Raises InputError
        for a model with an adapter and a name with the ending of another format, CheckpointError for what cannot be
        written.
        """
        if self.adapter is not None:
            problem = "the model has an adapter, which is no part of a checkpoint"
            raise InputError(f"{problem}; save_adapter() writes it alone, and after merge_adapter() save() writes all")
        files = {} if self.tokenizer is None else self.tokenizer.files()
        side_files = {name: self.inputs.side_file(name) for name in BESIDE}
        files |= {name: json.dumps(content, indent=2).encode() for name, content in side_files.items() if content}
        return save(path, self.module, self.hf, self.tokenizer, files, self.path)


@checked
def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    ignore: Sequence[str] = (),
    offline: bool = False,
    quantize: str | None = None,
    dequantize: bool | None = None,
    adapter: str | Path | None = None,
) -> Model:
    """Load a model from a directory, a `.gguf` file, or `hub:org/name`.

    A path never uses the network; `hub:org/name` (also `hub:org/name@revision` and `hub:org/name:file.gguf`) downloads
    from the Hugging Face Hub, with `offline` only reads what was downloaded before.

    `adapter` is a directory with an adapter for it, of this library or of PEFT; a `path` that is such a directory
    itself, or a run that trained one, loads the base that it names too.

    Weights keep their stored dtype unless `dtype` is given: torch.bfloat16, "bfloat16", "bf16" and so on.  Weights
    stored in fp16 become fp32 on a CPU unless `dtype` is given, and T5 is never run in fp16, whose range it exceeds: it
    gets bf16 or fp32 instead (`report.notes` says so).

    The packed matrices of a GGUF file, of AWQ and of GPTQ stay packed on a CPU with native kernels, unless `dtype` is
    neither float32 nor bfloat16; elsewhere they are dequantized, and `report.notes` says why.  The kernels round
    activations to 8 bits in groups of 32 (a relative error of at most 1e-2 a product), and packed matrices are not
    trained.  `dequantize=True` loads plain numbers, for exact arithmetic and for training; `dequantize=False` raises an
    error where the matrices cannot stay packed.  `quantize="int8"` or `"int4"` packs the matrices of any checkpoint,
    rounding them anew.  `report.packed` gives the bytes.

    `ignore` names config keys and tensor patterns to ignore; every other key and tensor must be understood and used.

    Raises CheckpointError, ConfigError or TextError where the files cannot be read or do not fit together, FetchError
    where a download fails, and InputError for a dtype or device that cannot be used.
    """
    dtype, device = compute_dtype(dtype), usable_device(device)  # before anything is read
    path, adapter = with_base(path, adapter)
    header = read_header(path, ignore=ignore, offline=offline)
    stored = None if adapter is None else read_adapter(adapter, header.spec)
    source = header.source or open_source(header.path)  # without weights: its error says what is there instead
    tokenizer = header.tokenizer()  # first: what building it needed is free again when the weights come
    source.metadata.clear()  # a vocabulary of a GGUF is so freed before what stays is made, and leaves no holes in it
    packing = packing_for(source, quantize, dequantize, device, dtype)
    plain, packer = packing.dequantize, packing.packer
    with torch.inference_mode(False):  # tensors made in inference mode count no changes and cannot be trained
        module, report = read_weights(header.spec, source, dtype, device, ignore, dequantize=plain, packer=packer)
        if stored is not None:
            added = nn.attach(module, stored.factors, stored.dropout)
            note = f"adapter {adapter}: {added.parameters:,} numbers of rank {added.rank} in {len(added.slots)} maps"
            report = replace(report, notes=(*report.notes, note))
    hf, where, report = header.hf, header.path, replace(report, notes=(*report.notes, *header.notes, *packing.notes))
    del header, source, packing, packer
    machine.give_back_memory()
    return Model(module, tokenizer, hf, where, report)


@checked
def create(config: dict[str, Any] | Spec | str, tokenizer: Tokenizer | None = None, *, seed: int = 0) -> Model:
    """A new model with random weights in fp32, drawn from `seed`.

    `config` is a spec; a dict with Hugging Face's keys, such as `{"model_type": "llama", "hidden_size": 128, ...}`; or
    the name of a known model, whose sizes it then has: "gpt2", "transformer-base" and those that `triptych count`
    lists.  `tokenizer` is one of `triptych.text`; without it rows are token ids.

    Raises ConfigError for a config that does not fit together and for another name, TextError for a tokenizer with more
    tokens than the model has rows for, InputError where the weights, 4 bytes each, do not fit into the memory that is
    free.
    """
    if isinstance(config, str):
        if config not in NAMED:
            problem = f"no model {config!r}{nearest(config, NAMED)}; create() knows {', '.join(NAMED)}"
            raise ConfigError(f"{problem}, and load() reads checkpoints")
        config = dict(NAMED[config])
    spec, keys = (config, None) if isinstance(config, Spec) else (families.read_config(config, where="config"), config)
    check_new(spec, keys or {})
    if tokenizer is not None and spec.vocab:
        tokenizer.check_rows(spec.vocab)
    with torch.inference_mode(False):  # as in `load`
        return Model(nn.new(spec, integer("seed", seed)), tokenizer, keys)
