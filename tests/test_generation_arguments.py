"""What a person may ask of a generation: it is done as written, or refused in one line before anything runs."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import cli_models
import tiny
from triptych import nn
from triptych.errors import InputError, ProbeError, TriptychError
from triptych.generate import Engine, Request, forbid
from triptych.generate.beam import _best_pairs
from triptych.generate.sampling import Sampling, sample
from triptych.model import Model, load

PROMPT = [3, 1, 4, 1, 5]
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.decoder())


@pytest.fixture(scope="module")
def written() -> Model:
    return load(cli_models.checkpoint("decoder"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be an integer of at least 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an integer"),
        ({"temperature": float("nan")}, "temperature=nan must be >= 0"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
        ({"top_p": float("nan")}, r"top_p=nan must be in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p=-0.1 must be in \[0, 1\]"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be > 0"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"seed": "a"}, "seed='a' must be an integer"),
        ({"chunk": -1}, "chunk=-1 must be an integer of at least 1"),
        ({"chunk": 0}, "chunk=0 must be an integer of at least 1"),
        ({"draft_tokens": -1}, "draft_tokens=-1 must be an integer of at least 1"),
        ({"draft": torch.zeros(2, 2)}, r"^draft=tensor\(.*\) must be a Model or 'ngram'$"),
        ({"on_token": 5}, "on_token=5 must be a function"),
        ({"on_progress": "bar"}, "on_progress='bar' must be a function"),
        ({"beams": -1}, "beams=-1 must be an integer of at least 0"),
        ({"beams": 1.5}, "beams=1.5 must be an integer"),
        ({"beams": 30_000}, "beams=30000 is more than the 41 tokens of the vocabulary"),
        ({"beams": 2, "length_penalty": float("nan")}, "length_penalty=nan must be in"),
        ({"beams": 2, "length_penalty": 1e308}, "must be in"),
        ({"length_penalty": 2.0}, "length_penalty is for beams"),
        ({"logprobs": -1}, "logprobs=-1 must be an integer of at least 0"),
        ({"rules": [3]}, "a rule must be a function"),
        ({"max_new_tokens": 60}, "5 prompt tokens and 60 new ones need 65 positions, the model has 64"),
        ({"max_new_tokens": 60, "beams": 2}, "need 65 positions, the model has 64"),
        ({"decoder_prefix": [1]}, "decoder_prefix is for encoder-decoders"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(model: Model, how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.generate([PROMPT], **how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompt": None}, "prompt 0 is None, not a list of token ids"),
        ({"prompt": "text"}, "prompt 0 is 'text', not a list of token ids"),
        ({"sampling": {"temperature": 1}}, "must be a Sampling"),
        ({"ends": 2}, "ends=2 must be a collection of token ids"),
        ({"number": -1}, "number=-1 must be an integer of at least 0"),
    ],
    ids=str,
)
def test_requests_that_mean_nothing_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request(**({"prompt": PROMPT} | how))


def test_an_engine_runs_modules(model: Model) -> None:
    with pytest.raises(InputError, match="must be a Transformer"):
        Engine(model)


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"seed": 3},
        {"seed": 0}, {"logprobs": 1}, {"draft": "ngram"},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_with_beams_is_refused(model: Model, how: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"beams and {next(iter(how))}"):
        model.generate([PROMPT], beams=2, max_new_tokens=2, **how)


def test_more_beams_than_a_step_has_memory_for_are_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.machine.free_memory", lambda: 8 * 41 * 40 - 1)
    with pytest.raises(InputError, match="beams=40 needs 13,120 bytes for the probabilities of 41 tokens"):
        model.generate([PROMPT], beams=40, max_new_tokens=2)


@pytest.mark.parametrize("wanted", [1, 5, 30, 99])
def test_the_best_continuations_are_the_first_of_all_in_order(wanted: int) -> None:
    totals = torch.randint(-4, 4, (6, 5)).float()  # many are equal
    totals[2, 1:4] = -torch.inf
    ids = torch.randint(0, 100, (6, 5))
    every = [(float(totals[at, i]), at, int(ids[at, i])) for at in range(6) for i in range(5)]
    assert _best_pairs(totals, ids, wanted) == sorted(every, key=lambda pair: -pair[0])[:wanted]


def test_beams_give_each_token_of_the_best_hypothesis(model: Model) -> None:
    tokens: list[tuple[int, int]] = []
    best = model.generate([PROMPT, [7, 7]], beams=2, max_new_tokens=4, on_token=lambda *pair: tokens.append(pair))
    assert tokens == [(i, token) for i, one in enumerate(best) for token in one.ids]


def test_no_prompts_and_wrong_ids_are_refused(model: Model) -> None:
    for prompts, message in [([], "no rows"), ([[1.5]], "no token id"), ([[]], "the text is empty"), ([[41]], "41")]:
        with pytest.raises(InputError, match=message):
            model.generate(prompts, max_new_tokens=2)


def test_forbidden_ids_are_ids_of_the_model(model: Model) -> None:
    for wrong in (["a"], [1.5], [-1], [True], "abc"):
        with pytest.raises(
            InputError, match=r"an id to forbid=.* must be an integer of at least 0|not a list of token ids"
        ):
            forbid(wrong)  # type: ignore[arg-type]
    for ids in ([10**6], [0, 41]):
        with pytest.raises(InputError, match=f"token id {max(ids)} is outside the vocabulary of 41"):
            model.generate([PROMPT], max_new_tokens=2, rules=[forbid(ids)])
    assert model.generate([PROMPT], max_new_tokens=2, rules=[forbid([40]), forbid([])])[0].ids


def test_one_stop_string_is_one_string(written: Model) -> None:
    how: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 1}
    text = written.generate(["Mill"], **how)[0].text
    letters = next(pair for pair in pairwise(text) if all(c.isascii() for c in pair))
    stop = "".join(letters)
    one, listed = (written.generate(["Mill"], stop=s, **how)[0] for s in (stop, [stop]))
    assert (one.text, one.reason) == (listed.text, listed.reason) == (text[: text.index(stop)], "stop")
    assert "".join(written.stream("Mill", stop=stop, **how)) == one.text
    for wrong in ("", [""], ["a", ""], [3], 3):
        with pytest.raises(InputError, match="stop"):
            written.generate(["Mill"], stop=wrong, **how)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="stop"):
            written.stream("Mill", stop=wrong, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{}, {"beams": 3}, {"draft": "ngram"}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_stop_ids_end_a_row_as_the_end_tokens_of_its_config_do(model: Model, how: dict[str, Any]) -> None:
    prompts, spec = [PROMPT, [7, 7], [2, 9, 11]], model.spec
    free = model.generate(prompts, max_new_tokens=12, **how)
    stop = [free[0].ids[3], free[1].ids[5]]
    ending = Model(nn.new(replace(spec, ids=replace(spec.ids, eos=tuple(stop)))))
    ending.module.load_state_dict(model.module.state_dict())
    cut, expected = (one.generate(prompts, max_new_tokens=12, **how, **at) for one, at in
                     ((model, {"stop_ids": stop}), (ending, {})))  # fmt: skip
    assert [(row.ids, row.reason) for row in cut] == [(row.ids, row.reason) for row in expected]
    assert cut[0].reason == "end"
    assert [row.ids for row in cut] != [row.ids for row in free]


def test_a_stop_id_is_not_in_the_text(written: Model) -> None:
    free = written.generate(["Mill"], max_new_tokens=24)[0]
    stop = free.ids[4]
    cut = written.generate(["Mill"], max_new_tokens=24, stop_ids=[stop])[0]
    assert cut.ids == free.ids[: free.ids.index(stop) + 1]
    assert cut.text == written.inputs.words.decode(cut.ids[:-1])
    for engine in (None, written.engine()):
        assert "".join(written.stream("Mill", max_new_tokens=24, stop_ids=[stop], engine=engine)) == cut.text
    assert "".join(written.stream("Mill", max_new_tokens=24)) == free.text != cut.text


@pytest.mark.parametrize(
    "messages", ["hi", ["hi"], {"role": "user", "content": "hi"}, [{"role": "user"}], [], [{1: 2}]]
)
def test_a_chat_takes_messages(written: Model, messages: Any) -> None:
    with pytest.raises(InputError, match=r'messages must be a list of \{"role": \.\.\., "content": \.\.\.\}'):
        written.chat(messages)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 1e-8])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits, rows = torch.randn(5, 17) * 3, [[1]] * 5
    for how in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        found = sample(logits, Sampling(temperature=temperature, seed=3, **how), range(5), rows)
        assert found == logits.argmax(-1).tolist()
    assert sample(logits, Sampling(temperature=1.0, seed=3), range(5), rows) != logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-40, 1e-300])
def test_a_penalty_that_overflows_is_refused(penalty: float, temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    with pytest.raises(InputError, match="makes the scores overflow"):
        sample(logits, Sampling(temperature=temperature, repetition_penalty=penalty), [0], [[1]])
    assert sample(logits, Sampling(repetition_penalty=1e30), [0], [[2]]) == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("how", [{}, {"beams": 2}, {"temperature": 1.0}], ids=str)
def test_broken_logits_are_refused_however_tokens_are_chosen(how: dict[str, Any], value: float) -> None:
    module = tiny.decoder()
    proj = module.get_parameter("head.proj.weight")
    with torch.no_grad():
        if value == -float("inf"):  # of every token
            proj.fill_(value)
            module.get_parameter("decoder.final_norm.weight").zero_().add_(1)
        else:
            proj[7] = value
    with pytest.raises(InputError, match="not finite"):
        Model(module).generate([PROMPT], max_new_tokens=3, **how)


def test_numpy_numbers_are_numbers(model: Model) -> None:
    how = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 5, "seed": 7}
    same = {"max_new_tokens": np.int64(3), "temperature": np.float32(1.0), "top_k": np.int32(5), "seed": np.int64(7)}
    assert model.generate([PROMPT], **how)[0].ids == model.generate([PROMPT], **same)[0].ids


# ---------------------------------------------------------------- memory


def test_reads_are_billed_before_a_generation_runs(model: Model) -> None:
    """The bill is for the rows at their final lengths, and the logits of new tokens alone."""
    calls: list[int] = []
    handle = model.module.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ProbeError, match=r"the reads would keep [\d,]+ bytes, over max_bytes=10,000"):
            model.generate([PROMPT], max_new_tokens=20, read=["*"], max_bytes=10_000)
        assert not calls
    finally:
        handle.remove()
    trace = model.generate([PROMPT], max_new_tokens=20, read=["*"])[0].trace
    bill = trace.nbytes
    with pytest.raises(ProbeError, match="max_bytes"):
        model.generate([PROMPT], max_new_tokens=20, read=["*"], max_bytes=bill // 2)


def test_every_refusal_is_of_one_family(model: Model) -> None:
    for how in ({"top_k": None}, {"stop": 5}, {"rules": 7}, {"chunk": "x"}, {"edit": 3}, {"read": 3}):
        with pytest.raises(TriptychError):
            model.generate([PROMPT], **how)  # type: ignore[arg-type]
