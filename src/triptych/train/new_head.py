"""The layout and the head that an objective needs, and a model with that head."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from triptych import families, nn
from triptych.checkpoints.header import KEY, label_names
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.errors import ConfigError
from triptych.families import read_config
from triptych.nn import Transformer
from triptych.spec import ClassHeadSpec, ModelSpec, PoolingSpec, ReplacedHeadSpec, SpanHeadSpec, TokenHeadSpec
from triptych.text import Layout
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


@torch.no_grad()
def with_head(
    module: Transformer, hf: Mapping[str, Any], config: Mapping[str, Any], kind: HeadKind, seed: int
) -> Transformer:
    """The model of `config`, which `head_config` made of `hf`: its body is that of `module`, and so is what both heads
    store under one name (BERT's pooler); the rest of the head is drawn from `seed`.

    `module` itself is returned where it has this head already.
    """
    head = module.spec.head
    # A mean does not read BERT's pooler, which would never be trained.
    without_pooler = kind == "contrastive" and not (isinstance(head, PoolingSpec) and head.mode == "dense")
    spec = read_config(config, stored=() if without_pooler else None, where="model")
    same = label_names(module.spec, hf) == label_names(spec, config)
    if spec == module.spec and same:
        return module
    fresh = nn.new(spec, seed, module.dtype)
    own = dict(module.named_parameters())
    stored: dict[str, Tensor] = dict(to_checkpoint(module, hf)[0])
    filled = dict(fresh.named_parameters())
    for name, parameter in filled.items():
        if name.startswith("head."):
            continue
        if name not in own:
            raise ConfigError(f"the model has no {name}, which a model with the new head needs")
        parameter.copy_(own[name])
    for step in families.save_plan(spec):
        if not step.ours[0].startswith("head.") or (not same and ".classes." in step.ours[0]):
            continue
        source = next((one for one in stored if step.source == one or step.source.endswith(f".{one}")), None)
        if source is not None and tuple(stored[source].shape) == tuple(step.source_shape):
            for name, value in step.to_ours(stored[source]).items():
                filled[name].copy_(value)
    return fresh


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
