"""The released clients of OpenAI and Anthropic, for the server at the fixture `port` of a file of tests."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def by_openai(port: int) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="needs the client of OpenAI")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def by_anthropic(port: int) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic", reason="needs the client of Anthropic")
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="k", max_retries=0) as client:
        yield client
