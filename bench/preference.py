"""Losses and gradients of preference pairs beside trl's DPOTrainer (`pip install trl==1.16.0 peft`), on small random
models: `python bench/preference.py`.

For a Llama and a GPT-2, trained as a whole and by an adapter, on texts and on messages, with two values of beta: both
read the same file of records, and both compare the same changed weights with the same reference.  Printed are the loss
of ours, and the largest differences of losses and of gradients, relative to the largest gradient.  As controls, ours
with the answers swapped and with the adapter left on in the reference must differ.
"""

import itertools
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from safetensors.torch import load_file
from torch import Tensor

import triptych
from triptych.checkpoints.adapter_files import write_adapter
from triptych.checkpoints.load_weights import to_checkpoint
from triptych.nn import LoraFactors, Transformer
from triptych.text import DECODER, ChatTemplate, Tokenizer, byte_tokenizer
from triptych.train import Job, check_recipe, prepare
from triptych.train.objectives import MAX_LOGITS, collate
from triptych.train.preference import PreferenceBatch, PreferenceLoss, PreferencePair

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "max_position_embeddings": 160,
         "initializer_range": 0.2, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 160, "initializer_range": 0.2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " made of stone."},
    {"prompt": "A king rode", "chosen": " over the hills at night", "rejected": " up"},
    {"prompt": "Rain", "chosen": " fell.", "rejected": " sang."},
]
MESSAGES = [
    {"prompt": [{"role": "user", "content": row["prompt"]}]}
    | {side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}
    for row in TEXTS
]


def job_of(folder: Path, base: Path, rows: Sequence[Mapping[str, Any]], beta: float, *, adapter: bool) -> Job:
    """The run of ours, its weights moved away from the reference by noise."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    job = prepare(
        check_recipe({
            "model": {"path": str(base)},
            "data": {"path": str(data), "held_out_path": str(data)},
            "objective": {"name": "preference", "beta": beta},
            "run": {"rows": len(rows), "length": 160, "steps": 1, "precision": "fp32"},
            **({"adapter": {"rank": 4, "alpha": 8.0}} if adapter else {}),
        })
    )  # fmt: skip
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in job.trainer.module.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.02, generator=random)
    return job


def ours(module: Transformer, pairs: Sequence[PreferencePair]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss, and the gradients by the names of our parameters."""
    module.zero_grad()
    batch = collate(pairs)
    assert isinstance(batch, PreferenceBatch)
    loss = batch.nats(module, MAX_LOGITS, None) / batch.weight
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def in_their_names(job: Job, gradients: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Gradients by the names of transformers and of PEFT, in their shapes."""
    module = job.trainer.module
    if module.lora_adapter is None:
        values = {name: p.data for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.data = gradients[name]
        named = {name: value.clone() for name, value in dict(to_checkpoint(module, job.hf)[0]).items()}
        for name, parameter in module.named_parameters():
            parameter.data = values[name]
        return named
    shared: dict[int, Tensor] = {}
    parts = {slot: module.get_submodule(slot) for slot in module.lora_adapter.slots}
    factors = {
        slot: LoraFactors(
            shared.setdefault(id(part.down), gradients.get(f"{slot}.down", torch.empty(0))),
            gradients[f"{slot}.up"],
            part.alpha,
        )
        for slot, part in parts.items()
    }  # fmt: skip
    write_adapter(folder / "gradients", module.spec, factors)
    return load_file(folder / "gradients" / "adapter_model.safetensors")


def theirs(
    policy: Any, reference: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], beta: float, folder: Path
) -> tuple[float, dict[str, Tensor]]:
    """The loss of trl, and its gradients by name."""
    settings = trl.DPOConfig(
        output_dir=str(folder / "trl"), beta=beta, loss_type="sigmoid", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=len(rows), max_length=None,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        policy, ref_model=reference, args=settings, train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=tokenizer,
    )  # fmt: skip
    if reference is None:  # trl copies an adapter that was trained before; without the copy it switches the adapter off
        policy.delete_adapter("ref")
    policy.zero_grad()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    named = {name.replace(".default", ""): p.grad for name, p in trainer.model.named_parameters()}
    return loss.item(), {name: gradient for name, gradient in named.items() if gradient is not None}


def compare(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], beta: float, *, adapter: bool) -> str:
    plain = byte_tokenizer(DECODER)
    chat = ChatTemplate(TEMPLATE, {"eos_token": plain.specials.eos or ""})
    tokenizer = Tokenizer(plain.backend, plain.specials, chat=chat)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, changed = folder / "base", folder / "changed"
        ids = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_id}
        triptych.create(ids | dict(config), tokenizer).save(base)
        job = job_of(folder, base, rows, beta, adapter=adapter)
        module, pairs = job.trainer.module, job.trainer.data.draw(0, 0, len(rows))
        loss, gradients = ours(module, pairs)
        named = in_their_names(job, gradients, folder)
        other = transformers.AutoModelForCausalLM.from_pretrained
        reference = None if adapter else other(base, dtype=torch.float32)
        if adapter:
            write_adapter(changed, module.spec, triptych.nn.factors_of(module))
            policy = peft.PeftModel.from_pretrained(other(base, dtype=torch.float32), str(changed), is_trainable=True)
        else:
            triptych.Model(module, tokenizer, job.hf).save(changed)
            policy = other(changed, dtype=torch.float32)
        peer = transformers.AutoTokenizer.from_pretrained(base)
        peer.pad_token = peer.eos_token
        their_loss, their_gradients = theirs(policy, reference, peer, rows, beta, folder)
        largest = max(float(g.abs().max()) for g in their_gradients.values())
        assert named.keys() >= their_gradients.keys(), set(their_gradients) - set(named)
        apart = max(float((named[key] - g).abs().max()) for key, g in their_gradients.items()) / largest
        swapped, _ = ours(module, [exchanged(pair) for pair in pairs])
        same, _ = ours(module, [replace(pair, loss=PreferenceLoss(beta, module)) for pair in pairs])
        controls = f"controls: answers swapped {abs(swapped - their_loss):.1e}, reference trained too " + (
            f"{abs(same - their_loss):.1e}"
        )
        return f"{loss:10.6f} {abs(loss - their_loss):10.1e} {apart:10.1e}   {controls}"


def exchanged(pair: PreferencePair) -> PreferencePair:
    """The pair with its answers swapped."""
    other = pair.rejected
    chosen = triptych.train.Example(pair.ids, pair.targets, pair.trained)
    return PreferencePair(other.ids, other.targets, other.trained, rejected=chosen, loss=pair.loss)


def main() -> None:
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    versions = {"triptych": triptych.__version__, "trl": trl.__version__, "peft": peft.__version__,
                "transformers": transformers.__version__, "torch": torch.__version__}  # fmt: skip
    print("fp32, 1 thread;", ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{'':42}{'loss':>10} {'apart':>10} {'gradients':>10}")
    for config, adapter, rows, beta in itertools.product((LLAMA, GPT2), (False, True), (TEXTS, MESSAGES), (0.1, 0.5)):
        what = f"{config['model_type']}, {'an adapter' if adapter else 'all weights'}, "
        what += f"{'texts' if rows is TEXTS else 'messages'}, beta {beta}"
        print(f"{what:42}{compare(config, rows, beta, adapter=adapter)}", flush=True)


if __name__ == "__main__":
    main()
