"""Model directories with one file changed at random: each is read, or refused in one short line.

`test_checkpoints_read.py` has the malformed headers one by one.  Here every file takes part: configs, indexes,
tokenizers of every kind, packed weights.  The dice are seeded, so what goes wrong once goes wrong again.
"""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import test_packed
import test_text_vocabulary as vocabularies
import triptych
from cli_models import Captured
from triptych.errors import TriptychError
from triptych.text import Specials, SpecialsLayout, bpe_tokenizer, from_directory, has_tokenizer

EACH = 30  # changes of each directory
ODD: list[Any] = [
    None, True, 0, -1, 0.5, 1e400, float("nan"), 2**31, 2**63, -(2**63), 10**30, "", "x" * 50_000, "../x",
    "/etc/passwd", "\ud800", "\x00", [], {}, [[]], [None], {"a": 1},
]  # fmt: skip
NEW = ("auto_map", "quantization_config", "rope_scaling", "added_tokens_decoder", "extra_special_tokens", "x")
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 16,
         "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
TOKENIZERS = ("T5", "Llama", "Marian", "Bert", "GPT2 extra", "MBart50")


def llama(path: Path) -> None:
    words = bpe_tokenizer(["the sun and the moon"], 290, SpecialsLayout(Specials(bos="<s>", eos="</s>"), before="bos"))
    triptych.create(LLAMA, words).save(path)
    (path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<x>"]}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def sharded(path: Path) -> None:
    llama(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@cache
def sound(kind: str, root: Path) -> dict[str, bytes]:
    """The files of a directory that is read."""
    path = root / kind
    if kind in TOKENIZERS:
        name, files, config = vocabularies.CASES[kind]
        vocabularies.written(path, files(), {"tokenizer_class": f"{name}Tokenizer", **config})
    else:
        {"llama": llama, "sharded": sharded, "gptq": gptq}[kind](path)
    open_all(path)
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def gptq(path: Path) -> None:
    test_packed.write(path, test_packed.GPTQ, test_packed.gptq(32))


def open_all(path: Path) -> None:
    """Everything a user would do first."""
    if (path / "config.json").is_file():
        model = triptych.load(path)
        tokenizer = model.tokenizer
    else:
        tokenizer = from_directory(path) if has_tokenizer(path) else None
    if tokenizer is not None:
        ids = tokenizer.encode("the sun é 日本 <s> <x>\n")
        tokenizer.decode(ids)
        tokenizer.tokens(ids)
        tokenizer.files()


def changed_json(raw: bytes, dice: random.Random) -> bytes:
    """One value, not too deep, replaced by an odd one, dropped, or joined by a new one."""
    whole = json.loads(raw)
    place = whole
    while isinstance(place, dict | list) and place:
        key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or dice.random() < 0.5:
            break
        place = place[key]
    what = dice.random()
    if not place or what < 0.15:
        whole[dice.choice(NEW)] = dice.choice(ODD)
    elif what < 0.3:
        del place[key]
    else:
        place[key] = dice.choice(ODD)
    text = json.dumps(whole)
    return (text.replace(":", ":" + "[" * 100_000, 1) if dice.random() < 0.03 else text).encode()


def changed_bytes(raw: bytes, dice: random.Random) -> bytes:
    """Cut, lengthened, or with a length or a few bytes overwritten, mostly near the beginning."""
    at, what = dice.randrange(min(len(raw), dice.choice((64, 2_000, len(raw)))) or 1), dice.random()
    if what < 0.2:
        return raw[:at]
    if what < 0.4:
        lie = dice.choice((2**63, 2**64 - 1, 2**32, len(raw) + 1, 0)).to_bytes(8, "little")
        return raw[:at] + lie + raw[at + 8 :]
    if what < 0.5:
        return raw[:at] + raw[at + dice.choice((1, 8, 50)) :]
    if what < 0.6:
        return raw + raw[:at]
    return raw[:at] + bytes([dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))]) + raw[at + 1 :]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sound")


@pytest.mark.parametrize("kind", ["llama", "sharded", "gptq", *TOKENIZERS])
def test_a_damaged_directory_is_read_or_refused(kind: str, root: Path, tmp_path: Path, capfd: Captured) -> None:
    files, dice, refused = sound(kind, root), random.Random(f"{kind}, the first"), list[str]()
    for _ in range(EACH):
        victim = dice.choice(sorted(files))
        change = changed_json if victim.endswith(".json") and dice.random() < 0.7 else changed_bytes
        path = tmp_path / "damaged"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(change(content, dice) if name == victim else content)
        try:
            open_all(path)
        except TriptychError as error:
            refused.append(str(error))
    assert EACH // 4 < len(refused) < EACH
    assert not [one for one in refused if "\n" in one or len(one) > len(str(tmp_path)) + 700]
    capfd.readouterr()  # what libraries have to say of their panics
