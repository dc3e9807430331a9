"""Training on shards: rows as of text in memory, the same for any number of ranks, and resumed bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_texts import documents, shards_of
from triptych.errors import ConfigError, InputError, TextError
from triptych.shards import ShardSet
from triptych.text import DECODER, ENCODER, SEQ2SEQ, byte_tokenizer
from triptych.train import (
    Example,
    Job,
    check_recipe,
    prepare,
    read_recipe,
    rows_of_rank,
    verify_resume,
    write_new_recipe,
)

SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "causal": {"model_type": "llama", "num_key_value_heads": 1, **SIZES},
    "masked": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES},
    "replaced": {"model_type": "electra", "embedding_size": 16, **SIZES},
    "corruption": {"model_type": "t5", "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 3},
}
LAYOUTS = {"causal": DECODER, "masked": ENCODER, "replaced": ENCODER, "corruption": SEQ2SEQ}


def tables(shards: object, objective: str = "causal", **run: object) -> dict[str, Any]:
    return {
        "model": MODELS[objective], "data": {"shards": shards, "held_out": 0.1, "pack": 4},
        "objective": {"name": objective},
        "run": {"rows": 6, "length": 32, "steps": 4, "precision": "fp32", "seed": 3, **run},
    }  # fmt: skip


def job_of(shards: object, objective: str = "causal", **run: object) -> Job:
    return prepare(check_recipe(tables(shards, objective, **run)))


def values(examples: list[Example]) -> list[Any]:
    return [(e.ids.tolist(), e.targets.tolist(), e.trained.tolist(), None if e.source is None else e.source.tolist())
            for e in examples]  # fmt: skip


def folder_for(tmp_path: Path, objective: str, seed: int = 0) -> str:
    where = tmp_path / f"{objective}{seed}"
    where.mkdir()
    return str(shards_of(where, documents(60, seed), tokenizer=byte_tokenizer(LAYOUTS[objective])))


@pytest.mark.parametrize("objective", MODELS)
def test_rows_are_the_same_for_any_number_of_ranks(objective: str, tmp_path: Path) -> None:
    """Of a mixture: what stands in them, and what is hidden.  The control: another seed and another step."""
    mixture = {folder_for(tmp_path, objective): 2.0, folder_for(tmp_path, objective, 1): 1.0}
    data = job_of(mixture, objective).trainer.data
    for step in (0, 7, 10**9):
        whole = values(data.draw(3, step, 6))
        for ranks in (1, 2, 3, 4, 7):
            parts = [rows_of_rank(data, 3, step, 6, rank, ranks) for rank in range(ranks)]
            assert [row for part in parts for row in values(part)] == whole
        assert values(data.draw(3, step + 1, 6)) != whole
        assert values(data.draw(4, step, 6)) != whole
    text = tmp_path / "text.txt"
    text.write_text("\n".join(documents(60)))
    recipe = tables("x", objective) | {"data": {"path": str(text)}, "tokenizer": "byte"}
    data = prepare(check_recipe(recipe)).trainer.data
    for ranks in (1, 2, 3, 7):
        parts = [rows_of_rank(data, 3, 5, 6, rank, ranks) for rank in range(ranks)]
        assert [row for part in parts for row in values(part)] == values(data.draw(3, 5, 6))
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError):
            rows_of_rank(data, 3, 5, 6, rank, ranks)


def test_causal_rows_are_documents_between_their_special_tokens(tmp_path: Path) -> None:
    """Each row is a stretch of one document, its target the next token, the end among them."""
    shards = folder_for(tmp_path, "causal")
    data, opened = job_of(shards).trainer.data, ShardSet(shards)
    end = byte_tokenizer().eos_id
    texts = [[end, *opened.document(i).tolist(), end] for i in range(opened.documents)]
    ended = 0
    for step in range(5):
        drawn = data.draw(3, step, 6)
        assert sum(len(one.ids) for one in drawn) == 6 * 32
        for one in drawn:
            ids, targets = one.ids.tolist(), one.targets.tolist()
            assert any(
                text[i : i + len(ids)] == ids and text[i + 1 : i + 1 + len(ids)] == targets
                for text in texts
                for i in range(len(text) - len(ids))
            )
            ended += targets[-1] == end
    assert ended > 3


@pytest.mark.parametrize("objective", MODELS)
def test_what_is_held_out_is_never_drawn(objective: str, tmp_path: Path) -> None:
    """Every document has a mark of its own; the training rows of many epochs have those of the first ones alone."""
    marks = [chr(0x4E00 + i) for i in range(40)]
    words = byte_tokenizer(LAYOUTS[objective])
    shards = str(shards_of(tmp_path, [(mark * 15) for mark in marks], 700, words))
    job = job_of(shards, objective)
    rows = [row for step in range(60) for row in job.trainer.data.draw(0, step, 6)]
    sides = [side for row in rows for side in (row.targets, row.source) if side is not None]
    drawn = "".join(words.decode([i for i in side.tolist() if i < 256]) for side in sides)
    seen = [mark in drawn for mark in marks]
    assert seen == [True] * 36 + [False] * 4
    assert job.trainer.held_out is not None
    held = sum(batch.tokens for batch in job.trainer.held_out.batches)
    assert held >= 4 * 45 * 0.8


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_a_run_is_resumed_bit_for_bit(objective: str, tmp_path: Path) -> None:
    mixture = {folder_for(tmp_path, objective): 2.0, folder_for(tmp_path, objective, 1): 1.0}
    verify_resume(check_recipe(tables(mixture, objective)), 4)


def test_rows_in_shards_teach_what_rows_in_memory_teach(tmp_path: Path) -> None:
    """The same text, documents and budget: held-out losses within a tenth of each other, far below the first one."""
    texts = documents(300)
    shards = str(shards_of(tmp_path, texts, 10_000))
    common = {"steps": 60, "evaluate_every": 1.0}
    from_disk = job_of(shards, **common)
    recipe = tables("x", **common) | {
        "data": {"path": str(tmp_path / "texts.jsonl"), "held_out": 0.1}, "tokenizer": "byte"
    }  # fmt: skip
    in_memory = prepare(check_recipe(recipe))
    losses = []
    for job in (from_disk, in_memory):
        job.run()
        losses.append(job.trainer.last_score().nats_per_token)
    assert max(losses) < 4.0 < np.log(257)
    assert abs(losses[0] - losses[1]) < 0.1 * losses[1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "names no texts; give data.path, or data.shards"),
        ({"shards": {}}, "names no texts"),
        ({"path": "a.txt", "shards": "b"}, "path and shards, which exclude each other"),
        ({"shards": "b", "words": 3}, "has words, which is not for shards"),
        ({"shards": "b", "columns": {"text": "x"}}, "has columns, which is not for shards"),
        ({"path": "a.txt", "pack": 3}, "pack without shards"),
        ({"shards": {"a": 0.0}}, "greater than 0"),
        ({"shards": {"a": float("nan")}}, "finite number|greater than 0"),
        ({"shards": 5}, "shards"),
    ],
)
def test_keys_that_do_not_fit(data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_recipe(tables("x") | {"data": data})
    assert "\n" not in str(caught.value)


def test_shards_that_do_not_fit_the_model(tmp_path: Path) -> None:
    shards = folder_for(tmp_path, "causal")
    with pytest.raises(ConfigError, match=r"learns the tokens of its shards, by their tokenizer; remove tokenizer"):
        check_recipe(tables(shards) | {"tokenizer": "byte"})
    with pytest.raises(ConfigError, match=r"data.shards are plain text, for causal, masked, corruption, replaced"):
        prepare(check_recipe(tables(shards) | {"objective": {"name": "chat"}, "model": MODELS["causal"]}))
    other = folder_for(tmp_path, "masked")
    with pytest.raises(ConfigError, match=r"made with the tokenizer of hash \w{12}, and that of"):
        job_of({shards: 1.0, other: 1.0})
    job = job_of(shards, out=str(tmp_path / "run"))
    job.run()
    further = {"data": {"shards": other}, "objective": {"name": "causal"}, "model": {"path": str(tmp_path / "run")},
               "run": {"rows": 2, "length": 16, "steps": 1}}  # fmt: skip
    with pytest.raises(ConfigError, match=r"and that of the model has \w{12}; tokenize with the model's"):
        prepare(check_recipe(further))
    prepare(check_recipe(further | {"data": {"shards": shards}})).run()
    with pytest.raises(ConfigError, match=r"holds shards; write data\.shards"):
        prepare(check_recipe(tables(shards) | {"data": {"path": shards}, "tokenizer": "byte"}))
    with pytest.raises(ConfigError, match="there is no directory"):
        job_of(str(tmp_path / "nowhere"))
    one = tmp_path / "one"
    one.mkdir()
    with pytest.raises(TextError, match="too short to hold out"):
        job_of(str(shards_of(one, ["a"])))


def test_few_tokens_make_short_rows(tmp_path: Path) -> None:
    """A row is all of them where they are fewer than it may have."""
    job = job_of(str(shards_of(tmp_path, ["warm", "cold"])))
    assert {len(one.ids) for one in job.trainer.data.draw(0, 5, 3)} <= set(range(1, 7))
    job.run()


def test_a_new_recipe_names_shards_where_data_are(tmp_path: Path) -> None:
    shards = folder_for(tmp_path, "causal")
    job = job_of(shards, out=str(tmp_path / "run"))
    job.run()
    write_new_recipe(tmp_path / "new.toml", base=str(tmp_path / "run"), data=shards)
    recipe = read_recipe(tmp_path / "new.toml")
    assert (recipe.data.shards, recipe.data.path, recipe.objective.name) == (shards, "", "causal")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(documents(20)))
    write_new_recipe(tmp_path / "other.toml", tmp_path / "new.toml", data=str(text))
    recipe = read_recipe(tmp_path / "other.toml")
    assert (recipe.data.shards, recipe.data.path) == (None, str(text))


def test_weights_are_bit_equal_whatever_was_drawn_before(tmp_path: Path) -> None:
    """What is kept of the shards in memory changes nothing."""
    shards = folder_for(tmp_path, "causal")
    jobs = [job_of(shards), job_of(shards)]
    for step in range(50):
        jobs[1].trainer.data.draw(9, step, 5)
    for job in jobs:
        job.run()
    first, second = ([p.detach() for p in job.trainer.module.parameters()] for job in jobs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
