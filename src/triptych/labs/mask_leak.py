"""What a decoder trained without its causal mask learns (lectures L0 exercise 4, L2 exercise 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from triptych import nn
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import Points, fit
from triptych.model import Model
from triptych.page import Curve, Sample, Samples, Section, TableSection
from triptych.spec import Mask, causal, full
from triptych.spec import Model as Spec
from triptych.train import Job, Recipe, check_recipe, evaluate, prepare

STEPS, ROWS, LENGTH = 300, 16, 64
HELD_OUT = 16_384  # characters
OPENING, WRITTEN = 40, 160  # characters read before writing, and written
MASKS = {"with the mask": causal(), "without": full()}


@dataclass(frozen=True, eq=False)
class Trained:
    """One of the two models: how its loss fell, and its weights under either mask - (the model, held-out nats)."""

    losses: Points
    used: dict[str, tuple[nn.Transformer, float]]


def run(setup: Setup) -> Finding:
    """A character decoder of 2 layers and D 64, trained and used with and without its mask: all four."""
    setup.say("reading the text")
    job = prepare(_recipe(setup))
    found = {}
    for name, mask in MASKS.items():
        setup.say(f"training {name}: {STEPS} steps")
        found[name] = _train(job, mask, setup.seed)
    (own, lost), (blind, leaky) = ([nats for _, nats in trained.used.values()] for trained in found.values())
    guess = _frequencies(job)
    checks = (
        Check("trained and used with the mask, over guessing by frequency", own / guess, most=0.8),
        Check("trained and used without it, over that with it", leaky / own, most=0.1),
        Check("trained without and used with it, nats above trained with it", blind - own, least=0.75),
        Check("trained with and used without it, nats above used with it", lost - own, least=0.05),
    )
    meaning = (
        "Without the mask every place sees the character it has to predict, and the loss falls to almost nothing:"
        f" the model learns to copy its neighbour on the right. Nobody stands there when it writes. Given its mask"
        f" back it is {blind:.2f} nats from the truth, where guessing by the frequency of characters alone gives"
        f" {guess:.2f}, and its text is nonsense. A lower loss is a better model only if the loss asks what the model"
        " is for. Trained with the mask, the same weights lose too when it is taken away: they never learned what to"
        " do with places ahead."
    )
    question = "What does a decoder learn when its mask is forgotten?"
    return Finding(question, meaning, checks, _sections(job, found, guess, setup.seed))


def _recipe(setup: Setup) -> Recipe:
    model = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return check_recipe(
        {
            "model": model,
            "tokenizer": "characters",
            "data": {"path": setup.data or "shakespeare", "held_out_limit": HELD_OUT},
            "objective": {"name": "causal"},
            "run": {"rows": ROWS, "length": LENGTH, "steps": STEPS, "seed": setup.seed, "precision": "fp32"},
        }
    )


def _train(job: Job, mask: Mask, seed: int) -> Trained:
    module = nn.new(_masked(job.trainer.module.spec, mask), seed)
    losses = fit(module, job.trainer.data, rows=ROWS, length=LENGTH, steps=STEPS, seed=seed)
    assert job.trainer.held is not None
    used = {}
    for name, other in MASKS.items():
        same = nn.new(_masked(module.spec, other))
        same.load_state_dict(module.state_dict())
        used[name] = same, evaluate(same, job.trainer.held).nats_per_token
    return Trained(losses, used)


def _masked(model: Spec, mask: Mask) -> Spec:
    """`model` with `mask` in place of its own: a fact of the spec, the weights have no part in it."""
    stack = model.decoder
    assert stack is not None
    kinds = {name: replace(kind, mask=mask) for name, kind in stack.kinds.items()}
    return replace(model, decoder=replace(stack, kinds=kinds))


def _frequencies(job: Job) -> float:
    """Held-out nats a character when each is guessed by how often it comes in the training text."""
    assert job.trainer.held is not None
    counts = np.bincount(job.trainer.data.targets(), minlength=job.tokenizer.vocab_size) + 1.0
    nats = -np.log(counts / counts.sum())
    return float(np.mean(np.concatenate([nats[batch.targets.numpy()] for batch in job.trainer.held.batches])))


def _sections(job: Job, found: dict[str, Trained], guess: float, seed: int) -> tuple[Section, ...]:
    rows = [[name, *(f"{nats:.2f}" for _, nats in trained.used.values())] for name, trained in found.items()]
    table = TableSection("Held-out nats per character", ("trained", *(f"used {name}" for name in MASKS)), rows)
    curve = Curve(
        "Loss in training",
        "step",
        "nats per character",
        {f"trained {name}": trained.losses for name, trained in found.items()},
        {"guessing by frequency": guess, "trained without, used with": found["without"].used["with the mask"][1]},
    )
    assert job.trainer.held is not None
    opening = job.trainer.held.batches[0].ids[:OPENING].tolist()
    samples = []
    for trained, how in found.items():
        for used, (module, _) in how.used.items():
            model = Model(module, job.tokenizer)
            (text,) = model.generate([opening], max_new_tokens=WRITTEN, temperature=0.8, seed=seed)
            samples.append(Sample(None, f"trained {trained}, writing {used}", text.text))
    told = job.tokenizer.decode(opening)
    return table, curve, Samples(f"What they write on from {told!r}", samples)
