"""Preference pairs: the loss and its gradient in closed form, what is read of records, and what is learned."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cli_models
import triptych
from triptych import nn
from triptych.errors import InputError, TriptychError
from triptych.text import ChatTemplate, Tokenizer
from triptych.train import Job, TrainingBatch, check_recipe, evaluate, loss, prepare, resume, show_batch, verify_resume
from triptych.train.base_model import AdapterRecipe
from triptych.train.objectives import MAX_LOGITS, collate
from triptych.train.parallel.start import check_parallel
from triptych.train.preference import PreferenceBatch, PreferenceLoss, PreferencePair

TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " made of stone."},
    {"prompt": "A king", "chosen": " rode over the hills", "rejected": " up"},
    {"prompt": "Rain", "chosen": " fell.", "rejected": " sang."},
]
BETA = 0.4


def written(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def recipe(folder: Path, rows: Sequence[Any], *, adapter: bool = True, **changes: Any) -> Any:
    data = written(folder / "rows.jsonl", rows)
    tables: dict[str, Any] = {
        "model": {"path": str(cli_models.checkpoint("decoder"))},
        "data": {"path": data, "held_out_path": data},
        "objective": {"name": "preference", "beta": BETA},
        "optimizer": {"lr": 3e-3},
        "run": {"rows": len(rows), "length": 64, "steps": 4, "precision": "fp32", "sample_every": 0},
    }
    if adapter:
        tables["adapter"] = {"rank": 3, "alpha": 6.0}
    for name, values in changes.items():
        tables[name] = tables.get(name, {}) | values
    return check_recipe(tables)


def moved(job: Job) -> nn.Transformer:
    """The module in fp64, its trained weights moved away from the reference."""
    module, random = job.trainer.module.double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.05, generator=random)
    return module.train()


def log_probabilities(module: nn.Transformer, prompt: str, answer: str, *, mean: bool = False) -> Tensor:
    """The log-probability of the bytes of `answer` and the end after them, by the logits of one row."""
    assert isinstance(module.decoder, nn.Stack)
    tokenizer = triptych.load(cli_models.checkpoint("decoder")).tokenizer
    ids = [*tokenizer.encode(prompt + answer, special=False), tokenizer.eos_id]
    flat, rows = nn.flat([ids], torch.device("cpu"))
    logits = module.logits(nn.Batch(inputs=flat, rows=rows))
    each = torch.stack([
        logits[at - 1, ids[at]] - torch.log(torch.exp(logits[at - 1]).sum())
        for at in range(len(tokenizer.encode(prompt, special=False)), len(ids))
    ])  # fmt: skip
    return each.mean() if mean else each.sum()


def closed_form(module: nn.Transformer, before: nn.Transformer, *, swapped: bool = False, mean: bool = False) -> Tensor:
    """Equation 7 of Rafailov et al. 2023 for `TEXTS`, written out."""
    losses = []
    for row in TEXTS:
        gains = []
        for side in ("chosen", "rejected"):
            with torch.no_grad():
                old = log_probabilities(before, row["prompt"], row[side], mean=mean)
            gains.append(log_probabilities(module, row["prompt"], row[side], mean=mean) - old)
        ahead = BETA * (gains[swapped] - gains[not swapped])
        losses.append(-torch.log(1 / (1 + torch.exp(-ahead))))
    return torch.stack(losses).mean()


def model_batch() -> nn.Batch:
    ids, rows = nn.flat([[5, 9, 3]], torch.device("cpu"))
    return nn.Batch(inputs=ids, rows=rows)


def gradient(value: Tensor, module: nn.Transformer) -> Tensor:
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, [p for p in module.parameters() if p.requires_grad])]
    )


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "all weights"])
def test_the_loss_is_equation_7(tmp_path: Path, adapter: bool) -> None:
    job = prepare(recipe(tmp_path, TEXTS, adapter=adapter))
    before = triptych.load(cli_models.checkpoint("decoder"), dtype=torch.float32).module.double()
    module = moved(job)
    batch = collate(job.trainer.data.draw(0, 0, len(TEXTS)))
    assert isinstance(batch, PreferenceBatch)
    if batch.loss.frozen is not None:
        batch.loss.frozen.double()
    own, right = batch.nats(module, MAX_LOGITS, None) / batch.weight, closed_form(module, before)
    assert abs((own - right).item()) < 1e-12
    slope, wanted = gradient(own, module), gradient(right, module)
    assert (slope - wanted).abs().max() < 1e-10 * wanted.abs().max()
    assert module.training  # as before: the reference is read in evaluation mode
    wrong = {
        "swapped": closed_form(module, before, swapped=True),
        "mean over tokens": closed_form(module, before, mean=True),
        "the trained model as reference": closed_form(module, module),
    }
    for name, value in wrong.items():
        assert abs((own - value).item()) > 1e-3, name


def test_logits_in_parts_and_rows_in_micro_batches_are_the_same_loss(tmp_path: Path) -> None:
    job = prepare(recipe(tmp_path, TEXTS))
    module, pairs = moved(job), job.trainer.data.draw(0, 0, len(TEXTS))
    batch = collate(pairs)
    whole = batch.nats(module, MAX_LOGITS, None)
    wanted = gradient(whole, module)
    for most in (1, 5 * module.spec.vocab, 40 * module.spec.vocab):
        part = batch.nats(module, most, None)
        assert abs((part - whole).item()) < 1e-12
        assert (gradient(part, module) - wanted).abs().max() < 1e-10 * wanted.abs().max()
    assert abs((sum(collate([pair]).nats(module, MAX_LOGITS, None) for pair in pairs) - whole).item()) < 1e-12
    assert loss(module, batch)[1] == batch.trained


def test_an_adapter_switched_off_is_the_model_without_it(tmp_path: Path) -> None:
    job = prepare(recipe(tmp_path, TEXTS))
    plain = triptych.load(cli_models.checkpoint("decoder"), dtype=torch.float32).module.double()
    module = moved(job)
    batch = model_batch()

    def apart() -> float:
        return (module.logits(batch) - plain.logits(batch)).abs().max().item()

    changed = apart()
    with nn.without_adapter(module):
        assert apart() == 0
    assert apart() == changed > 0.01
    with pytest.raises(InputError, match="the model has no adapter"), nn.without_adapter(plain):
        pass


NOUNS = ("river", "king", "horse", "night", "crown", "castle", "sword", "wheel")


def preferences(nouns: Sequence[str]) -> list[dict[str, str]]:
    """Answers that end with an exclamation mark are chosen."""
    return [{"prompt": f"{noun}:", "chosen": f" {noun}!", "rejected": f" {noun}?"} for noun in nouns]


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_preferred_is_learned(tmp_path: Path, swapped: bool) -> None:
    rows = preferences(NOUNS[:6])
    held_out = written(tmp_path / "held.jsonl", preferences(NOUNS[6:]))
    if swapped:
        rows = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    job = prepare(recipe(tmp_path, rows, data={"held_out_path": held_out}, run={"steps": 25}))
    start = evaluate(job.trainer.module, job.trainer.held_out)
    assert start.metrics == {"accuracy": 0.0, "margin": 0.0}  # it is the reference
    assert start.baselines["longer answer"] == 0.0
    job.run()
    score = job.trainer.last_score()
    assert score.metrics["accuracy"] == (0.0 if swapped else 1.0)
    assert (score.metrics["margin"] < -0.2) if swapped else (score.metrics["margin"] > 0.2)
    assert score.baselines == start.baselines


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "all weights"])
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, adapter: bool) -> None:
    """The reference of a run that is resumed is still the model before its first step."""
    out = str(tmp_path / "run")
    made = recipe(tmp_path, TEXTS, adapter=adapter, run={"steps": 6, "save_every": 0.5, "out": out})
    verify_resume(made, 6)
    prepare(made).run(until=3)
    resumed = resume(out)
    batch = collate(resumed.trainer.data.draw(0, 0, len(TEXTS)))
    assert isinstance(batch, PreferenceBatch)
    gains, _ = batch.gains(resumed.trainer.module, MAX_LOGITS, None)
    assert gains.abs().min() > 0
    if not adapter:
        assert any("second copy of the model" in note for note in resumed.notes)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_base(folder: Path) -> str:
    model = triptych.load(cli_models.checkpoint("decoder"))
    plain = model.tokenizer
    chat = ChatTemplate(TEMPLATE, {"eos_token": plain.specials.eos or ""})
    triptych.create(model.hf, Tokenizer(plain.backend, plain.specials, chat=chat)).save(folder / "chat")
    return str(folder / "chat")


def test_messages_are_rendered_and_the_answer_is_trained(tmp_path: Path) -> None:
    prompt, base = [{"role": "user", "content": "hi"}], chat_base(tmp_path)
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    explicit, implicit = {"prompt": prompt, **answers}, {side: [*prompt, *answers[side]] for side in answers}
    shown = []
    for row in (explicit, implicit):
        job = prepare(recipe(tmp_path, [row] * 2, model={"path": base}))
        rows = show_batch(job.trainer.data.draw(0, 0, 1), job.tokenizer)
        trained = ["".join(token for token, state in one.text if state == "trained") for one in rows]
        assert trained == ["chosen<|endoftext|>", "rejected<|endoftext|>"]
        assert all(
            "".join(token for token, _ in one.text).startswith("<user>hi<|endoftext|><assistant>") for one in rows
        )
        shown.append(rows)
    assert shown[0] == shown[1]


def test_longer_answers_are_cut_or_left_out(tmp_path: Path) -> None:
    rows = [
        *TEXTS,
        {"prompt": "p" * 70, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a" * 90, "rejected": "b"},
    ]
    counts = {}
    for key in ("cut_longer", "drop_longer"):
        job = prepare(recipe(tmp_path, rows, data={key: True}))
        counts[key] = len(job.trainer.data.examples)
        assert max(len(one.ids) for one in job.trainer.data.examples) <= 64
    assert counts == {"cut_longer": 4, "drop_longer": 3}  # a prompt that fills the row leaves no answer to cut


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 4: chosen and rejected are the same"),
        ({"chosen": "b", "rejected": "c"}, "line 4: there is no prompt, which only lists of messages"),
        ({"prompt": "a", "chosen": "b"}, "line 4: there is no field 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": 5}, "line 4: rejected is 5, not a text"),
        ({"prompt": 1.5, "chosen": "b", "rejected": "c"}, "line 4: prompt is 1.5, not a text"),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, "line 4: chosen is empty"),
        ({"prompt": "a" * 70, "chosen": "b", "rejected": "c"}, "line 4 has 7[0-9] tokens, more than run.length = 64"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": "c"}, "line 4: rejected is 'c', not a list of"),
        ({"prompt": [], "chosen": [ANSWER], "rejected": [ANSWER]}, r"line 4: prompt is \[\], not a list of"),
        ({"prompt": [USER, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]}, "line 4: the prompt does not end with"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [ANSWER]}, "line 4: an answer does not begin with the assis"),
        ({"chosen": [ANSWER], "rejected": [USER]}, "line 4: the prompt does not end with a message to be answered"),
        ({"prompt": [USER], "chosen": [{"role": "assistant"}], "rejected": [ANSWER]}, "line 4: a message is"),
    ],
)
def test_bad_records_are_one_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(TriptychError, match=message) as caught:
        prepare(recipe(tmp_path, [*TEXTS, row]))
    assert "\n" not in str(caught.value)


def test_trained_norms_are_not_divided_among_processes(tmp_path: Path) -> None:
    made = recipe(tmp_path, TEXTS, adapter=True, parallel={"tensor": 2})
    job = prepare(made.model_copy(update={"parallel": None}))
    check_parallel(made, job.trainer.module)
    assert made.adapter is not None
    dora = made.model_copy(update={"adapter": made.adapter.model_copy(update={"dora": True})})
    with pytest.raises(TriptychError, match=r"adapter\.dora needs whole rows of each matrix; set parallel\.tensor = 1"):
        check_parallel(dora, job.trainer.module)


@pytest.mark.parametrize("kind", [{"dora": True}, {"rank_stabilized": True}], ids=str)
def test_other_kinds_of_adapters_train_and_go_on_with_the_same_bits(tmp_path: Path, kind: dict[str, bool]) -> None:
    out = tmp_path / "run"
    verify_resume(recipe(tmp_path, TEXTS).model_copy(update={"adapter": AdapterRecipe(rank=3, **kind)}), 4)
    made = recipe(tmp_path, TEXTS, run={"out": str(out)}).model_copy(update={"adapter": AdapterRecipe(rank=3, **kind)})
    job = prepare(made)
    job.run()
    config = json.loads((out / "model" / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"]) == ("dora" in kind, "rank_stabilized" in kind)
    opened = triptych.load(out)
    assert (opened.logits([[5, 9, 3]])[0] - job.trainer.module.logits(model_batch())).abs().max().item() < 1e-5


def test_what_does_not_fit_the_objective(tmp_path: Path) -> None:
    made = recipe(tmp_path, TEXTS, adapter=False).model_copy(update={"model": cli_models.LLAMA, "tokenizer": "byte"})
    with pytest.raises(TriptychError, match=r"compares a model with what it was before; give model\.path"):
        prepare(made)
    with pytest.raises(TriptychError, match=r"objective\.beta is for preference; objective causal does not read it"):
        prepare(recipe(tmp_path, TEXTS, objective={"name": "causal"}))
    with pytest.raises(TriptychError, match=r"objective\.beta"):
        recipe(tmp_path, TEXTS, objective={"beta": float("nan")})
    encoder = {"path": str(cli_models.checkpoint("encoder"))}
    with pytest.raises(TriptychError, match="objective preference needs the layout decoder"):
        prepare(recipe(tmp_path, TEXTS, adapter=False, model=encoder))
    job = prepare(recipe(tmp_path, TEXTS))
    pair = job.trainer.data.draw(0, 0, 1)[0]
    assert isinstance(pair, PreferencePair)
    plain = triptych.load(cli_models.checkpoint("decoder")).module
    with pytest.raises(InputError, match="the model has no adapter"):
        collate([pair]).nats(plain, MAX_LOGITS, None)
    assert isinstance(collate([pair]), TrainingBatch)
    assert PreferenceLoss(0.3).nats(torch.tensor([[1.0], [1.0]])).item() == pytest.approx(np.log(2))
