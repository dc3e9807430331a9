"""Training from Python: the loss of rows against transformers', a loop of one's own, and a run by a function call."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import triptych
from cli_models import LLAMA, Captured, checkpoint
from triptych.errors import ConfigError, InputError, TextError
from triptych.model import Model, create, load
from triptych.native import library, why_not
from triptych.text import DECODER, byte_tokenizer
from triptych.train import row_loss

TEXTS = ["the old mill stands", "the river", "where the river bends by the old mill"]
ROWS = [[7, 3, 11, 40, 5, 9, 2, 6, 13], [5, 19, 3], [6, 6, 28, 14, 33]]
TARGETS = [[4, 30, 22, 1], [12, 18, 25, 5, 35, 16, 1], [20, 1]]
LABELS = [[-100, -100, 11, 40, -100, 9, 2, 6, 13], [5, 19, -100], [6, 6, 28, -100, 33]]
V = 43


def reference(kind: str, path: Path) -> tuple[Model, Any]:
    """A tiny random model of transformers, and ours on the same weights."""
    torch.manual_seed(1)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, head_dim=10, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        theirs: Any = transformers.LlamaForCausalLM(config)
    elif kind == "bert":
        theirs = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=V, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=3,
                max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
    else:
        theirs = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=V, d_model=24, d_kv=10, d_ff=37, num_layers=2, num_decoder_layers=2, num_heads=6,
                decoder_start_token_id=0, dropout_rate=0.0,
            )
        )  # fmt: skip
    theirs.save_pretrained(path)
    return load(path), theirs.train()


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def gradients(model: Model, kept: Path) -> dict[str, torch.Tensor]:
    """Our gradients under the reference's names: written as if they were the weights."""
    copy = load(kept)
    with torch.no_grad():
        for name, parameter in copy.module.named_parameters():
            grad = model.module.get_parameter(name).grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    copy.save(kept.with_name("gradients"))
    from safetensors.torch import load_file

    return load_file(kept.with_name("gradients") / "model.safetensors")


@pytest.mark.parametrize("kind", ["llama", "llama labels", "bert", "t5"])
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    family = kind.split()[0]
    ours, theirs = reference(family, tmp_path / "model")
    mask = padded([[1] * len(row) for row in ROWS], 0)
    ids = padded(ROWS, 0)
    if kind == "t5":
        expected = theirs(input_ids=ids, attention_mask=mask, labels=padded(TARGETS, -100)).loss
        loss = ours.loss(ROWS, TARGETS)
    else:
        labels = LABELS if kind != "llama" else ROWS
        expected = theirs(input_ids=ids, attention_mask=mask, labels=padded(labels, -100)).loss
        loss = ours.loss(ROWS, labels=None if kind == "llama" else labels)
        by_tensors = ours.loss(ids, mask=mask, labels=padded(labels, -100))  # with their padding
        assert by_tensors.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (loss.dim(), loss.dtype) == (0, torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    loss.backward()
    found = gradients(ours, tmp_path / "model")
    compared = 0
    for name, parameter in theirs.named_parameters():
        if name in found and parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
            compared += int(parameter.grad.abs().max() > 1e-4)
    assert compared > 10


def test_a_row_without_a_token_to_predict_adds_nothing() -> None:
    decoder, encoder, both = (load(checkpoint(layout)) for layout in ("decoder", "encoder", "encoder-decoder"))
    rows = [[7, 3, 11, 9], [5, 2]]
    labels = [[-100, *row[1:]] for row in rows]
    assert torch.equal(decoder.loss([[3], *rows, []]), decoder.loss(rows))
    assert torch.equal(decoder.loss([[3], *rows], labels=[[3], *labels]), decoder.loss(rows, labels=labels))
    with pytest.raises(InputError, match="row 0 has 1 token; give its labels as 1 id, "):
        decoder.loss([[3], *rows], labels=[[3, 4], *labels])
    assert torch.equal(encoder.loss([[], *rows], seed=1), encoder.loss(rows, seed=1))
    assert both.loss(["", *TEXTS], [*TEXTS, ""]).isfinite()


def test_a_shift_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: labels that are not shifted give another loss."""
    ours, theirs = reference("llama", tmp_path / "model")
    labels = padded(LABELS, -100)
    expected = theirs(
        input_ids=padded(ROWS, 0), attention_mask=padded([[1] * len(row) for row in ROWS], 0), labels=labels
    ).loss
    labelled = row_loss._labelled
    monkeypatch.setattr(row_loss, "_labelled", lambda one, label: labelled(one, np.append(label[1:], label[:1])))
    assert abs(ours.loss(ROWS, labels=LABELS).item() - expected.item()) > 1e-3


def test_texts_are_encoded_as_ids_are_and_hidden_tokens_follow_the_seed() -> None:
    decoder, encoder, both = (load(checkpoint(layout)) for layout in ("decoder", "encoder", "encoder-decoder"))
    assert torch.equal(decoder.loss(TEXTS), decoder.loss(decoder.ids(TEXTS)))
    assert torch.equal(both.loss(TEXTS, TEXTS), both.loss(both.ids(TEXTS), both.ids(TEXTS, target=True)))
    first, again, other = (encoder.loss(TEXTS, seed=seed).item() for seed in (1, 1, 2))
    assert first == again != other
    torch.manual_seed(5)
    drawn = [encoder.loss(TEXTS).item() for _ in range(2)]
    torch.manual_seed(5)
    assert [encoder.loss(TEXTS).item() for _ in range(2)] == drawn
    assert drawn[0] != drawn[1]


def test_a_loop_of_ones_own_learns_and_the_model_generates_what_it_learned() -> None:
    model = load(checkpoint("decoder")).train()
    before = model.generate(["the old"], max_new_tokens=5)[0].ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = model.loss(TEXTS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert model.module.training
    assert not model.eval().module.training
    assert model.generate(["the old"], max_new_tokens=5)[0].text == " mill"
    assert before != model.generate(["the old"], max_new_tokens=5)[0].ids


def test_dropout_is_active_in_training_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=24, intermediate_size=37, num_hidden_layers=1, num_attention_heads=3,
        hidden_dropout_prob=0.4,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.loss(ROWS, labels=LABELS).item() == model.loss(ROWS, labels=LABELS).item()
    model.train()
    assert model.loss(ROWS, labels=LABELS).item() != model.loss(ROWS, labels=LABELS).item()


def test_where_and_in_what_a_model_is() -> None:
    model = load(checkpoint("decoder"))
    assert model.to("bf16").module.dtype == torch.bfloat16
    assert model.to(torch.float64).to("cpu").module.dtype == torch.float64
    assert model.to("cpu", dtype="float32").loss(TEXTS).dtype == torch.float32
    with pytest.raises(InputError, match="is not known to torch"):
        model.to("gpu")
    assert len(list(model.parameters())) == len(list(model.module.parameters()))


@pytest.mark.parametrize(
    ("layout", "arguments", "options", "message"),
    [
        ("decoder", (TEXTS, TEXTS), {}, "this decoder model takes rows only"),
        ("encoder-decoder", (TEXTS,), {}, "takes a source and a target"),
        ("encoder-decoder", (TEXTS, TEXTS[:2]), {}, "3 sources and 2 targets"),
        ("encoder-decoder", (TEXTS, TEXTS), {"labels": LABELS}, "give no labels beside it"),
        ("decoder", ([[3], [4]],), {}, "no row has two tokens, one to read and one to predict; give longer rows"),
        ("decoder", ([],), {}, "there are no rows"),
        ("decoder", (TEXTS[0],), {}, "give a list of texts, not one string"),
        ("decoder", ([list(range(3, 90))],), {}, "more than|longer|positions"),
        ("decoder", ([[3, 4, 5]],), {"labels": [[3, 4]]}, "row 0 has 3 tokens; give its labels as 3 ids"),
        ("decoder", ([[3, 4, 5]],), {"labels": [[3, 4, 9999]]}, "label 9999 is neither one of"),
        ("decoder", ([[3, 4, 5]],), {"labels": [[3.0, 4.0, math.nan]]}, "give its labels as 3 ids"),
        ("decoder", ([[3, 4, 5]],), {"labels": [[-100] * 3]}, "no trained token"),
        ("encoder", (TEXTS,), {"seed": -1}, "seed"),
        ("encoder", ([[3, 4, 5]],), {"labels": [[-100] * 3, [1]]}, "one row of labels for each of the 1 rows"),
    ],
)
def test_rows_that_have_no_loss(
    layout: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str, unchecked: None
) -> None:
    with pytest.raises(InputError, match=message) as error:
        load(checkpoint(layout)).loss(*arguments, **options)
    assert "\n" not in str(error.value)


def test_packed_weights_are_not_put_in_training_mode(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 257}
    create(LLAMA | sizes, byte_tokenizer(DECODER)).save(tmp_path / "plain")
    if library() is None:
        pytest.skip(why_not())
    model = load(tmp_path / "plain", quantize="int8")
    with pytest.raises(InputError, match="packed matrices, which are not trained; load it with dequantize=True"):
        model.train()
    assert not model.eval().module.training
    assert load(tmp_path / "plain").train().module.training


# ---------------------------------------------------------------- triptych.train(recipe)


@pytest.fixture
def tables(text: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(checkpoint("decoder"))},
        "data": {"path": str(text)},
        "objective": {"name": "causal"},
        "optimizer": {"lr": 1e-3},
        "run": {"rows": 2, "length": 12, "steps": 3},
    }


def test_a_recipe_is_run_by_a_call(tables: dict[str, Any], tmp_path: Path) -> None:
    import triptych.train.recipe

    steps: list[int] = []
    model = triptych.train(tables, out=tmp_path / "run", on_step=lambda event: steps.append(event.step))  # type: ignore[operator]
    assert steps == [1, 2, 3]
    assert isinstance(model, Model)
    assert model.path == tmp_path / "run/model"
    assert model.generate(["the old"], max_new_tokens=2)[0].ids
    for name, parameter in load(tmp_path / "run").module.named_parameters():
        assert torch.equal(parameter, model.module.get_parameter(name))
    checked = triptych.train.recipe.check_recipe(tables)
    again = triptych.train(checked)  # type: ignore[operator]
    assert again.path is None
    assert all(torch.equal(a, b) for a, b in zip(again.module.parameters(), model.module.parameters(), strict=True))
    longer = triptych.train(tables, out=tmp_path / "run", resume=True, changes=["run.steps=6"])  # type: ignore[operator]
    assert not torch.equal(longer.module.decoder.final_norm.weight, model.module.decoder.final_norm.weight)
    other = {**tables, "data": {"path": str(tmp_path / "other.txt")}}
    for _ in range(2):  # and the directory is free again
        with pytest.raises(ConfigError, match="data of the recipe is not that of the run"):
            triptych.train(other, out=tmp_path / "run", resume=True)  # type: ignore[operator]


def test_what_cannot_be_run_is_refused(tables: dict[str, Any], unchecked: None) -> None:
    for recipe, error, message in (
        (3, ConfigError, "a recipe is a file, a dict of its tables or a Recipe, not int"),
        ("nowhere.toml", ConfigError, "no recipe nowhere.toml"),
        ({**tables, "run": {}}, ConfigError, "run.rows is missing"),
        ({**tables, "data": {"path": "/nowhere"}}, TextError, "no file or folder"),
    ):
        with pytest.raises(error, match=message):
            triptych.train(recipe)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="resume needs to know which run"):
        triptych.train(tables, resume=True)  # type: ignore[operator]


PAGE = Path(__file__).parents[1] / "docs/concepts/fine-tuning.md"


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, unchecked: None
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint("decoder"), tmp_path / "model")
    Path("notes.txt").write_text("".join(f"the old mill stands where river {i} bends\n\n\n" for i in range(40)))
    run, loop = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(run, {})
    assert (tmp_path / "runs/python/model/config.json").is_file()
    capsys.readouterr()
    assert len([line for line in loop.splitlines() if line and not line.startswith(("import", "from"))]) <= 15
    exec(loop.replace("5e-5", "5e-3"), {})  # a model of random weights learns nothing in 20 steps at the page's rate
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
    assert load("tuned").generate(["the old"], max_new_tokens=2)[0].ids
