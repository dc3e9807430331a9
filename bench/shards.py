"""Texts into shards, and rows out of them: `python bench/shards.py WHAT --folder DIR`, of which WHAT is one of

    tokenize   `--megabytes` of generated text: bytes a second of processor time, beside the tokenizer alone on some of
               the same text before and after; then the same again, killed `--kills` times at random moments, and the
               shards compared byte for byte
    rows       shards of `--tokens` tokens, whose ids are holes in the files: the time in which a step's rows are found
               and read, and documents that packing cuts
    memory     anonymous memory (RssAnon of /proc/self/status, so on Linux only) of a process that draws steps from
               shards of 50 million and of `--tokens` tokens

Rates are of processor time, so that other processes change them little; the wall clock is printed beside.  An exit
status of 1 says that tokens were lost, or a bound in `BOUNDS` does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import tokenizers

import triptych
from triptych import machine
from triptych.shards import ShardSet
from triptych.shards.manifest import Manifest, ShardEntry, fingerprint
from triptych.shards.order import Frame, Positions, RowOrder
from triptych.shards.shard_file import shard_name
from triptych.text import Tokenizer, bpe_tokenizer, from_directory

SHARD_TOKENS = 1 << 24
SHARD_MB = 8  # small, so that shards are made between two kills
SAMPLE = 32 << 20  # bytes of text for the tokenizer alone
BOUNDS = {"rate": 0.8, "milliseconds": 1.0}
LENGTH, ROWS = 1024, 8


def write_texts(path: Path, megabytes: int) -> None:
    """JSON lines of documents of 1 to 3,000 words of a vocabulary of 20,000, the n-th as often as 1 / n."""
    random, letters = np.random.default_rng(0), np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(random.choice(letters, size)) for size in random.integers(1, 11, 20_000)]
    shares = 1 / np.arange(1, 20_001)
    steps = (shares / shares.sum()).cumsum()
    with path.open("w", encoding="ascii") as file:
        while file.tell() < megabytes * 10**6:
            drawn = np.minimum(np.searchsorted(steps, random.random(1 << 20)), 19_999).tolist()
            at = 0
            while at < len(drawn):
                size = int(np.clip(random.lognormal(5.5, 1.0), 1, 3000))
                text = " ".join(words[i] for i in drawn[at : at + size])
                file.write(f'{{"text": "{text}"}}\n')
                at += size


def alone(words: Tokenizer, texts: list[str]) -> tuple[float, float]:
    """Bytes a second of processor time of the tokenizer alone, a million characters a call on one thread: encoding, and
    encoding with the ids taken out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    groups, size = [list[str]()], 0
    for text in texts:
        groups[-1].append(text)
        size += len(text)
        if size >> 20 >= len(groups):
            groups.append([])
    encoding = taking = 0.0
    for group in groups:
        began = time.process_time()
        rows = words.backend.encode_batch_fast(group, add_special_tokens=False)
        encoded = time.process_time()
        assert sum(len(row.ids) for row in rows) >= len(group)
        encoding += encoded - began
        taking += time.process_time() - encoded
    return size / encoding, size / (encoding + taking)


def run(source: Path, out: Path, tokenizer: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "triptych", "data", "tokenize", str(source), "--out", str(out), "--tokenizer",
               str(tokenizer), "--shard-mb", str(SHARD_MB)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def tokenizing(folder: Path, megabytes: int, kills: int) -> bool:
    source, tokenizer, whole = folder / "texts.jsonl", folder / "tokenizer", folder / "whole"
    if not source.exists():
        write_texts(source, megabytes)
    with source.open(encoding="ascii") as file:
        texts, size = list[str](), 0
        while size < SAMPLE and (line := file.readline()):
            texts.append(json.loads(line)["text"])
            size += len(line)
    words = bpe_tokenizer(texts[:4000], 8192)
    words.save(tokenizer)
    words = from_directory(tokenizer)
    before = alone(words, texts)
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    assert run(source, whole, tokenizer).wait() == 0
    seconds, after_run = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after_run.ru_utime + after_run.ru_stime - used.ru_utime - used.ru_stime
    after = alone(words, texts)
    made = json.loads((whole / "manifest.json").read_text())
    size, tokens = (sum(one[name] for one in made["shards"]) for name in ("text_bytes", "tokens"))
    rate, own = size / processor, [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    share = rate / own[0]
    print(f"{size / 1e9:.2f} GB of text, {tokens / 1e6:,.0f}M tokens, {len(made['shards'])} shards in {seconds:,.0f} s")
    print(f"processor time: {rate / 1e6:.2f} MB/s; the tokenizer alone {before[0] / 1e6:.2f} before and "
          f"{after[0] / 1e6:.2f} after, {own[1] / 1e6:.2f} with its ids taken out: {share:.1%} and "
          f"{rate / own[1]:.1%}", flush=True)  # fmt: skip
    out, done, began, draws = folder / "killed", 0, time.monotonic(), random.Random(0)
    while not (out / "manifest.json").exists():
        process = run(source, out, tokenizer)
        if done < kills:
            try:
                process.wait(draws.uniform(0.3, 1.7) * seconds / kills)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                done += 1
        process.wait()
    same = [(whole / one["name"]).read_bytes() == (out / one["name"]).read_bytes() for one in made["shards"]] + [
        (whole / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()
    ]
    print(f"killed {done} times, in {time.monotonic() - began:,.0f} s: {sum(same)} of {len(same)} files are the same")
    return all(same) and done == kills and share >= BOUNDS["rate"]


def sparse(folder: Path, tokens: int) -> Path:
    """Shards of so many tokens, whose documents have lengths as in the texts above, and whose ids are holes."""
    out = folder / f"sparse-{tokens}"
    if (out / "manifest.json").exists():
        return out
    out.mkdir(parents=True)
    words = bpe_tokenizer(["a b c"], 300)
    words.save(out / "tokenizer")
    plan = Manifest(
        tokenizer=fingerprint(words), vocab_size=words.vocab_size, tokenizer_from="", field="text", separator=None,
        shard_bytes=1, inputs=[],
    )  # fmt: skip
    draws, shards = np.random.default_rng(0), list[ShardEntry]()
    for number in range(-(-tokens // SHARD_TOKENS)):
        size = min(SHARD_TOKENS, tokens - number * SHARD_TOKENS)
        ends = np.maximum(1, draws.lognormal(6.0, 1.0, size // 300).astype(np.int64)).cumsum()
        ends = np.append(ends[ends < size], size).astype(np.uint64)
        count = len(ends)
        origin = {"run": plan.run, "number": number, "tokenizer": plan.tokenizer, "text_bytes": 0, "empty": 0,
                  "digest": "", "sha256": ""}  # fmt: skip
        header = {
            "__metadata__": {"shard": json.dumps(origin)},
            "ends": {"dtype": "U64", "shape": [count], "data_offsets": [0, 8 * count]},
            "hashes": {"dtype": "U64", "shape": [count], "data_offsets": [8 * count, 16 * count]},
            "tokens": {"dtype": "U16", "shape": [size], "data_offsets": [16 * count, 16 * count + 2 * size]},
        }  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (out / shard_name(number)).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + ends.tobytes())
            file.truncate(8 + len(text) + 16 * count + 2 * size)
            nbytes = file.seek(0, os.SEEK_END)
        shards.append(ShardEntry(name=shard_name(number), documents=count, tokens=size, text_bytes=0, empty=0,
                                 size=nbytes, sha256=""))  # fmt: skip
    plan.model_copy(update={"shards": shards}).write(out / "manifest.json")
    return out


def rows(folder: Path, tokens: int) -> bool:
    path = sparse(folder, tokens)
    began = time.perf_counter()
    shards = ShardSet(path)
    print(f"{shards!r} in {len(shards.manifest.shards)} shards opened in {time.perf_counter() - began:.2f} s")
    held = True
    for pack in (1, 16, 32):
        order = RowOrder(Positions(shards, Frame((0,), (1,), shifted=True)), LENGTH, pack)
        found, clock, read, pieces = list[float](), list[float](), list[float](), 0
        for step in range(2000):
            began, at = time.thread_time(), time.perf_counter()
            cuts = [cut for row in range(ROWS) for cut in order.row(0, step * ROWS + row)]
            clock.append(time.perf_counter() - at)
            found.append(time.thread_time() - began)
            for cut in cuts:
                order.positions.read(cut)
            read.append(time.thread_time() - began)
            pieces += len(cuts)
        cut_off = _cut_documents(order)
        print(
            f"pack {pack}: {ROWS} rows of {LENGTH} found in {median(found) * 1e3:.3f} ms of processor time (median of "
            f"2,000 steps; 99% {sorted(found)[1980] * 1e3:.3f}; by the clock {median(clock) * 1e3:.3f}), found and "
            f"read in {median(read) * 1e3:.3f} ms; {pieces / ROWS / 2000:.2f} pieces a row; "
            f"{cut_off:.1%} of documents that fit a row are cut",
            flush=True,
        )
        held = held and median(found) * 1e3 < BOUNDS["milliseconds"]
    return held


def _cut_documents(order: RowOrder) -> float:
    """Of the documents no longer than a row, the share that the groups of 200 numbers cut."""
    whole = cut_off = 0
    for number in range(200):
        cuts, packed = order._pack(number * order.pack * order.length)
        pieces: dict[tuple[int, int], list[int]] = {}
        for row in packed:
            for item, start, stop in row:
                pieces.setdefault(cuts[item][:2], []).append(stop - start)
        for (shard, document), sizes in pieces.items():
            ends = order.positions.shards.arrays(shard).ends
            length = int(ends[document]) - (int(ends[document - 1]) if document else 0) + order.positions.frame.extra
            if length <= order.length:
                whole += 1
                cut_off += len(sizes) > 1 or sizes[0] < length
    return cut_off / whole


DRAW = """
import sys
from triptych import machine
from triptych.train import check_recipe, prepare
job = prepare(check_recipe({"model": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024},
    "data": {"shards": sys.argv[1]}, "objective": {"name": "causal"}, "run": {"rows": 8, "length": 1024, "steps": 1}}))
for step in range(int(sys.argv[2])):
    job.trainer.data.draw(0, step, 8)
print(machine.process_status("RssAnon"), machine.process_status("RssFile"))
"""


def memory(folder: Path, tokens: int) -> bool:
    sizes = {}
    for count in (50_000_000, tokens):
        command = [sys.executable, "-c", DRAW, str(sparse(folder, count)), "3000"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        anonymous, mapped = map(int, result.stdout.split())
        sizes[count] = anonymous
        print(f"{count / 1e6:,.0f}M tokens ({count * 2 / 1e9:,.1f} GB): anonymous {anonymous / 1e6:,.1f} MB, of files "
              f"{mapped / 1e6:,.1f} MB, after 3,000 steps of 8 rows of 1,024")  # fmt: skip
    return abs(sizes[tokens] - sizes[50_000_000]) < 20e6


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["tokenize", "rows", "memory"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=10_000_000_000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    cores = machine.cores()
    print(f"{cores.usable} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
          f"tokenizers {tokenizers.__version__}, triptych {triptych.__version__}", flush=True)  # fmt: skip
    if arguments.what == "tokenize":
        held = tokenizing(arguments.folder, arguments.megabytes, arguments.kills)
    else:
        held = {"rows": rows, "memory": memory}[arguments.what](arguments.folder, arguments.tokens)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
