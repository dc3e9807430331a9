"""Peers that read GGUF files: llama.cpp by llama-cpp-python, and ik_llama.cpp, both by their C interface."""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from triptych.errors import InputError
from triptych.measure.jobs import Ids
from triptych.measure.side import Options, Side


class Gguf(Side):
    """What both have in common: a decoder in one GGUF file, computed with what the file has."""

    dtypes = ()

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if Path(options.model).suffix != ".gguf" or options.layout != "decoder":
            raise InputError(f"{self.name} is measured on decoders in .gguf files, not on {options.model}")


class LlamaCpp(Gguf):
    """A context for the rows of a job; all rows in one batch."""

    name = "llama.cpp"
    needs = ("llama_cpp",)
    install = 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python'

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.c: Any = import_module("llama_cpp")
        import_module("llama_cpp._logger").set_verbose(False)
        self.model: Any = None
        self.context: Any = None
        self.c.llama_backend_init()

    @property
    def versions(self) -> dict[str, str]:
        return {"llama-cpp-python": version("llama_cpp_python")}

    def load(self) -> None:
        self._free()
        if self.model is not None:
            self.c.llama_model_free(self.model)
        self.model = self.c.llama_model_load_from_file(self.options.model.encode(), self.c.llama_model_default_params())
        if not self.model:
            raise InputError(f"llama.cpp cannot load {self.options.model}")
        self.vocab = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))

    def prepare(self, rows: int, tokens: int) -> None:
        self._free()
        settings = self.c.llama_context_default_params()
        settings.n_ctx = rows * (-(-tokens // 256) * 256)
        settings.n_batch = max(settings.n_batch, settings.n_ctx)
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = self.options.threads
        self.context = self.c.llama_init_from_model(self.model, settings)
        if not self.context:
            raise InputError("llama.cpp has no room for its context")
        self.batch = self.c.llama_batch_init(settings.n_batch, 0, 1)

    def start(self, rows: Sequence[Ids], new: int) -> None:
        self.length = len(rows[0])
        self._decode([(token, at, i) for i, row in enumerate(rows) for at, token in enumerate(row)])

    def step(self) -> int:
        self._decode([(token, self.length, i) for i, token in enumerate(self.chosen)])
        self.length += 1
        return len(self.chosen)

    def _decode(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Run (token, position, row); the likeliest token after the last position of each row is chosen."""
        last = {row: at for at, (_, _, row) in enumerate(tokens)}
        batch = self.batch
        batch.n_tokens = len(tokens)
        for at, (token, position, row) in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = row, last[row] == at
        if self.c.llama_decode(self.context, batch):
            raise InputError("llama.cpp could not decode a batch")
        logits = (self.c.llama_get_logits_ith(self.context, at) for at in last.values())
        self.chosen = [int(np.ctypeslib.as_array(one, (self.vocab,)).argmax()) for one in logits]

    def _free(self) -> None:
        if self.context is not None:
            self.c.llama_batch_free(self.batch)
            self.c.llama_free(self.context)
            self.context = None


class IkLlamaCpp(Gguf):
    """One request, with tensors repacked while they are loaded, which is its fastest way."""

    name = "ik_llama.cpp"
    needs = ("ik_llama_cpp",)
    install = "build it with bench/build_ik_llama.sh VENV"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        interface: Any = import_module("ik_llama_cpp._ctypes_api")
        self.internals: Any = import_module("ik_llama_cpp._internals")
        usual = interface.llama_model_default_params

        def repacked() -> Any:
            settings = usual()
            settings.repack_tensors, settings.use_mmap = True, False
            return settings

        for module in (interface, self.internals.C):
            module.llama_model_default_params = repacked
        self.model: Any = None
        self.context: Any = None

    @property
    def versions(self) -> dict[str, str]:
        return {"ik-llama-cpp-python": version("ik_llama_cpp_python")}

    def load(self) -> None:
        self.context = None
        self.model = self.internals.IkModel(self.options.model, use_mmap=False)

    def prepare(self, rows: int, tokens: int) -> None:
        if rows > 1:
            raise InputError("ik_llama.cpp is measured with one request")
        self.context = self.internals.IkContext(self.model, n_ctx=max(1024, tokens), n_threads=self.options.threads)

    def start(self, rows: Sequence[Ids], new: int) -> None:
        self.length = len(rows[0])
        self._decode(self.internals.make_batch_range(rows[0], pos_start=0))

    def step(self) -> int:
        self._decode(self.internals.make_batch_single(self.chosen, self.length))
        self.length += 1
        return 1

    def _decode(self, batch: Any) -> None:
        self.context.decode(batch)
        logits = np.ctypeslib.as_array(self.context.get_logits(-1), (self.model.n_vocab,))
        self.chosen = int(logits.argmax())
