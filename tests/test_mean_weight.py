"""One definition of a head's score: that of the roles, and that of links and labs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triptych.probe.role_labels import View, label
from triptych.probe.role_scores import at_offset, mean_weight
from triptych.probe.role_texts import HeadSample

HALF = 12


def view() -> View:
    """A row that is repeated, and one in which nothing is, as a decoder reads them."""
    repeated, control = [*range(HALF), *range(HALF)], list(range(2 * HALF))
    samples = [HeadSample(repeated, None, "repeated", half=HALF), HeadSample(control, None, "control")]
    rows = [sample.ids for sample in samples]
    visible = [np.tril(np.ones((len(row), len(row)), bool)) for row in rows]
    return View("decoder", samples, rows, rows, visible)


@pytest.mark.parametrize(("role", "offset", "sample"), [("previous", -1, 1), ("induction", 1 - HALF, 0)])
def test_the_score_of_a_role_is_the_mean_weight_on_its_keys(role: str, offset: int, sample: int) -> None:
    one = view()
    labels = label(role, one, {}, np.random.default_rng(0))
    assert labels is not None
    patterns = [torch.rand(3, 2 * HALF, 2 * HALF).tril().softmax(-1) for _ in one.samples]
    flat = torch.cat([pattern.flatten(1) for pattern in patterns], 1).T.contiguous()
    scores = labels.scores(flat)[0, 0]
    reads = torch.zeros(2 * HALF, 2 * HALF, dtype=torch.bool)
    for query in labels.queries[sample]:
        reads |= at_offset(range(query, query + 1), offset, 2 * HALF)
    own = mean_weight(patterns[sample], reads)
    torch.testing.assert_close(scores, own)
    assert not torch.allclose(scores, mean_weight(patterns[sample], reads.roll(1, 1)))  # the keys beside


def test_several_keys_of_a_query_add_up_and_queries_without_keys_do_not_count() -> None:
    pattern = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.3, 0.2]])
    reads = torch.tensor([[False, False, False], [True, True, False], [False, True, True]])
    torch.testing.assert_close(mean_weight(pattern, reads), torch.tensor((1.0 + 0.5) / 2))
    torch.testing.assert_close(mean_weight(torch.stack([pattern, 2 * pattern]), reads), torch.tensor([0.75, 1.5]))
