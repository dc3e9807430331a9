"""Which tensors does a config ask for, and how many numbers is that?  (Lecture L0, exercises 6 and 8.)

The shapes are computed here from the numbers of a config alone, independently of the library.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from triptych import families
from triptych.count import PARTS, Count, count
from triptych.errors import InputError
from triptych.files import tables_of
from triptych.page import TableSection
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .pretrained import decoder
from .small_models import curve

Shape = tuple[int, ...]

_TABLES: Mapping[str, Mapping[str, Any]] = tables_of(__file__)
QWEN3_4B, KEYS = _TABLES["qwen3-4b"], _TABLES["keys"]
PUBLISHED = 4_022_468_096
# What L0 exercise 6 counts: a narrower MLP, heads of D/H, none of them grouped, and no norms.
EXERCISE = {**QWEN3_4B, "intermediate_size": 6912, "head_dim": 80, "num_key_value_heads": 32}
EXERCISE_TOTAL = 3_243_704_320


class ParametersLab(Lab):
    name = "parameters"
    seeds = 1

    hidden: Ints = size((2048, 4096, 6912, 8192, 9728, 12288), "MLP widths F of the curve")

    def findings(self, setup: Setup) -> Findings:
        qwen, exercise = (count(families.read_config(dict(hf))) for hf in (QWEN3_4B, EXERCISE))
        off = abs(exercise.total - exercise.parameters["norms"] - EXERCISE_TOTAL)
        predicted = predict(QWEN3_4B)
        by_shapes = sum(map(prod, predicted.values()))
        model = decoder(setup)
        name, foreseen = model.path.stem if model.path else "the model", predict(model.hf or {})
        loaded = {tensor: tuple(p.shape) for tensor, p in model.module.named_parameters()}
        mlp, norms = qwen.parameters["mlp"], qwen.parameters["norms"]
        gap = mlp - exercise.parameters["mlp"]
        attention = qwen.parameters["attention"] / exercise.parameters["attention"]
        yield clause(
            "A config of a dozen numbers fixes every tensor: predicted from them alone, with q H·K wide and k and"
            f" v G·K whatever D is, no tensor of Qwen3-4B is another, and none of {name}, which was loaded.",
            Check("tensors of Qwen3-4B predicted otherwise", _unlike(predicted, qwen.spec.shapes()), most=0),
            Check(f"tensors of {name} predicted otherwise than loaded", _unlike(foreseen, loaded), most=0),
            instead="The config does not fix every tensor",
        )
        yield clause(
            f"Qwen3-4B has {qwen.total:,} parameters, as published; {mlp / qwen.total:.0%} of them are in its MLPs.",
            Check(f"counted beside the published {PUBLISHED:,}", abs(qwen.total - PUBLISHED), most=0),
            Check("parameters by the predicted shapes beside those counted", abs(by_shapes - qwen.total), most=0),
            instead="The sum is not the published one",
        )
        yield clause(
            f"The exercise counts {EXERCISE_TOTAL:,}, without norms: {PUBLISHED - EXERCISE_TOTAL:,} fewer, and not"
            f" for want of the embedding, which is in both. {gap:,} of that are its narrower MLPs, {norms:,} the"
            " norms of Qwen3-4B, and attention is as large either way.",
            Check(f"counted without norms beside the exercise's {EXERCISE_TOTAL:,}", off, most=0),
            Check("the gap less MLPs and norms", abs(PUBLISHED - EXERCISE_TOTAL - gap - norms), most=0),
            Check("parameters of attention, Qwen3-4B over the exercise's", attention, 1.0, 1.0),
            instead="The gap is another one",
        )
        counts = {"Qwen3-4B": qwen, "the exercise": exercise, name: count(model.spec)}
        shown = [part for part in PARTS if any(c.parameters[part] for c in counts.values())]
        rows = [[part, *(f"{c.parameters[part]:,}" for c in counts.values())] for part in shown]
        # where the exercise's 3.2 billion and the published 4.0 lie on one line
        wider = [count(families.read_config({**QWEN3_4B, "intermediate_size": F})) for F in self.hidden]
        kinds, published = ("all", "mlp", "attention", "embedding"), {"published": PUBLISHED / 1e9}
        lines = {kind: [(c.parameters.get(kind) or c.total) / 1e9 for c in wider] for kind in kinds}
        yield _first_block(qwen, loaded, name)
        yield TableSection(
            "The config of Qwen3-4B",
            ("key", "meaning", "value"),
            [[key, KEYS[key], "true" if QWEN3_4B[key] is True else f"{QWEN3_4B[key]:,}"] for key in KEYS],
        )
        yield TableSection(
            "Parameters",
            ("part", *counts),
            [
                *rows,
                ["total", *(f"{c.total:,}" for c in counts.values())],
                ["total without norms", *(f"{c.total - c.parameters['norms']:,}" for c in counts.values())],
            ],
        )
        yield curve("Qwen3-4B with another MLP width", "F", "billion parameters", self.hidden, lines, published)


def predict(hf: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of a Llama or Qwen3, by the library's names: weights are [out, in].

    Raises InputError for another architecture.
    """
    if hf.get("model_type") not in ("llama", "qwen3"):
        raise InputError(f"--model: shapes are predicted for llama and qwen3, not for {hf.get('model_type')!r}")
    D, F, V = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    H = hf["num_attention_heads"]
    G, K = hf.get("num_key_value_heads") or H, hf.get("head_dim") or D // H
    block: dict[str, Shape] = {
        "attn_norm.pre": (D,), "attn.q": (H * K, D), "attn.k": (G * K, D), "attn.v": (G * K, D), "attn.out": (D, H * K),
        "mlp_norm.pre": (D,), "mlp.gate": (F, D), "mlp.up": (F, D), "mlp.down": (D, F),
    }  # fmt: skip
    block |= {"attn.q_norm": (K,), "attn.k_norm": (K,)} if hf["model_type"] == "qwen3" else {}
    outside = {"decoder.embed.tokens.weight": (V, D), "decoder.final_norm.weight": (D,)}
    outside |= {} if hf.get("tie_word_embeddings") else {"head.proj.weight": (V, D)}
    layers = range(hf["num_hidden_layers"])
    return outside | {f"decoder.blocks.{i}.{name}.weight": shape for i in layers for name, shape in block.items()}


def _unlike(predicted: Mapping[str, Shape], actual: Mapping[str, Shape]) -> int:
    """How many tensors only one of them has, or both in different shapes."""
    return sum(predicted.get(name) != actual.get(name) for name in {*predicted, *actual})


def _first_block(qwen: Count, loaded: Mapping[str, Shape], name: str) -> TableSection:
    letters = {
        "attn.q": "H·K, D", "attn.q_norm": "K", "attn.k": "G·K, D", "attn.k_norm": "K", "attn.v": "G·K, D",
        "attn.out": "D, H·K", "mlp.gate": "F, D", "mlp.up": "F, D", "mlp.down": "D, F",
    }  # fmt: skip
    rows = []
    for tensor, formula in letters.items():
        weights = (of.get(f"decoder.blocks.0.{tensor}.weight", ()) for of in (qwen.spec.shapes(), loaded))
        rows.append([tensor, formula, *(" × ".join(map(str, shape)) or "none" for shape in weights)])
    return TableSection("The weights of block 0, [out, in]", ("tensor", "shape", "Qwen3-4B", name), rows)
