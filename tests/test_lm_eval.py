"""lm-eval's tasks from local files: every answer is that of its own adapter for transformers on the same weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cli_models
from cli_models import Captured, checkpoint, refused, said
from triptych.errors import InputError
from triptych.model import Model, create, load
from triptych.text import SEQ2SEQ, byte_tokenizer

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")

from triptych.evaluate import windows
from triptych.evaluate.lm_eval_model import TriptychLM
from triptych.evaluate.lm_eval_tasks import run_tasks

TASKS = Path(__file__).parent / "data" / "lm_eval"
NAMES = ["endings", "letters", "last_word", "whole_text", "next_line"]
LIMIT = 1e-4  # nats of a request


def both() -> Model:
    """An encoder-decoder whose two stacks have as many layers: transformers 5.23 cannot generate with others."""
    tokenizer = byte_tokenizer(SEQ2SEQ)
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "vocab_size": tokenizer.vocab_size}
    more = {"decoder_start_token_id": tokenizer.pad_id, "num_decoder_layers": 2}
    return create(cli_models.T5 | ids | more, tokenizer, seed=2)


MODELS: dict[str, Callable[[], Model]] = {
    "decoder": lambda: load(checkpoint("decoder")),  # 72 positions: several texts are cut off on the left
    "encoder-decoder": both,
}


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shots", [None, 2])
@pytest.mark.parametrize("layout", MODELS)
def test_five_tasks_answer_as_lm_evals_own_adapter(layout: str, shots: int | None) -> None:
    model, tasks = MODELS[layout](), NAMES if shots is None else ["endings"]
    results = run_tasks(
        model, tasks, include_path=TASKS, num_fewshot=shots, max_length=96 if layout == "encoder-decoder" else None,
        against="transformers", batch_size=4,
    )  # fmt: skip
    difference = results.difference
    assert difference is not None
    assert {metric.task for metric in results.metrics} == {*tasks}
    assert difference.requests >= 18
    assert difference.log_likelihood < LIMIT, difference.request
    assert difference.other_greedy == 0
    assert difference.texts == (6 if shots is None else 0)
    if layout == "decoder":  # of an encoder-decoder, lm-eval counts the source's tokens as written ones
        assert difference.other_texts == 0
    for metric in results.metrics:
        if "perplexity" not in metric.metric and metric.task != "next_line":
            assert metric.their_value == pytest.approx(metric.value, abs=1e-5)
    assert all(metric.shots == (shots or 0) for metric in results.metrics)


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", MODELS)
def test_other_weights_answer_otherwise(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one number of the weights is changed in the copy that transformers opens."""
    model = MODELS[layout]()
    saved = Model.save

    def changed(self: Model, path: str | Path) -> object:
        weight = self.module.get_parameter("decoder.final_norm.weight")
        with torch.no_grad():
            weight[0] += 1.0
            try:
                return saved(self, path)
            finally:
                weight[0] -= 1.0

    monkeypatch.setattr(Model, "save", changed)
    results = run_tasks(model, "endings", include_path=TASKS, against="transformers", max_length=72)
    assert results.difference is not None
    assert results.difference.log_likelihood > 100 * LIMIT


def test_windows_are_lm_evals() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for count in range(30):
        for width in range(1, 9):
            for overlap in range(width):
                theirs = get_rolling_token_windows(
                    token_list=list(range(count)), prefix_token=99, max_seq_len=width, context_len=overlap + 1
                )
                ours = list(windows(list(range(count)), 99, width, overlap))
                assert ours == list(map(make_disjoint_window, theirs)), (count, width, overlap)


def test_empty_contexts_long_contexts_and_empty_texts() -> None:
    model = load(checkpoint("decoder"))
    lm, words = TriptychLM(model), model.inputs.words
    long = "the old mill stands where the river bends " * 3
    answers = lm.loglikelihood(requests("loglikelihood", ("", "the tide"), (long, "and more"), (long, "a" * 71)))
    first = words.bos_id if words.bos_id is not None else words.eos_id
    rows = [[first, *words.encode("the tide", special=False)], [*words.encode(long.rstrip() + " and more")][-73:]]
    for row, (value, greedy), count in zip(rows, answers, (8, 9), strict=False):
        scores = model.logits([row[:-1]])[0].double().log_softmax(-1)[-count:]
        assert value == pytest.approx(float(scores.gather(-1, torch.tensor(row[-count:])[:, None]).sum()), abs=1e-4)
        assert greedy == (scores.argmax(-1).tolist() == row[-count:])
    with pytest.raises(InputError, match="a choice is empty"):
        lm.loglikelihood(requests("loglikelihood", ("a", "")))
    with pytest.raises(InputError, match="longer than the 72 of the model"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b" * 80)))
    assert lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("",))) == [0.0]


def test_generations_take_the_settings_of_a_task() -> None:
    model = load(checkpoint("decoder"))
    lm = TriptychLM(model)
    asked = [("the ship", {"until": ["e"], "max_gen_toks": 9}), ("the mill", {"max_new_tokens": 4, "until": "zz"}),
             ("the tide", {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_gen_toks": 6})]  # fmt: skip
    texts = lm.generate_until(requests("generate_until", *asked))
    assert texts[0] == model.generate(["the ship"], max_new_tokens=9, stop=["e"])[0].text
    assert texts[1] == model.generate(["the mill"], max_new_tokens=4, stop=["zz"])[0].text
    assert texts[2] == model.generate(["the tide"], max_new_tokens=6, temperature=0.7, top_k=5)[0].text
    with pytest.raises(InputError, match=r"'temprature', which is not known \(did you mean 'temperature'"):
        lm.generate_until(requests("generate_until", ("a", {"temprature": 0.5})))
    with pytest.raises(InputError, match="max_gen_toks=72 leaves no room"):
        lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 72})))


def test_a_chat_template_is_the_models_own() -> None:
    lm = TriptychLM(load(checkpoint("decoder")))
    chat = [{"role": "user", "content": "tide?"}, {"role": "assistant", "content": "at six"}]
    assert lm.chat_template(True) == cli_models.CHAT
    assert lm.chat_template() == ""
    assert lm.apply_chat_template(chat[:1]) == "<user>tide?\n<assistant>"
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<user>tide?\n<assistant>at six"
    with pytest.raises(InputError, match="no chat template"):
        TriptychLM(both()).apply_chat_template(chat)


def test_an_encoder_and_weights_that_are_no_numbers() -> None:
    with pytest.raises(InputError, match=r"this bert encoder does not; .* pseudo-perplexity"):
        run_tasks(load(checkpoint("encoder")), "next_line", include_path=TASKS)
    model = both()
    with torch.no_grad():
        model.module.get_parameter("decoder.final_norm.weight")[0] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        run_tasks(model, "endings", include_path=TASKS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dataset_path", None, "the task lacks dataset_path"),
        ("doc_to_text", None, "the task lacks doc_to_text"),
        ("doc_to_target", None, "the task lacks doc_to_target"),
        ("doc_to_choice", None, "lacks doc_to_choice, which output_type: multiple_choice needs"),
        ("test_split", None, "lacks test_split or validation_split"),
        ("dataset_kwargs", None, "lacks dataset_kwargs: data_files"),
        ("dataset_path", "allenai/ai2_arc", r"comes from the network .* write hub:endings"),
        ("dataset_kwargs", {"data_files": {"test": "nowhere.jsonl"}}, "names nowhere.jsonl, which is neither here"),
        ("dataset_kwargs", {"data_files": "https://host/x.jsonl"}, "an address on the network"),
        ("metric_list", [{"metric": "f1", "hf_evaluate": True}], "fetches a metric from the network"),
        ("output_type", "guess", "lm-eval cannot use the task"),
        ("test_split", "dev", "lm-eval cannot use the task"),
        ("task", None, "is no task; a task's YAML file has a name under `task`"),
    ],
)
def test_a_task_that_cannot_be_run(field: str, value: object, message: str, tmp_path: Path) -> None:
    import yaml

    config = yaml.safe_load((TASKS / "endings.yaml").read_text("utf-8")) | {field: value}
    path = tmp_path / "endings.yaml"
    path.write_text(yaml.safe_dump({key: one for key, one in config.items() if one is not None}), encoding="utf-8")
    shutil.copy(TASKS / "endings.jsonl", tmp_path)
    with pytest.raises(InputError, match=message):
        run_tasks(load(checkpoint("decoder")), str(path))


def test_names_that_are_no_tasks(unchecked: None, tmp_path: Path) -> None:
    model = load(checkpoint("decoder"))
    for wrong, message in (
        (lambda: run_tasks(model, "endngs", include_path=TASKS), r"no task 'endngs' below .* \(did you mean 'endings'"),
        (lambda: run_tasks(model, "arc_easy"), r"no task 'arc_easy' here; give include_path"),
        (lambda: run_tasks(model, []), "there are no tasks"),
        (lambda: run_tasks(model, "endings", include_path=tmp_path / "no"), "is no folder of tasks"),
        (lambda: run_tasks(model, str(tmp_path / "a.yaml")), "there is no such file"),
        (lambda: run_tasks(model, "endings", include_path=TASKS, limit=0), "limit=0 must be above 0"),
        (lambda: run_tasks(model, "endings", include_path=TASKS, num_fewshot=-1), "num_fewshot"),
        (lambda: run_tasks(model, "endings", include_path=TASKS, against="llama.cpp"), "must be 'transformers'"),
        (lambda: run_tasks(model, "endings", include_path=TASKS, max_rows=0), "max_rows"),
        (lambda: run_tasks(model, 5), "tasks"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()


def test_a_tag_stands_for_its_tasks() -> None:
    results = run_tasks(load(checkpoint("decoder")), "local_choices", include_path=TASKS, limit=2)
    assert {(metric.task, metric.samples) for metric in results.metrics} == {("endings", 2), ("letters", 2)}


@pytest.mark.filterwarnings("ignore")
def test_the_command_runs_tasks(tmp_path: Path, capsys: Captured) -> None:
    samples = tmp_path / "samples.jsonl"
    argv = ["eval", str(checkpoint("decoder")), "--tasks", f"{TASKS / 'endings.yaml'},letters", "--include-path",
            str(TASKS), "--limit", "4"]  # fmt: skip
    out, _ = said([*argv, "--samples", str(samples), "--against", "transformers"], capsys)
    assert "largest difference of 24 requests" in out
    lines = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    assert [line["task"] for line in lines] == ["endings"] * 4 + ["letters"] * 4
    assert {path.name for path in tmp_path.iterdir()} == {samples.name}
    answer = json.loads(said([*argv, "--json"], capsys)[0])
    assert {metric["task"]: metric["samples"] for metric in answer["metrics"]} == {"endings": 4, "letters": 4}
    assert answer["difference"] is None
    assert "did you mean 'endings'" in refused([*argv[:3], "ending", *argv[4:]], capsys)


@pytest.mark.heavy
@pytest.mark.weights
@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.filterwarnings("ignore")
def test_smollm2_answers_as_by_lm_evals_own_adapter(smollm2: Model) -> None:
    results = run_tasks(smollm2, NAMES, include_path=TASKS, against="transformers", limit=4)
    difference = results.difference
    assert difference is not None
    assert difference.log_likelihood < LIMIT, difference.request
    assert (difference.other_greedy, difference.other_texts) == (0, 0)
    values = {(metric.task, metric.metric): metric.value for metric in results.metrics}
    assert values["endings", "acc"] >= 0.5
