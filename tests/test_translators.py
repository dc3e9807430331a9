"""The five translators: their masks, their padding, how they write and how they are judged."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from triptych import nn
from triptych.attention import Rows
from triptych.train import Example, collate
from triptych_lectures.data.second_language import SecondLanguage
from triptych_lectures.labs import translators
from triptych_lectures.labs.translation import TranslationTask, quarters, word_by_word, write, wrong_tokens

TINY = translators.Training(width=24, heads=4, layers=1, rows=5, steps=3, rate=3e-3, seed=0)
BUILDERS = [
    translators.beside_encoder,
    translators.behind_prefix,
    translators.behind_prompt,
    translators.fixed_vector,
    translators.bahdanau,
]
Build = Callable[
    [Sequence[tuple[translators.Ids, translators.Ids]], int, translators.Training], translators.TrainedTranslator
]


@pytest.fixture(scope="module")
def task() -> TranslationTask:
    pairs = SecondLanguage(0, nouns=4, verbs=3, adjectives=2).sentences(0, 52, 2)
    return TranslationTask(pairs[:40], pairs[40:])


@pytest.mark.parametrize("build", BUILDERS)
def test_rows_of_other_lengths_beside_it_change_no_row(build: Build, task: TranslationTask) -> None:
    model = build(task.rows, len(task.vocabulary), TINY).model
    together = write(model, task.sources, 6)
    assert together == [write(model, [source], 6)[0] for source in task.sources]
    assert all(len(row) <= 6 for row in together)


@pytest.mark.parametrize("build", BUILDERS)
def test_training_is_a_function_of_the_seed(build: Build, task: TranslationTask) -> None:
    runs = [build(task.rows, len(task.vocabulary), TINY._replace(seed=seed, steps=12)) for seed in (1, 1, 2)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses != runs[2].losses
    assert len(runs[0].losses) == 12
    assert runs[0].losses[-1][1] < 0.95 * runs[0].losses[0][1]


def test_all_models_train_on_the_same_sentences_in_the_same_order(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets of each step are the same, however a model reads the source."""
    seen: dict[int, list[list[int]]] = {}
    in_epochs = translators.EpochRows.draw

    def draw(self: translators.EpochRows, seed: int, step: int, rows: int) -> list[Example]:
        examples = in_epochs(self, seed, step, rows)
        seen.setdefault(BUILDERS.index(build), []).append([int(i) for e in examples for i in e.targets[e.trained]])
        return examples

    monkeypatch.setattr(translators.EpochRows, "draw", draw)
    for build in BUILDERS:
        build(task.rows, len(task.vocabulary), TINY)
    assert len({str(steps) for steps in seen.values()}) == 1
    assert len(seen) == len(BUILDERS)


def hidden(model: translators.BehindPrompt, row: translators.Ids, rows: Rows) -> torch.Tensor:
    with torch.no_grad():
        return model.module(nn.Batch(inputs=torch.tensor(row), rows=rows))


@pytest.mark.parametrize("prefix", [True, False])
def test_who_sees_whom_behind_a_prefix_and_a_plain_prompt(prefix: bool, task: TranslationTask) -> None:
    build = translators.behind_prefix if prefix else translators.behind_prompt
    model = build(task.rows, len(task.vocabulary), TINY).model
    assert isinstance(model, translators.BehindPrompt)
    source, target = [5, 6, 7, 0], [1, 9, 10, 11]
    rows = translators.with_prefixes([8], [5]) if prefix else Rows((8,))
    whole = hidden(model, [*source, *target], rows)
    other_source = hidden(model, [5, 6, 8, 0, *target], rows)
    other_target = hidden(model, [*source, 1, 9, 12, 11], rows)
    assert torch.equal(whole[0], other_source[0]) is not prefix  # a word of the source before the one that changed
    assert not torch.equal(whole[4], other_source[4])
    torch.testing.assert_close(whole[:6], other_target[:6])  # what stands before a word of the target does not see it
    assert not torch.allclose(whole[7], other_target[7])


def test_the_loss_of_a_prompted_row_is_that_of_its_target_alone(task: TranslationTask) -> None:
    rows = [translators._prompted(pair, translators.PrefixExample) for pair in task.rows[:3]]
    batch = collate(rows)
    assert batch.targets.tolist() == [token for _, target in task.rows[:3] for token in target]
    first = batch.rows.split(batch.rows.documents)[0].tolist()
    inside = len(task.rows[0][0]) + 1  # the source, its end and the start of the target
    assert first == [0] * inside + list(range(inside, len(first)))


def test_padding_reaches_no_state_of_a_recurrent_model() -> None:
    for attention in (False, True):
        torch.manual_seed(0)
        module = translators.RecurrentTranslator(20, 16, attention=attention).double()
        sources = [torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([9, 3])]
        written = torch.tensor([[1, 4, 5], [1, 6, 7]])
        both = module(sources, written)
        torch.testing.assert_close(both[1:], module(sources[1:], written[1:]))
        both[1].sum().backward()
        assert not module.embed.weight.grad[8].any()


def test_the_fixed_vector_is_all_that_the_decoder_knows_of_the_source() -> None:
    """Without the last states, the fixed vector's output does not depend on the source, and that of attention does."""
    for attention in (False, True):
        torch.manual_seed(0)
        module = translators.RecurrentTranslator(20, 16, attention=attention)
        module.encoder.register_forward_hook(lambda _, __, out: (out[0], torch.zeros_like(out[1])))
        written = torch.tensor([[1, 4, 5]])
        one, other = (module([torch.tensor(source)], written) for source in ([3, 4, 5], [9, 8, 7]))
        assert torch.equal(one, other) is not attention


def test_quarters_go_from_the_shortest_to_the_longest() -> None:
    groups = quarters([[0] * n for n in (5, 1, 4, 2, 8, 7, 3, 6)])
    assert groups == [[1, 3], [6, 2], [0, 7], [5, 4]]


def test_wrong_tokens_by_hand() -> None:
    assert wrong_tokens([[4, 5, 6]], [[4, 5, 6]]) == 0.0
    assert wrong_tokens([[4, 6], []], [[4, 5, 6], [7]]) == 0.5  # one left out of three, one of one
    assert wrong_tokens([[7, 8, 9]], [[7]]) == 2.0


def test_word_by_word_knows_each_word_and_no_order(task: TranslationTask) -> None:
    written = word_by_word(task)
    kept = [set(ours) & set(right) for ours, right in zip(written, task.targets, strict=True)]
    assert all(kept)
    assert wrong_tokens(written, task.targets) > 0.5


def test_the_step_from_which_a_loss_is_reached() -> None:
    losses = list(np.linspace(3.0, 1.0, 41))
    model = translators.fixed_vector([([2, 0], [3, 0])], 4, TINY).model
    trained = translators.TrainedTranslator(model, list(enumerate(losses)), 1.0)
    step = trained.reached(2.0)
    assert np.mean(losses[step - 10 : step]) <= 2.0 < np.mean(losses[step - 11 : step - 1])
    assert trained.reached(0.5) is None
    assert trained.reached(trained.last) == 41


def test_chains_grow_with_the_sentence_where_there_is_recurrence(task: TranslationTask) -> None:
    gru = translators.fixed_vector(task.rows, len(task.vocabulary), TINY).model
    transformer = translators.beside_encoder(task.rows, len(task.vocabulary), TINY).model
    assert gru.sequential_steps(30, 40) == 70
    assert transformer.sequential_steps(30, 40) == transformer.sequential_steps(3, 4) == 2 + 3
