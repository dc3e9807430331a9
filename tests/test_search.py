"""Search in a folder: where texts are cut, which files are read, what the index keeps, and who is found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triptych
from browser import CHROMIUM, Browser
from cli_models import BERT, WORDS, Captured, answered, checkpoint, refused, said
from triptych import tasks
from triptych.errors import CheckpointError, InputError
from triptych.files import exists
from triptych.model import Model, create, load
from triptych.page import vector_plane
from triptych.tasks import search_index
from triptych.tasks.search_index import cut
from triptych.text import DECODER, Tokenizer, byte_tokenizer, word_tokenizer
from triptych.text.corpus import read_folder

TEXTS = {
    "mill.txt": "the old mill stands where the river bends\n",
    "sea/ship.txt": "\n\nthe ship came in on the evening tide\n",
    "sea/both.txt": "the old ship\n\nthe river tide\n",
}
STRANGER = b"a thesis, and no index"
VIT = {"model_type": "vit", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1,
       "num_attention_heads": 6, "image_size": 20, "patch_size": 5, "num_channels": 2}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triptych" / "search"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        file = tmp_path / "texts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "texts"


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = word_tokenizer(WORDS, 90)
    return create(BERT | {"architectures": ["BertModel"], "vocab_size": tokenizer.vocab_size, "pad_token_id": 0},
                  tokenizer, seed=3)  # fmt: skip


class Counted:
    """An embedder that counts the texts it was asked for."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, identity: str = "one") -> None:
        self.texts: list[str] = []
        self.model = model
        self.embedder = tasks.Embedder(self.encode, tokenizer or model.tokenizer, identity, 70)

    def encode(self, texts: Any) -> torch.Tensor:
        self.texts += texts
        return self.model.encode(list(texts))


# ---------------------------------------------------------------- passages


def check_passages(text: str, tokenizer: Tokenizer, tokens: int, overlap: int) -> list[tuple[int, int]]:
    """The places of passages that cover every word, each short enough, with the lines they stand in."""
    spans = cut(text, tokenizer, tokens, overlap)
    covered = np.zeros(len(text), bool)
    for span in spans:
        covered[span.begin : span.end] = True
        assert len(tokenizer.encode(text[span.begin : span.end], special=False)) <= tokens
        assert span.line == text.count("\n", 0, span.begin) + 1
        assert span.last_line == text.count("\n", 0, span.end) + 1
        assert text[span.begin : span.end] == text[span.begin : span.end].strip()
    assert all(covered[i] or text[i].isspace() for i in range(len(text)))
    begins = [span.begin for span in spans]
    assert begins == sorted(set(begins))
    return [(span.begin, span.end) for span in spans]


@pytest.mark.parametrize(("tokens", "overlap"), [(5, 0), (5, 2), (8, 4), (30, 10), (500, 0)])
@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_passages_cover_the_text(tokens: int, overlap: int, kind: str) -> None:
    tokenizer = word_tokenizer(WORDS, 90) if kind == "words" else byte_tokenizer(DECODER)
    sentences = [
        "the old mill.  ",
        "Where the river bends?\n",
        "the ship\n\n",
        "came in (on the tide.) ",
        "x" * 37 + " ",
    ]
    text = "\n \n" + "".join(sentences[i * i % 5] for i in range(23)) + "the"
    check_passages(text, tokenizer, tokens, overlap)


def test_passages_end_with_sentences_and_paragraphs_and_overlap() -> None:
    tokenizer = word_tokenizer(WORDS, 90)
    text = "the mill. the river. the ship. the tide. the old. the mill. "  # three tokens each
    ends = [text[a:b] for a, b in check_passages(text, tokenizer, 8, 3)]
    assert ends == ["the mill. the river.", "the river. the ship.", "the ship. the tide.", "the tide. the old.",
                    "the old. the mill."]  # fmt: skip
    assert [text[a:b] for a, b in check_passages(text, tokenizer, 8, 0)][:2] == [
        "the mill. the river.",
        "the ship. the tide.",
    ]
    paragraphs = "the mill\nthe river\n\nthe ship"
    assert [paragraphs[a:b] for a, b in check_passages(paragraphs, tokenizer, 8, 3)] == [
        "the mill\nthe river",
        "the ship",
    ]


def test_a_text_without_ends_is_cut_in_bounded_parts() -> None:
    spans = cut("a" * 10_000, word_tokenizer(WORDS, 90), 50, 0)
    assert max(span.end - span.begin for span in spans) <= 50 * search_index.MOST_CHARACTERS
    assert cut(" \n\n ", word_tokenizer(WORDS, 90), 50, 0) == []


# ---------------------------------------------------------------- files


def test_what_is_not_text_is_skipped_with_a_count(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (folder / "out").symlink_to(outside)
    (folder / "out.txt").symlink_to(outside / "secret.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "nowhere").symlink_to(folder / "missing")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "bytes").write_bytes(b"the\xff")
    (folder / "zero").write_bytes(b"the\0mill")
    (folder / "empty").write_text("  \n")
    (folder / "large").write_text("the " * 300)
    os.mkfifo(folder / "pipe")
    found = read_folder(folder, most_bytes=1000)
    assert [file.name for file in found.files] == sorted(TEXTS)
    assert found.skipped == {"hidden": 1, "symbolic links": 4, "binary or not UTF-8": 2, "without text": 1,
                             "larger than 0 MiB": 1, "unreadable": 1}  # fmt: skip
    followed = read_folder(folder, follow_links=True)
    assert {"out/secret.txt", "out.txt"} <= {file.name for file in followed.files}
    assert followed.skipped["links to a folder that is read already"] == 1
    assert followed.skipped["unreadable"] == 2  # the pipe, and the link that leads nowhere


def test_bytes_of_names_are_data(folder: Path, model: Model, capsys: Captured, tmp_path: Path) -> None:
    (folder / "\x1b[31mred\n.txt").write_text("the evening")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt"))).write_text("the evening tide")
    names = {file.name for file in read_folder(folder).files}
    assert {"\x1b[31mred\n.txt", "\\xff.txt"} <= names
    model.save(tmp_path / "bert")
    out = said(["search", str(folder), "the evening", "--model", str(tmp_path / "bert"), "--k", "20"], capsys)[0]
    assert "\x1b" not in out
    assert "�[31mred�.txt" in out
    assert names == {
        hit["file"]
        for hit in answered(
            ["search", str(folder), "the evening", "--model", str(tmp_path / "bert"), "--k", "20"], capsys
        )["results"]
    }


# ---------------------------------------------------------------- ranking


def test_hits_are_the_nearest_passages(folder: Path, model: Model) -> None:
    result = model.search(folder, "the old ship", k=3, tokens=5, overlap=0)
    assert result.hits[0].text == "the old ship"
    assert result.hits[0].score == pytest.approx(1, abs=1e-5)
    assert (result.hits[0].file, result.hits[0].line, result.hits[0].last_line) == ("sea/both.txt", 1, 1)
    assert [hit.score for hit in result.hits] == sorted((hit.score for hit in result.hits), reverse=True)
    # By hand: the cosine of every passage.
    parts = [text[s.begin : s.end] for _, text in sorted(TEXTS.items()) for s in cut(text, model.inputs.words, 5, 0)]
    vectors = torch.nn.functional.normalize(model.encode([*parts, "the old ship"]), dim=-1)
    cosines = dict(zip(parts, (vectors[:-1] @ vectors[-1]).tolist(), strict=True))
    expected = sorted(cosines, key=lambda part: -cosines[part])[:3]
    assert [hit.text for hit in result.hits] == expected
    assert [hit.score for hit in result.hits] == pytest.approx([cosines[part] for part in expected], abs=1e-5)
    assert result.passages == len(parts)
    assert model.search(folder, TEXTS["sea/ship.txt"].strip(), k=1, tokens=8).hits[0].file == "sea/ship.txt"
    assert model.search(folder, TEXTS["sea/ship.txt"].strip(), k=1, tokens=8).hits[0].line == 3  # after two empty lines


def test_a_decoder_searches_too(folder: Path) -> None:
    decoder = triptych.load(checkpoint("decoder"))
    result = decoder.search(folder, "the old ship", k=1)
    assert result.hits[0].text.startswith("the old ship")
    assert decoder.note_on_vectors() is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"query": ""}, "the query is"),
        ({"query": " \n"}, "the query is"),
        ({"k": 0}, "k"),
        ({"k": True}, "k"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 71}, "reads at most 70"),
        ({"tokens": 8, "overlap": 5}, "more than half"),
        ({"overlap": -1}, "overlap"),
        ({"folder": "missing"}, "is not a folder"),
        ({"folder": ""}, "is not a folder"),
        ({"folder": "a\0b"}, "is not a folder"),
    ],
)
def test_bad_arguments_are_said_before_any_work(
    arguments: dict[str, Any], says: str, folder: Path, model: Model
) -> None:
    counted = Counted(model)
    values = {"folder": folder, "query": "the mill"} | arguments
    with pytest.raises(InputError, match=says):
        tasks.search_with(counted.embedder, values.pop("folder"), values.pop("query"), **values)
    assert counted.texts == []


def test_a_folder_without_text(tmp_path: Path, model: Model) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"no text files to search$"):
        model.search(tmp_path / "none", "the mill")
    (tmp_path / "none" / ".hidden").write_text("the mill")
    with pytest.raises(InputError, match=r"no text files to search \(skipped: 1 hidden\)"):
        model.search(tmp_path / "none", "the mill")


def test_vectors_that_are_not_finite_are_refused(folder: Path, model: Model, tmp_path: Path) -> None:
    broken = tasks.Embedder(lambda texts: torch.full((len(texts), 4), torch.nan), model.tokenizer, "broken", None)
    with pytest.raises(InputError, match="not finite"):
        tasks.search_with(broken, folder, "the mill", index=tmp_path / "index.safetensors")


# ---------------------------------------------------------------- index


def test_only_new_content_is_embedded(folder: Path, model: Model, own_cache: Path) -> None:
    counted = Counted(model)
    first = tasks.search_with(counted.embedder, folder, "the mill")
    assert (first.embedded, first.files) == (3, 3)
    assert len(counted.texts) == 1 + first.passages
    (file,) = own_cache.glob("*.safetensors")
    assert file == first.index
    counted.texts.clear()
    again = tasks.search_with(counted.embedder, folder, "the mill")
    assert (again.embedded, counted.texts) == (0, ["the mill"])
    assert again.hits == first.hits
    (folder / "mill.txt").rename(folder / "moved.txt")  # the same content under another name
    (folder / "sea" / "both.txt").write_text("the old river")
    (folder / "copy.txt").write_text("the old river")
    counted.texts.clear()
    changed = tasks.search_with(counted.embedder, folder, "the mill")
    assert changed.embedded == 1
    assert counted.texts == ["the mill", "the old river"]
    assert {"moved.txt:1", "copy.txt:1", "sea/both.txt:1"} <= set(changed.places)
    assert len(search_index.read_index(file, 24)) == 3  # what is gone is forgotten
    other = Counted(model, identity="two")
    assert tasks.search_with(other.embedder, folder, "the mill").embedded == 3
    assert tasks.search_with(counted.embedder, folder, "the mill", tokens=9).embedded == 3


def test_the_identity_follows_weights_tokenizer_and_settings(model: Model) -> None:
    def identity(one: Model, settings: object = None) -> str:
        return tasks.identity_of(one.module, one.inputs, settings)

    tokenizer = word_tokenizer(WORDS, 90)
    keys = BERT | {"architectures": ["BertModel"], "vocab_size": tokenizer.vocab_size, "pad_token_id": 0}
    same = create(keys, tokenizer, seed=3)
    assert identity(same) == identity(model) != identity(create(keys, tokenizer, seed=4))
    assert identity(same, 1) != identity(same, 2)
    assert identity(
        create(keys, word_tokenizer([words.replace("mill", "mull") for words in WORDS], 90), seed=3)
    ) != identity(model)
    next(same.module.parameters()).view(-1).detach()[5] += 1e-3
    assert identity(same) != identity(model)


def test_a_damaged_index_is_made_anew(folder: Path, model: Model) -> None:
    counted = Counted(model)
    first = tasks.search_with(counted.embedder, folder, "the mill")
    whole = first.index.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    metadata = whole[8 : 8 + header]
    digest = next(iter(search_index.read_index(first.index, 24)))
    damages = {
        "cut": whole[:-3],
        "empty": b"",
        "no header": b"\xff" * 8 + whole[8:],
        "not json": whole[:8] + b"x" * header + whole[8 + header :],
        "other format": whole.replace(b"index 2", b"index 0"),
        "digest": whole.replace(digest.encode(), b"z" * 64),
        "digest twice": whole.replace(list(search_index.read_index(first.index, 24))[1].encode(), digest.encode()),
        "not finite": whole[:-4] + b"\xff\xff\xff\x7f",
        "another dtype": whole[:8] + metadata.replace(b'"F32"', b'"I32"') + whole[8 + header :],
    }
    for name, damaged in damages.items():
        assert damaged != whole, name
        first.index.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            search_index.read_index(first.index, 24)
        again = tasks.search_with(counted.embedder, folder, "the mill")
        assert again.embedded == 3, name
        assert len(again.notes) == 1
        assert "damaged and was made anew" in again.notes[0]
        assert again.hits == first.hits
        assert tasks.search_with(counted.embedder, folder, "the mill").notes == ()  # it was replaced
    first.index.write_bytes(whole)
    with pytest.raises(CheckpointError, match="vectors"):
        search_index.read_index(first.index, 25)


def test_spans_of_an_index_must_fit(folder: Path, model: Model) -> None:
    result = tasks.search_with(Counted(model).embedder, folder, "the mill")
    known = search_index.read_index(result.index, 24)
    name, part = next(iter(known.items()))
    for bad in ((5, 2, 1, 1), (-1, 2, 1, 1), (0, 2, 0, 1), (0, 2, 3, 1)):
        spans = (search_index.Span(*bad), *part.spans[1:])
        search_index.write_index(result.index, {name: search_index.Embedded(spans, part.vectors)}, 24)
        with pytest.raises(CheckpointError, match="fit together"):
            search_index.read_index(result.index, 24)


def test_an_index_that_cannot_be_kept_is_a_note(folder: Path, model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = tasks.search_with(Counted(model).embedder, folder, "the mill", index=tmp_path / "file" / "index")
    assert result.hits
    assert "was not kept" in " ".join(result.notes)


def test_an_interrupted_search_keeps_what_is_done(folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[tasks.search.__module__], "AT_ONCE", 1)
    counted = Counted(model)

    def stop(done: int, total: int) -> None:
        assert total == 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tasks.search_with(counted.embedder, folder, "the mill", on_embedded=stop)
    assert tasks.search_with(counted.embedder, folder, "the mill").embedded == 1


@pytest.mark.heavy
def test_two_processes_on_one_index(folder: Path, tmp_path: Path, model: Model) -> None:
    model.save(tmp_path / "bert")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{'the old ship ' * (i + 1)}")
    command = [sys.executable, "-m", "triptych", "search", str(folder), "the tide", "--json", "--model",
               str(tmp_path / "bert")]  # fmt: skip
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    outputs = [process.communicate(timeout=500) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    hits = [json.loads(out)["results"] for out, _ in outputs]
    assert hits[0] == hits[1] == hits[2]
    assert model.search(folder, "the tide").embedded == 0
    (kept,) = (tmp_path / "cache" / "triptych" / "search").iterdir()  # and nothing temporary beside it
    assert kept.suffix == ".safetensors"


# ---------------------------------------------------------------- picture


def test_the_plane_is_that_of_the_principal_components(folder: Path, model: Model) -> None:
    result = model.search(folder, "the old ship", k=2, tokens=4, overlap=0)
    at, shown, share = result.plane()
    assert at.shape == (1 + result.passages, 2)
    assert shown.tolist()[:2] == result.ranked.tolist()[:2]
    centred = result.vectors.astype(np.float64) - result.vectors.astype(np.float64).mean(0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    assert np.abs(np.abs(at[1:]) - np.abs(centred[shown] @ directions[:2].T)).max() < 1e-9
    assert share == pytest.approx((sizes[:2] ** 2).sum() / (sizes**2).sum())
    few, kept, _ = result.plane(most=3)
    assert (len(few), len(kept)) == (4, 3)
    assert np.abs(few[:3] - at[:3]).max() == 0
    with pytest.raises(InputError):
        result.plane(0)


def test_pictures(folder: Path, model: Model, tmp_path: Path) -> None:
    (folder / "<b>&.txt").write_text("the evening")
    result = model.search(folder, "the <old> ship", k=2, tokens=5)
    drawing = vector_plane.svg(result)
    assert "<desc>triptych search notes &lt;q&gt;</desc>" in vector_plane.svg(result, "triptych search notes <q>")
    assert drawing.count("<circle") == result.passages
    assert "&lt;b&gt;&amp;.txt" in drawing
    assert "<b>" not in drawing + vector_plane.html(result).split("<body")[1].split("<script")[0]
    for name in ("one.svg", "one.html"):
        vector_plane.save(tmp_path / name, result)
        vector_plane.save(tmp_path / name, result)  # its own files are replaced
    with pytest.raises(InputError, match="must end in"):
        vector_plane.save(tmp_path / "one.txt", result)
    (tmp_path / "mine.svg").write_text("<svg/>")
    with pytest.raises(triptych.TriptychError, match="not written by Triptych"):
        vector_plane.save(tmp_path / "mine.svg", result)


@pytest.mark.heavy
def test_a_png(folder: Path, model: Model, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "$x$.txt").write_text("the evening")
    vector_plane.save(tmp_path / "one.png", model.search(folder, "the $ship$", k=9, tokens=5))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
def test_the_page_names_the_hits(folder: Path, model: Model, tmp_path: Path) -> None:
    for i in range(200):
        (folder / f"{i}.txt").write_text(f"the river {'tide ' * (i % 7)}{i}")
    vector_plane.save(tmp_path / "one.html", model.search(folder, "the old ship", k=3))
    with Browser(tmp_path / "profile") as browser:
        tab = browser.open(tmp_path / "one.html")
        tab.wait('document.querySelectorAll("svg.plane circle").length > 0')
        names = tab.evaluate('[...document.querySelectorAll("svg.plane text")].map((one) => one.textContent)')
        assert len(names) == 4
        assert "query" in names
        assert tab.evaluate('document.querySelector("input[type=range]").hidden')
        assert not tab.console()


# ---------------------------------------------------------------- the command


def test_the_command(folder: Path, model: Model, tmp_path: Path, capsys: Captured) -> None:
    model.save(tmp_path / "bert")
    argv = ["search", str(folder), "the old ship", "--model", str(tmp_path / "bert"), "--k", "2"]
    out, err = said([*argv, "--picture", str(tmp_path / "one.svg")], capsys)
    assert "sea/both.txt:1" in out
    assert "3 new or changed" in err
    assert exists(tmp_path / "one.svg")
    out, err = said([*argv, "--json"], capsys)
    document = json.loads(out)
    assert [hit["file"] for hit in document["results"]] == [hit.file for hit in model.search(folder, argv[2], k=2).hits]
    assert (document["files"], document["embedded"]) == (3, 0)
    assert "all from the index" in err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["search", "FOLDER", " ", "--model", "m"], 2, "the query is empty"),
        (["search", "FOLDER", "x", "--model", "m", "--k", "0"], 2, "--k"),
        (["search", "FOLDER", "x", "--model", "m", "--picture", "x.gif"], 2, "--picture"),
        (["search", "FOLDER", "x", "--model", "m", "--picture", "none/x.svg"], 1, "No such directory"),
        (["search", "nowhere", "x", "--model", "BERT"], 1, "is not a folder"),
        (["search", "FOLDER", "x", "--model", "VIT"], 1, "reads images"),
    ],
)
def test_a_wrong_command_is_one_line(
    argv: list[str],
    code: int,
    says: str,
    folder: Path,
    model: Model,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    if "BERT" in argv:
        model.save(tmp_path / "bert")
    if "VIT" in argv:
        create(VIT).save(tmp_path / "vit")
    names = {"FOLDER": str(folder), "BERT": str(tmp_path / "bert"), "VIT": str(tmp_path / "vit")}
    assert says in refused([names.get(word, word) for word in argv], capsys, code)


def test_a_file_that_is_no_index_stays(tmp_path: Path) -> None:
    """An index that is damaged, or is of another model, is made anew; what never was one is left alone."""
    model, index = load(checkpoint("encoder")), tmp_path / "index"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the old mill\n")
    index.write_bytes(b"")
    assert model.search(tmp_path / "texts", "mill", index=index).hits
    index.write_bytes(index.read_bytes()[:-7])
    assert "damaged" in model.search(tmp_path / "texts", "mill", index=index).notes[0]
    index.write_bytes(STRANGER)
    with pytest.raises(InputError, match="is no index of a search"):
        model.search(tmp_path / "texts", "mill", index=index)
    assert index.read_bytes() == STRANGER


def test_sentences_of_a_tokenizer_are_its_ids() -> None:
    """What a transformers tokenizer returns is not a list of the names of its keys, whatever prepares sentences."""
    plain = load(checkpoint("encoder"))
    prepared = Model(plain.module, plain.tokenizer, {**plain.hf, "triptych_sentences": {"max_seq_length": 6}})
    rows = [[3, 5, 10, 4], [3, 6, 4]]
    assert torch.equal(prepared.encode({"input_ids": rows}), plain.encode(rows))
