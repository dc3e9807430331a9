"""lm-eval's tasks on a model and on the same weights by lm-eval's own adapter for transformers, both in fp32:
`python bench/eval_tasks.py MODEL`, or with `--encoder-decoder` on one with random weights and the tokenizer of MODEL.

The tasks are made of the text of files (`--text`, by default the documentation): `endings`, questions with four choices
of several tokens; `endings_shots`, the same with three examples before each; `letters`, whose choices are one token;
`last_word`; and `documents`, perplexities of texts of very different lengths.  Each is run by both in turn, `--rounds`
times, and by the other adapter with each batch size; the fastest run of each counts.  Printed are seconds on the clock
and of all cores, which a busy machine changes less, and the largest difference of two log-likelihoods.
"""

import argparse
import json
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers

import triptych
from triptych import machine
from triptych.evaluate.lm_eval_model import TriptychLM
from triptych.evaluate.lm_eval_tasks import Answers, adapter_of_transformers, answers_of, difference, loaded, quiet

DOCS = Path(__file__).parent.parent / "docs"
BATCHES = (1, 4, 8, 16)
T5 = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8,
      "num_heads": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # fmt: skip
CHOICES = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{endings}}",
           "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "endings": CHOICES,
    "endings_shots": CHOICES | {"num_fewshot": 3, "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}},
    "letters": CHOICES | {
        "doc_to_text": "{{text}}\nA{{endings[0]}}\nB{{endings[1]}}\nC{{endings[2]}}\nD{{endings[3]}}\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"],
    },
    "last_word": {
        "output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{endings[answer].split(' ')[0]}}",
        "metric_list": [{"metric": "acc"}],
    },
    "documents": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{document}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip


def write_tasks(folder: Path, text: str, count: int) -> None:
    """The tasks as lm-eval reads them, of `count` documents."""
    draw = random.Random(0)
    words = re.sub(r"[^\x20-\x7e]+", " ", text).split()
    rows = []
    for _ in range(count):
        before, after = draw.randrange(60, 160), draw.randrange(5, 13)
        places = [draw.randrange(len(words) - 800) for _ in range(4)]
        first, answer = places[0], draw.randrange(4)
        endings = [" ".join(words[place + before : place + before + after]) for place in places]
        endings[0], endings[answer] = endings[answer], endings[0]
        document = " ".join(words[first : first + draw.choice((40, 90, 160, 300, 700))])
        rows.append({"text": " ".join(words[first : first + before]), "endings": endings, "answer": answer,
                     "document": document})  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, fields in TASKS.items():
        config = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
                  "test_split": "test", **fields}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[triptych.Model]:
    """The model with fp32 weights, from a directory that both read."""
    with tempfile.TemporaryDirectory() as folder:
        model = triptych.load(options.model, dtype=torch.float32, dequantize=True)
        if options.encoder_decoder:
            words = model.inputs.words
            ids = {"vocab_size": words.vocab_size, "eos_token_id": words.eos_id, "pad_token_id": words.pad_id,
                   "decoder_start_token_id": words.pad_id}  # fmt: skip
            model = triptych.create(T5 | ids, words)
        model.save(folder + "/model")
        yield triptych.load(folder + "/model")


def best(runs: Sequence[Answers]) -> tuple[float, float]:
    """Seconds on the clock and of all cores, each of the fastest run."""
    return min(run.seconds for run in runs), min(run.cpu_seconds for run in runs)


def compare(model: triptych.Model, name: str, folder: Path, options: argparse.Namespace) -> None:
    ours, theirs = TriptychLM(model), dict[int, list[Answers]]()
    own: list[Answers] = []
    with quiet(), adapter_of_transformers(model, ours.max_length, 1) as other:
        for _ in range(options.rounds):
            own.append(answers_of(TriptychLM(model), loaded([name], folder))[0])
            for batch in options.batches:
                other.batch_size_per_gpu = batch
                theirs.setdefault(batch, []).append(answers_of(other, loaded([name], folder))[0])
    wall, cpu = best(own)
    batch = min(theirs, key=lambda size: best(theirs[size])[not options.wall])
    their_wall, their_cpu = best(theirs[batch])
    apart = difference(own[0], theirs[batch][0])
    print(
        f"{name:14} {apart.requests:5} {wall:8.2f} {cpu:8.2f} {their_wall:8.2f} {their_cpu:8.2f} {batch:6} "
        f"{their_wall / wall:7.2f} {their_cpu / cpu:7.2f} {apart.log_likelihood:10.1e} {apart.other_greedy:4}",
        flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--encoder-decoder", action="store_true")
    parser.add_argument("--text", type=Path, nargs="*", default=sorted(DOCS.glob("**/*.md")))
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS])
    parser.add_argument("--threads", type=int, default=machine.cores().usable)
    parser.add_argument("--wall", action="store_true", help="choose the batch size by the clock: on a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = "\n".join(path.read_text("utf-8") for path in options.text)
    with tempfile.TemporaryDirectory() as folder, opened(options) as model:
        write_tasks(Path(folder), text, options.documents)
        print(f"{model}\n{options.threads} threads, fp32, torch {torch.__version__}, transformers "
              f"{transformers.__version__}, lm-eval {lm_eval.__version__}")  # fmt: skip
        print(f"{'':20} {'Triptych':>17} {'transformers':>17} {'best':>6} {'times as fast':>15} {'largest':>10} other")
        print(f"{'task':14} {'asked':>5} {'clock':>8} {'cores':>8} {'clock':>8} {'cores':>8} {'batch':>6} "
              f"{'clock':>7} {'cores':>7} {'difference':>10} greedy")  # fmt: skip
        for name in options.tasks:
            compare(model, name, Path(folder), options)


if __name__ == "__main__":
    main()
