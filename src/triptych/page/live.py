"""One offline HTML file that runs a model: `live_page(model, name)`."""

from __future__ import annotations

from typing import Any

from triptych.arguments import checked
from triptych.draw.details import equation_of, words_of
from triptych.draw.graph import boxes_of
from triptych.errors import InputError, shown
from triptych.model import Model
from triptych.program import Program
from triptych.spec import FramesSpec, ModelSpec
from triptych.spec.part import part_name
from triptych.text.tokenizer import check_unicode
from .live_export import check_size, export
from .render import render
from .sections import Facts, LiveSection
from .tokenizer_data import tokenizer_data
from .word_states import word_states

TEXTS = {"decoder": "She sat by the river bank", "encoder-decoder": "I loue"}
FIRST_TOKENS = 32  # of the target that the page of an encoder-decoder opens with
BOX = ("entry", "index", "part", "kind", "layer", "site", "depth", "lane")  # what the diagram reads of a box
NOTES = {
    "decoder": "Type, and the bars show the likeliest next tokens. Let it write, or cut parts out and compare.",
    "encoder": "Type, press a token to mask it, and see what the model fills in; cut parts out and compare.",
    "encoder-decoder": "Type a source, let the model write the target, and see which source tokens each one reads.",
}


def live_section(model: Model, text: str | None = None, note: str | None = None) -> LiveSection:
    """The section that runs `model`, in int8 with fp32 activations; it begins with `text`, and `note` introduces it.

    Raises InputError for a model without a tokenizer, one that reads no text, and as `live_export.export`.
    """
    check_size(model.spec)
    model.check_words("a page")
    if model.tokenizer is None:
        raise InputError("a page needs the model's tokenizer, and this checkpoint has none; add its tokenizer.json")
    tokenizer, spec = tokenizer_data(model.tokenizer), model.spec
    exported = export(model)
    first = _first_text(spec, model.tokenizer.specials.mask) if text is None else text
    if text is not None and (tokens := len(model.tokenizer.encode(text))) > exported.limit:
        raise InputError(f"text has {tokens:,} tokens, and this page takes {exported.limit}; shorten it")
    stops = {*spec.ids.eos, *model.tokenizer.stop_ids}
    content: dict[str, Any] = {
        "layout": spec.layout, "head": None if spec.head is None else part_name(spec.head),
        "labels": _labels(model), "text": first, "target": _target(model, first), "limit": exported.limit,
        "ids": {"mask": model.tokenizer.mask_id, "start": spec.ids.start, "stop": sorted(stops)},
        "tokenizer": tokenizer, "program": exported.program, "parts": exported.parts(), "tables": exported.tables,
        "tensors": exported.tensors,
        "stride": spec.reads.embed.stride if isinstance(spec.reads.embed, FramesSpec) else 1,
        "weights": exported.base64(), "word_states": word_states(), **_diagram(exported.lowered),
    }  # fmt: skip
    return LiveSection("Run the model", note or NOTES[spec.layout], content)


@checked
def live_page(model: Model, name: str, text: str | None = None) -> str:
    """One offline HTML page that runs the model, as text: `name` is its title, `text` what it begins with.

    Raises InputError as `triptych.page.live_export.export`, and for a model without a tokenizer that a page can run.
    """
    page = name + (text or "")
    check_unicode(page)
    if "\0" in page or not name.strip():
        raise InputError(f"name={shown(name)} must be a title, and neither it nor the text may have a zero byte")
    section = live_section(model, text)
    parameters = sum(p.numel() for p in model.module.parameters())
    facts = [
        ("Model", f"{model.spec.family}, {model.spec.layout}"),
        ("Parameters", f"{parameters:,}"),
        ("Weights", "int8 matrices, a scale for every 32 columns; all else in fp32"),
        ("Longest text", f"{section.content['limit']} tokens"),
    ]
    return render(name, [section, Facts("The model", facts)], subtitle="A model that runs in this page")


def _diagram(program: Program) -> dict[str, Any]:
    """The boxes of the flow diagram by stack, and what each does with its equation; equal words stand once."""
    words: dict[tuple[str, str], int] = {}
    stacks: dict[str, Any] = {}
    for stack in ("encode", "decode"):
        if stack not in program.entries:
            continue
        boxes = boxes_of(program, stack)
        place = {box: i for i, box in enumerate(boxes)}
        stacks[stack] = [
            {"id": box.name}
            | {field: getattr(box, field) for field in BOX}
            | {
                "title": words_of(box)[0],
                "words": words.setdefault((words_of(box)[1], equation_of(box)), len(words)),
                "inputs": [[a.key, a.value, None if a.source is None else place[a.source]] for a in box.arrows],
            }
            for box in boxes
        ]
    return {"boxes": stacks, "words": list(map(list, words))}


def _first_text(spec: ModelSpec, mask: str | None) -> str:
    if spec.layout != "encoder" or mask is None:
        return TEXTS.get(spec.layout, TEXTS["decoder"])
    return f"The king is {mask} , long live the king !"


def _target(model: Model, source: str) -> str:
    """The text that an encoder-decoder writes for `source`, so that the page opens with an alignment; else nothing."""
    if model.spec.layout != "encoder-decoder" or not source:
        return ""
    return model.generate([source], max_new_tokens=FIRST_TOKENS)[0].text


def _labels(model: Model) -> list[str]:
    """Names of the classes, by number; empty where the config has none."""
    names = (model.hf or {}).get("id2label")
    return [str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0]))] if names else []
