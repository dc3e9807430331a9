"""The layout and the head that an objective needs, and a model with that head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import Tensor

from triptych import families
from triptych.checkpoints.header import KEY, label_names
from triptych.errors import ConfigError
from triptych.families import read_config
from triptych.mapping.tensor_plan import TensorLoad
from triptych.nn import NamedWeights, empty, initial_weights
from triptych.spec import ClassHeadSpec, ModelSpec, PoolingSpec, ReplacedHeadSpec, SpanHeadSpec, TokenHeadSpec
from triptych.text import Layout
from .base_model import StartingModel
from .recipe import Objective
from .settings import Config

HeadKind = Literal["labels", "tags", "spans", "contrastive", "replaced"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

#: How transformers calls the classes of each encoder.
_NAMES = {
    "bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert",
    "distilbert": "DistilBert", "electra": "Electra", "modernbert": "ModernBert", "deberta": "Deberta",
    "deberta-v2": "DebertaV2", "vit": "ViT", "bart": "Bart", "mbart": "MBart", "t5": "T5", "mt5": "MT5",
}  # fmt: skip
ENCODER_DECODERS = ("bart", "mbart", "t5", "mt5")  # whose decoder gives the label of a row at its last token
_LABELS_ALONE = ("vit", *ENCODER_DECODERS)
HEADS: dict[HeadKind, tuple[type, str]] = {  # what a head is in a spec, and how its classes end in transformers
    "labels": (ClassHeadSpec, "ForSequenceClassification"),
    "tags": (TokenHeadSpec, "ForTokenClassification"),
    "spans": (SpanHeadSpec, "ForQuestionAnswering"),
    "contrastive": (PoolingSpec, "Model"),
    "replaced": (ReplacedHeadSpec, "ForPreTraining"),
}
LAYOUTS: dict[Objective, Layout] = {
    "causal": "decoder", "chat": "decoder", "seq2seq": "encoder-decoder", "corruption": "encoder-decoder",
    "captions": "encoder-decoder", "transcripts": "encoder-decoder", "masked": "encoder", "labels": "encoder",
    "tags": "encoder", "spans": "encoder", "contrastive": "encoder", "replaced": "encoder", "preference": "decoder",
}  # fmt: skip


def head_config(hf: Mapping[str, Any], kind: HeadKind, labels: Sequence[str] = (), *, several: bool = False) -> Config:
    """The HF config `hf` with the class that has the head `kind`, and the names of its labels.

    Raises ConfigError for a model that has no such class.
    """
    model_type = str(hf.get("model_type"))
    name = _NAMES.get(model_type)
    if name is None or (kind == "replaced" and name != "Electra") or (kind != "labels" and model_type in _LABELS_ALONE):
        fitting = [one for one in _NAMES if kind == "labels" or one not in _LABELS_ALONE]
        known = "electra" if kind == "replaced" else ", ".join(fitting)
        raise ConfigError(f"objective {kind} trains one of {known}; the model is of type {model_type}")
    of_other_heads = ["num_labels", "id2label", "label2id"]
    of_other_heads += [] if kind == "contrastive" else [KEY, "triptych_pooling"]
    config = {key: value for key, value in hf.items() if key not in of_other_heads}
    config["architectures"] = [name + ("ForImageClassification" if name == "ViT" else HEADS[kind][1])]
    if kind == "contrastive":
        config.setdefault("triptych_pooling", {"mode": "mean", "normalize": False})
    if labels:
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
    if kind == "labels":
        config["problem_type"] = ("multi" if several else "single") + "_label_classification"
    return config


def with_head(base: StartingModel, config: Config, kind: HeadKind, seed: int) -> StartingModel:
    """The model of `config`, which `head_config` made of that of `base`: its body is that of `base`, and so is what
    both heads store under one name (BERT's pooler); the rest of the head is drawn from `seed`.

    It is `base` with this config where that has the head already.
    """
    model, head = base.module.spec, base.module.spec.head
    # A mean does not read BERT's pooler, which would never be trained.
    without_pooler = kind == "contrastive" and not (isinstance(head, PoolingSpec) and head.mode == "dense")
    spec = read_config(config, stored=() if without_pooler else None, where="model")
    same = label_names(model, base.hf) == label_names(spec, config)
    if spec == model and same:
        return replace(base, hf=config)
    if absent := [name for name in _body(spec) if name not in model.shapes()]:
        raise ConfigError(f"the model has no {absent[0]}, which a model with the new head needs")
    stored, copies = {step.source: step for step in families.save_plan(model)}, []
    for step in families.save_plan(spec):
        if not step.ours[0].startswith("head.") or (not same and ".classes." in step.ours[0]):
            continue
        source = next((one for one in stored if step.source == one or step.source.endswith(f".{one}")), None)
        if source is not None and stored[source].source_shape == step.source_shape:
            copies.append((stored[source], step))
    assert base.weights is not None
    drawn = initial_weights(spec, seed, base.module.dtype)
    return replace(base, module=empty(spec), hf=config, weights=_body_and_head(base.weights, drawn, spec, copies))


def _body(spec: ModelSpec) -> list[str]:
    """The names of the weights outside the head."""
    return [name for name in spec.shapes() if not name.startswith("head.") and name not in spec.ties]


def _body_and_head(
    weights: NamedWeights, drawn: NamedWeights, spec: ModelSpec, copies: Sequence[tuple[TensorLoad, TensorLoad]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model `spec`: the body is in `weights`, and the head in `drawn`, but for `copies` of tensors
    that `weights` would be stored as."""
    body, needed = set(_body(spec)), {name for before, _ in copies for name in before.ours}
    kept: dict[str, Tensor] = {}
    for name, value in weights:
        if name in needed:
            kept[name] = value
        if name in body:
            yield name, value
    head = {name: value for name, value in drawn if name.startswith("head.")}
    for before, after in copies:
        head |= {name: value.clone() for name, value in after.to_ours(before.to_source(kept)).items()}
    yield from head.items()


def check_layout(spec: ModelSpec, objective: Objective) -> None:
    """Raises ConfigError for a model of another layout than that of the objective; labels also train the decoder of an
    encoder-decoder."""
    both = objective == "labels" and spec.family in ENCODER_DECODERS
    if spec.layout != LAYOUTS[objective] and not both:
        fitting = next(name for name, layout in LAYOUTS.items() if layout == spec.layout)
        raise ConfigError(
            f"objective {objective} needs the layout {LAYOUTS[objective]}; {spec.family} is of layout {spec.layout}, "
            f"whose objective is {fitting}"
        )
