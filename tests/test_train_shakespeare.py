"""Pairs of the two editions and turns of one person as training data, and the recipes that use them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import triptych
from triptych.cli import main
from triptych.errors import ConfigError
from triptych.text import shakespeare, shakespeare_labels
from triptych.train import prepare, read_recipe
from triptych.train.task import read_split

ROOT = Path(__file__).parents[1]
RETRIEVAL, CHARACTER = (ROOT / "docs" / "examples" / f"{name}.toml" for name in ("retrieval", "character"))


@pytest.fixture(scope="module")
def retrieval() -> ModuleType:
    spec = importlib.util.spec_from_file_location("retrieval", ROOT / "bench" / "retrieval.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pieces_of_both_editions_belong_together() -> None:
    """Each pair once, of equally many words, and none of a held-out play in those to train on."""
    data = read_recipe(RETRIEVAL).data
    train, held = read_split(data, ("text", "text_b"), ("negative",))
    assert len(held) <= data.held_out_limit == 500
    for side in (train, held):
        pairs = [(one.text("text"), one.text("text_b")) for one in side]
        assert len(set(pairs)) == len(pairs)
        assert all(len(a.split()) == len(b.split()) <= data.words == 3 for a, b in pairs)
    plays = " ".join(" ".join(pair.folio.split()) for pair in shakespeare.parallel_split()[1])
    assert all(one.text("text") in plays for one in held)
    whole, _ = read_split(data.model_copy(update={"words": None}), ("text", "text_b"))
    assert max(len(one.text("text").split()) for one in whole) > 3


@pytest.mark.parametrize("key", [{"columns": {"text": "a"}}, {"held_out_path": "other.jsonl"}])
def test_pairs_have_fields_of_their_own(key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has its own fields and held-out texts"):
        read_split(read_recipe(RETRIEVAL).data.model_copy(update=key), ("text", "text_b"))


@pytest.mark.parametrize("name", shakespeare_labels.SPEAKERS)
def test_turns_answer_another_person(name: str) -> None:
    """The held-out turns are the last of the play."""
    train, held = shakespeare_labels.turns(name)
    numbers = [int(turn.where.rpartition(" ")[2]) for turn in (*train, *held)]
    assert numbers == sorted(set(numbers))
    assert 0.15 < len(held) / len(numbers) < 0.21
    assert len(numbers) > 100
    assert all(len(turn.asked.split()) <= shakespeare_labels.ASKED for turn in train)


def test_a_conversation_is_one_answer_of_the_person() -> None:
    data = read_recipe(CHARACTER).data
    records, _ = read_split(data, ("messages",))
    (first,) = (one for one in records if "A little more than kin" in json.dumps(one.values["messages"]))
    system, asked, answer = first.values["messages"]  # type: ignore[misc]
    assert "Hamlet" in system["content"]
    assert asked["content"].endswith("my cousin Hamlet, and my son--")
    assert answer["content"].startswith("[Aside.]") or answer["content"].startswith("A little more than kin")
    with pytest.raises(ConfigError, match="names no person whose turns are known; they are hamlet, iago, rosalind"):
        read_split(data.model_copy(update={"path": "shakespeare:turns:romeo"}), ("messages",))
    with pytest.raises(ConfigError, match="has conversations; use objective chat"):
        read_split(data, ("text", "label"))


def test_evaluate_prints_the_score_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The score of the weights that the run begins with, which training changes."""
    (tmp_path / "text.txt").write_text("The king was cold, and the night was long. " * 40)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f"""tokenizer = "byte"
        model = {{model_type = "gpt2", n_embd = 16, n_layer = 1, n_head = 2, n_inner = 24, n_positions = 32}}
        data = {{path = '{tmp_path / "text.txt"}', held_out = 0.2}}
        objective = {{name = "causal"}}
        run = {{rows = 4, length = 16, steps = 30, save_every = 0, sample_every = 0, precision = "fp32"}}
        """
    )
    assert main(["train", str(recipe), "--evaluate", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["held_out"]["nats_per_token"]
    job = prepare(read_recipe(recipe))
    assert before == pytest.approx(job.trainer.last_score().nats_per_token)
    job.run()
    assert job.trainer.last_score().nats_per_token < before - 0.3
    assert main(["train", str(recipe), "--evaluate"]) == 0
    assert capsys.readouterr().out.startswith("held out: ")
    assert main(["train", str(recipe), "--evaluate", "--resume"]) == 2


@pytest.mark.heavy
def test_pieces_are_found_by_fine_tuned_vectors(retrieval: ModuleType, minilm_dir: Path, unchecked: None) -> None:
    """30 steps on other plays.  Without the partners' own texts, shuffled pairs, nothing is found."""
    before = retrieval.measured(triptych.load(minilm_dir), 300, 0, 3)
    changes = ["run.steps=30", "run.evaluate_every=0", "data.held_out_limit=20"]
    job = prepare(read_recipe(RETRIEVAL, changes, {"model.path": str(minilm_dir)}))
    job.run()
    after = retrieval.measured(triptych.Model(job.trainer.module, job.tokenizer, job.hf), 300, 0, 3)
    assert after["recall"][1] > before["recall"][1] > before["words in common"][1]
    assert after["shuffled"][10] < 3 * after["chance"][10]
