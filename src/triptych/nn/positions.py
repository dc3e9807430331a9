"""Position parts as modules: the parameters live here, the arithmetic in `attention/rope.py` and
`attention/position_biases.py`.

A position encoding can act in three places: on the embedding (`embed`), on queries and keys (a rotation), and on the
scores (a bias).  A part implements those it needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import ContentBias, Rows, ScoreBias
from triptych.attention.position_biases import alibi_bias, disentangled_bias, reached_row, reached_table, t5_bias
from triptych.attention.rope import rotation, sinusoidal
from triptych.errors import InputError
from triptych.spec import positions as spec
from .attention import Attention
from .part import Module, S, VectorMap

TABLE = 1 << 14  # positions up to which a table of rotation angles is kept


@dataclass(frozen=True, eq=False)
class Positioned:
    """The values that a position part gives the layers of one kind in one forward.

    rotation   what turns queries and keys, as data.
    bias       what is added to the scores, of positions alone; or what `content` is made from.
    content    of an attention layer, a bias that also reads its queries and keys.
    """

    rotation: ops.Rotation | None = None
    bias: ScoreBias | None = None
    content: Callable[[Attention], ContentBias] | None = None


UNPOSITIONED = Positioned()


class Position(Module[S]):
    """No position at all; the base of the parts below."""

    def embed(self, positions: Tensor) -> Tensor:
        """[N] absolute positions -> [N, D] to add to the token embedding.  Raises NotImplementedError for a part that
        acts inside attention."""
        raise NotImplementedError(f"{type(self).__name__} acts inside attention, not on the embedding")

    def prepare(self, rows: Rows, x: Tensor, random: ops.RowNoise | None = None) -> Positioned:
        """The values that attention layers need of these rows; `x` [N, D] says on which device and how exactly."""
        return UNPOSITIONED


class Learned(Position[spec.LearnedSpec], of=spec.LearnedSpec):
    weight: Tensor

    def embed(self, positions: Tensor) -> Tensor:
        return ops.embedding(positions + self.spec.offset, self.weight)


class Sinusoidal(Position[spec.SinusoidalSpec], of=spec.SinusoidalSpec):
    def embed(self, positions: Tensor) -> Tensor:
        return sinusoidal(positions, self.spec)


class Rope(Position[spec.RopeSpec], of=spec.RopeSpec):
    """The angles of the first positions are kept, by device and dtype, so that a step only looks them up."""

    def __init__(self, part: spec.RopeSpec) -> None:
        super().__init__(part)
        self.tables: dict[tuple[spec.RopeSpec, torch.device, torch.dtype], ops.Rotation] = {}

    def prepare(self, rows: Rows, x: Tensor, random: ops.RowNoise | None = None) -> Positioned:
        end, exact = rows.end, torch.promote_types(x.dtype, torch.float32)
        looked_up = end <= TABLE and not (rows.symbolic or torch.compiler.is_compiling())
        if isinstance(self.spec.scaling, spec.LongRope) or not looked_up:
            return Positioned(self._computed(rows, x.device, exact))
        table = self.tables.get((self.spec, x.device, exact))
        if table is None or table.cos.shape[0] < end:
            table = self._grow(end, x.device, exact)
        here = slice(rows.past[0], end) if len(rows.lengths) == 1 else rows.positions(x.device)
        return Positioned(ops.Rotation(table.cos[here], table.sin[here], table.pairing))

    def _grow(self, end: int, device: torch.device, exact: torch.dtype) -> ops.Rotation:
        """The table, at least `end` positions long; outside inference mode, so that training may use it."""
        with torch.inference_mode(False), torch.no_grad():
            table = self._computed(Rows((1 << max(end - 1, 255).bit_length(),)), device, exact)
        self.tables[self.spec, device, exact] = table
        return table

    def _computed(self, rows: Rows, device: torch.device, exact: torch.dtype) -> ops.Rotation:
        length = None
        if isinstance(self.spec.scaling, spec.LongRope):  # its factors depend on how long the row has become
            length = rows.ends_of_tokens(device)
        return rotation(self.spec, rows.positions(device), length, exact)


class Alibi(Position[spec.AlibiSpec], of=spec.AlibiSpec):
    def prepare(self, rows: Rows, x: Tensor, random: ops.RowNoise | None = None) -> Positioned:
        return Positioned(bias=partial(alibi_bias, self.spec.heads))


class T5Buckets(Position[spec.T5BucketsSpec], of=spec.T5BucketsSpec):
    weight: Tensor

    def prepare(self, rows: Rows, x: Tensor, random: ops.RowNoise | None = None) -> Positioned:
        far, both = self.spec.max_distance, self.spec.bidirectional
        return Positioned(bias=partial(t5_bias, self.weight, max_distance=far, bidirectional=both))


class Disentangled(Position[spec.DisentangledSpec], of=spec.DisentangledSpec):
    """The bias of positions holds rows of the table; each layer maps the table and meets its queries and keys."""

    weight: Tensor
    norm: VectorMap | None

    def prepare(self, rows: Rows, x: Tensor, random: ops.RowNoise | None = None) -> Positioned:
        table, row = self.reached(rows)

        def content(layer: Attention) -> ContentBias:
            vectors = self.vectors(self._with_dropout(table, rows, random), layer)
            return lambda q, k, places: disentangled_bias(q, k, places, **vectors)

        return Positioned(bias=row, content=content)

    def _reached(self, table: Tensor, rows: Rows) -> Tensor:
        """The rows of a table that these rows can reach."""
        longest, positions = max(rows.ends, default=1) - 1, rows.positions(self.device)
        return reached_table(table, positions, longest, self.spec.span, self.spec.max_distance)

    def reached(self, rows: Rows) -> tuple[Tensor, ScoreBias]:
        """The part of the table [R, D] that these rows can reach, and where in it a query finds each key: [T, S]."""
        longest, span, limit = max(rows.ends, default=1) - 1, self.spec.span, self.spec.max_distance
        table = self._reached(self.weight, rows)
        table = table if self.norm is None else self.norm(table)
        return table, lambda q_pos, k_pos: reached_row(q_pos, k_pos, longest, span, limit)

    def _with_dropout(self, table: Tensor, rows: Rows, random: ops.RowNoise | None) -> Tensor:
        """What is dropped is drawn for the whole table, so that it does not depend on the part that is reached."""
        if random is None or not (self.training and self.spec.dropout):
            return ops.dropout(table, self.spec.dropout, self.training)
        kept = random.of_all().kept(self.weight, self.spec.dropout).to(table.dtype)
        return table * self._reached(kept, rows)

    def vectors(self, table: Tensor, layer: Attention) -> dict[str, Tensor]:
        """What a layer maps a table [R, D] to: `pos_k` [R, G, K] for queries to meet and `pos_q` [R, H, K] for keys,
        by its scale already."""
        part = layer.spec
        scale = part.head_width**-0.5 if part.scale is None else part.scale
        maps = {"c2p": ("pos_k", layer.pos_k or layer.k), "p2c": ("pos_q", layer.pos_q or layer.q)}
        chosen = [maps[term] for term in self.spec.terms]
        return {name: scale * mapped(table).view(table.shape[0], -1, part.head_width) for name, mapped in chosen}


def refuse_length(rows: Rows, limit: int, what: str) -> None:
    """Refuse the first row that ends past `limit`, the positions the model has.  Raises InputError naming the row."""
    row = next(i for i, end in enumerate(rows.ends) if end > limit)
    raise InputError(f"{what}: row {row} needs {rows.ends[row]} positions and the model has {limit}; shorten the row")
