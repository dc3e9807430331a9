"""Peers that run on torch: transformers and sentence-transformers."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.errors import InputError
from triptych.measure.jobs import Ids
from triptych.measure.side import Options, Side, Sources
from triptych.media.audio import RATE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, None: "auto"}
BATCH = 32  # texts, of similar length


class OnTorch(Side):
    """What both have in common."""

    devices = ("cpu", "cuda")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        torch.set_num_threads(options.threads)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`: this file, and nothing from the network."""
        return {"dtype": DTYPES[self.options.dtype], "local_files_only": True}

    def wait(self) -> None:
        if self.options.device != "cpu":
            torch.cuda.synchronize()


class Transformers(OnTorch):
    """Decoding by the model's forward with its own cache, one token a call; `generate` for encoder-decoders."""

    name = "transformers"
    needs = ("transformers",)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.library: Any = import_module("transformers")
        self.library.logging.set_verbosity_error()
        self.library.logging.disable_progress_bar()
        self.model: Any = None

    @property
    def versions(self) -> dict[str, str]:
        return {"transformers": self.library.__version__, "torch": torch.__version__}

    def load(self) -> None:
        path, self.model = Path(self.options.model), None
        names = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModel"}
        written = "AutoModelForSpeechSeq2Seq" if self.options.sound else "AutoModelForSeq2SeqLM"
        cls = getattr(self.library, names.get(self.options.layout, written))
        more = {"gguf_file": path.name} if path.suffix == ".gguf" else {"use_safetensors": True}
        where = path.parent if path.suffix == ".gguf" else path
        self.model = cls.from_pretrained(str(where), **self.settings, **more).eval().to(self.options.device)
        if self.options.layout == "encoder":
            self.tokenizer = self.library.AutoTokenizer.from_pretrained(str(where), local_files_only=True)

    @torch.inference_mode()
    def start(self, rows: Sequence[Ids], new: int) -> None:
        self.past = None
        self._forward(torch.tensor(rows, device=self.options.device))

    @torch.inference_mode()
    def step(self) -> int:
        self._forward(self.chosen)
        return len(self.chosen)

    def _forward(self, ids: torch.Tensor) -> None:
        out = self.model(input_ids=ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past, self.chosen = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = self.tokenizer(list(texts), truncation=True)["input_ids"]
        vectors: list[Any] = [None] * len(rows)
        for group in by_length(rows):
            inputs = self.tokenizer.pad({"input_ids": [rows[i] for i in group]}, return_tensors="pt")
            inputs = inputs.to(self.options.device)
            hidden = self.model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None]
            pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
            for i, vector in zip(group, pooled.cpu().numpy(), strict=True):
                vectors[i] = vector
        return np.stack(vectors)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in self.tokenizer(list(texts), truncation=True)["input_ids"]]

    @torch.inference_mode()
    def read(self, sources: Sources) -> None:
        self.model.get_encoder()(**self._inputs(sources))

    @torch.inference_mode()
    def write(self, sources: Sources, new: int, beams: int) -> list[int]:
        settings = {"num_beams": beams, "do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
        # Whisper's own `generate` adds rules for times; the one it extends writes exactly what it is told.
        out = self.library.GenerationMixin.generate(self.model, **self._inputs(sources), **settings)
        return [int(out.shape[1]) - 1] * len(out)

    def _inputs(self, sources: Sources) -> dict[str, torch.Tensor]:
        device, dtype = self.options.device, self.model.dtype
        if not self.options.sound:
            ids = torch.tensor([list(row) for row in sources], device=device)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        extract = self.library.WhisperFeatureExtractor(feature_size=self.model.config.num_mel_bins)
        frames = extract([np.asarray(row) for row in sources], sampling_rate=RATE, return_tensors="pt")
        return {"input_features": frames["input_features"].to(device, dtype)}


class SentenceTransformers(OnTorch):
    """`SentenceTransformer.encode`, which sorts by length and pads batches."""

    name = "sentence-transformers"
    needs = ("sentence_transformers",)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.layout != "encoder":
            raise InputError(f"sentence-transformers runs encoders of texts; {options.model} is an {options.layout}")
        self.library: Any = import_module("sentence_transformers")
        self.model: Any = None

    @property
    def versions(self) -> dict[str, str]:
        return {"sentence-transformers": self.library.__version__, "torch": torch.__version__}

    def load(self) -> None:
        self.model = self.library.SentenceTransformer(
            self.options.model, device=self.options.device, local_files_only=True,
            model_kwargs={"dtype": DTYPES[self.options.dtype]},
        )  # fmt: skip

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = self.model.encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return np.asarray(vectors.float().cpu())

    def lengths(self, texts: Sequence[str]) -> list[int]:
        longest = self.model.max_seq_length
        return [len(row) for row in self.model.tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]]


def by_length(rows: Sequence[Ids], size: int = BATCH) -> list[list[int]]:
    """Indices of rows in groups of `size`, sorted by length, longest first."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    return [order[at : at + size] for at in range(0, len(order), size)]
