"""Rows of every kind a person gives a model: read as meant, or refused in one line."""

import copy
from collections import UserDict
from inspect import getattr_static, isfunction, signature
from typing import Any

import numpy as np
import pytest
import torch

import cli_models
import tiny
from triptych import attend, migration_hints, window
from triptych.checkpoints.convert import convert
from triptych.errors import InputError
from triptych.model import Model, load
from triptych.tasks.model_inputs import ModelInputs
from triptych.text import DECODER, Tokenizer, byte_tokenizer
from triptych_lectures import labs

TEXTS = ["the old mill", "stands"]
pytestmark = pytest.mark.usefixtures("unchecked")  # what is refused here is of types that no signature has


@pytest.fixture(scope="module")
def model() -> Model:
    return load(cli_models.checkpoint("encoder"))


def bare(pad: int | None = None, eos: tuple[int, ...] = ()) -> ModelInputs:
    """The inputs of a model without a tokenizer."""
    from dataclasses import replace

    spec = tiny.decoder().spec
    return ModelInputs(replace(spec, ids=replace(spec.ids, pad=pad, eos=eos)), None, None)


class BatchEncoding(UserDict):  # type: ignore[type-arg]
    """Of the kind a transformers tokenizer returns: a mapping that is no dict."""


def encoded(model: Model, kind: Any) -> BatchEncoding:
    """Both texts, padded on the right, as rows of `kind`."""
    rows = model.ids(TEXTS)
    longest = max(map(len, rows))
    ids = [row + [0] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return BatchEncoding(input_ids=kind(ids), token_type_ids=kind([[0] * longest] * 2), attention_mask=kind(mask))


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["torch", "numpy", "lists"])
def test_what_a_transformers_tokenizer_returns_is_read_by_its_mask(model: Model, kind: Any) -> None:
    output, plain = encoded(model, kind), model.logits(TEXTS)
    assert model.ids(output) == model.ids(dict(output)) == model.ids(TEXTS)
    assert all(torch.equal(a, b) for a, b in zip(model.logits(output), plain, strict=True))
    assert torch.equal(model.encode(output), model.encode(TEXTS))


def test_mappings_that_mean_something_else_are_refused(model: Model) -> None:
    output = encoded(model, list)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text": TEXTS}, "must have input_ids"),
        ({**output, "token_type_ids": [[0, 1], [0, 0]]}, "pairs of texts"),
        ({"input_ids": [1, 2, 3]}, "a list of ids for each text"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "different shapes"),
    ]
    for mapping, message in wrong:
        with pytest.raises(InputError, match=message):
            model.ids(mapping)
    with pytest.raises(InputError, match="two masks"):
        model.ids(output, mask=torch.ones(2, 3))


def test_numpy_rows_are_padded_like_tensors() -> None:
    ids = np.array([[5, 6, 7], [5, 0, 0]])
    with pytest.raises(InputError, match="2 of 6 ids are the pad id 0"):
        bare(pad=0).ids(ids)
    assert bare(pad=0).ids(ids, torch.tensor([[1, 1, 1], [1, 0, 0]])) == [[5, 6, 7], [5]]
    assert bare().ids([np.array([1, 2]), torch.tensor([3])]) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("ids", "whole"),
    [
        ([[5, 6, 2]], True),
        ([[5, 6, 2], [7, 8, 2]], True),
        ([[2, 5, 6], [2, 7, 8]], True),
        ([[5, 2, 6, 7]], True),
        ([[5, 6, 7], [5, 6, 2]], False),
        ([[5, 6, 2], [5, 2, 2]], False),
        ([[5, 6, 2, 2]], False),
        ([[2, 5, 6], [7, 8, 9]], False),
    ],
)
def test_an_end_token_that_also_pads(ids: list[list[int]], whole: bool) -> None:
    inputs, tensor = bare(pad=2, eos=(2,)), torch.tensor(ids)
    if whole:
        assert inputs.ids(tensor) == ids
    else:
        with pytest.raises(InputError, match="are the pad id 2 and no mask was given"):
            inputs.ids(tensor)
    if any(2 in row for row in ids):
        with pytest.raises(InputError, match="pad id 2"):
            bare(pad=2).ids(tensor)  # an id that only pads is never text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.5]], "row 0: 1.5 is no token id"),
        ([[1], [True]], "row 1: True is no token id"),
        ([["a"]], "row 0 is a list of texts; give one text"),
        ([5, 6, 7], r"row 0 is 5, not a text or a list of token ids; give rows as \[\[5, 6, 7\]\]"),
        ([[1, 41]], "row 0: token id 41 is outside the vocabulary of 41"),
        ([[-1]], "token id -1 is outside"),
        ([], "there are no rows"),
        ("text", "list of texts, not one string"),
        ([b"text"], "row 0 is bytes; decode"),
        (7, "rows must be a list"),
        (torch.tensor([1, 2]), r"integer tensor \[B, T\]"),
    ],
    ids=str,
)
def test_rows_that_are_no_rows_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bare().ids(rows)


@pytest.mark.parametrize("texts", [5, None, "text", [5], [b"text"]])
def test_tasks_of_texts_take_a_list_of_texts(texts: Any, model: Model) -> None:
    for task in (model.tag, model.entities, model.summarize, model.translate):
        with pytest.raises(InputError):
            task(texts)


def test_ids_of_a_tokenizer_larger_than_its_model_are_refused() -> None:
    tokenizer = byte_tokenizer(DECODER)  # of more ids than the 41 of the model
    model = Model(tiny.decoder(), tokenizer)
    with pytest.raises(InputError, match=r"row 0: the tokenizer's ids: token id \d+ is outside the vocabulary of 41"):
        model.generate(["Mill"])


def test_the_vectors_can_be_trained_on(model: Model) -> None:
    """A linear probe: neither pass leaves tensors that autograd cannot save."""
    probe = torch.nn.Linear(24, 2)
    probe(model.encode(TEXTS)).sum().backward()
    assert probe.weight.grad is not None
    logits = model.logits(TEXTS)[0]
    torch.nn.Linear(logits.shape[-1], 2)(logits).sum().backward()
    assert torch.equal(model.encode(TEXTS, pooling="cls"), model.encode(TEXTS, pooling="first"))
    with pytest.raises(InputError, match=r"'first' \(also called 'cls'\)"):
        model.encode(TEXTS, pooling="max")
    with pytest.raises(InputError, match="batch_tokens=0 must be an integer of at least 1"):
        model.encode(TEXTS, batch_tokens=0)
    with pytest.raises(InputError, match="normalize='l2' must be True or False"):
        model.encode(TEXTS, normalize="l2")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("config", "; write model.spec, or model.hf"),
        ("named_parameters", "; write model.module.named_parameters"),
        ("run_with_cache", "; write model.trace"),
        ("logit", "did you mean 'logits'"),
        ("pictures", "Model has no 'pictures'$"),
        ("config_ids", r"Model has no 'config_ids'( \(did you mean '[^_].*)?$"),  # '_config_ids' is private
        ("from_pretrained", r"; write triptych\.load\("),
        ("create_completion", r"; write model\.generate"),
    ],
)
def test_names_of_other_libraries_are_answered_with_ours(name: str, hint: str) -> None:
    model = Model(tiny.decoder())
    with pytest.raises(AttributeError, match=hint):
        getattr(model, name)
    assert not hasattr(copy.copy(model), name)


@pytest.mark.parametrize(
    ("owner", "name"), [(Model, "from_pretrained"), (Model, "from_config"), (Tokenizer, "from_pretrained")]
)
def test_constructors_of_other_libraries_are_answered_with_ours(owner: type, name: str) -> None:
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=rf"{owner.__name__} has no '{name}'; write triptych\."):
        getattr(owner, name)


def test_calling_a_model_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"write model\.logits\(texts\)"):
        Model(tiny.decoder())([[1, 2]])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("max_length", "generate has no argument 'max_length'; write max_new_tokens="),
        ("do_sample", "; write temperature="),
        ("num_beams", "; write beams=$"),
        ("batch_size", "; write max_rows=$"),
        ("output_attentions", r'write read="\*.pattern"$'),
        ("pad_token_id", "; write nothing: rows are never padded"),
        ("temperatur", "did you mean 'temperature'"),
        ("zzz", "generate has no argument 'zzz'$"),
    ],
)
def test_arguments_of_other_libraries_are_answered_with_ours(argument: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        Model(tiny.decoder()).generate([[1, 2]], **{argument: 1})


def test_arguments_of_other_forwards_are_answered_with_a_trace() -> None:
    for name in ("output_attentions", "output_hidden_states", "names_filter"):
        with pytest.raises(TypeError, match=f"logits has no argument '{name}'; write model.trace"):
            Model(tiny.decoder()).logits([[1, 2]], **{name: True})


@pytest.mark.parametrize(("argument", "ours"), [("torch_dtype", "dtype="), ("load_in_8bit", 'quantize="int8"')])
def test_arguments_of_other_loaders_are_answered_with_ours(argument: str, ours: str) -> None:
    with pytest.raises(TypeError, match=f"load has no argument '{argument}'; write {ours}$"):
        load("nowhere", **{argument: 1})


def test_every_argument_named_in_place_of_another_library_s_is_one_of_ours() -> None:
    functions = [load, attend, convert, *(getattr(Tokenizer, name) for name in ("encode", "decode"))]
    functions += [window, labs.run, Model.trained]
    functions += [getattr(Model, name) for name in dir(Model) if isfunction(getattr_static(Model, name))]
    ours = set().union(*(signature(function).parameters for function in functions))
    for name, answers in migration_hints._TABLES["arguments"].items():
        for answer in answers:
            assert "=" not in answer or answer.split("=")[0] in ours, name
