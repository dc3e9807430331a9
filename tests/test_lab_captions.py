"""The labs on drawn pictures: in small, broken, and with shuffled data; and the pictures on their page."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from lab_results import failed, passes
from triptych.errors import InputError
from triptych.media.image import png
from triptych.nn.attention import Attention
from triptych.page import PatchWeights, Picture, PicturesSection, render
from triptych.text import SEQ2SEQ, word_tokenizer
from triptych.train.data import HiddenWords
from triptych_lectures import labs
from triptych_lectures.data import scenes
from triptych_lectures.labs import drawn_pictures, frozen_captions
from triptych_lectures.labs.lab import Setup

TINY = {"scenes": 200, "judged": 20, "steps": 2, "control": 1, "rows": 8, "width": 16}


@pytest.mark.parametrize("full", [True, False])
def test_a_full_run_is_held_to_the_whole_claim_and_a_smaller_one_says_so(full: bool) -> None:
    result = labs.run("captions", Setup(sizes=TINY | {"scenes": 60, "judged": 8}, full=full))
    claim = drawn_pictures.WHOLE if full else drawn_pictures.SMALLER
    assert [check.least for check in result.checks] == [claim.exact, None, None, claim.on_object, None]
    assert ("smaller version" in result.remarks) is not full
    assert drawn_pictures.SMALLER.exact < drawn_pictures.WHOLE.exact
    assert drawn_pictures.SMALLER.on_object > 1  # more than equal weights


@pytest.mark.heavy
def test_a_decoder_that_learned_nothing_fails_and_its_page_is_drawn() -> None:
    result = labs.run("captions", Setup(sizes=TINY))
    assert failed(result) == {check.claim for check in result.checks if check.least is not None}
    assert "Captions of new pairs are not read from the image" in result.meaning
    assert "Cross-attention is not on the object that is named" in result.meaning
    page = render(result.question, result.sections)
    assert page.count("data:image/png;base64,") >= 3
    assert [section.kind for section in result.sections] == ["table", "table", "pictures", "curve"]


@pytest.mark.parametrize("name", ["captions", "frozen-captions"])
def test_held_out_scenes_that_are_not_new_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are other scenes than those of the training, of the same pairs."""
    for lab in (drawn_pictures, frozen_captions):
        monkeypatch.setattr(lab, "scenes", lambda count, seed, *, held_out=False: scenes.scenes(count, seed + held_out))
    tiny = {"scenes": 200, "judged": 8, "steps": 1, "rows": 4}
    more = {"control": 1, "width": 16} if name == "captions" else {"label_steps": 1, "text_steps": 1}
    result = labs.run(name, Setup(sizes=tiny | more))
    assert "held-out scenes whose pairs of a color and a shape training has, both" in failed(result)


def test_weights_are_counted_on_the_object_that_is_named() -> None:
    """Patterns made by hand: all weight on the named object, evenly spread, and on the other object."""
    subject = scenes.scenes(30, 2)
    seen = drawn_pictures.Captioned.__new__(drawn_pictures.Captioned)
    seen.scenes, seen.patch = subject, 6
    patches = (scenes.SIDE // seen.patch) ** 2
    right, even, wrong = [], [], []
    for scene in subject:
        count = len(scene.caption.split()) + 1
        words = len(scene.caption.split())
        places = ((1, 2), (words - 2, words - 1))
        pattern = torch.full((2, count, 1 + patches), 1 / (1 + patches))
        even.append(pattern)
        for patterns, objects in ((right, scene.objects), (wrong, scene.objects[::-1])):
            own = pattern.clone()
            for one, both in zip(objects, places, strict=True):
                on = torch.cat([torch.zeros(1), torch.from_numpy(one.patches(seen.patch)).float()])
                own[:, list(both)] = on / on.sum()
            patterns.append(own)
    seen.patterns = [right, even, wrong]
    on_object, spread, elsewhere = seen.on_objects()
    assert spread == pytest.approx(1.0)
    assert on_object > drawn_pictures.WHOLE.on_object
    assert elsewhere < 0.5


def test_hidden_words_are_a_share_and_never_the_start() -> None:
    texts = [scene.caption for scene in scenes.scenes(40, 0)]
    tokenizer = word_tokenizer(texts, 100, SEQ2SEQ)
    model = drawn_pictures.CaptionsLab(width=16).created(tokenizer, 0)
    assert model.spec.ids.start == tokenizer.pad_id
    rows = tuple(drawn_pictures.seq2seq([0], tokenizer.encode(text), tokenizer.pad_id) for text in texts)
    data = HiddenWords(rows, tokenizer.unk_id, drawn_pictures.HIDDEN)
    drawn = data.draw(0, 0, 40)
    assert all(row.ids[0] == tokenizer.pad_id for row in drawn)
    hidden = np.concatenate([row.ids[1:] == tokenizer.unk_id for row in drawn])
    assert abs(hidden.mean() - drawn_pictures.HIDDEN) < 0.1
    assert not any((row.targets == tokenizer.unk_id).any() for row in drawn)
    assert all((a.ids == b.ids).all() for a, b in zip(drawn, data.draw(0, 0, 40), strict=True))


SHAPES = {"judged": 200}


@pytest.mark.heavy
def test_a_vit_names_shapes() -> None:
    passes(labs.run("image-labels", Setup(sizes=SHAPES)))


@pytest.mark.heavy
def test_a_vit_on_shuffled_labels_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = drawn_pictures.shapes

    def mixed(count: int, seed: int) -> list[tuple[scenes.Pixels, str]]:
        pictures, labels = zip(*draw(count, seed), strict=True)
        return list(zip(pictures, np.random.default_rng(seed).permutation(labels).tolist(), strict=True))

    monkeypatch.setattr(drawn_pictures, "shapes", mixed)
    assert len(failed(labs.run("image-labels", Setup(sizes=SHAPES)))) >= 2


@pytest.mark.heavy
def test_a_vit_without_attention_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first vector then never hears of a patch."""
    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda part, *inputs: torch.zeros_like(forward(part, *inputs)))
    assert len(failed(labs.run("image-labels", Setup(sizes=SHAPES)))) >= 2


# ---------------------------------------------------------------- pictures on a page


def picture(weights: Any) -> Picture:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Picture("a <b>", png(pixels), [PatchWeights("word", np.asarray(weights, dtype=np.float64), "50%")])


def test_a_patch_is_the_darker_the_less_weight_it_has() -> None:
    section = PicturesSection("t", "n", [picture([[0.0, 0.1], [0.2, 0.4]])])
    covers = {(x, y): opacity for x, y, opacity in section.covers(section.pictures[0].words[0])}
    assert covers[1, 1] == 0
    assert covers[0, 0] > covers[1, 0] > covers[0, 1] > 0
    page = render("t", [section])
    assert "<b>" not in page.split("<main")[1].split("alt=")[1][:40]
    assert page.count("<rect ") == 4
    # A rule for a class that the section has too would lay out its heading and notes among the pictures.
    assert not re.search(r"^\.pictures\b", page, re.MULTILINE)
    assert " style=" not in page.split("<main")[1].split("</main>")[0]  # which the page's policy would not allow


@pytest.mark.parametrize("weights", [[0.5, 0.5], [[1.5]], [[-0.1]], [[float("nan")]]])
def test_weights_that_are_no_matrix_of_shares_are_refused(weights: Any) -> None:
    with pytest.raises(InputError, match="give a matrix"):
        PicturesSection("t", "", [picture(weights)])
