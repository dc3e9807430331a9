"""The tests of llm-comply, a suite for servers of these APIs: all pass but those with images, and those it skips."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("llguidance")
pytest.importorskip("llm_comply", reason="needs the package llm-comply")

from scripted import model, serving

FORMATS = {
    "openai-chat": (9, "chat-image-input"),
    "open-responses": (13, "image-input"),
    "anthropic": (9, "anth-image-input"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_all_of_its_tests_pass_but_those_with_images(form: str) -> None:
    with serving({"hermes": model("hermes")}) as port:
        url = f"http://127.0.0.1:{port}/v1"
        run = "from llm_comply.cli import main; main()"  # in a process of its own, which prints what it found
        command = [sys.executable, "-c", run, "-u", url, "-k", "k", "-m", "hermes", "--format", form, "--json"]
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    results = json.loads(printed)["results"]
    count, image = FORMATS[form]
    assert len(results) == count
    assert {one["id"]: one["errors"] for one in results if one["status"] == "failed"}.keys() == {image}
    assert sum(one["status"] == "skipped" for one in results) == 1
