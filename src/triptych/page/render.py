"""Renders sections as one HTML file that loads nothing from a network.

Text reaches the page in two ways only: through the template, which escapes it, and as JSON in an inert block, which
the scripts read with `textContent`.  The content security policy holds the hashes of our style and script, so that
nothing else on the page could run even if an escape were missed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from triptych.arguments import checked
from triptych.errors import CheckpointError, InputError, TriptychError
from triptych.files import tables_of
from .sections import Chapter, Section, Tab, section_data

_FILES = tables_of(__file__)
INTERPRETER: Sequence[str] = _FILES["interpreter"]
TOKENIZER_SCRIPTS: Sequence[str] = _FILES["tokenizer"]
OF_MODELS: Mapping[str, Sequence[str]] = _FILES["of_models"]
OF_KIND: Mapping[str, Sequence[str]] = _FILES["of_kind"]


@checked
def render(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """The whole page, as one HTML document in UTF-8."""
    if not isinstance(sections, Sequence) or not all(isinstance(section, Section) for section in sections):
        raise InputError("a page needs a list of sections, such as [Prose(title, text)]")
    every = _all(sections)
    kinds = {section.kind for section in every}
    files = list(dict.fromkeys(file for kind in OF_KIND if kind in kinds for file in _of_kind(kind)))
    style = "".join(map(_asset, ("page.css", *(file for file in files if file.endswith(".css")))))
    own = [script for section in every for script in getattr(section, "scripts", ())]
    script = _joined(("base.js", *(file for file in files if file.endswith(".js")), "start.js"), own)
    interpreter = _joined(INTERPRETER, own) if "live" in kinds else None
    server = "chat" in kinds
    shown = {"title": title, "subtitle": subtitle}
    return _template().render(
        **shown,
        sections=sections,
        data=shown | {"sections": list(map(section_data, sections))},
        style=Markup(style),
        script=Markup(script),
        interpreter=None if interpreter is None else Markup(interpreter),
        server=server,
        policy=_policy(style, script, interpreter, server),
    )


@checked
def write(path: str | os.PathLike[str], html: str) -> None:
    """Replace the file `path` by a page, so that a reader sees the old page or the whole new one.

    Whatever ends the writing, an error, Ctrl-C or a kill, the old page stays; what a killed process left beside it is
    removed by the next write.  Raises TriptychError when the directory is missing or the file system refuses.
    """
    from triptych.checkpoints import atomic_write, recover  # imports torch

    path = Path(path)
    check_place(path)
    try:
        recover(path)
        # A token that ends inside a character may hold half a surrogate pair, which UTF-8 cannot encode.
        atomic_write(path, html.encode("utf-8", errors="replace"))
    except CheckpointError as error:
        raise TriptychError(f"{error}; choose another place for the page") from error


def check_place(path: Path) -> None:
    """Raise TriptychError where a page cannot be written to `path`, as far as that is known before it is made."""
    if not path.parent.is_dir():
        problem = f"{path.parent}: No such directory"
    elif path.is_dir():
        problem = "it is a directory"
    elif not os.access(path.parent, os.W_OK):
        problem = f"{path.parent}: Permission denied"
    else:
        return
    raise TriptychError(f"cannot write the page {path}: {problem}; choose another place for it")


def check_replaced(path: Path) -> None:
    """Raise TriptychError where `path` is a file that Triptych did not write; its own are replaced."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            start = file.read(1 << 14)
    except OSError as error:
        raise TriptychError(f"cannot replace {path}: {error.strerror}; choose another name") from error
    if start and b"Triptych" not in start:
        raise TriptychError(f"{path} exists and was not written by Triptych; choose another name, or remove it")


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # ASCII JSON with <, >, & and ' escaped by the filter: no U+2028, and no way to close its script block.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": True, "allow_nan": False, "separators": (",", ":")}
    environment.filters["marked"] = _marked
    return environment.from_string(_asset("page.html"))


def _marked(text: str) -> Markup:
    """A sentence whose `names` between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # escaped first


def _joined(names: Sequence[str], own: Sequence[str]) -> str:
    """Scripts as one, each of them followed by those in `own` that add to it."""
    return "\n".join(_asset(one) for name in names for one in (name, *(o for o in OF_MODELS.get(name, ()) if o in own)))


def _of_kind(name: str) -> list[str]:
    """The files that a section of this kind needs."""
    return [file for own in OF_KIND[name] for file in (_of_kind(own) if own in OF_KIND else (own,))]


def _all(sections: Sequence[Section]) -> list[Section]:
    """All sections, those of chapters and tabs included."""
    inner = [one for section in sections if isinstance(section, Chapter | Tab) for one in _all(section.sections)]
    return [*sections, *inner]


def _policy(style: str, script: str, interpreter: str | None, server: bool) -> str:
    """The policy of what the page may load and run: its own style and scripts.

    The interpreter of a page that runs a model may compile WebAssembly, which cannot reach anything the script does not
    hand to it, and may run in a worker made of its own text, which has the same policy; neither allows eval of a text.
    A page that comes from a server may ask that server.
    """
    live = "" if interpreter is None else f" '{_digest(interpreter)}' 'wasm-unsafe-eval'; worker-src blob:"
    asks = "; connect-src 'self'" if server else ""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'{live}{asks}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
