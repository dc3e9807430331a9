"""The table of operations: every executor has an entry or a reason, the docs say which, and no torch is needed."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from programs import program
from triptych import families, ops
from triptych.count import count
from triptych.families.named_configs import NAMED
from triptych.program.kind_programs import lower_kinds

ROOT = Path(__file__).parents[1]


def test_the_docs_get_the_table_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program("tools/operations.py")
    page = (ROOT / "docs" / "concepts" / "programs.md").read_text("utf-8")
    written = made.on_page_markdown(page)
    assert made.in_markdown() in written
    assert made.MARK not in written
    assert "make docs" not in written
    assert made.on_page_markdown("another page") == "another page"
    monkeypatch.setitem(ops.OPERATIONS, "tanh", replace(ops.OPERATIONS["tanh"], equation="x · tanh(x)"))
    assert made.in_markdown() not in written  # the control


def test_every_executor_has_an_operation_or_says_why_not() -> None:
    for executor in program("tools/operations.py").EXECUTORS:
        lacks = {name for name in ops.OPERATIONS if not executor.has(name)}
        assert lacks == set(executor.lacks), executor.name


def test_the_table_needs_no_torch() -> None:
    """Its file alone, beside a package of functions that does."""
    code = "import sys\nsys.modules['torch'] = None\nimport importlib.util\n" + (
        f"spec = importlib.util.spec_from_file_location('table', {str(ROOT / 'src/triptych/ops/table.py')!r})\n"
        "table = importlib.util.module_from_spec(spec)\nsys.modules['table'] = table\nspec.loader.exec_module(table)\n"
        "print(len(table.OPERATIONS))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == len(ops.OPERATIONS)


# ---------------------------------------------------------------- one block of each kind


def test_layers_that_are_alike_are_lowered_once() -> None:
    """Gemma 2 has two kinds of layers; a model with 126 layers of 16,384 takes no memory and one block."""
    gemma = lower_kinds(families.read_config({**NAMED["llama-7b"], **GEMMA2}, where="test"))
    assert gemma.layers == {"decoder": [[0, 2, 4], [1, 3, 5]]}
    large = families.read_config({**NAMED["llama-7b"], **LARGE}, where="test")
    kinds = lower_kinds(large)
    assert [len(layers) for layers in kinds.layers["decoder"]] == [126]
    assert len([step for step in kinds.program.entries["decode"].instructions if step.op == "attend"]) == 1
    assert count(large).flops(1)["mlp"] == 2 * 126 * 3 * 16_384 * 53_248


GEMMA2 = {"model_type": "gemma2", "num_hidden_layers": 6, "sliding_window": 4, "query_pre_attn_scalar": 128,
          "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
LARGE = {"hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126, "num_attention_heads": 128,
         "num_key_value_heads": 8}  # fmt: skip


def test_a_mixture_of_671_billion_is_counted_by_its_experts() -> None:
    """58 layers of 256 experts; a token goes through 8 of them."""
    spec = families.read_config(MIXTURE, where="test")
    counted = count(spec)
    assert 665e9 < counted.total < 675e9
    per_token = 2 * 58 * (8 * 3 * 7168 * 2048 + 7168 * 256)
    assert counted.flops(10)["mlp"] == 10 * per_token


MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 7168, "num_hidden_layers": 58, "num_attention_heads": 128,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 129_280, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


# ---------------------------------------------------------------- docs/add-an-operation.md

ENTRY = re.compile(r"^### \d\. `([^`]+)`\n(.*?)```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
SECOND = re.compile(r"^In `([^`]+)`:\n\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)


def insert(path: Path, words: str, code: str) -> None:
    """Put code where the docs say: after or before a line of the file, or at its end."""
    text, code = path.read_text("utf-8") if path.exists() else "", code.strip("\n") + "\n"
    place = re.search(r"(After|Before) the line\s`([^`]+)`", words)
    if place is None:
        path.write_text(f"{text}\n\n{code}" if text else code, "utf-8")
        return
    line = f"{place[2]}\n"
    assert text.count(line) == 1, line
    path.write_text(text.replace(line, line + code if place[1] == "After" else f"{code}\n\n{line}"), "utf-8")


def run_walkthrough(copy: Path, changed: str = "") -> subprocess.CompletedProcess[str]:
    """The entries of the page in a copy of the code, those of its second operation too, and its test.  `changed` is
    the file whose entry is left out."""
    page = (ROOT / "docs" / "add-an-operation.md").read_text("utf-8")
    shutil.copytree(ROOT / "src" / "triptych", copy / "src" / "triptych", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    words = {}
    for path, text, code in ENTRY.findall(page):
        words[path] = text
        if path != changed:
            insert(copy / path, text, code)
    for path, code in SECOND.findall(page):
        if path != changed:
            insert(copy / path, words[path], code)
    test = copy / "tests" / "test_squared_relu.py"
    both = test.read_text("utf-8").replace("import squared_relu\n", "import squared_relu, tanh_gate\n")
    test.write_text(both + SECOND_TEST, "utf-8")
    assert len(words) == 5
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(copy / "src"), str(ROOT / "tests")))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(test)]
    return subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=600)


SECOND_TEST = """

def test_the_second_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_everywhere(monkeypatch, tmp_path, "tanh_gate", tanh_gate)
"""


@pytest.mark.heavy
def test_the_walkthrough_adds_an_operation_to_every_executor(tmp_path: Path) -> None:
    ran = run_walkthrough(tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert "3 passed" in ran.stdout


@pytest.mark.heavy
@pytest.mark.parametrize("left_out", ["src/triptych/program/native_operations.py"])
def test_an_entry_that_is_left_out_is_found(left_out: str, tmp_path: Path) -> None:
    ran = run_walkthrough(tmp_path, left_out)
    assert "the native step has no operation squared_relu" in ran.stdout
