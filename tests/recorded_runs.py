"""What fixed runs of this package compute, as plain arrays: trained models, real weights, their generations.

`python tests/recorded_runs.py --smollm2 FILE.gguf --minilm DIRECTORY --out tests/recorded` writes the records of the
package that PYTHONPATH names; `test_same_as_before.py` compares the package under test with the records made at commit
133d396.  Only public interfaces are used, so that the same file runs against an older checkout.

The texts are made here, by a generator of our own, so that no corpus has to be fetched.  Prompts and seeds are chosen
when the records are written: the two likeliest tokens differ by more than `MARGIN` nats at every step, and weights
that were changed by `NOISE` (relative) give the same tokens.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from torch import Tensor

import triptych
from triptych.model import Model
from triptych.train import prepare, read_recipe

Records = dict[str, NDArray[Any]]
Meta = dict[str, Any]

STEPS = 50
ARRAYS, META = "runs.safetensors", "runs.json"
PANELS = ("decoder", "encoder", "encoder-decoder")
NEW_TOKENS = 20
BEAMS = 3
MARGIN = 1e-3  # nats; the least distance of the two likeliest tokens at every greedy step
NOISE = 1e-4  # relative change of every weight that must not change a token
SAMPLES = 48  # values of each saved tensor that are stored
CHOSEN = 256  # log-probabilities stored at each position, evenly spaced over a large vocabulary
# Muon orthogonalizes in bf16, which turns a difference of 1e-7 in the weights into 5e-2 after 50 steps of the decoder.
# AdamW with this epsilon keeps it below 1e-6, so that another processor reaches the same weights to 1e-5.
WELL_CONDITIONED = ("optimizer.name=adamw", "optimizer.eps=1e-5")
MUON_STEPS = 3  # of the recipe's own optimizer, compared more loosely
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
SENTENCES = [
    "She sat by the river bank.",
    "The bank raised its interest rates again.",
    "A dog barks.",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "This sentence is longer than the others by far, so that the rows of one batch differ in length.",
]
SMOLLM2_PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
    "1, 2, 3, 4, 5,",
    "The three primary colours are red,",
]


# ---------------------------------------------------------------- texts

NOUNS = [
    "king", "farmer", "river", "mill", "boat", "apple", "garden", "village", "horse", "soldier", "letter", "candle",
    "mountain", "window", "story", "lion", "sailor", "bridge", "kitchen", "shadow",
]  # fmt: skip
ADJECTIVES = ["old", "young", "green", "quiet", "heavy", "golden", "broken", "small", "distant", "cheerful"]
VERBS = ["carried", "found", "followed", "painted", "forgot", "loved", "visited", "described", "repaired", "saved"]
ENDINGS = ("in the morning", "before the rain", "with great care", "without a word", "for seven years")


def numbers(seed: int) -> Iterator[int]:
    """Pseudo-random numbers below 2**31 that depend on nothing but `seed` (MMIX's generator, Knuth)."""
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 33


def sentences(count: int, seed: int = 1) -> list[str]:
    """Sentences of a small grammar: article, adjective, noun, verb, article, adjective, noun, ending."""
    random = numbers(seed)

    def one_of(words: Sequence[str]) -> str:
        return words[next(random) % len(words)]

    return [
        f"The {one_of(ADJECTIVES)} {one_of(NOUNS)} {one_of(VERBS)} the {one_of(ADJECTIVES)} {one_of(NOUNS)} "
        f"{one_of(ENDINGS)}."
        for _ in range(count)
    ]


def respelled(text: str) -> str:
    """The text in a spelling of its own: what the encoder-decoder turns back."""
    return text.replace("v", "u").replace("ll", "l").replace("in", "yn")


def write_texts(folder: Path) -> dict[str, Path]:
    """The training data of each panel, as files under `folder`."""
    lines = sentences(1500)
    text, pairs = folder / "text.txt", folder / "pairs.jsonl"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pairs.write_text(
        "".join(json.dumps({"source": respelled(line), "target": line}) + "\n" for line in lines), encoding="utf-8"
    )
    return {"decoder": text, "encoder": text, "encoder-decoder": pairs}


# ---------------------------------------------------------------- three models, trained here


def train(
    panel: str, folder: Path, changes: Sequence[str] = WELL_CONDITIONED, steps: int = STEPS, noise: float = 0.0
) -> tuple[Model, list[float]]:
    """The quickstart's recipe `panel`, `steps` steps in fp32 on one thread: the model, and the loss of every step.

    The clock has no part in it: `run.seconds` is so large that progress follows the steps.  `noise` changes every
    weight by this part after each step.
    """
    fixed = {
        "data.path": json.dumps(str(write_texts(folder)[panel])),
        "run.steps": steps,
        "run.seconds": 1e12,
        "run.precision": "fp32",
        "run.threads": 1,
        "run.evaluate_every": 0,
        "run.sample_every": 0,
        "run.save_every": 0,
    }
    recipe = read_recipe(panel, [*(f"{key}={value}" for key, value in fixed.items()), *changes])
    job = prepare(recipe)
    losses: list[float] = []

    def on_step(event: Any) -> None:
        losses.append(event.loss)
        if noise:
            perturb(job.trainer.module, noise, len(losses))

    job.run(on_step=on_step)
    return Model(job.trainer.module.eval(), job.tokenizer, job.hf), losses


def saved_tensors(model: Model, folder: Path) -> dict[str, Tensor]:
    """What `model.save` wrote, by name."""
    model.save(folder)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_torch(file).items()}


def evenly(count: int, size: int) -> Tensor:
    """`count` places of `size`, evenly spaced from the first to the last."""
    return torch.linspace(0, size - 1, count, dtype=torch.float64).round().long()


def sampled(tensor: Tensor) -> NDArray[np.float32]:
    """Up to `SAMPLES` values of a tensor, evenly spaced over its storage order."""
    flat = tensor.detach().float().flatten()
    places = evenly(min(SAMPLES, len(flat)), len(flat))
    return flat[places].numpy()


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def tensor_records(prefix: str, tensors: dict[str, Tensor]) -> Records:
    """Values and norms of trained tensors, for a comparison within a tolerance."""
    arrays: Records = {}
    for name, tensor in sorted(tensors.items()):
        arrays[f"{prefix}/tensors/{name}"] = sampled(tensor)
        arrays[f"{prefix}/norms/{name}"] = np.array([tensor.double().norm().item()])
    return arrays


def described(tensors: dict[str, Tensor]) -> Meta:
    """Shape, dtype and SHA-256 of each tensor, for a comparison of bits."""
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "sha256": sha256(tensor)}
        for name, tensor in sorted(tensors.items())
    }


# ---------------------------------------------------------------- generations


def log_probabilities(logits: Tensor) -> NDArray[np.float32]:
    """[T, at most CHOSEN]: the normalized log-probabilities of evenly spaced ids at every position."""
    whole = torch.log_softmax(logits.float(), -1)
    places = evenly(min(CHOSEN, whole.shape[-1]), whole.shape[-1])
    return whole[:, places].numpy()


def generations(model: Model, prompts: Sequence[Any], seeds: Sequence[int], tokens: int) -> dict[str, list[list[int]]]:
    """Greedy ids of all prompts in one ragged batch; sampled ids of one prompt a seed; beams of the first prompt."""
    result = {"greedy": [g.ids for g in model.generate(prompts, max_new_tokens=tokens)]}
    result["sampled"] = [
        model.generate([prompts[i % len(prompts)]], max_new_tokens=tokens, seed=seed, **SAMPLING)[0].ids
        for i, seed in enumerate(seeds)
    ]
    result["beams"] = [model.generate([prompts[0]], max_new_tokens=tokens, beams=BEAMS)[0].ids]
    return result


def forced(model: Model, prompt: Any, ids: Sequence[int]) -> Tensor:
    """[len(ids), V]: the logits from which each of `ids` was chosen, from one uncached pass."""
    if model.spec.layout == "encoder-decoder":
        start = model.spec.ids.start
        return model.logits([prompt], [[start, *ids[:-1]]])[0]
    row = model.ids([prompt])[0]
    return model.logits([[*row, *ids[:-1]]])[0][len(row) - 1 :]


def margin(logits: Tensor) -> float:
    """The least distance, over the positions, of the two largest log-probabilities."""
    best = torch.log_softmax(logits.float(), -1).topk(2).values
    return (best[:, 0] - best[:, 1]).min().item()


def generation_records(model: Model, prefix: str, meta: Meta) -> tuple[Records, dict[str, list[list[int]]]]:
    """The generations that `meta` names (prompts, seeds, tokens), and the log-probabilities along the greedy ones."""
    found = generations(model, meta["prompts"], meta["seeds"], meta["tokens"])
    arrays = {
        f"{prefix}/log_probabilities/{i}": log_probabilities(forced(model, prompt, meta["greedy"][i]))
        for i, prompt in enumerate(meta["prompts"])
    }
    return arrays, found


# ---------------------------------------------------------------- one record a model


def trained_record(panel: str, model: Model, losses: list[float], folder: Path, meta: Meta) -> tuple[Records, Meta]:
    """Losses, saved tensors and outputs of a trained model; `meta` names prompts and seeds."""
    tensors = saved_tensors(model, folder / f"saved-{panel}")
    arrays = tensor_records(panel, tensors)
    arrays[f"{panel}/losses"] = np.array(losses)
    result: Meta = {"tensors": described(tensors)}
    if panel == "encoder":
        for i, row in enumerate(model.logits(meta["prompts"])):
            arrays[f"{panel}/log_probabilities/{i}"] = log_probabilities(row)
        result["filled"] = [[[word for word, _ in mask] for mask in row] for row in model.fill(meta["prompts"], top=1)]
    else:
        more, result["generations"] = generation_records(model, panel, meta)
        arrays |= more
    return arrays, result


def muon_record(panel: str, folder: Path) -> Records:
    """Losses and saved values of a few steps of the recipe as it is shipped."""
    model, losses = train(panel, folder, (), MUON_STEPS)
    tensors = saved_tensors(model, folder / f"muon-{panel}")
    arrays = {f"{panel}/muon/{name}": sampled(tensor) for name, tensor in sorted(tensors.items())}
    return arrays | {f"{panel}/muon/losses": np.array(losses)}


def smollm2_record(model: Model, meta: Meta) -> tuple[Records, Meta]:
    arrays, found = generation_records(model, "smollm2", meta)
    return arrays, {"generations": found}


def minilm_record(model: Model) -> Records:
    return {"minilm/vectors": model.encode(SENTENCES).float().numpy()}


# ---------------------------------------------------------------- writing the records


@torch.no_grad()
def perturb(module: torch.nn.Module, size: float, seed: int) -> None:
    """Multiply every weight by 1 + size * noise, in place."""
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=random))


def stable(model: Model, ask: Callable[[], Any], copies: int = 2) -> bool:
    """Whether `ask` has the same answer when the weights are changed a little; the weights are put back."""
    first, weights = ask(), {name: p.detach().clone() for name, p in model.module.named_parameters()}
    same = True
    for seed in range(copies):
        perturb(model.module, NOISE, seed)
        same = same and ask() == first
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                parameter.copy_(weights[name])
    return same


def stable_seeds(model: Model, prompts: Sequence[str], tokens: int) -> list[int]:
    """As many seeds as prompts, with which what they sample is stable."""
    seeds: list[int] = []
    for seed in range(100):
        prompt = prompts[len(seeds) % len(prompts)]

        def sample(prompt: str = prompt, seed: int = seed) -> list[int]:
            return model.generate([prompt], max_new_tokens=tokens, seed=seed, **SAMPLING)[0].ids

        if len(seeds) < len(prompts) and stable(model, sample):
            seeds.append(seed)
    assert len(seeds) == len(prompts), "too few seeds are stable"
    return seeds


def choose(model: Model, candidates: Sequence[str], tokens: int, count: int = 3) -> Meta:
    """The `count` prompts of the largest margins that are stable, and as many stable seeds."""
    measured = []
    for prompt in candidates:
        ids = model.generate([prompt], max_new_tokens=tokens)[0].ids
        measured.append((margin(forced(model, prompt, ids)), prompt, ids))
    measured.sort(key=lambda entry: -entry[0])
    chosen = [
        entry
        for entry in measured
        if entry[0] > MARGIN and stable(model, lambda e=entry: model.generate([e[1]], max_new_tokens=tokens)[0].ids)
    ][:count]
    assert len(chosen) == count, "too few prompts have a margin"
    prompts = [prompt for _, prompt, _ in chosen]
    seeds = stable_seeds(model, prompts, tokens)
    assert stable(model, lambda: model.generate([prompts[0]], max_new_tokens=tokens, beams=BEAMS)[0].ids)
    meta: Meta = {"prompts": prompts, "seeds": seeds, "tokens": tokens}
    meta |= {"greedy": [ids for _, _, ids in chosen], "margins": [size for size, _, _ in chosen]}
    return meta


def masked(line: str, word: int) -> str:
    """The sentence with one word hidden, spaced as the word tokenizer expects."""
    words = line.replace(".", " .").split()
    words[word] = "[MASK]"
    return " ".join(words)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--smollm2", type=Path, required=True, metavar="FILE")
    options.add_argument("--minilm", type=Path, required=True, metavar="DIRECTORY")
    options.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    meta: Meta = {"torch": torch.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        arrays: Records = {}
        for panel in PANELS:
            more, meta[panel] = record_panel(panel, Path(scratch))
            arrays |= more
        more, meta["smollm2"] = record_smollm2(arguments.smollm2, Path(scratch))
        arrays |= more
        minilm = triptych.load(arguments.minilm)
        arrays |= minilm_record(minilm)
        meta["minilm"] = {"tensors": described(saved_tensors(minilm, Path(scratch) / "minilm"))}
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, arguments.out / ARRAYS)
    (arguments.out / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def record_panel(panel: str, scratch: Path) -> tuple[Records, Meta]:
    model, losses = train(panel, scratch)
    lines = sentences(40, seed=2)
    if panel == "encoder":
        chosen: Meta = {"prompts": [masked(line, i % 7 + 1) for i, line in enumerate(lines[:4])]}
    elif panel == "decoder":
        chosen = choose(model, [line[:17] for line in lines], NEW_TOKENS)
    else:
        chosen = choose(model, [" ".join(respelled(line).split()[1:3]) for line in lines], NEW_TOKENS)
    arrays, result = trained_record(panel, model, losses, scratch, chosen)
    return arrays | muon_record(panel, scratch), chosen | result


def record_smollm2(path: Path, scratch: Path) -> tuple[Records, Meta]:
    exact = {"dequantize": True} if "dequantize" in signature(triptych.load).parameters else {}  # older code always did
    model = triptych.load(path, **exact)
    chosen = choose(model, SMOLLM2_PROMPTS, NEW_TOKENS)
    arrays, result = smollm2_record(model, chosen)
    tensors = described(saved_tensors(model, scratch / "smollm2"))
    return arrays, chosen | result | {"tensors": tensors}


def read(folder: Path) -> tuple[Records, Meta]:
    """The arrays and the rest of the records in `folder`."""
    return load_file(folder / ARRAYS), json.loads((folder / META).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
