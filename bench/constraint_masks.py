"""What a constraint adds to a step: rows that write JSON of a schema beside the same rows without it, in alternation.

    python bench/constraint_masks.py [--rows 1 8] [--steps 150]

Two models with random weights, packed to 8 bits: one of SmolLM2-135M's shape with 49,152 tokens, one of Gemma 3 270M's
with 262,144.  Each step runs once with a constraint and once without; printed are the medians, the difference as a
share of the step without, and the time of the masks alone.  Times are those of the processor, which other processes
change less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import triptych
from triptych import machine
from triptych.generate import Constraint, Engine, Request, Sampling
from triptych.generate.constraints import row_constraint
from triptych.text import Tokenizer
from triptych.text.detokenize import BYTE_OF

SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
           "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
           "tie_word_embeddings": True}  # fmt: skip
GEMMA3 = {"model_type": "llama", "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048,
          "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
          "max_position_embeddings": 2048, "tie_word_embeddings": True}  # fmt: skip
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
                   "code": {"type": "string", "pattern": "^[a-z]+-[0-9]+$"}, "kind": {"enum": ["tea", "rain"]},
                   "notes": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "code", "kind", "notes"],
}  # fmt: skip
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}


def tokenizer_of(size: int) -> Tokenizer:
    """A byte-level vocabulary of so many tokens: bytes, and words as they are frequent in texts and JSON."""
    draw, letters = random.Random(0), "etaoinshrdlucmfwypvbgk"
    texts = dict.fromkeys(BYTE_OF)
    space = next(char for char, byte in BYTE_OF.items() if byte == 0x20)
    while len(texts) < size:
        word = "".join(draw.choices(letters, k=draw.randint(2, 8)))
        mark = draw.choices(["", space, '"', '",', '":', '{"', "\u010a"], [8, 8, 1, 1, 1, 1, 1])[0]
        texts[draw.choice([mark + word, word + mark]) if mark != space else mark + word] = None
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def measured(model: Any, rows: int, steps: int, sampling: Sampling) -> tuple[float, float, float]:
    """Median seconds of a step without and with the constraint, and of the masks alone."""
    constraint = Constraint.schema(SCHEMA)
    engines = []
    for own in (None, constraint):
        engine = Engine(model.module, tokenizer=model.tokenizer)
        engine.add(*(
            Request(
                prompt=[*range(50 + i, 114 + i)], number=i, max_new_tokens=steps + 9, sampling=sampling, constraint=own
            )
            for i in range(rows)
        ))  # fmt: skip
        for _ in range(4):
            engine.step()
        engines.append(engine)
    seconds: tuple[list[float], list[float]] = ([], [])
    masks: list[float] = []
    fill = row_constraint.fill_masks

    def timed(states: Any) -> Any:
        start = time.process_time()
        filled = fill(states)
        masks.append(time.process_time() - start)
        return filled

    row_constraint.fill_masks = timed
    for _ in range(steps):
        for engine, times in zip(engines, seconds, strict=True):
            start = time.process_time()
            engine.step()
            times.append(time.process_time() - start)
    row_constraint.fill_masks = fill
    return statistics.median(seconds[0]), statistics.median(seconds[1]), statistics.median(masks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    machine.use_threads()
    print(f"threads {torch.get_num_threads()}, torch {torch.__version__}, triptych {triptych.__version__}")
    for name, config in (("SmolLM2-135M's shape", SMOLLM2), ("Gemma 3 270M's shape", GEMMA3)):
        vocab = int(config["vocab_size"])  # type: ignore[call-overload]
        with tempfile.TemporaryDirectory() as folder:
            triptych.create(config).save(folder)
            model = triptych.load(folder, quantize="int8")
        model.tokenizer = tokenizer_of(vocab)
        start = time.process_time()
        Constraint.schema(SCHEMA).prepare(model.tokenizer, vocab)
        print(f"{name}, {vocab:,} tokens, int8: vocabulary read in {time.process_time() - start:.2f} s")
        for rows in options.rows:
            for words, sampling in (("greedy", Sampling()), ("temperature 1", Sampling(temperature=1.0))):
                plain, kept, mask = measured(model, rows, options.steps, sampling)
                print(
                    f"  {rows} rows, {words}: {1e3 * plain:.2f} ms a step, {1e3 * kept:.2f} with a constraint "
                    f"({(kept - plain) / plain:+.1%}); masks {1e6 * mask:.0f} us ({mask / plain:.1%})"
                )


if __name__ == "__main__":
    main()
