"""Beam search (Sutskever et al. 2014; length penalty as in Wu et al. 2016 without coverage): deterministic, cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.errors import InputError
from triptych.generate.engine import State


@dataclass(frozen=True)
class Beam:
    """One hypothesis: its new tokens and the sum of their log-probabilities (nats)."""

    tokens: list[int]
    logprob: float

    def score(self, length_penalty: float) -> float:
        """Log-probability over `length ** length_penalty`."""
        return float(self.logprob / max(len(self.tokens), 1) ** length_penalty)


@torch.inference_mode()
def beam_search(
    state: State, *, beams: int, max_new_tokens: int, eos: Sequence[int], length_penalty: float = 1.0
) -> list[list[Beam]]:
    """For each row of `state`, up to `beams` hypotheses, best first.

    Ends for a row once it has `beams` finished ones and no live one can still beat the worst of them.
    """
    if beams < 1:
        raise InputError(f"beams={beams} must be at least 1")
    n = len(state.rows)
    prompts = [len(row) for row in state.rows]
    done: list[list[Beam]] = [[] for _ in range(n)]
    scores = [[0.0] for _ in range(n)]  # live beams of each row
    owner = list(range(n))  # live state row -> request
    for step in range(max_new_tokens):
        logp = torch.log_softmax(state.advance().float(), dim=-1)  # [live, V]
        vocab = logp.shape[-1]
        keep: list[int] = []
        tokens: list[int] = []
        next_scores: list[list[float]] = [[] for _ in range(n)]
        next_owner: list[int] = []
        for request in dict.fromkeys(owner):
            mine = [i for i, o in enumerate(owner) if o == request]
            total = logp[mine] + torch.tensor(scores[request], device=logp.device)[:, None]
            width = min(beams * (1 + len(eos)), total.numel())
            best, where = total.flatten().topk(width)
            live = 0
            for value, flat in zip(best.tolist(), where.tolist(), strict=True):
                parent, token = mine[flat // vocab], flat % vocab
                grown = [*state.rows[parent][prompts[request] :], token]
                if token in eos:
                    done[request].append(Beam(grown, value))
                elif live < beams:
                    live += 1
                    keep.append(parent)
                    tokens.append(token)
                    next_scores[request].append(value)
                    next_owner.append(request)
            done[request] = sorted(done[request], key=lambda b: -b.score(length_penalty))[:beams]
            if (
                len(done[request]) == beams
                and live
                and _settled(done[request], next_scores[request], step + 1, length_penalty)
            ):
                cut = len(keep) - live
                del keep[cut:], tokens[cut:], next_owner[cut:]
                next_scores[request] = []
        scores, owner = next_scores, next_owner
        if not keep:
            break
        state.keep(keep)
        for row, token in zip(state.rows, tokens, strict=True):
            row.append(token)
    for i, request in enumerate(owner):  # those the length limit cut short
        j = sum(1 for o in owner[:i] if o == request)
        done[request].append(Beam(state.rows[i][prompts[request] :], scores[request][j]))
    return [sorted(row, key=lambda b: -b.score(length_penalty))[:beams] for row in done]


def _settled(done: list[Beam], live: list[float], length: int, length_penalty: float) -> bool:
    """No live hypothesis, were it to end now, beats the worst finished one (exact when the penalty is 0)."""
    return done[-1].score(length_penalty) >= Beam([0] * length, max(live)).score(length_penalty)
