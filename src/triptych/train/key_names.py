"""Which key of a recipe was meant by a name that is none: one of another table, of another library, or misspelled."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.errors import nearest

#: What transformers, PyTorch and others call a key -> the key.
_OTHERS = {
    "learning_rate": "optimizer.lr", "max_lr": "optimizer.lr", "min_lr": "schedule.floor", "optim": "optimizer.name",
    "adam_epsilon": "optimizer.eps", "adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas",
    "beta1": "optimizer.betas", "beta2": "optimizer.betas", "wd": "optimizer.weight_decay",
    "grad_clip": "optimizer.clip", "gradient_clip": "optimizer.clip", "max_grad_norm": "optimizer.clip",
    "lr_scheduler": "schedule.shape", "lr_scheduler_type": "schedule.shape", "scheduler": "schedule.shape",
    "warmup_ratio": "schedule.warmup", "warmup_steps": "schedule.warmup",
    "batch_size": "run.rows", "per_device_train_batch_size": "run.rows", "batch": "run.rows",
    "block_size": "run.length", "max_length": "run.length", "max_seq_length": "run.length", "seq_len": "run.length",
    "sequence_length": "run.length", "context_length": "run.length", "max_len": "run.length",
    "max_steps": "run.steps", "iterations": "run.steps", "max_iters": "run.steps", "epochs": "run.steps",
    "num_epochs": "run.steps", "num_train_epochs": "run.steps", "time": "run.seconds",
    "gradient_accumulation_steps": "run.accumulate", "grad_accum": "run.accumulate", "dtype": "run.precision",
    "bf16": "run.precision", "fp16": "run.precision", "torch_compile": "run.compile",
    "gradient_checkpointing": "run.recompute", "eval_steps": "run.evaluate_every", "save_steps": "run.save_every",
    "output_dir": "run.out", "out_dir": "run.out", "dataset": "data.path", "train_file": "data.path",
    "mlm_probability": "objective.rate", "task": "objective.name", "model_name_or_path": "model.path",
    "base_model": "model.path", "pretrained": "model.path",
}  # fmt: skip


def meant(path: Sequence[str], beside: Sequence[str], every: Sequence[tuple[str, ...]]) -> str:
    """`" (did you mean 'run.seconds'?)"` for the unknown key at `path`, or the empty string.

    `beside` are the keys of its table, `every` all keys of a recipe with their tables.
    """
    name = path[-1]
    same = [".".join(key) for key in every if key[-1] == name]
    if name in _OTHERS or same:
        return f" (did you mean {_OTHERS.get(name) or ' or '.join(same)!r}?)"
    return nearest(name, beside) or nearest(".".join(path), [".".join(key) for key in every])
