"""One forward: a row in a batch is the row alone, cached is uncached, chunked is whole, the past never moves.

Over position parts x masks x layouts, in fp32 and with float64 where exactness is the claim.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from triptych import nn, spec
from triptych.attention import Rows, row_plan
from triptych.count import count
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.probe import sites
from triptych.probe.prompts import prompt_of
from triptych.spec import causal, keys, window

CPU = torch.device("cpu")
VARIANTS = [(p, m) for p in tiny.POSITIONS for m in tiny.MASKS]
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [1, 8, 2, 8, 1, 8, 2]]
rows_of = st.lists(st.lists(st.integers(0, tiny.V - 1), min_size=1, max_size=13), min_size=1, max_size=4)


def logits(module: nn.Transformer, rows: list[list[int]], source: list[list[int]] | None = None) -> list[torch.Tensor]:
    ids, where = nn.flat(rows, CPU)
    read = None if source is None else nn.flat(source, CPU)
    with torch.inference_mode():
        return where.split(module.logits(nn.Batch(inputs=ids, rows=where, source=read)))


def same(a: list[torch.Tensor], b: list[torch.Tensor], within: float = 1e-4) -> bool:
    return all((x.log_softmax(-1) - y.log_softmax(-1)).abs().max() <= within for x, y in zip(a, b, strict=True))


def cached(
    module: nn.Transformer, rows: list[list[int]], source: list[list[int]] | None, chunk: int
) -> list[torch.Tensor]:
    """Every position's logits, `chunk` tokens of each row at a time through a cache."""
    engine, sources = Engine(module, chunk=chunk), [None] * len(rows) if source is None else source
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    engine.add(
        *(
            Request(prompt=row, source=read, max_new_tokens=1, number=i, all_logits=True)
            for i, (row, read) in enumerate(zip(rows, sources, strict=True))
        )
    )
    while engine.rows:
        for output in engine.step():
            assert output.logits is not None
            found[output.row.request.number].append(output.logits)
    return [torch.cat(pieces) for pieces in found]


@pytest.mark.parametrize(("position", "mask"), VARIANTS)
def test_a_row_in_a_batch_is_the_row_alone(position: str, mask: str) -> None:
    module = tiny.decoder(position, mask)
    together, alone = logits(module, ROWS), [logits(module, [row])[0] for row in ROWS]
    assert same(together, alone)
    assert not same(together, [alone[0], alone[1].flip(0), alone[2]])  # the measure can tell rows apart


@pytest.mark.parametrize(("position", "mask"), VARIANTS)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_cached_in_chunks_is_one_uncached_pass(position: str, mask: str, chunk: int) -> None:
    module = tiny.decoder(position, mask)
    assert same(cached(module, ROWS, None, chunk), logits(module, ROWS))


@pytest.mark.parametrize("mechanism", ["additive", "linear"])
def test_other_mechanisms_keep_every_promise(mechanism: str) -> None:
    module = tiny.decoder(mechanism=mechanism)
    whole = logits(module, ROWS)
    assert same(whole, [logits(module, [row])[0] for row in ROWS])
    for chunk in (1, 3):
        assert same(cached(module, ROWS, None, chunk), whole)
    after = logits(module, [[*ROWS[0][:6], 40, 39], ROWS[1]])[0]
    assert torch.allclose(after[:6], whole[0][:6], atol=1e-6)
    assert not same(whole, logits(tiny.decoder(), ROWS))


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_cached_beside_an_encoder(chunk: int) -> None:
    module, sources = tiny.encoder_decoder(), [[5, 6, 7], [8], [9, 10, 11, 12]]
    assert same(cached(module, ROWS, sources, chunk), logits(module, ROWS, sources))


@settings(max_examples=25)
@given(rows_of, st.integers(1, 5), st.sampled_from(VARIANTS))
def test_any_rows_any_chunk(rows: list[list[int]], chunk: int, variant: tuple[str, str]) -> None:
    module = tiny.decoder(*variant)
    together = logits(module, rows)
    assert same(together, [logits(module, [row])[0] for row in rows])
    assert same(cached(module, rows, None, chunk), together)


@pytest.mark.parametrize(("position", "mask"), VARIANTS)
def test_a_changed_future_leaves_the_past_bit_identical(position: str, mask: str) -> None:
    module = tiny.decoder(position, mask)
    row = ROWS[0]
    before = logits(module, [row, ROWS[1]])[0]
    after = logits(module, [[*row[:6], 40, 39, 38, 37, 36], ROWS[1]])[0]
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:], after[6:])


def test_an_encoder_sees_the_future() -> None:
    module = tiny.encoder()
    assert not torch.equal(logits(module, [[1, 2, 3]])[0][0], logits(module, [[1, 2, 4]])[0][0])


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "t5", "alibi"])
def test_encoder_rows_do_not_meet(position: str) -> None:
    module = tiny.encoder(position)
    assert same(logits(module, ROWS), [logits(module, [row])[0] for row in ROWS])


def test_sources_of_a_batch_do_not_meet() -> None:
    module, sources = tiny.encoder_decoder(), [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
    together = logits(module, ROWS, sources)
    assert same(together, [logits(module, [r], [s])[0] for r, s in zip(ROWS, sources, strict=True)])
    assert not same(together, logits(module, ROWS, [[5, 6, 8], [8], [9, 10, 11, 12, 13, 14]]))


def test_dropped_and_repeated_rows_go_on_as_they_were() -> None:
    module = tiny.decoder("rope", "window")
    engine = tiny.engine(module, ROWS)
    engine.logits()
    rows = engine.reorder([engine.rows[2], engine.rows[0], engine.rows[0]])
    for row, token in zip(rows, [11, 12, 13], strict=True):
        row.ids.append(token)
    found = engine.logits()
    expected = [logits(module, [row])[0][-1:] for row in ([*ROWS[2], 11], [*ROWS[0], 12], [*ROWS[0], 13])]
    assert same(list(found.split(1)), expected)


def test_parameters_are_the_shapes_of_the_spec() -> None:
    for module in (tiny.decoder("t5"), tiny.encoder(), tiny.encoder_decoder()):
        assert {name: tuple(p.shape) for name, p in module.named_parameters()} == module.spec.shapes()


def test_ties_share_storage() -> None:
    module = tiny.encoder_decoder()
    assert module.get_parameter("head.proj.weight") is module.get_parameter("encoder.embed.tokens.weight")


@pytest.mark.parametrize("position", ["rope", "t5", "alibi"])
def test_recompute_gives_the_same_gradients(position: str) -> None:
    module, rows = tiny.decoder(position, blocks=3), ROWS
    ids, where = nn.flat(rows, CPU)
    grads = []
    for recompute in (False, True):
        module.train()
        module.decoder.recompute = recompute
        module.zero_grad()
        module.logits(nn.Batch(inputs=ids, rows=where)).logsumexp(-1).sum().backward()
        grads.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() == module.spec.shapes().keys()
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in grads[0])


def test_a_row_past_the_positions_is_refused() -> None:
    with pytest.raises(InputError, match="65 positions and the model has 64"):
        logits(tiny.decoder(), [[1] * 65])
    with pytest.raises(InputError, match="the model has 64"):
        Engine(tiny.decoder()).add(Request(prompt=[1] * 60, max_new_tokens=5))


@pytest.mark.parametrize("context", [None, 100])
def test_a_row_past_a_learned_table_is_refused(context: int | None) -> None:
    """The table has 64 positions, whether or not the spec says how long a row may be."""
    module = nn.new(replace(tiny.decoder("learned").spec, context=context))
    assert logits(module, [[1] * 64])[0].isfinite().all()
    with pytest.raises(InputError, match="65 positions and the model has 64"):
        logits(module, [[1] * 64, [1] * 65])
    with pytest.raises(InputError, match="the model has 64"):
        Engine(module).add(Request(prompt=[1] * 60, max_new_tokens=5))
    with pytest.raises(InputError, match="65 tokens and the model reads 64"):
        prompt_of(Model(module), [1] * 65)
    encoder = nn.new(replace(tiny.encoder("learned").spec, context=context))
    with pytest.raises(InputError, match="65 positions and the model has 64"):
        logits(encoder, [[1] * 65])


def test_empty_batches_and_rows_are_refused() -> None:
    with pytest.raises(InputError, match=r"the text is empty \(row 1\)"):
        logits(tiny.decoder(), [[1], []])
    with pytest.raises(InputError, match=r"the text is empty \(prompt 0\)"):
        Request(prompt=[])


def test_post_norm_residuals_scale_with_depth() -> None:
    """Weights that write to the residual stream start smaller by the square root of the number of sublayers."""
    module = tiny.decoder(blocks=8)
    q = module.get_parameter("decoder.blocks.0.attn.q.weight").std()
    out = module.get_parameter("decoder.blocks.0.attn.out.weight").std()
    assert 3.2 < q / out < 4.8  # sqrt(16)


def test_a_block_may_do_without_an_mlp() -> None:
    """The stream between attention and MLP is then what leaves the block; nothing else of the model notices."""
    module = tiny.attention_only(blocks=8)
    model, row = Model(module), [3, 1, 4, 1, 5]
    assert not [site for site in sites(module.spec) if ".mlp" in site]
    trace = model.trace([row], read=["blocks.*.resid_*", "blocks.*.attn.out"])
    for i in range(8):
        before, added, after = (trace[f"blocks.{i}.{s}"][0] for s in ("resid_pre", "attn.out", "resid_post"))
        assert torch.equal(before + added, after)
        assert torch.equal(trace[f"blocks.{i}.resid_mid"][0], after)
    q, out = (module.get_parameter(f"decoder.blocks.0.attn.{part}.weight").std() for part in ("q", "out"))
    assert 2.3 < q / out < 3.4  # sqrt(8): one sublayer a block
    assert count(module.spec).flops(5)["mlp"] == 0
    assert spec.from_json(spec.to_json(module.spec)) == module.spec
    greedy = model.generate([row], max_new_tokens=3)[0].ids
    assert greedy[0] == int(model.logits([row])[0][-1].argmax())


def test_rows_positions_follow_the_past() -> None:
    rows = Rows((2, 3), (5, 0))
    assert rows.positions(torch.device("cpu")).tolist() == [5, 6, 0, 1, 2]


def with_mask(mask: spec.Mask, position: str = "rope") -> nn.Transformer:
    """A decoder all of whose layers have this mask."""
    model = tiny.decoder(position).spec
    kinds = {name: replace(kind, mask=mask) for name, kind in model.decoder.kinds.items()}
    return nn.new(replace(model, decoder=replace(model.decoder, kinds=kinds)))


@pytest.mark.parametrize("rows", [[ROWS[0]], ROWS], ids=["one row", "ragged rows"])
def test_a_mask_that_hides_only_later_tokens_is_decided_at_every_step(rows: list[list[int]]) -> None:
    """The first key and a window: no step before the fifth hides anything."""
    module = with_mask(causal() & (window(4) | keys(1)))
    whole = logits(module, rows)
    assert same(cached(module, rows, None, 1), whole)
    assert not same([row[4:] for row in logits(with_mask(causal()), rows[:1])], [whole[0][4:]], within=1e-3)


def test_a_step_of_other_rows_is_decided_anew() -> None:
    """One token a step, of rows that leave, come back and change their order in between."""
    module = tiny.decoder()
    cache, read, rows = module.decoder.cache(3), [0, 0, 0], [ROWS[0], [*ROWS[1], 8, 1, 5], [*ROWS[2], 8, 4]]
    expected = logits(module, rows)
    with torch.inference_mode():
        for live in ([0, 1, 2], [0, 1, 2], [2, 0], [2, 0], [0, 2], [0], [2], [2], [0, 2]):
            where = Rows((1,) * len(live), tuple(read[i] for i in live), tuple(live))
            ids = torch.tensor([rows[i][read[i]] for i in live])
            found = module.logits(nn.Batch(inputs=ids, rows=where, cache=cache))
            assert same(list(found.split(1)), [expected[i][read[i] : read[i] + 1] for i in live])
            for i in live:
                read[i] += 1


@pytest.mark.parametrize("module", [tiny.decoder(), tiny.encoder_decoder()], ids=["decoder", "encoder-decoder"])
def test_a_plan_is_made_for_the_dtype_that_autocast_gives(
    module: nn.Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is chosen by the dtype: with that of the residual stream, training in bf16 takes the fused kernel for
    short rows, whose backward is several times slower there."""
    run, seen = row_plan.Piece.run, []

    def recorded(self: row_plan.Piece, q: Tensor, *others: Any) -> Tensor:
        seen.append((q.dtype, self.request.dtype))
        return run(self, q, *others)

    monkeypatch.setattr(row_plan.Piece, "run", recorded)
    ids, rows = nn.flat([[1, 2, 3, 4]], module.device)
    source = (ids, rows) if module.encoder is not None else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(nn.Batch(inputs=ids, rows=rows, source=source))
    assert seen
    assert all(planned == given == torch.bfloat16 for given, planned in seen)
