"""Rows under a constraint: what is written is of the constraint, whatever else is asked of the row."""

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import page_tokenizers
from constrained_texts import allowed, bytewise
from native_models import needs_native
from triptych.cli import main
from triptych.errors import InputError, TextError, TriptychError
from triptych.generate import (
    Constraint,
    Engine,
    Request,
    Sampling,
    Scheduler,
    beam_search,
    forbid,
    next_tokens,
    sampling,
)
from triptych.generate.constraints import row_constraint
from triptych.generate.constraints.row_constraint import RowConstraint, fill_masks, masks_of
from triptych.generate.constraints.vocabulary import TokenVocabulary, vocabulary_of
from triptych.generate.sampling import TokenMasks
from triptych.model import Model, create
from triptych.text import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
}
DATE = r"\d{4}-\d\d-\d\d( (morning|noon))?"
CONSTRAINTS = {
    "schema": Constraint.schema(PERSON),
    "regex": Constraint.regex(DATE),
    "grammar": Constraint.grammar('start: item ("," item)*\nitem: /[a-z]{2}/ | "<" item ">"'),
    "choices": Constraint.choices(["yes", "yes, of course", 'n"o\\', "\u00e9\n"]),
}
ITEM = r"(<*)[a-z]{2}(>*)"
PROMPTS = ["the old mill", "x", "12"]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    "penalty": {"repetition_penalty": 1.5},
}


def model(vocab: int = 300, **changes: Any) -> Model:
    """A decoder of bytes with more embeddings than tokens, whose weights are large enough for it to write something."""
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 700, "eos_token_id": 256,
              "initializer_range": 0.3}  # fmt: skip
    return create(config | changes, bytewise())


def is_of(kind: str, text: str) -> bool:
    """Whether a text is of one of the constraints above, judged without the library that makes the masks."""
    if kind == "schema":
        return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))
    if kind == "regex":
        return re.fullmatch(DATE, text) is not None
    if kind == "choices":
        return text in ("yes", "yes, of course", 'n"o\\', "\u00e9\n")
    found = [re.fullmatch(ITEM, item) for item in text.split(",")]
    return all(match is not None and len(match[1]) == len(match[2]) for match in found)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_every_text_is_of_its_constraint(kind: str, how: str) -> None:
    for one in model().generate(PROMPTS, constraint=CONSTRAINTS[kind], max_new_tokens=200, **HOW[how]):
        assert one.reason == "end" or (kind == "grammar" and one.reason == "length")
        assert one.reason == "length" or is_of(kind, one.text), one.text


def test_without_its_mask_a_text_is_not_of_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same rows without masks."""
    monkeypatch.setattr(next_tokens, "masks_of", lambda rows: None)
    with pytest.raises(InputError, match="the constraint cannot be kept after"):
        model().generate(PROMPTS, constraint=CONSTRAINTS["regex"], max_new_tokens=50)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_drafts_change_nothing(kind: str, how: str) -> None:
    """Guesses of the text itself, and of a draft model under the same constraint, some of them wrong."""
    one, other = model(), create(dict(model().hf or {}) | {"num_hidden_layers": 1}, bytewise())
    plain = one.generate(PROMPTS, constraint=CONSTRAINTS[kind], max_new_tokens=120, **HOW[how])
    for draft in ("ngram", other, one):
        drafted = one.generate(PROMPTS, constraint=CONSTRAINTS[kind], max_new_tokens=120, draft=draft, **HOW[how])
        assert [(x.ids, x.reason) for x in drafted] == [(x.ids, x.reason) for x in plain]
        if draft is one:  # under the constraint too, or it would guess what the mask forbids
            assert sum(x.accepted for x in drafted) == sum(x.drafted for x in drafted) > 0


@pytest.mark.parametrize("kind", ["schema", "regex", "choices"])
def test_beams_keep_the_constraint(kind: str) -> None:
    found = model().generate(PROMPTS, constraint=CONSTRAINTS[kind], beams=3, max_new_tokens=200)
    assert all(one.reason == "end" and is_of(kind, one.text) for one in found)


def test_the_best_of_all_choices_is_found_by_beams() -> None:
    """As many beams as choices compare them all: the sums of their log-probabilities are those of the model."""
    one, texts = model(), ["yes", "no", "maybe", "never"]
    (found,) = one.generate(["so: "], constraint=Constraint.choices(texts), beams=4, max_new_tokens=9, length_penalty=0)
    prompt = one.inputs.words.encode("so: ")
    scores = {}
    for text in texts:
        ids = [*prompt, *text.encode(), 256]
        logprobs = one.logits([ids])[0].log_softmax(-1)
        scores[text] = sum(float(logprobs[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))
    assert found.text == max(scores, key=scores.__getitem__)


def test_rows_with_and_without_constraints_write_what_each_writes_alone() -> None:
    one = model()
    rows = [*CONSTRAINTS.values(), None]
    requests = [
        Request(prompt=[5 + i, 7], constraint=constraint, number=i, max_new_tokens=60, ends=[256],
                sampling=Sampling(temperature=0.9, seed=2))
        for i, constraint in enumerate(rows)
    ]  # fmt: skip

    def written(some: Sequence[Request]) -> list[tuple[list[int], str | None]]:
        queue = Scheduler(Engine(one.module, tokenizer=one.tokenizer), max_rows=4)
        live = [queue.submit(request) for request in some]
        while queue.busy:
            queue.step()
        return [(row.new, row.reason) for row in live]

    assert written(requests) == [written([request])[0] for request in requests]


def test_a_limit_in_the_middle_says_so() -> None:
    (cut,) = model().generate(["x"], constraint=CONSTRAINTS["schema"], max_new_tokens=9)
    assert (cut.reason, len(cut.ids)) == ("length", 9)
    (whole,) = model().generate(["x"], constraint=CONSTRAINTS["choices"], max_new_tokens=len("\u00e9\n".encode()) + 40)
    assert whole.reason == "end"


def test_a_text_may_end_where_it_is_whole_and_nowhere_else() -> None:
    """An end id is allowed after each whole text: a rule that prefers it ends the row there."""

    def prefer_end(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        logits[256] += 1000
        return logits

    (one,) = model().generate(["x"], constraint=CONSTRAINTS["regex"], rules=[prefer_end], max_new_tokens=40)
    assert (len(one.text), one.reason, one.ids[-1]) == (10, "end", 256)
    (digits,) = model().generate(["x"], constraint=Constraint.regex("[0-9]{3,}"), rules=[prefer_end])
    assert (len(digits.text), digits.reason) == (3, "end")


def test_an_id_that_ends_rows_stands_only_where_the_text_may_end() -> None:
    """`a` ends rows and is a letter of the text: it would end it in its middle."""
    (one,) = model().generate(
        ["x"], constraint=Constraint.regex("b[ab]c"), stop_ids=[ord("a")], temperature=2.0, max_new_tokens=9
    )
    assert (one.text, one.reason) == ("bbc", "end")


def test_special_tokens_and_ids_of_no_token_are_never_allowed() -> None:
    tokenizer = bytewise()
    row = Constraint.regex("(?s).*").start(tokenizer, 300, [])
    assert set(allowed(row)) <= set(range(256))
    assert {ord("a"), 10} <= set(allowed(row))
    text = Constraint.choices(["<|endoftext|>"]).start(tokenizer, 300, [])
    for byte in b"<|endoftext|>":
        assert 256 not in allowed(text)
        text.advance(byte)
    assert text.matcher.is_stopped()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.heavy] * (name in ("t5", "marian"))) for name in page_tokenizers.KINDS],
)
def test_texts_of_every_kind_of_vocabulary(name: str) -> None:
    """Random tokens under a constraint decode to texts of it, whole and in pieces; or the vocabulary is refused."""
    tokenizer = page_tokenizers.KINDS[name]()
    pattern = r"[a-z ]{3,12}[.!?]( [A-Z][a-z\u00e9]{1,5}){2}\n[\w#]{2}"
    size, draw = tokenizer.vocab_size + 7, np.random.default_rng(0)
    if name in ("words", "bert", "bert-cased", "marian", "other steps"):
        with pytest.raises(TextError, match="a constraint needs a tokenizer whose tokens are parts of the text"):
            vocabulary_of(tokenizer, size)
        return
    for _ in range(8):
        row, ids = Constraint.regex(pattern).start(tokenizer, size, []), list[int]()
        done = False
        while not done:
            ids.append(int(draw.choice(allowed(row))))
            done = row.advance(ids[-1])
            assert row.problem is None
        stream = tokenizer.stream()
        assert re.fullmatch(pattern, tokenizer.decode(ids)), tokenizer.decode(ids)
        assert "".join(map(stream.put, ids)) + stream.flush() == tokenizer.decode(ids)


def test_a_first_space_that_is_not_in_the_text_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece's decoders leave out the first space.  The control: with its token allowed, texts lack it."""
    tokenizer = page_tokenizers.KINDS["llama2"]()
    constraint = Constraint.regex(" ?[a-z]{2}")
    row = constraint.start(tokenizer, 1500, [])
    assert not [token for token in allowed(row) if row.vocabulary.tokens[token].startswith(b" ")]
    assert row.leading([next(i for i, text in enumerate(row.vocabulary.tokens) if text == b" ")]) == 0
    with pytest.raises(InputError, match="cannot be kept"):
        Constraint.regex(" [a-z]{2}").start(tokenizer, 1500, [])
    monkeypatch.setattr(row.vocabulary, "never_first", np.zeros_like(row.vocabulary.never_first))
    spaces = [token for token in allowed(row) if row.vocabulary.tokens[token] == b" "]
    assert [tokenizer.decode([space]) for space in spaces] == ["", ""]  # the piece, and the byte


def test_a_vocabulary_is_made_once_by_many_threads() -> None:
    tokenizer, made = page_tokenizers.KINDS["gpt-2"](), list[TokenVocabulary]()
    threads = [threading.Thread(target=lambda: made.append(vocabulary_of(tokenizer, 1000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(map(id, made))) == 1
    assert vocabulary_of(tokenizer, 1001) is not made[0]


def test_a_tokenizer_that_lies_about_its_tokens_is_refused() -> None:
    """Its decoder is of known steps, and joins two tokens in another way than each stands alone."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])
    with pytest.raises(TextError, match="parts of the text"):
        vocabulary_of(Tokenizer(backend), 3)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ay", "x")])
    assert vocabulary_of(Tokenizer(backend), 3).tokens == [b"a", b"b", b"c"]


# ---------------------------------------------------------------- one token on, some tokens back


def test_tokens_are_taken_back() -> None:
    row = CONSTRAINTS["schema"].start(bytewise(), 300, [256])
    states = []
    for byte in b'{"name":"a","age":1':
        states.append(fill_masks([row])[0])
        assert not row.advance(byte)
    for count in (1, 4, 7):
        row.roll_back(count)
        assert row.written == len(states) - count
        assert (fill_masks([row])[0] == states[row.written]).all()
        states = states[: row.written]
    assert row.leading(b'{"nam') == 0
    assert row.leading(list(b'me":"xx!')[: 20 - row.written]) <= 8


def test_a_copy_goes_its_own_way() -> None:
    row = CONSTRAINTS["choices"].start(bytewise(), 300, [256])
    row.advance(ord("y"))
    twin = row.copy()
    for byte in b"es":
        assert not row.advance(byte)
    assert allowed(twin) == [ord("e")]
    assert allowed(row) == [ord(","), 256]


def test_a_state_that_went_wrong_allows_nothing() -> None:
    """The library then allows the end of the text alone; a row must not end there."""
    row = CONSTRAINTS["regex"].start(bytewise(), 300, [256])
    assert not row.advance(ord("x"))
    assert row.problem
    assert not fill_masks([row]).any()
    assert "cannot be kept after" in str(row.error)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("vocab", [257, 288, 300, 33])
def test_masked_scores_are_those_of_the_allowed_tokens(
    vocab: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(sampling, "library", lambda: None)
    tokenizer, scores = bytewise(), torch.randn(4, vocab)
    rows: list[RowConstraint | None] = [
        Constraint.regex("[ -!]").start(tokenizer, vocab, []), None,
        Constraint.regex("(?s).").start(tokenizer, vocab, []), Constraint.choices([" "]).start(tokenizer, vocab, []),
    ]  # fmt: skip
    before, masks = scores.clone(), masks_of(rows)
    out = masks.apply(scores)
    assert torch.equal(scores, before)
    assert torch.equal(masks.of([2, 0]).apply(scores[[2, 0]]), out[[2, 0]])
    for row, x, y in zip(rows, scores, out, strict=True):
        keep = torch.ones(vocab, dtype=torch.bool)
        if row is not None:
            keep = torch.isin(torch.arange(vocab), torch.tensor(allowed(row)))
            assert keep.any()
        assert torch.equal(y, x.masked_fill(~keep, -torch.inf))


@needs_native
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 4, "top_p": 0.9, "min_p": 0.01}]
)
@pytest.mark.parametrize("allowed_tokens", [1, 9, 60, 1500, 2999, 3001])
def test_tokens_drawn_under_masks_are_those_drawn_from_masked_scores(
    how: dict[str, Any], allowed_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens are taken out before they are sampled, many are sampled in their places; torch does neither."""
    rows, vocab, draw = 24, 3001, np.random.default_rng(allowed_tokens)
    scores, bits = torch.randn(rows, vocab) * 3, np.zeros((rows, (vocab + 31) // 32 * 32), np.uint8)
    for row in bits:
        row[draw.choice(vocab, allowed_tokens, replace=False)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    masks = TokenMasks(words, np.array([-1, *range(rows - 1)], np.int32))
    ways = [Sampling(seed=i, **how) for i in range(rows)]
    native = sampling.draw(scores, ways, [7] * rows, [0] * rows, masks)
    assert all(bits[i][token] for i, token in zip(masks.which[1:], native[1:], strict=True))
    assert native == sampling.draw(masks.apply(scores), ways, [7] * rows, [0] * rows)
    monkeypatch.setattr(sampling, "library", lambda: None)
    assert native == sampling.draw(scores, ways, [7] * rows, [0] * rows, masks)


def test_masks_of_several_threads_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [constraint.start(bytewise(), 300, [256]) for constraint in CONSTRAINTS.values() for _ in range(3)]
    one = fill_masks(rows)
    monkeypatch.setattr(row_constraint, "usable_threads", lambda threads: 2)
    assert (fill_masks(rows) == one).all()


# ---------------------------------------------------------------- refused before the first token; errors afterwards

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"constraint": "yes"}, "must be a Constraint"),
    ({"schema": 5}, "schema"),
    ({"schema": "{"}, "schema is no JSON"),
    ({"schema": PERSON, "constraint": CONSTRAINTS["regex"]}, "schema and constraint do not go together"),
    ({"schema": PERSON, "stop": "x"}, "stop and a constraint do not go together"),
    ({"constraint": Constraint.regex("")}, "allows the empty text alone"),
    ({"schema": {"type": "string", "minLength": 5, "maxLength": 3}}, "schema"),
    ({"schema": {"$ref": "#"}}, "cannot be kept"),
    ({"schema": {"enum": []}}, "schema"),
]


@pytest.mark.parametrize(("settings", "problem"), REFUSED)
def test_what_cannot_be_kept_is_refused_before_the_first_token(
    settings: dict[str, Any], problem: str, unchecked: None
) -> None:
    tokens: list[int] = []
    with pytest.raises(TriptychError, match=problem) as caught:
        model().generate(["x"], on_token=lambda row, token: tokens.append(token), **settings)
    assert not tokens
    assert "\n" not in str(caught.value)
    with pytest.raises(TriptychError, match=problem):
        model().stream("x", **settings)


def test_models_without_a_tokenizer_and_beams_without_an_end_are_refused() -> None:
    with pytest.raises(InputError, match="needs a tokenizer"):
        create(dict(model().hf or {})).generate([[5]], constraint=CONSTRAINTS["regex"])
    one = model()
    request = Request(prompt=[5], constraint=CONSTRAINTS["regex"])
    with pytest.raises(InputError, match="need an end id"):
        beam_search(Engine(one.module, tokenizer=one.tokenizer), [request], beams=2)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Constraint.regex("(a"), "regex"),
        (lambda: Constraint.regex(r"(?=a)b"), "regex"),
        (lambda: Constraint.regex(r"\bfoo"), "regex"),
        (lambda: Constraint.regex(r"(a)\1"), "regex"),
        (lambda: Constraint.regex(r"\D"), "means ASCII to some"),
        (lambda: Constraint.regex(5), "must be a string"),
        (lambda: Constraint.choices([]), "must be texts"),
        (lambda: Constraint.choices("yes"), "must be texts"),
        (lambda: Constraint.choices(["a", ""]), "must be texts"),
        (lambda: Constraint.choices(["\x7f"]), "choices"),
        (lambda: Constraint.grammar("start: x"), "unknown name"),
        (lambda: Constraint.grammar('root ::= "a"'), "GBNF"),
        (lambda: Constraint.grammar("start: a\na[temperature=0.5]: /x/"), "temperature"),
        (lambda: Constraint.grammar("start: a\na[max_tokens=2]: /x{5}/"), "max_tokens"),
        (lambda: Constraint.grammar('start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
        (lambda: Constraint.grammar('start: %json {"uniqueItems": true}'), "uniqueItems"),
    ],
)
def test_each_kind_names_what_it_cannot_keep(make: Any, problem: str, unchecked: None) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_row_that_is_stuck_ends_with_an_error_and_others_run_on() -> None:
    one = model()
    queue = Scheduler(Engine(one.module, tokenizer=one.tokenizer))
    stuck = queue.submit(
        Request(prompt=[5], constraint=Constraint.regex("ab"), rules=[forbid([ord("b")])], number=0, max_new_tokens=9)
    )
    good = queue.submit(Request(prompt=[5], constraint=Constraint.regex("ab"), number=1, max_new_tokens=9))
    while queue.busy:
        queue.step()
    assert (stuck.reason, stuck.new) == ("error", [ord("a")])
    assert "after 1 tokens: the rules forbid all tokens" in str(stuck.error)
    assert (good.reason, good.new) == ("end", [*b"ab"])


def test_a_vocabulary_that_cannot_write_the_text_is_refused_or_ends_with_an_error() -> None:
    """Letters without a brace: JSON cannot begin; a text that only cannot go on ends with an error."""
    from triptych.text import character_tokenizer

    letters = character_tokenizer("abc")
    one = create(dict(model().hf or {}) | {"vocab_size": 8, "eos_token_id": None}, letters)
    with pytest.raises(InputError, match="cannot be kept: no token of this vocabulary"):
        one.generate(["a"], schema=PERSON)
    with pytest.raises(InputError, match="after 1 tokens: no token of this vocabulary leads"):
        one.generate(["a"], constraint=Constraint.regex("a[x-z]"))


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match="pip install 'llguidance"):
        Constraint.choices(["a"])


COMMANDS: list[tuple[list[str], int, str]] = [
    (["--regex", "[a-c]{3}"], 0, ""),
    (["--choice", "yes", "--choice", "no", "--beams", "2"], 0, ""),
    (["--regex", "a", "--choice", "b"], 2, "--regex and --choice do not go together"),
    (["--regex", "("], 1, "regex: '(' is no regular expression"),
    (["--schema", "nowhere.json"], 1, "nowhere.json"),
    (["--schema", "wrong.json"], 1, "wrong.json: schema/not is not kept"),
    (["--choice", "a", "--stop", "b"], 1, "stop and a constraint do not go together"),
]


@pytest.mark.parametrize(("options", "code", "problem"), COMMANDS)
def test_the_command_line_keeps_constraints(
    options: list[str], code: int, problem: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model().save(tmp_path / "model")
    (tmp_path / "wrong.json").write_text('{"not": {}}')
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "model", "x", "--json", "--max-new-tokens", "9", *options]) == code
    out, err = capsys.readouterr()
    assert problem in err
    if not code:
        text = json.loads(out)["results"][0]["text"]
        assert re.fullmatch("[a-c]{3}|yes|no", text)


@pytest.mark.weights
def test_smollm2_writes_json_of_a_schema(smollm2: Model) -> None:
    prompt = smollm2.render([{"role": "user", "content": "Describe a person named Ada as JSON."}])
    for how in ({}, {"temperature": 1.0, "seed": 1}, {"draft": "ngram"}):
        for one in smollm2.generate([prompt], schema=PERSON, max_new_tokens=120, **how):
            assert one.reason == "end"
            assert is_of("schema", one.text)
