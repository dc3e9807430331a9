"""This library as one of the sides: through `load`, the engine and `Model.encode`, as the commands use it."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from triptych import machine, tasks
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.generate.beam import beam_search
from triptych.media import audio
from triptych.model import Model, load
from triptych.nn import Batch, InputRow
from triptych.nn.packed_weight import PackedWeight
from triptych.program.native_encoder import NativeEncoder
from triptych.program.native_executor import prompts_in_bf16
from triptych.quantize import BandFormat, kernel_matrix, packing_arguments
from triptych.spec import FramesSpec
from . import limits
from .jobs import Ids
from .side import Options, Side, Sources

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Ours(Side):
    """Weights as in the file unless `dtype` or `quantize` is given."""

    name = "triptych"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        torch.set_num_threads(options.threads)
        self.device = machine.device(options.device)
        self.model: Model | None = None
        self.engine: Engine | None = None
        self.encoder: NativeEncoder | None = None

    @property
    def versions(self) -> dict[str, str]:
        return {"triptych": version("triptych"), "torch": torch.__version__}

    @property
    def dtype(self) -> str:
        model = self._model()
        packed = {p.format.layout.name for p in _packed(model) if isinstance(p.format, BandFormat)}
        plain = NAMES.get(model.module.dtype, str(model.module.dtype))
        form = "+".join([*sorted(packed), plain]) if packed else plain
        encoder = model.spec.layout == "encoder"
        return f"{form}, {'products' if encoder else 'those of prompts'} in bf16" if self._note() else form

    def load(self) -> None:
        options, self.model, self.engine, self.encoder = self.options, None, None, None
        form, plain = packing_arguments(options.quantize)
        self.model = load(
            options.model, dtype=options.dtype, device=self.device, ignore=options.ignore,
            offline=options.offline, quantize=form, dequantize=plain,
        )  # fmt: skip
        self.model.executor = options.executor

    def prepare(self, rows: int, tokens: int) -> None:
        """Capture and compile what steps of fixed shapes need."""
        if self.options.executor in ("static", "compiled"):
            self.engine = self._engine()
            self.engine.warm_up(rows, tokens + 1)

    def start(self, rows: Sequence[Ids], new: int) -> None:
        if self.options.executor in ("auto", "modules"):
            self.engine = self._engine()
        assert self.engine is not None
        self.engine.free(self.engine.rows)
        # One token more than is asked for: no row ends, and gives its slot back, while the clock runs.
        live = self.engine.add(*[Request(prompt=row, max_new_tokens=new + 1, number=i) for i, row in enumerate(rows)])
        while not all(row.new for row in live):
            self.engine.step()

    def step(self) -> int:
        assert self.engine is not None
        self.engine.guard.only_own_code = True
        return sum(output.token is not None for output in self.engine.step())

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors: NDArray[np.float32] = (
            self._model().encode(list(texts), matmul=self.options.matmul).float().cpu().numpy()
        )
        return vectors

    def lengths(self, texts: Sequence[str]) -> list[int]:
        model = self._model()
        return [len(row) for row in model.inputs.sentences(list(texts))]

    @torch.inference_mode()
    def read(self, sources: Sources) -> None:
        model = self._model()
        module, rows = model.module, self._rows(sources)
        inputs, where = module.flat(rows)
        if self.encoder is None or self.encoder.module is not module:
            bf16 = prompts_in_bf16(module, self.options.matmul)
            self.encoder = NativeEncoder(module, matrix_of=kernel_matrix, bf16=bf16)
        assert module.decoder is not None
        slots = Rows(where.lengths, slots=tuple(range(len(rows))))
        if model.executor != "auto" or not self.encoder.project(inputs, slots, module.decoder.cross_cache()):
            module(Batch(source=(inputs, where)))

    def write(self, sources: Sources, new: int, beams: int) -> list[int]:
        model = self._model()
        engine = self._engine()
        start = model.spec.ids.start
        if start is None:
            raise InputError(f"{self.options.model} names no start token for its decoder")
        requests = [
            Request(prompt=[start], source=row, max_new_tokens=new, number=i)
            for i, row in enumerate(self._rows(sources))
        ]
        if beams > 1:
            return [len(best[0].tokens) for best in beam_search(engine, requests, beams=beams)]
        rows = engine.add(*requests)
        while engine.rows:
            engine.step()
        return [len(row.new) for row in rows]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """`packed`, the bytes a decoding step reads and the bytes of a number of its cache, the executor, and the notes
        of loading."""
        model = self._model()
        notes = [] if model.report is None else [*filter(None, [model.report.packed]), *model.report.notes]
        if note := self._note():
            notes.append(note)
        facts: dict[str, Any] = {"packed": bool(_packed(model)), "dtype": str(model.module.dtype), "notes": notes}
        if model.module.decoder is None:
            return facts
        stores = model.module.decoder.cache(cache_type=self.options.cache).stores
        numbers = sum(one.layer.groups * (one.layer.width + one.layer.value_width) for one in stores)
        return facts | {
            "step": limits.step_bytes(model.module),
            "cache_bytes": sum(one.place_bytes for one in stores) / numbers,
            "why_modules": None if self.engine is None else self.engine.why_modules,
        }

    def _note(self) -> str | None:
        """That an encoder multiplies in another form than its weights have, or a decoder the tokens of prompts."""
        module, matmul = self._model().module, self.options.matmul
        if module.spec.layout == "encoder":
            return tasks.note_on_products(module, matmul)
        native = self.options.executor == "auto" and module.decoder is not None
        return tasks.note_on_prompts(module, matmul) if native else None

    def _rows(self, sources: Sources) -> Sequence[InputRow]:
        """Ids as they are; sound as log-mel frames [T, M], which is part of the work."""
        slot = self._model().spec.reads.embed
        if not isinstance(slot, FramesSpec):
            return [list(row) for row in sources]
        length = slot.stride * slot.position.length
        rows = [np.asarray(row, np.float32) for row in sources]
        return [torch.from_numpy(audio.log_mel(audio.padded(row, length), slot.conv1.inputs)) for row in rows]

    def _engine(self) -> Engine:
        options = self.options
        return Engine(self._model().module, executor=options.executor, matmul=options.matmul, cache_type=options.cache)

    def _model(self) -> Model:
        if self.model is None:
            self.load()
        assert self.model is not None
        return self.model


def _packed(model: Model) -> list[PackedWeight]:
    return [weight for weight in model.module.parameters() if isinstance(weight, PackedWeight)]
