"""What a decoder trained without its causal mask learns (lectures L0 exercise 4, L2 exercise 3)."""

import numpy as np

from triptych import nn
from triptych.model import Model
from triptych.page import Curve, Sample, Samples, TableSection
from triptych.spec import causal, full
from triptych.train import HeldOut, Job, Recipe, check_recipe, evaluate, prepare
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import Points, fit, masked, with_mask

OPENING = 40  # characters
MASKS = {"with the mask": causal(), "without": full()}


class MaskLeakLab(Lab):
    name = "mask-leak"

    width: int = size(64, "model width D, a multiple of 8", multiple=8)
    hidden: int = size(172, "MLP width")
    layers: int = size(2, "layers of each model")
    steps: int = size(200, "training steps", full=1000)
    rows: int = size(16, "rows of a training step")
    length: int = size(64, "characters of a row, at most 256", most=256)
    held_out: int = size(4096, "characters of held-out text", full=16_384)
    written: int = size(160, "characters that each model writes")
    prompt: str = size("", f"text that each continues; empty: the first {OPENING} held-out characters", blank=True)

    def findings(self, setup: Setup) -> Findings:
        setup.progress("reading the text")
        job = prepare(self._recipe(setup))
        held_out, data = job.trainer.held_out, job.trainer.data
        assert held_out is not None
        losses: dict[str, Points] = {}
        modules: dict[tuple[str, str], nn.Transformer] = {}  # by the mask of the training and that of the use
        for name, mask in MASKS.items():
            setup.progress(f"training {name}: {self.steps} steps")
            module = nn.new(masked(job.trainer.module.spec, mask), setup.seed)
            losses[name] = fit(module, data, rows=self.rows, length=self.length, steps=self.steps, seed=setup.seed)
            modules |= {(name, used): with_mask(module, other) for used, other in MASKS.items()}
        nats = {masks: evaluate(module, held_out).nats_per_token for masks, module in modules.items()}
        own, lost = (nats["with the mask", used] for used in MASKS)  # trained with the mask, used with and without it
        blind, leaky = (nats["without", used] for used in MASKS)  # trained without it
        guess, without = _frequencies(job, held_out), "trained without and used with it"
        gained = (guess - blind) / max(guess - own, 1e-9)
        yield clause(
            "Without the mask every place sees the character it has to predict: the model copies the character to"
            f" its right, and its loss falls to {leaky:.2f} nats, where the model with the mask, the control, has"
            f" {own:.2f} and guessing by the frequency of characters {guess:.2f}.",
            Check("trained and used with the mask, over guessing by frequency", own / guess, most=0.8),
            Check("trained and used without it, over that with it", leaky / own, most=0.1),
            instead="That one model learns and the one without the mask copies was not seen",
        )
        yield clause(
            f"Given its mask back, as in writing, it has nothing to copy and is at {blind:.2f} nats: the lower loss"
            " was not that of a better model.",
            Check(f"{without}, nats above trained with it", blind - own, least=0.75),
            Check(f"{without}: gain over guessing by frequency, over that of trained with it", gained, most=0.5),
            instead="Given its mask back it is not much worse than the model trained with it",
        )
        yield clause(
            f"The model trained with the mask loses {lost - own:.2f} nats when it is taken away: its weights were"
            " never trained with places ahead in sight.",
            Check("trained with and used without it, nats above used with it", lost - own, least=0.05),
            instead="The model trained with the mask can do without it",
        )
        rows = [[name, *(f"{nats[name, used]:.2f}" for used in MASKS)] for name in MASKS]
        opening = job.tokenizer.encode(self.prompt) or held_out.batches[0].ids[:OPENING].tolist()
        samples = []
        for (name, used), module in modules.items():
            model = Model(module, job.tokenizer)
            (text,) = model.generate([opening], max_new_tokens=self.written, temperature=0.8, seed=setup.seed)
            samples.append(Sample(None, f"trained {name}, writing {used}", text.text))
        lines = {f"trained {name}": points for name, points in losses.items()}
        guides = {"guessing by frequency": guess, "trained without, used with": blind}
        yield TableSection("Held-out nats per character", ("trained", *(f"used {name}" for name in MASKS)), rows)
        yield Curve("Loss in training", "step", "nats per character", lines, guides)
        yield Samples(f"What they write after {job.tokenizer.decode(opening)!r}", samples)

    def _recipe(self, setup: Setup) -> Recipe:
        model = {
            "model_type": "llama", "hidden_size": self.width, "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": 4, "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        }  # fmt: skip
        run = {"rows": self.rows, "length": self.length, "steps": self.steps, "seed": setup.seed, "precision": "fp32"}
        return check_recipe(
            {
                "model": model,
                "tokenizer": "characters",
                "data": {"path": setup.data or "shakespeare", "held_out_limit": self.held_out},
                "objective": {"name": "causal"},
                "run": run,
            }
        )


def _frequencies(job: Job, held_out: HeldOut) -> float:
    """Held-out nats a character when each is predicted by its frequency in the training text."""
    counts = np.bincount(job.trainer.data.targets(), minlength=job.tokenizer.vocab_size) + 1.0
    nats = -np.log(counts / counts.sum())
    return float(np.mean(np.concatenate([nats[batch.targets.numpy()] for batch in held_out.batches])))
