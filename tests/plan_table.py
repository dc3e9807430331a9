"""The table of `docs/concepts/planning.md`: `python tests/plan_table.py` prints it."""

from triptych.count import ClusterRates, TrainingPlan, plan
from triptych.errors import InputError
from triptych.families import read_config
from triptych.families.named_configs import NAMED

MODELS = ("qwen3-4b", "llama-7b", "qwen2.5-72b")
GPUS = (8, 64, 256, 1024)
ROWS, LENGTH, MEMORY = 1024, 4096, 80e9
RATES = ClusterRates(flops=400e12, bandwidth=300e9, between=50e9, per_node=8)
COLUMNS = (
    "model", "GPUs", "replicate x shard x tensor", "micro-batches x rows", "recompute", "GB of each", "GB sent by each",
    "seconds", "sending",
)  # fmt: skip


def cells(one: TrainingPlan) -> list[str]:
    mesh, step, seconds = one.mesh, one.step, one.seconds or 0.0
    return [
        f"{mesh.replicate} x {mesh.shard} x {mesh.tensor}", f"{step.accumulate} x {step.rows}",
        "yes" if step.recompute else "no", f"{one.memory.peak / 1e9:.1f}", f"{one.sent.total / 1e9:,.0f}",
        f"{seconds:.2f}", f"{1 - (one.compute_seconds or 0.0) / seconds:.0%}",
    ]  # fmt: skip


def table() -> str:
    """The whole table in Markdown."""
    lines = []
    for name in MODELS:
        for gpus in GPUS:
            try:
                found = cells(plan(read_config(dict(NAMED[name])), gpus, MEMORY, length=LENGTH, rows=ROWS, rates=RATES))
            except InputError:
                found = ["does not fit", *[""] * 6]
            lines.append(f"| {' | '.join([name, f'{gpus:,}', *found])} |\n")
    return f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n{''.join(lines)}"


if __name__ == "__main__":
    print(table(), end="")
