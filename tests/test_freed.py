"""A model is freed with its last reference, whatever it was used for, without a run of the garbage collector."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import ref

import pytest
from torch import Tensor

import cli_models
from native_models import needs_native
from triptych.model import Model, load
from triptych.probe import zero

TEXT = "The river runs past the old mill"


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


USES: dict[str, Callable[[Model], object]] = {
    "generate": lambda model: model.generate([TEXT, f"{TEXT} and"], max_new_tokens=4),
    "draft": lambda model: model.generate([TEXT], max_new_tokens=4, draft="ngram", stop="mill"),
    "modules": lambda model: [setattr(model, "executor", "modules"), model.generate([TEXT], max_new_tokens=4)],
    "static": lambda model: [setattr(model, "executor", "static"), model.generate([TEXT], max_new_tokens=4)],
    "read": lambda model: model.generate([TEXT], max_new_tokens=4, read=["blocks.*.mlp.out"]),
    "edited": lambda model: model.generate([TEXT], max_new_tokens=4, edit=[zero("blocks.0.mlp.out")]),
    "beams": lambda model: model.generate([TEXT], max_new_tokens=4, beams=2),
    "stream": lambda model: [*model.stream(TEXT, max_new_tokens=4)],
    "stream closed": lambda model: next(model.stream(TEXT, max_new_tokens=4)),
    "stream of an engine": lambda model: [*model.stream(TEXT, max_new_tokens=4, engine=model.engine())],
    "chat": lambda model: [*model.chat([{"role": "user", "content": TEXT}], max_new_tokens=4)],
    "trace": lambda model: model.trace([TEXT], read=["blocks.*.attn.pattern"]),
    "trace_size": lambda model: model.trace_size([TEXT], read=["final"]),
    "logits": lambda model: model.logits([TEXT]),
}


@needs_native
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("use", USES)
def test_a_decoder_is_freed_with_its_last_reference(use: str, quantize: str | None) -> None:
    freed("decoder", USES[use], quantize)


@needs_native
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_other_layouts_are_freed_with_their_last_reference(quantize: str | None) -> None:
    freed(
        "encoder", lambda model: [model.encode([TEXT]), model.trace([TEXT], read=["blocks.*.attn.pattern"])], quantize
    )
    freed("encoder-decoder", lambda model: model.generate([TEXT], max_new_tokens=4), quantize)


def freed(layout: str, use: Callable[[Model], object], quantize: str | None) -> None:
    model = load(cli_models.checkpoint(layout), quantize=quantize)
    use(model)
    alive = [ref(model), ref(model.module), *(ref(part) for part in model.module.modules())]
    alive += [ref(one) for one in model.module.parameters()]
    del model
    assert not [one() for one in alive if one() is not None]


def tensor_bytes() -> int:
    """Bytes of all tensors that are not freed, each storage once."""
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if not one.is_meta}
    return sum(storages.values())


@needs_native
def test_ten_loads_take_the_memory_of_one() -> None:
    path: Path = cli_models.checkpoint("decoder")
    before, sizes = tensor_bytes(), []
    for _ in range(10):
        model = load(path)
        model.generate([TEXT], max_new_tokens=4)
        sizes.append(tensor_bytes() - before)
        del model
    assert sizes[0] > 0
    assert max(sizes) <= 1.2 * sizes[0]
    assert tensor_bytes() - before < 0.1 * sizes[0]
