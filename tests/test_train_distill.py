"""Distillation: its loss and gradient written out in fp64, the store of a teacher's logits, and what is refused."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cli_models
import triptych
from triptych import nn
from triptych.errors import TriptychError
from triptych.text import DECODER, ChatTemplate, Tokenizer, byte_tokenizer
from triptych.train import Job, check_recipe, evaluate, loss, prepare, resume, verify_resume
from triptych.train.distill_loss import DistilledBatch, student_entries, teacher_entries
from triptych.train.objectives import MAX_LOGITS, collate

TEXT = "".join(f"{i} times {j} is {i * j}.\n" for i in range(9) for j in range(9))
DATA: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "causal": ("decoder", []),
    "masked": ("encoder", []),
    "corruption": ("encoder-decoder", []),
    "seq2seq": ("encoder-decoder", [{"source": "a king", "target": "no king"}, {"source": "rain", "target": "sun"}]),
    "chat": (
        "decoder",
        [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]} for text in "ab"],
    ),
}
SMALLER = {
    "decoder": cli_models.LLAMA | {"num_hidden_layers": 1},
    "encoder": cli_models.BERT | {"num_hidden_layers": 1},
    "encoder-decoder": cli_models.T5 | {"num_layers": 1, "num_decoder_layers": 1},
}


def moved(module: nn.Transformer, seed: int) -> nn.Transformer:
    """The module, whose distributions are far from uniform."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.empty_like(parameter).normal_(0, 0.3, generator=random)
    return module


@cache
def teacher(objective: str) -> Path:
    """A teacher for `objective`: for chat it ends turns, and for corruption it has the tokens that stand for spans."""
    layout, folder = DATA[objective][0], Path(tempfile.mkdtemp(prefix="triptych-")) / objective
    model = triptych.load(cli_models.checkpoint(layout))
    words, hf = model.tokenizer, model.hf
    if objective == "chat":
        template = cli_models.CHAT.replace("\n{% end", "<|endoftext|>{% end")
        words = Tokenizer(words.backend, words.specials, chat=ChatTemplate(template))
    if objective == "corruption":
        words.backend.add_special_tokens([f"<extra_id_{i}>" for i in range(100)])
        words, hf = Tokenizer(words.backend, words.specials), hf | {"vocab_size": hf["vocab_size"] + 100}
    made = triptych.create(hf, words)
    moved(made.module, 1)
    made.save(folder)
    return folder


def recipe_tables(folder: Path, objective: str = "causal") -> dict[str, Any]:
    rows = DATA[objective][1]
    data = folder / ("rows.jsonl" if rows else "text.txt")
    words = "the old mill stands where the river bends\n" * 30
    text = words if objective == "masked" else TEXT
    data.write_text("\n".join(map(json.dumps, rows)) if rows else text, encoding="utf-8")
    return {
        "data": {"path": str(data), **({"held_out": 0.5} if rows else {"held_out": 0.1})},
        "objective": {"name": objective},
        "run": {"rows": 4, "length": 24, "steps": 4, "precision": "fp32", "sample_every": 0.0},
    }


def recipe(folder: Path, objective: str = "causal", **changes: Any) -> Any:
    """A smaller model of the teacher's layout and tokenizer, that learns from it."""
    path = teacher(objective)
    tables = recipe_tables(folder, objective) | {"model": SMALLER[DATA[objective][0]], "tokenizer": str(path)}
    tables["distill"] = {"teacher": str(path), "weight": 0.3}
    for name, values in changes.items():
        merged = isinstance(values, dict) and "path" not in values and "name" not in values
        tables[name] = tables.get(name, {}) | values if merged else values
    return check_recipe({name: value for name, value in tables.items() if value is not None})


def in_double(job: Job) -> tuple[nn.Transformer, nn.Transformer]:
    """The trained model and the teacher without dropout, in fp64 in the job too."""
    return moved(job.trainer.module.double(), 2).eval(), master_of(job).double()


def written_out(
    module: nn.Transformer, master: nn.Transformer, batch: Any, heat: float, weight: float, top: int | None,
    factor: float | None = None, *, rest: bool = True, reverse: bool = False,
) -> Tensor:  # fmt: skip
    """The sum of the losses, token by token; with `rest` false the kept probabilities are renormalized, and with
    `reverse` the divergence is that of the teacher from the model."""
    inputs = nn.Batch(inputs=batch.ids, rows=batch.rows, source=batch.source)
    own = module.logits(inputs)[batch.at]
    with torch.no_grad():
        theirs = master.logits(inputs)[batch.at]
    total = own.new_zeros(())
    for mine, other, target in zip(own, theirs, batch.targets.tolist(), strict=True):
        q, p = (torch.exp(one / heat) / torch.exp(one / heat).sum() for one in (mine, other))
        kept = torch.argsort(p, descending=True)[: len(p) if top is None else top].tolist()
        pairs = [(p[i], q[i]) for i in kept]
        if not rest:
            pairs = [(a / sum(p[i] for i in kept), b) for a, b in pairs]
        elif len(kept) < len(p):
            others = [i for i in range(len(p)) if i not in kept]
            pairs.append((p[others].sum(), q[others].sum()))
        apart = sum(b * torch.log(b / a) if reverse else a * torch.log(a / b) for a, b in pairs)
        tokens = -torch.log(torch.exp(mine[target]) / torch.exp(mine).sum())
        total = total + (1 - weight) * tokens + weight * (heat * heat if factor is None else factor) * apart
    return total


def gradient(value: Tensor, module: nn.Transformer) -> Tensor:
    wanted = [p for p in module.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(value, wanted, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(wanted, slopes, strict=True)]
    )


@pytest.mark.parametrize("heat", [1.0, 2.5])
@pytest.mark.parametrize("top", [None, 1, 5])
@pytest.mark.parametrize("objective", list(DATA))
def test_the_loss_and_its_gradient_are_those_written_out(
    tmp_path: Path, objective: str, top: int | None, heat: float
) -> None:
    made = recipe(tmp_path, objective, distill={"temperature": heat} | ({} if top is None else {"top": top}))
    job = prepare(made)
    module, master = in_double(job)
    batch = collate(job.trainer.data.draw(0, 0, 1 if top is None else 2))
    assert isinstance(batch, DistilledBatch)
    own, right = batch.nats(module, MAX_LOGITS, None), written_out(module, master, batch, heat, 0.3, top)
    assert abs((own - right).item()) < 1e-9 * abs(right.item())
    slope, wanted = gradient(own, module), gradient(right, module)
    assert (slope - wanted).abs().max() < 1e-8 * wanted.abs().max()
    wrong = {
        "no teacher": written_out(module, master, batch, heat, 0.0, top),
        "the model as its own teacher": written_out(module, module, batch, heat, 0.3, top),
        "the other divergence": written_out(module, master, batch, heat, 0.3, top, reverse=True),
    }
    if heat != 1.0:
        wrong["without the square of the temperature"] = written_out(module, master, batch, heat, 0.3, top, 1.0)
    if top is not None:
        wrong["renormalized"] = written_out(module, master, batch, heat, 0.3, top, rest=False)
        wrong["the whole vocabulary"] = written_out(module, master, batch, heat, 0.3, None)
    for name, value in wrong.items():
        assert abs((own - value).item()) > 1e-6 * abs(own.item()), name
    assert not any(parameter.requires_grad for parameter in master_of(job).parameters())


def master_of(job: Job) -> nn.Transformer:
    module: nn.Transformer = job.trainer.data.draw(0, 0, 1)[0].distillation.teacher.module  # type: ignore[attr-defined]
    assert not module.training
    return module


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def test_what_the_rest_as_one_entry_leaves_out() -> None:
    """KL over all = KL over the entries + r * KL inside the rest.  Renormalized ones are not least at the teacher."""
    theirs, mine = torch.randn(50, 29, dtype=torch.float64) * 2, torch.randn(50, 29, dtype=torch.float64) * 2
    wanted, ids = teacher_entries(theirs, 1.7, 4)
    assert ids is not None
    p, q = (one.div(1.7).softmax(-1) for one in (theirs, mine))
    outside = torch.ones_like(p).scatter(-1, ids, 0.0)
    r = (p * outside).sum(-1)
    inside = [one * outside / (one * outside).sum(-1, keepdim=True) for one in (p, q)]
    of_rest = (inside[0] * torch.where(outside > 0, (inside[0] / inside[1]).log(), 0.0)).sum(-1)
    kept = divergence(wanted.exp(), student_entries(mine, 1.7, ids).exp())
    assert (divergence(p, q) - kept - r * of_rest).abs().max() < 1e-12
    assert (r * of_rest).min() > 0
    assert r.max() > 0.1
    at = theirs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(divergence(wanted.exp(), student_entries(at, 1.7, ids).exp()).sum(), at)
    assert slope.abs().max() < 1e-12
    entries = student_entries(at, 1.7, ids)
    bare = wanted[:, :-1].log_softmax(-1)
    value = (bare.exp() * (bare - entries[:, :-1])).sum(-1)
    assert (value + (1 - r).log()).abs().max() < 1e-12  # -log(1 - r), and not 0
    (slope,) = torch.autograd.grad(value.sum(), at)
    assert (slope.gather(-1, ids) < 0).all()  # so that the kept entries rise above the teacher's


def test_extreme_logits_give_finite_losses() -> None:
    theirs = torch.tensor([[200.0, -200.0, 0.0, -float("inf")], [0.0, 0.0, 0.0, 0.0]])
    for top in (None, 1, 3, 4):
        mine = torch.tensor([[-300.0, 300.0, 0.0, 1.0], [0.0, 500.0, 0.0, 0.0]], requires_grad=True)
        wanted, ids = teacher_entries(theirs, 1.0, top)
        value = torch.nn.functional.kl_div(student_entries(mine, 1.0, ids), wanted, reduction="sum", log_target=True)
        (slope,) = torch.autograd.grad(value, mine)
        assert value.isfinite()
        assert slope.isfinite().all()


def test_parts_of_the_logits_and_micro_batches_are_the_same_loss(tmp_path: Path) -> None:
    for distill in ({}, {"top": 3}, {"store": str(tmp_path / "store"), "top": 3}):
        made = recipe(tmp_path, distill=distill)
        job = prepare(made)
        module = job.trainer.module.double()
        if job.store is None:
            module, _ = in_double(job)
        rows = job.trainer.data.draw(0, 0, 4)
        whole = collate(rows).nats(module, MAX_LOGITS, None)
        wanted = gradient(whole, module)
        for most in (1, 14 * module.spec.vocab):
            part = collate(rows).nats(module, most, None)
            assert abs((part - whole).item()) < 1e-9 * whole.item()
            assert (gradient(part, module) - wanted).abs().max() < 1e-8 * wanted.abs().max()
        each = sum(collate([row]).nats(module, MAX_LOGITS, None) for row in rows)
        assert abs((each - whole).item()) < 1e-9 * whole.item()
        assert loss(module, collate(rows))[1] == collate(rows).trained


def losses(made: Any, **options: Any) -> list[float]:
    job = prepare(made)
    job.run(**options)
    return [record.loss for record in job.trainer.at.history]


@pytest.mark.parametrize("stored", [False, True], ids=["online", "store"])
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, stored: bool) -> None:
    out = tmp_path / "run"
    distill = {"store": str(tmp_path / "store")} if stored else {"top": 7}
    run = {"steps": 6, "save_every": 0.5, "out": str(out), "accumulate": 2, "recompute": True}
    made = recipe(tmp_path, distill=distill, run=run)
    verify_resume(made, 6)
    whole = losses(made.model_copy(update={"run": made.run.model_copy(update={"out": None})}))
    prepare(made).run(until=3)
    resumed = resume(out)
    resumed.run()
    assert [record.loss for record in resumed.trainer.at.history] == whole
    again = triptych.load(out / "model").module
    score = evaluate(again, resumed.trainer.held_out)
    assert abs(score.nats - resumed.trainer.last_score().nats) < 1e-3  # of the tokens alone


def test_an_adapter_learns_from_a_teacher_and_is_one(tmp_path: Path) -> None:
    path, other = cli_models.checkpoint("decoder"), tmp_path / "other"
    model = triptych.load(path)
    triptych.create(model.hf, model.tokenizer, seed=4).save(other)
    changes = {"model": {"path": str(path)}, "tokenizer": None, "adapter": {"rank": 3}, "optimizer": {"lr": 0.01}}
    made = recipe(
        tmp_path, **changes, distill={"teacher": str(other), "weight": 1.0},
        run={"steps": 30, "out": str(tmp_path / "run")},
    )  # fmt: skip
    seen = losses(made)
    assert seen[-1] < 0.8 * seen[0]
    for store in ({}, {"store": str(tmp_path / "store")}):
        taught = {"teacher": str(tmp_path / "run"), "weight": 1.0} | store
        assert losses(recipe(tmp_path, **changes, distill=taught, run={"steps": 1}))[0] > 0.01
        itself = taught | {"teacher": str(path), "store": str(tmp_path / "other-store")}
        assert losses(recipe(tmp_path, **changes, distill=itself, run={"steps": 1}))[0] < 1e-3


def test_a_teacher_with_more_logits_than_tokens(tmp_path: Path) -> None:
    """Matrices are often padded to a round number; the additional logits count for nothing."""
    model = triptych.load(cli_models.checkpoint("decoder"))
    triptych.create(model.hf | {"vocab_size": 300}, model.tokenizer).save(tmp_path / "padded")
    for padded in (True, False):
        path = str(tmp_path / "padded") if padded else str(cli_models.checkpoint("decoder"))
        sizes = {} if padded else {"model": SMALLER["decoder"] | {"vocab_size": 300}}
        for top in ({}, {"top": 5}):
            losses(recipe(tmp_path, distill={"teacher": path} | top, run={"steps": 1}, **sizes))


def test_the_teacher_keeps_its_dtype(tmp_path: Path) -> None:
    model = triptych.load(cli_models.checkpoint("decoder"), dtype="bf16")
    model.save(tmp_path / "bf16")
    job = prepare(recipe(tmp_path, distill={"teacher": str(tmp_path / "bf16")}))
    assert master_of(job).dtype == torch.bfloat16
    pairs = zip(master_of(job).parameters(), triptych.load(tmp_path / "bf16").module.parameters(), strict=True)
    assert all(torch.equal(own, stored) for own, stored in pairs)
    job.run()
    assert job.trainer.module.dtype == torch.float32


def test_the_page_shows_the_recipe_of_the_examples() -> None:
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "concepts" / "objectives.md").read_text(encoding="utf-8")
    shown = page.partition('```toml title="docs/examples/distill.toml"\n')[2].partition("```")[0]
    assert shown.strip()
    assert shown in (docs / "examples" / "distill.toml").read_text(encoding="utf-8")


# ---------------------------------------------------------------- what is refused


def other_words(folder: Path) -> str:
    tokenizer = byte_tokenizer(DECODER)
    tokenizer.backend.add_tokens(["king"])
    triptych.create(
        cli_models.LLAMA | {"vocab_size": tokenizer.backend.get_vocab_size(), "eos_token_id": tokenizer.eos_id},
        tokenizer,
    ).save(folder / "words")
    return str(folder / "words")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"teacher": "nowhere"}, "nowhere"),
    ({"teacher": "hub:"}, "hub:"),
    ({"top": 258}, r"distill\.top = 258 is more than the 257 tokens of the vocabulary"),
    ({"top": 0}, r"distill\.top = 0"),
    ({"top": -4}, r"distill\.top = -4"),
    ({"top": "5"}, r"distill\.top = '5'"),
    ({"temperature": 0.0}, r"distill\.temperature = 0\.0"),
    ({"temperature": -1.0}, r"distill\.temperature = -1\.0"),
    ({"temperature": float("nan")}, r"distill\.temperature = nan"),
    ({"temperature": float("inf")}, r"distill\.temperature = inf"),
    ({"weight": 1.5}, r"distill\.weight = 1\.5"),
    ({"weight": -0.1}, r"distill\.weight = -0\.1"),
    ({"weight": float("nan")}, r"distill\.weight = nan"),
    ({"tempreature": 2.0}, r"did you mean 'temperature'"),
    ({"store": "~/store"}, "~ is not expanded"),
]


@pytest.mark.parametrize(("distill", "message"), REFUSED)
def test_a_recipe_that_does_not_fit_is_one_line(tmp_path: Path, distill: dict[str, Any], message: str) -> None:
    with pytest.raises(TriptychError, match=message) as caught:
        prepare(recipe(tmp_path, distill=distill))
    assert "\n" not in str(caught.value)


def test_a_teacher_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    def refused(message: str, objective: str = "causal", **changes: Any) -> None:
        with pytest.raises(TriptychError, match=message) as caught:
            prepare(recipe(tmp_path, objective, **changes))
        assert "\n" not in str(caught.value)

    refused("has another vocabulary than the trained model", distill={"teacher": other_words(tmp_path)})
    refused("is no decoder that predicts tokens", distill={"teacher": str(cli_models.checkpoint("encoder"))})
    refused("has 72 positions, fewer than run.length = 80", model={"max_position_embeddings": 90}, run={"length": 80})
    tables = recipe(tmp_path).model_dump() | {"objective": {"name": "labels"}, "parallel": None}
    with pytest.raises(TriptychError, match=r"distill is for causal, .*; objective labels learns from no teacher"):
        prepare(check_recipe({key: value for key, value in tables.items() if value is not None}))
