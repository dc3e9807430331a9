"""A small decoder with and without a teacher, on the plays, equal steps: `python bench/distill.py`.

The teacher is the quickstart's decoder; both learn the first million characters of the training plays, and the losses
are those of three held-out plays, in nats per character.  Of each seed four students are trained: as the recipe is, on
windows at any place; on the rows of the store, without a teacher (weight 0); on the same rows with the teacher's
largest logits; and, as a control, with the logits of other tokens.  Printed are the losses, and the mean over the seeds
of what the teacher changes, with its 95% interval (Student's t).  It does not time.
"""

import argparse
import math
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import triptych
from triptych import machine
from triptych.text import shakespeare
from triptych.train import check_recipe, prepare, read_recipe

CHARACTERS, HELD_OUT = 1_000_000, 60_000
T_OF_FOUR = 2.776  # Student's t for 95% and five seeds
STUDENT = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 2}
PLAIN, FIXED, TAUGHT, SHUFFLED = "windows anywhere", "rows of the store", "teacher", "shuffled teacher"


def trained(folder: Path, steps: int, **changes: Any) -> float:
    """The loss on the held-out plays, in nats per character, after so many steps of the quickstart's recipe."""
    tables = read_recipe("decoder").model_dump(exclude_defaults=True)
    tables["data"] = {"path": str(folder / "texts"), "held_out": 0.5, "held_out_limit": HELD_OUT}
    tables["run"] = {"rows": 16, "length": 128, "steps": steps, "precision": "fp32"}
    tables["run"] |= {"evaluate_every": 1.0, "sample_every": 0.0}
    for name, values in changes.items():
        tables[name] = tables[name] | values if isinstance(tables.get(name), dict) else values
    job = prepare(check_recipe(tables))
    job.run()
    loss = job.trainer.last_score().nats_per_character
    assert loss is not None
    return loss


def write_texts(folder: Path) -> None:
    """The texts to train on and, last, those that are held out."""
    train, held_out = shakespeare.split()
    folder.mkdir()
    (folder / "a.txt").write_text(train[:CHARACTERS], encoding="utf-8")
    (folder / "b.txt").write_text(held_out, encoding="utf-8")


def shuffle(store: Path, other: Path) -> None:
    """A copy of the store in which each token has the numbers of another one."""
    other.mkdir()
    random = torch.Generator().manual_seed(0)
    for file in sorted(store.iterdir()):
        with safe_open(file, "pt") as part:
            tensors, metadata = {name: part.get_tensor(name) for name in part.keys()}, part.metadata()  # noqa: SIM118
        order = torch.randperm(len(tensors["ids"]), generator=random)
        save_file({name: tensor[order] for name, tensor in tensors.items()}, other / file.name, metadata)


def interval(differences: Sequence[float]) -> str:
    half = T_OF_FOUR * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{statistics.mean(differences):+.4f} +- {half:.4f}, below 0 in {sum(d < 0 for d in differences)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--weight", type=float, default=0.8)
    options = parser.parse_args()
    print(
        f"{machine.look().processor}, {torch.get_num_threads()} threads, fp32, triptych {triptych.__version__}, "
        f"torch {torch.__version__}, python {platform.python_version()}; {vars(options)}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "texts")
        run = {"out": str(folder / "teacher"), "seed": 99, "save_every": 1.0}
        loss = trained(folder, options.teacher_steps, run=run)
        teacher = folder / "teacher" / "model"
        words = {"tokenizer": str(teacher), "model": STUDENT}
        print(f"teacher, {options.teacher_steps} steps: {loss:.4f}", flush=True)
        distill = {"teacher": str(teacher), "top": options.top, "temperature": options.temperature}
        distill |= {"store": str(folder / "store"), "weight": options.weight}
        cases: dict[str, dict[str, Any]] = {
            PLAIN: {}, FIXED: {"distill": distill | {"weight": 0.0}}, TAUGHT: {"distill": distill},
            SHUFFLED: {"distill": distill | {"store": str(folder / "shuffled")}},
        }  # fmt: skip
        losses: dict[str, list[float]] = {case: [] for case in cases}
        print("seed", *cases, sep="  ")
        for seed in range(options.seeds):
            for case, changes in cases.items():
                if case == SHUFFLED and not (folder / "shuffled").exists():
                    shuffle(folder / "store", folder / "shuffled")
                losses[case].append(trained(folder, options.steps, **words, **changes, run={"seed": seed}))
            print(f"{seed:4}", *(f"{of[-1]:>{len(case)}.4f}" for case, of in losses.items()), sep="  ", flush=True)
    for case, base in ((TAUGHT, PLAIN), (TAUGHT, FIXED), (SHUFFLED, FIXED)):
        differences = [a - b for a, b in zip(losses[case], losses[base], strict=True)]
        print(f"{case} less {base}: {interval(differences) if len(differences) > 1 else differences}")


if __name__ == "__main__":
    main()
