"""`triptych data`: texts tokenized into shards on the disk, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from triptych.errors import counted
from . import options, screen
from .records import cluster_of

if TYPE_CHECKING:
    from triptych.shards import ShardContents, ShardSet, TokenizingSummary

SHOWN_TOKENS = 120
_COLORS = ("black on cyan", "black on yellow", "black on green", "black on magenta")


def tokenize(
    inputs: list[str],
    *,
    out: options.NamedPath,
    tokenizer: str,
    layout: Literal["decoder", "encoder", "encoder-decoder"] = "decoder",
    field: str = "text",
    separator: str | None = None,
    split: str = "train",
    subset: str | None = None,
    processes: options.Positive | None = None,
    shard_mb: options.Positive = 64,
    offline: bool = False,
    ray: options.Ray = None,
    actors: options.Actors = None,
    as_json: options.Json = False,
) -> None:
    """Tokenize texts into shards for recipes (data.shards); run again, it goes on.

    INPUT...: Text files, folders of them, .jsonl, .csv, .tsv, .parquet, or hub:org/name.
    --out DIR: Directory of the shards.
    --tokenizer MODEL: Model or directory with the tokenizer; or byte, bpe:8192 or words:8192 for a new one.
    --layout NAME: Of a new tokenizer: the layout of the model that it is for.
    --field NAME: Field with the text, of files of records.
    --separator TEXT: Text between two documents of a text file, such as "<|endoftext|>"; by default a file is one.
    --split NAME: Split of a data set of the hub.
    --subset NAME: Subset of a data set of the hub.
    --processes N: Processes; by default as many as there are cores.
    --shard-mb N: Megabytes of text that become a shard.
    --offline: With hub:, use only files of a model that were downloaded before.
    """
    from triptych.shards.tokenizer_choice import choose_tokenizer
    from triptych.shards.tokenizing import tokenize as run

    make = None
    if (cluster := cluster_of(ray, actors)) is not None:
        from triptych.batches.elsewhere import make_shards_on_cluster

        make = make_shards_on_cluster(cluster)
    with screen.counting() as bar:
        task = bar.add_task("reading the tokenizer", total=None)
        chosen = choose_tokenizer(
            tokenizer, inputs, out, layout=layout, field=field, separator=separator, offline=offline
        )
        bar.update(task, description="megabytes")
        try:
            summary = run(
                inputs, out, chosen, tokenizer_from=tokenizer, field=field, separator=separator, split=split,
                subset=subset, processes=processes, shard_bytes=shard_mb << 20, make=make,
                progress=lambda done, total: bar.update(
                    task, completed=done // 10**6, total=None if total is None else total // 10**6
                ),
            )  # fmt: skip
        except KeyboardInterrupt:
            screen.note(f"{out} has the shards that are done; the same command goes on from there")
            raise
    _made(summary, out, as_json=as_json)


def _made(summary: TokenizingSummary, out: Path, *, as_json: bool) -> None:
    """Say what has been tokenized."""
    from triptych.shards.tokenizing import in_words

    for line in summary.notes:
        screen.note(line)
    if as_json:
        made = summary.manifest
        screen.result({
            "out": str(out), "documents": made.documents, "tokens": made.tokens, "text_bytes": made.text_bytes,
            "shards": len(made.shards), "resumed": summary.resumed, "tokenizer": made.tokenizer,
            "empty": sum(one.empty for one in made.shards),
        })  # fmt: skip
        return
    if summary.resumed:
        screen.note(f"made before: {counted(summary.resumed, 'shard')}")
    screen.console().print(f"{out}: {in_words(summary)}; in a recipe: data.shards = {str(out)!r}", soft_wrap=True)


def inspect(
    directory: Path,
    *,
    document: options.Natural = 0,
    check: bool = False,
    as_json: options.Json = False,
) -> None:
    """Show what is in a directory of shards: documents, lengths, duplicates, and the tokens of one.

    DIR: Directory of the shards.
    --document N: The document whose tokens are shown, counted from 0.
    --check: Read every byte and compare the checksums; exit code 1 where a shard is damaged.
    """
    from triptych.errors import TextError
    from triptych.shards import ShardSet, contents

    shards = ShardSet(directory)
    ids = shards.document(document).tolist()
    if check:
        with screen.waiting("reading all shards"):
            damaged = list(shards.check())
        for line in damaged[:-1]:
            screen.note(line)
        if damaged:
            raise TextError(damaged[-1])
    with screen.waiting("reading the documents"):
        found = contents(shards)
    tokens = shards.tokenizer().token_texts(ids[:SHOWN_TOKENS])
    if as_json:
        screen.result(_as_json(shards, found, document, len(ids), tokens) | ({"damaged": 0} if check else {}))
        return
    _show(shards, found, checked=check)
    _show_tokens(tokens, f"document {document:,}: {counted(len(ids), 'token')}", cut=len(ids) > len(tokens))


def _as_json(
    shards: ShardSet, found: ShardContents, document: int, length: int, tokens: list[str]
) -> dict[str, object]:
    made = shards.manifest
    return {
        "documents": found.documents, "tokens": found.tokens, "text_bytes": made.text_bytes, "shards": len(made.shards),
        "tokenizer": made.tokenizer, "vocab_size": made.vocab_size, "shortest": found.shortest, "mean": found.mean,
        "longest": found.longest, "lengths": [{"from": 2**k, "documents": n} for k, n in found.lengths.items()],
        "duplicates": found.duplicates, "repeated": [{"document": n, "times": times} for n, times in found.repeated],
        "document": {"number": document, "length": length, "tokens": tokens},
    }  # fmt: skip


def _show(shards: ShardSet, found: ShardContents, *, checked: bool) -> None:
    made = shards.manifest
    share = found.duplicates / found.documents
    rows = [
        ("documents", f"{found.documents:,}; {sum(one.empty for one in made.shards):,} without a token left out"),
        ("tokens", f"{found.tokens:,}; {made.text_bytes / found.tokens:.2f} bytes of text each"),
        ("lengths", f"{found.shortest:,} to {found.longest:,} tokens, {found.mean:,.1f} on average"),
        ("duplicates", f"{found.duplicates:,} with the tokens of an earlier document ({share:.1%})"),
        ("tokenizer", f"{made.tokenizer_from or 'not named'}, {made.vocab_size:,} tokens, hash {made.tokenizer[:12]}"),
        ("shards", f"{len(made.shards):,}" + (", all bytes as they were written" if checked else "")),
    ]
    screen.show(screen.facts(rows), str(shards.path))
    lengths = [(f"{2**k:,}", f"{n:,}", "█" * -(-40 * n // found.documents)) for k, n in found.lengths.items()]
    screen.show_rows(("tokens from", "documents", ""), lengths, right=("tokens from", "documents"))
    for number, times in found.repeated:
        screen.note(f"document {number:,} comes {times:,} times")


def _show_tokens(tokens: list[str], title: str, *, cut: bool) -> None:
    """The tokens end to end, neighbours in different colours; with | between them where there are no colours."""
    from rich.text import Text

    out = screen.console()
    styled = [Text(screen.plain(token), _COLORS[i % len(_COLORS)]) for i, token in enumerate(tokens)]
    line = Text("" if out.is_terminal else "|").join(styled)
    if cut:
        line.append(" ...")
    out.print(title, style="bold")
    out.print(line, soft_wrap=True)
