"""One forward for all: hooks fire whoever runs the model, packed documents do not meet, dropout draws as it is told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from triptych import check, nn, ops
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.model import Model
from triptych.nn.linear import Linear
from triptych.spec import causal, full, same_document
from triptych.spec.masks import Mask
from triptych.train import causal as causal_example
from triptych.train import collate, loss, seq2seq

CPU = torch.device("cpu")
DOCUMENTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]

# ---------------------------------------------------------------- documents


def changed(module: nn.Transformer, **fields: Any) -> nn.Transformer:
    """A new model with other `fields` in every kind of attention."""
    name = "decoder" if module.decoder is not None else "encoder"
    stack = module.spec.stacks[name]
    kinds = {kind: replace(part, **fields) for kind, part in stack.kinds.items()}
    return nn.new(replace(module.spec, **{name: replace(stack, kinds=kinds)}))


def packed(module: nn.Transformer, documents: list[int] | None, rows: tuple[int, ...] = (14,)) -> Tensor:
    ids = torch.tensor([token for document in DOCUMENTS for token in document])
    labels = None if documents is None else torch.tensor(documents)
    with torch.inference_mode():
        return module.logits(nn.Batch(inputs=ids, rows=Rows(rows, documents=labels)))


def alone(module: nn.Transformer) -> Tensor:
    ids, rows = nn.flat(DOCUMENTS, CPU)
    with torch.inference_mode():
        return module.logits(nn.Batch(inputs=ids, rows=rows))


LABELS = [0] * 5 + [1] * 2 + [2] * 7
MODELS: dict[str, tuple[Callable[[], nn.Transformer], Mask]] = {
    "decoder": (tiny.decoder, causal()),
    "alibi": (lambda: tiny.decoder("alibi"), causal()),
    "t5": (lambda: tiny.decoder("t5"), causal()),
    "encoder": (lambda: tiny.encoder("alibi"), full()),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_rows_of_their_own(name: str) -> None:
    """Positions run on from document to document, so only relative ones can tell no difference."""
    make, mask = MODELS[name]
    module = changed(make(), mask=mask & same_document())
    expected = alone(changed(make(), mask=mask)).log_softmax(-1)
    assert torch.allclose(packed(module, LABELS).log_softmax(-1), expected, atol=1e-4)
    several = packed(module, LABELS, (7, 7)).log_softmax(-1)  # the documents of the first row, then the third
    assert torch.allclose(several, expected, atol=1e-4)
    assert not torch.allclose(packed(module, [0] * 14).log_softmax(-1), expected, atol=1e-2)


def test_a_mask_of_documents_needs_them() -> None:
    module = changed(tiny.decoder(), mask=causal() & same_document())
    with pytest.raises(InputError, match=r"the mask has same_document\(\) and the batch has no documents"):
        packed(module, None)
    with pytest.raises(InputError, match="no documents"):
        Model(module).logits([[3, 1, 4]])
    with pytest.raises(InputError, match=r"documents \[3\]: give one for each of 14 tokens"):
        packed(module, [0, 0, 1])


def test_documents_are_not_kept_in_a_cache() -> None:
    module = changed(tiny.decoder(), mask=causal() & same_document())
    cache, labels = module.decoder.cache(1), torch.tensor([0, 0, 1])
    first = nn.Batch(inputs=torch.tensor([3, 1, 4]), rows=Rows((3,), documents=labels), cache=cache)
    with torch.inference_mode():
        module(first)
        with pytest.raises(InputError, match="documents are not kept in a cache"):
            module(nn.Batch(inputs=torch.tensor([1]), rows=Rows((1,), (3,), documents=labels[-1:]), cache=cache))


# ---------------------------------------------------------------- hooks


def parts(module: nn.Transformer, *names: str) -> dict[str, torch.nn.Module]:
    """The model, its stacks, its blocks, and every linear map; of those, only what lies below `names`, if given."""
    kinds = (nn.Transformer, nn.Stack, nn.Block, Linear)
    own = {name: part for name, part in module.named_modules() if isinstance(part, kinds)}
    return {name: part for name, part in own.items() if not names or name.startswith(names) or name == ""}


def generates(module: nn.Transformer) -> None:
    Model(module).generate([[3, 1, 4], [1, 5]], max_new_tokens=3)


def trains(module: nn.Transformer) -> None:
    both = module.spec.layout == "encoder-decoder"
    example = seq2seq([3, 1, 4], [1, 5, 1], start=0) if both else causal_example([3, 1, 4, 1, 5])
    nats, _ = loss(module.train(), collate([example]))
    nats.backward()


def checks(module: nn.Transformer) -> None:
    assert check.check(Model(module), against="none").passed


RUNS = {"training": trains, "generation": generates, "check": checks}


def fired(
    module: nn.Transformer, expected: dict[str, torch.nn.Module], run: Callable[[nn.Transformer], object]
) -> set[str]:
    """Names of the parts of `expected` whose hooks fired while `run` used the model."""
    names: set[str] = set()
    hooks = [part.register_forward_hook(lambda *_, name=name: names.add(name)) for name, part in expected.items()]
    run(module)
    for hook in hooks:
        hook.remove()
    return names


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("make", [tiny.decoder, tiny.encoder_decoder], ids=["decoder", "encoder-decoder"])
def test_every_hook_fires(make: Callable[[], nn.Transformer], run: str) -> None:
    module = make()
    expected = parts(module)
    assert any(".cross.k" in name for name in expected) == (module.encoder is not None)
    assert fired(module, expected, RUNS[run]) == set(expected)


@pytest.mark.parametrize("make", [tiny.encoder, tiny.encoder_decoder], ids=["encoder", "encoder-decoder"])
def test_encoding_fires_the_hooks_of_the_encoder_alone(make: Callable[[], nn.Transformer]) -> None:
    module = make()
    names = fired(module, parts(module), lambda module: Model(module).encode([[3, 1, 4]]))
    assert names == set(parts(module, "encoder"))


def test_a_hook_of_a_cross_attention_projection_changes_what_is_generated() -> None:
    module = tiny.encoder_decoder()
    before = Model(module).logits([[3, 1, 4]], [[0, 5]])[0]
    cross = module.decoder.blocks[0].cross
    cross.v.register_forward_hook(lambda part, given, out: 0 * out)
    assert not torch.allclose(Model(module).logits([[3, 1, 4]], [[0, 5]])[0], before, atol=1e-3)


# ---------------------------------------------------------------- dropout


def dropping(rate: float = 0.3) -> nn.Transformer:
    """A decoder with dropout wherever its parts have it."""
    model = tiny.decoder("t5").spec
    blocks = []
    for block in model.decoder.blocks:
        attn, mlp = replace(block.attn, dropout=rate), replace(block.mlp, dropout=rate)
        blocks.append(replace(block, attn=attn, mlp=mlp, dropout=rate))
    embed = replace(model.decoder.embed, dropout=rate)
    return nn.new(replace(model, decoder=replace(model.decoder, embed=embed, blocks=tuple(blocks), dropout=rate)))


def drawn(module: nn.Transformer, random: ops.RowNoise | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits in training, and gradients."""
    module.train().zero_grad()
    ids, rows = nn.flat(DOCUMENTS, CPU)
    out = module.logits(nn.Batch(inputs=ids, rows=rows, random=random))
    out.logsumexp(-1).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def seeded(seed: int) -> ops.RowNoise:
    return ops.RowNoise(seed, range(len(DOCUMENTS)))


def test_dropout_follows_from_its_seed_alone() -> None:
    module = dropping()
    state = torch.get_rng_state()
    expected, gradients = drawn(module, seeded(7))
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn from it
    found, own = drawn(module, seeded(7))
    assert torch.equal(found, expected)
    assert all(torch.equal(own[name], gradients[name]) for name in gradients)
    assert not torch.equal(drawn(module, seeded(8))[0], expected)
    assert not torch.equal(drawn(dropping(0.0), None)[0], expected)


def test_dropout_of_a_row_is_the_same_beside_other_rows() -> None:
    module = dropping().train()
    (whole, rows), (alone, row) = nn.flat(DOCUMENTS, CPU), nn.flat(DOCUMENTS[1:2], CPU)
    together = module.logits(nn.Batch(inputs=whole, rows=rows, random=seeded(7))).split(rows.lengths)[1]
    single = nn.Batch(inputs=alone, rows=row, random=ops.RowNoise(7, [1]))
    assert torch.allclose(module.logits(single), together, atol=1e-5)
    other = nn.Batch(inputs=alone, rows=row, random=ops.RowNoise(7, [0]))
    assert not torch.allclose(module.logits(other), together, atol=1e-2)


@pytest.mark.parametrize("own", [True, False], ids=["of rows", "global generator"])
def test_recompute_draws_the_same_numbers(own: bool) -> None:
    module = dropping()
    results = []
    for recompute in (False, True):
        module.decoder.recompute = recompute
        torch.manual_seed(7)
        results.append(drawn(module, seeded(7) if own else None))
        results[-1][1]["random state"] = torch.get_rng_state()
    (plain, gradients), (again, others) = results
    assert torch.equal(plain, again)
    assert gradients.keys() == others.keys()
    assert all(torch.allclose(gradients[name].float(), others[name].float(), atol=1e-5) for name in gradients)
