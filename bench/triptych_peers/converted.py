"""Peers that run a converted model: onnxruntime and CTranslate2.

The conversion is made before the clock runs, into a temporary directory; the weights are those of the file.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import InputError
from triptych.measure.jobs import Ids
from triptych.measure.side import Options, Side, Sources
from triptych.media import audio
from triptych_peers.on_torch import by_length


class Converted(Side):
    """What both have in common: the directory of the conversion, and the tokenizer of transformers' fast kind."""

    dtypes = ("fp32", "int8")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if not Path(options.model).is_dir():
            raise InputError(f"{self.name} is measured on Hugging Face directories, not on {options.model}")
        import torch

        torch.set_num_threads(options.threads)
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.tokenizer: Any = None

    def _rows(self, texts: Sequence[str]) -> list[Ids]:
        if self.tokenizer is None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.options.model, local_files_only=True)
        rows: list[Ids] = self.tokenizer(list(texts), truncation=True, max_length=self._longest())["input_ids"]
        return rows

    def _longest(self) -> int | None:
        """What sentence-transformers reads of a text."""
        settings = Path(self.options.model) / "sentence_bert_config.json"
        return json.loads(settings.read_text()).get("max_seq_length") if settings.is_file() else None

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in self._rows(texts)]

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Batches of 32, sorted by length; the mean of the states of a text, of length 1."""
        rows = self._rows(texts)
        vectors: list[Any] = [None] * len(rows)
        for group in by_length(rows):
            lengths = np.array([len(rows[i]) for i in group])
            hidden = self._states([rows[i] for i in group], lengths)
            mask = np.arange(hidden.shape[1]) < lengths[:, None]
            pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
            for i, vector in zip(group, pooled / np.linalg.norm(pooled, axis=1, keepdims=True), strict=True):
                vectors[i] = vector
        return np.stack(vectors).astype(np.float32)

    def _states(self, rows: Sequence[Ids], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        """The last hidden states of rows, `[B, longest, D]`."""
        raise NotImplementedError


class OnnxRuntime(Converted):
    """An encoder that torch exports; int8 is its dynamic quantization."""

    name = "onnxruntime"
    needs = ("onnxruntime", "onnx", "transformers")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.layout != "encoder":
            raise InputError(f"onnxruntime is measured on encoders; {options.model} is a {options.layout}")
        self.library: Any = import_module("onnxruntime")
        self.session: Any = None
        self.file = self.folder / f"{options.dtype or 'fp32'}.onnx"
        self._export()

    @property
    def versions(self) -> dict[str, str]:
        return {"onnxruntime": self.library.__version__}

    def _export(self) -> None:
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained(
            self.options.model, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()

        class States(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                states: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
                return states

        plain, axes = self.folder / "fp32.onnx", {0: "rows", 1: "tokens"}
        ids = torch.full((2, 7), 5)
        torch.onnx.export(
            States(), (ids, torch.ones_like(ids)), str(plain), input_names=["ids", "mask"], output_names=["states"],
            dynamic_axes={"ids": axes, "mask": axes, "states": axes}, opset_version=17, dynamo=False,
        )  # fmt: skip
        if self.options.dtype == "int8":
            tools: Any = import_module("onnxruntime.quantization")
            tools.quantize_dynamic(plain, self.file, weight_type=tools.QuantType.QInt8)

    def load(self) -> None:
        settings = self.library.SessionOptions()
        settings.intra_op_num_threads = self.options.threads
        self.session = self.library.InferenceSession(str(self.file), settings, providers=["CPUExecutionProvider"])

    def _states(self, rows: Sequence[Ids], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.zeros_like(mask)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = row
        states: NDArray[np.float32] = self.session.run(None, {"ids": ids, "mask": mask})[0]
        return states


class CTranslate2(Converted):
    """Encoders, and encoder-decoders of text and of sound; Whisper's features are computed by this library, since
    CTranslate2 brings none."""

    name = "ctranslate2"
    needs = ("ctranslate2", "transformers")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.layout == "decoder":
            raise InputError(f"CTranslate2 is measured on encoders and encoder-decoders; {options.model} is a decoder")
        self.library: Any = import_module("ctranslate2")
        self.model: Any = None
        form = {"fp32": "float32", None: "float32"}.get(options.dtype, options.dtype)
        self.folder = self.folder / "converted"
        converter = self.library.converters.TransformersConverter(options.model)
        converter.convert(str(self.folder), quantization=form)
        config = json.loads((Path(options.model) / "config.json").read_text())
        self.start_id, self.end_id = config.get("decoder_start_token_id"), config.get("eos_token_id")
        self.mels = config.get("num_mel_bins")

    @property
    def versions(self) -> dict[str, str]:
        return {"ctranslate2": self.library.__version__}

    def load(self) -> None:
        kinds = {"encoder": self.library.Encoder, "encoder-decoder": self.library.Translator}
        kind = self.library.models.Whisper if self.options.sound else kinds[self.options.layout]
        threads = {"inter_threads": 1, "intra_threads": self.options.threads}
        self.model = kind(str(self.folder), device="cpu", **threads)
        names = self.folder / "shared_vocabulary.json"
        self.words = json.loads(names.read_text()) if names.is_file() else []

    def _states(self, rows: Sequence[Ids], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.array(self.model.forward_batch([list(row) for row in rows]).last_hidden_state)

    def read(self, sources: Sources) -> None:
        if not self.options.sound:
            super().read(sources)
        np.array(self.model.encode(self._features(sources)))

    def write(self, sources: Sources, new: int, beams: int) -> list[int]:
        if self.options.sound:
            # It writes at most half of `max_length` tokens; an end that is suppressed never comes.
            prompts = [[self.start_id]] * len(sources)
            results = self.model.generate(
                self._features(sources), prompts, beam_size=beams, max_length=2 * new, suppress_tokens=[self.end_id],
            )  # fmt: skip
            return [len(one.sequences_ids[0]) for one in results]
        words = [[self.words[int(i)] for i in row] for row in sources]
        results = self.model.translate_batch(
            words, beam_size=beams, min_decoding_length=new, max_decoding_length=new, max_batch_size=len(words)
        )
        return [len(one.hypotheses[0]) for one in results]

    def _features(self, sources: Sources) -> Any:
        frames = [audio.log_mel(np.asarray(row, np.float32), self.mels).T for row in sources]
        return self.library.StorageView.from_array(np.ascontiguousarray(np.stack(frames), np.float32))
