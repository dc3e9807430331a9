"""Every family against transformers: whole pass, cached, ragged batches, and a directory written back.

Log-probabilities (or, without a language head, the outputs themselves) agree to 1e-4 in fp32.
"""

import json
from pathlib import Path

import pytest
import torch

import references
import tiny
import triptych
from parity import ROWS, WITHIN, largest, ours, rows_of, targets_of, theirs
from triptych import nn
from triptych.errors import ConfigError
from triptych.spec import LMHeadSpec


@pytest.mark.parametrize("name", references.VARIANTS)
def test_a_ragged_batch_is_the_reference(name: str) -> None:
    assert largest(name, ours(name)) <= WITHIN


@pytest.mark.parametrize("name", references.VARIANTS)
def test_cached_generation_is_the_reference(name: str) -> None:
    """Prefill in chunks of three, then one token at a time, each step's logits against a whole uncached pass."""
    model = ours(name)
    if not isinstance(model.spec.head, LMHeadSpec):
        pytest.skip("no head for the next token")
    targets = targets_of(model)
    rows = [row[:5] for row in (targets or ROWS)]
    sources = rows_of(model)
    engine = tiny.engine(model.module, rows, sources if targets else None, chunk=3)
    for step in range(6):
        logits = engine.logits()
        for i, live in enumerate(engine.rows):
            expected = theirs(name, sources[i], live.ids) if targets else theirs(name, live.ids)
            gap = (logits[i].log_softmax(-1) - expected[-1].log_softmax(-1)).abs().max()
            assert gap <= WITHIN, (step, i)
            live.ids.append(int(logits[i].argmax()))


@pytest.mark.parametrize("name", ["llama-longrope", "phi3-long"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_rows_that_outgrow_the_first_factors_of_longrope(name: str, chunk: int | None) -> None:
    """All of such a row is turned by the second ones, so what was cached under the first is of no use."""
    rows = [row[:12] for row in (ROWS[0], ROWS[0][::-1], ROWS[2])]
    rows[1] += [9, 8]
    engine, outgrown = tiny.engine(ours(name).module, rows, chunk=chunk), 13
    for step in range(5):
        logits = engine.logits()
        for i, live in enumerate(engine.rows):
            expected = theirs(name, live.ids)[-1]
            assert (logits[i].log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= WITHIN, (step, i)
            live.ids.append(int(logits[i].argmax()))
    lengths = [len(live.ids) for live in engine.rows]
    assert [n - 5 > outgrown for n in lengths] == [False, True, False]  # before, from the start, never
    assert [n > outgrown for n in lengths] == [True, True, False]


@pytest.mark.parametrize("name", references.VARIANTS)
def test_saved_by_us_opens_there_and_here(name: str, tmp_path: Path) -> None:
    model = ours(name)
    model.save(tmp_path / "out")
    back = triptych.load(tmp_path / "out")
    assert back.spec == model.spec
    for key, value in model.module.state_dict().items():
        assert torch.equal(value, back.module.state_dict()[key]), key
    reference = references.saved(name)[0]
    again, info = type(reference).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert set(info["missing_keys"]) <= set(model.report.ignored)
    assert not info["unexpected_keys"]
    expected = reference.state_dict()
    found = again.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected if key not in model.report.ignored)


def test_greedy_generation_is_the_reference() -> None:
    for name in ("llama", "gpt2", "t5"):
        model, reference = ours(name), references.saved(name)[0]
        for row in ROWS:
            mask = torch.ones(1, len(row), dtype=torch.long)  # their T5 cache takes both stacks to be equally deep
            how = {"max_new_tokens": 12, "do_sample": False, "use_cache": name != "t5", "attention_mask": mask}
            expected = reference.generate(torch.tensor([row]), **how)[0].tolist()
            start = 1 if name == "t5" else len(row)
            assert model.generate([row], max_new_tokens=12)[0].ids == expected[start:]


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_checkpoint_says_of_its_targets_holds(beside: bool, tmp_path: Path) -> None:
    """The first token of mBART, those Marian never writes: beside the weights, or in an old config."""
    reference, row = references.saved("mbart")[0], ROWS[0]
    free = {i: ours("mbart").generate([row], max_new_tokens=9, decoder_prefix=[i])[0].ids for i in range(3, 41)}
    first, said = max(free.items(), key=lambda pair: len(pair[1]))
    banned = said[:2]
    assert len(said) > 2
    told = {
        "forced_bos_token_id": first,
        "bad_words_ids": [*([i] for i in banned), [35, 7]],
        "decoder_start_token_id": 0,
    }
    reference.save_pretrained(tmp_path)
    file = tmp_path / ("generation_config.json" if beside else "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    if not beside:
        (tmp_path / "generation_config.json").unlink()
    model = triptych.load(tmp_path)
    how = told | {"bad_words_ids": told["bad_words_ids"][:-1], "use_cache": False, "forced_eos_token_id": None}
    how |= {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones(1, len(row)).long()}
    expected = reference.generate(torch.tensor([row]), **how)[0].tolist()
    assert expected[:2] == [0, first]
    assert model.generate([row], max_new_tokens=9)[0].ids == expected[2:]
    assert not set(banned) & set(model.generate([row], max_new_tokens=9, beams=3)[0].ids)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bad_words_ids": "none"}))
    with pytest.raises(ConfigError, match="bad_words_ids must be token ids"):
        triptych.load(tmp_path).generate([row])


def test_token_types_reach_bert() -> None:
    model, reference = ours("bert"), references.saved("bert")[0]
    ids, types = torch.tensor(ROWS[0]), torch.tensor([i % 3 for i in range(len(ROWS[0]))])
    ids_flat, where = nn.flat(ROWS[:1], torch.device("cpu"))
    with torch.no_grad():
        expected = reference(input_ids=ids[None], token_type_ids=types[None]).logits[0]
        found = model.module.logits(nn.Batch(inputs=ids_flat, rows=where, token_types=types))
        assert (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= WITHIN
        assert (model.module.logits(nn.Batch(inputs=ids_flat, rows=where)) - found).abs().max() > 10 * WITHIN
