"""Text models inside models of images and text (Gemma 3, LLaVA, Mistral 3): the text model is read on its own,
and every other tensor is reported as left out.

References: transformers `models/gemma3`, `models/llava`, `models/mistral3`; text without images
goes through their text model alone.
"""

from collections.abc import Collection, Mapping
from typing import Any

from triptych.files import tables_of
from triptych.mapping import ConfigKeys, Values, names_in

#: The model_type of a text_config without one.
INSIDE = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}

# Default sizes of these text models.
_SIZES: Mapping[str, Values] = tables_of(__file__)
_OUTER_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_OF_IMAGES = names_in("""
    boi_token_id boi_token_index eoi_token_id eoi_token_index image_seq_length image_token_id image_token_index
    initializer_range mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size
    vision_config vision_feature_layer vision_feature_select_strategy
""")

# Prefixes of the text model's tensors -> those of a model of text alone, and the prefixes of everything else.
_BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_BESIDE = {
    "vision_tower.": "part of the image encoder; only the text model is built",
    "multi_modal_projector.": "maps images into the text; only the text model is built",
}


def text_config(hf: Mapping[str, Any], where: str, ignore: Collection[str] = ()) -> Mapping[str, Any]:
    """The config of the text model inside a wrapper's; any other config as it is.

    Raises ConfigError for a key of the wrapper that is not understood, and for a wrapper without text.
    """
    if str(hf.get("model_type")) not in INSIDE:  # a value that is not a string is refused later
        return hf
    keys = ConfigKeys(hf, where)
    inside = keys.table("text_config")
    if inside is None:
        raise keys.error("text_config is missing or empty, and only the text model can be read")
    outer = {name: keys.get(name) for name in _OUTER_KEYS if hf.get(name) is not None}
    keys.finish({*ignore, *_OF_IMAGES})
    kind = inside.str("model_type", default=INSIDE[keys.str("model_type")])
    text = {**_SIZES.get(kind, {}), **inside.data, **outer, "model_type": kind}
    return {name: value for name, value in text.items() if name != "architectures"}


def text_name(name: str) -> str:
    """The text model's name of the tensor `name`."""
    for old, new in _BEGINNINGS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def reasons_left_out(stored: Collection[str]) -> dict[str, str]:
    """The reason why each tensor beside a text model is left out; none where there is no text model inside another."""
    if not any(name.startswith(tuple(_BEGINNINGS)) for name in stored):
        return {}
    short_names = {name: name.removeprefix("model.") for name in stored}
    return {
        name: why for name, short in short_names.items() for start, why in _BESIDE.items() if short.startswith(start)
    }
