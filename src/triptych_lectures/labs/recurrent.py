"""A recurrent encoder-decoder, with one fixed vector (Sutskever et al. 2014; Cho et al. 2014) or with attention over
all states of the source (Bahdanau et al. 2015).  Both are the baselines that transformers are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from triptych.attention import additive
from triptych.spec import keys


class RecurrentTranslator(nn.Module):
    """A bidirectional GRU reads the source, another GRU writes the target, each with states of width D.

    The last states of the source start the decoder.  Without attention they are also a part of each of its inputs;
    with attention this part is the mean of the source's states, weighted by an additive score against the decoder's
    state before.
    """

    def __init__(self, vocab: int, width: int, *, attention: bool) -> None:
        super().__init__()
        self.width, self.attention = width, attention
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(width, width)
        self.decoder = nn.GRUCell(2 * width, width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.empty(width).normal_(0, width**-0.5))
        self.head = nn.Linear(2 * width, vocab)
        if not attention:
            del self.query, self.key, self.score

    def forward(self, sources: Sequence[Tensor], written: Tensor) -> Tensor:
        """Rows of source ids, and `[B, T]` decoder inputs -> logits `[B, T, V]` of the token after each."""
        lengths = torch.tensor([len(source) for source in sources])
        embedded = self.embed(pad_sequence(list(sources), batch_first=True))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = pad_packed_sequence(states, batch_first=True)
        fixed = torch.cat([last[0], last[1]], -1)
        state, outputs = self.first_state(fixed).tanh(), []
        for token in self.embed(written).unbind(1):
            context = self._read(state, states, lengths) if self.attention else fixed
            state = self.decoder(torch.cat([token, context], -1), state)
            outputs.append(torch.cat([state, context], -1))
        logits: Tensor = self.head(torch.stack(outputs, 1))
        return logits

    def _read(self, state: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """`[B, D]`: the mean of the source's states `[B, S, D]` that one state `[B, D]` asks for."""
        read = additive(
            state[:, None, None], states[:, None], states[:, None],
            w_q=self.query.weight, w_k=self.key.weight, w_v=self.score, mask=keys(lengths.tolist()),
        )  # fmt: skip
        return read[:, 0, 0]
