"""Token ids of texts larger than memory: memory-mapped shards on the disk, made once and read row by row.

    tokenizing  texts -> a directory of shards, by several processes, that goes on after a kill
    inputs      files of texts, cut into parts of which each becomes a shard; worker is the program that makes one
    shard_file  one shard: a safetensors file of tokens, ends and hashes of documents
    manifest    what is in a directory: the tokenizer, the inputs, size and checksum of each shard
    shard_set   a finished directory, opened: its documents and tokens by number, without reading what precedes
    order       which rows a step has, as a function of (seed, step) without a table; packing fills rows by best fit
    inspection  documents, lengths and duplicates of a directory, for people

Needs no torch.
"""

from triptych.migration_hints import answer_for
from .inspection import Contents, contents
from .manifest import Manifest
from .order import Mixture, RowOrder
from .shard_set import ShardSet
from .tokenizing import Summary, tokenize

__all__ = ["Contents", "Manifest", "Mixture", "RowOrder", "ShardSet", "Summary", "contents", "tokenize"]

answer_for(__name__)
