"""`triptych convert` and `page`: a checkpoint in another format, and one offline HTML file that runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from . import options, screen
from .loading import base_header, load_model


def convert(
    model: options.ModelPath,
    out: str,
    *,
    to: Literal["hf", "gguf"] | None = None,
    dtype: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] | None = None,
    adapter: options.NamedPath | None = None,
    force: bool = False,
    offline: bool = False,
    ignore: list[str] | None = None,
    as_json: options.Json = False,
) -> None:
    """Convert a checkpoint to a Hugging Face directory, or to one GGUF file for llama.cpp.

    OUT: Output directory, or .gguf file.
    --to: Output format; by default from the ending of OUT.
    --dtype: Type of the matrices; by default the stored dtype, f32 for quantized ones. q* needs gguf.
    --force: Replace an existing OUT.
    """
    with screen.waiting(f"converting {model}"):
        from triptych import machine
        from triptych.checkpoints.convert import convert as run

        machine.use_threads()
        conversion = run(
            model, out, to=to, dtype=dtype, force=force, offline=offline, ignore=ignore or (), adapter=adapter
        )
    if as_json:
        screen.result(conversion.to_dict())
        return
    for note in conversion.notes:
        screen.note(note)
    kinds = ", ".join(f"{count} {name}" for name, count in conversion.tensors.items())
    rows = [("wrote", conversion.path), ("format", f"{conversion.format}, {conversion.family}"), ("tensors", kinds)]
    screen.show(screen.facts([*rows, ("size", screen.mib(conversion.nbytes))]))


def page(
    checkpoint: options.Checkpoint,
    *,
    out: Path,
    text: str | None = None,
    as_json: options.Json = False,
) -> None:
    """Write one offline HTML page that runs a small model: type, remove heads, generate.

    --out FILE: Write the page to this .html file.
    --text TEXT: The text that the page begins with.
    """
    screen.check_suffix(out, option="--out")
    from triptych.page.render import check_place

    check_place(out)
    from triptych.page import write
    from triptych.page.live import live_page
    from triptych.page.live_export import check_size

    check_size(base_header(checkpoint).spec)
    model = load_model(checkpoint)
    name = Path(checkpoint.model).name or checkpoint.model
    write(out, live_page(model, name, text))
    size = out.stat().st_size
    screen.note(f"wrote {out}, {screen.mib(size)}; open it in a browser")
    if as_json:
        screen.result({"out": str(out), "bytes": size})
