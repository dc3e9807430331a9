"""The lectures' experiments: each a table, a plot and a verdict, most of them within 20 seconds on two cores.

`LABS` lists them without importing one.  A lab's file has its name, with `_` for `-`; `FILES` names the files that hold
several labs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from triptych.arguments import checked
from triptych.errors import InputError, nearest, shown
from triptych.migration_hints import answer_for

if TYPE_CHECKING:
    from triptych_lectures.labs.lab import Lab, LabResult, Setup

LABS = {
    "scaling": "why scores are divided by √d: variance, entropy and gradient over d",
    "permutation": "attention without positions does not depend on the order of its input",
    "mask-leak": "a decoder trained without its mask copies the answer, and cannot write",
    "kv-cache": "the cache changes no token and saves recomputing the past",
    "paged-cache": "a common beginning computed once; pages laid over the cache, shared and copied before a write",
    "speculation": "guessed tokens change no text; drafts from right to wrong, and the forwards they save",
    "linear-state": "linear attention writes with two sums in place of a cache that grows",
    "quadratic": "the cost of T tokens: full, fused, window, block-sparse, linear, grouped",
    "flash-tiles": "FlashAttention's tiles in NumPy: the same numbers, and what they move between memories",
    "sparse-patterns": "strided and powers-of-two patterns: pairs computed over T, and layers to connect all",
    "additive-vs-dot": "Bahdanau's score beside the dot product: memory, parameters, widths, sharpness",
    "soft-vs-hard": "at high sharpness, attention is a dictionary lookup",
    "heads-vs-width": "H heads of width D/H cost what one head of width D costs, and read H places",
    "bottleneck": "a sequence through one fixed vector against attention, over its length",
    "depth": "gradients through 2 to 64 layers: pre-norm, post-norm, no residual",
    "induction": "two layers learn A B ... A -> B; the heads that do it, identified and removed",
    "alignment": "cross-attention of a spelling model beside the true alignment",
    "recurrence": "a recurrent translator with one vector or attention, and a transformer, by length",
    "panels": "one translation by an encoder-decoder and by decoders with two masks",
    "word-alignment": "cross-attention of a translation model beside the true word alignment",
    "modernize": "First Folio to modern spelling on plays never read, beside a table of words",
    "spoken-digits": "sound to text, trained from nothing: voices, speeds and pitches never heard",
    "captions": "captions of drawn scenes, and where cross-attention is on the picture meanwhile",
    "image-labels": "a ViT names shapes that a linear model of the pixels does not find",
    "bank": "river bank and money bank: the heads that read the context, and the two vectors",
    "head-roles": "heads of a pretrained model: token before, punctuation, first token, none",
    "not-explanation": "other attention patterns that give the same output; gradients and ablation beside them",
    "parameters": "a real config's shapes, predicted from the arithmetic and loaded",
    "gradients": "a backward written by hand beside autograd's",
    "corrections": "statements of the lectures that do not hold, beside what is computed",
    "trained-scale": "attention trained with and without the division by √d",
    "trained-heads": "1 to 16 heads at equal parameters, reading one place or several at once",
    "padding": "padding that is not masked: what trained models answer beside it",
    "residual-scaling": "how the weights that write to the residual stream begin, trained",
    "activations": "ReLU, GELU and SwiGLU trained at equal parameters",
    "norm-placement": "pre- and post-norm trained over depth, with and without a warm-up",
    "in-context": "a function that is new in each row, learned from the examples in the row",
    "exposure-bias": "trained on true prefixes, writing after its own: errors over length",
    "trained-scores": "additive and dot-product scores trained side by side, at small and at large d",
    "cosine-scores": "cosine scores beside dot products, trained from weights of two sizes",
}

# The files of labs that share one; the others have files of their own names.
FILES = {
    lab: file
    for file, labs in {
        "untrained_scores": ("scaling", "additive-vs-dot"),
        "lookup_and_order": ("soft-vs-hard", "permutation"),
        "heads_and_width": ("heads-vs-width", "trained-heads"),
        "reading_heads": ("trained-scale", "trained-scores", "cosine-scores"),
        "deep_stacks": ("norm-placement", "residual-scaling"),
        "serving": ("speculation", "linear-state"),
        "translation": ("recurrence", "panels"),
        "drawn_pictures": ("captions", "image-labels"),
    }.items()
    for lab in labs
}

# What a lab may be given in place of its own; the labs that are not here make their own model and text.
INPUTS: dict[str, tuple[str, ...]] = {
    "mask-leak": ("data",),
    "kv-cache": ("model",),
    "alignment": ("model", "data"),
    "modernize": ("model",),
    "bank": ("model",),
    "head-roles": ("model",),
    "not-explanation": ("model",),
    "parameters": ("model",),
}


@checked
def checked_name(name: str) -> str:
    """`name`, where it is in `LABS`.  Raises InputError, with the nearest names, where it is not."""
    if name not in LABS:
        raise InputError(f"no lab {name!r}{nearest(name, LABS)}; `triptych lab` lists them")
    return name


def check_inputs(name: str, **inputs: str | None) -> None:
    """Raise InputError for a `model` or `data` that the lab would not read."""
    for kind, value in inputs.items():
        if value is not None and kind not in INPUTS.get(name, ()):
            users = ", ".join(lab for lab, kinds in INPUTS.items() if kind in kinds)
            raise InputError(f"the lab {name} does not use --{kind}; these do: {users}")


def module_of(name: str) -> str:
    """The module of a lab."""
    return f"{__name__}.{FILES.get(name, name.replace('-', '_'))}"


def lab_class(name: str) -> type[Lab]:
    """The class of a lab.  Raises InputError, with the nearest names, for one that is not in `LABS`."""
    import_module(module_of(checked_name(name)))
    from triptych_lectures.labs.lab import LAB_CLASSES

    return LAB_CLASSES[name]


@checked
def run(name: str, setup: Setup | None = None) -> LabResult:
    """Run one lab.  Raises InputError, with the nearest names, for one that is not in `LABS`."""
    kind = lab_class(name)
    from triptych_lectures.labs.lab import Setup

    setup = Setup() if setup is None else setup
    if not isinstance(setup, Setup):
        raise InputError(f"setup={shown(setup)} must be a Setup, such as Setup(seed=1)")
    check_inputs(name, model=setup.model, data=setup.data)
    return kind.sized(setup).run(setup)


answer_for(__name__)
