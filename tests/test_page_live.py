"""The page's interpreter in a real browser computes what Python computes on the same int8 weights."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import parity
import references
import tiny
from browser import CHROMIUM, Browser, Tab
from live_pages import in_browser, in_python, interpreter_page, section, without
from test_program import MODULES
from triptych.model import Model
from triptych.page.live_export import export
from triptych.page.sections import defined

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]
WITHIN = 1e-3
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    folder = tmp_path_factory.mktemp("live")
    with Browser(folder / "profile") as browser:
        yield browser.open(interpreter_page(folder / "interpreter.html"))


def apart(a: Tensor, b: Tensor) -> float:
    assert a.numel() == b.numel()
    return float((a.flatten() - b.flatten()).abs().max())


@pytest.mark.parametrize("name", MODULES)
def test_every_part_computes_what_python_computes(name: str, tab: Tab) -> None:
    """With WebAssembly, in plain JavaScript, and, where there is a decoder, through the cache."""
    model = Model(MODULES[name]())
    target = parity.TARGETS[1] if model.spec.layout == "encoder-decoder" else None
    exported = export(model)
    expected = in_python(model, exported, parity.ROWS[0], target)
    wasm = in_browser(tab, model, exported, parity.ROWS[0], target)
    plain = in_browser(tab, model, exported, parity.ROWS[0], target, plain=True)
    assert apart(wasm, expected) <= WITHIN
    assert apart(wasm, plain) <= 1e-5 * max(1.0, float(expected.abs().max()))
    if model.spec.decoder is not None:
        cached = in_browser(tab, model, exported, parity.ROWS[0], target, cached=True)
        assert apart(cached, expected) <= WITHIN


@pytest.mark.parametrize("name", references.NAMES)
def test_every_family_computes_what_python_computes(name: str, tab: Tab) -> None:
    model = parity.ours(name)
    exported = export(model)
    targets = parity.targets_of(model)
    target = None if targets is None else targets[1]
    row = parity.rows_of(model)[0]
    expected = in_python(model, exported, row, target)
    assert apart(in_browser(tab, model, exported, row, target), expected) <= WITHIN


def _no_head(h: int) -> Callable[[Tensor], Tensor]:
    def edit(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, h] = 0
        return z

    return edit


@pytest.mark.parametrize(
    ("cuts", "site", "edit"),
    [
        (["decoder.blocks.1.attn:3"], "decoder.blocks.1.attn.z", _no_head(3)),
        (["decoder.blocks.0.cross:5"], "decoder.blocks.0.cross.z", _no_head(5)),
        (["encoder.blocks.1.attn:0"], "encoder.blocks.1.attn.z", _no_head(0)),
        (["decoder.blocks.1.mlp"], "decoder.blocks.1.mlp.out", torch.zeros_like),
        (["encoder.blocks.0.mlp"], "encoder.blocks.0.mlp.out", torch.zeros_like),
    ],
)
def test_a_part_that_is_cut_adds_nothing(
    cuts: list[str], site: str, edit: Callable[[Tensor], Tensor], tab: Tab
) -> None:
    model = Model(tiny.encoder_decoder())
    exported = export(model)
    row, target = parity.ROWS[0], parity.TARGETS[1]
    whole = in_python(model, exported, row, target)
    expected = in_python(model, exported, row, target, edits={site: edit})
    assert apart(whole, expected) > 0.05
    assert apart(in_browser(tab, model, exported, row, target, how={"cuts": cuts}), expected) <= WITHIN


@pytest.mark.parametrize("name", ["rope", "window"])
@pytest.mark.parametrize("switch", ["mask", "scale"])
def test_the_mask_and_the_scale_can_be_switched_off(name: str, switch: str, tab: Tab) -> None:
    model = Model(MODULES[name]())
    exported = export(model)
    changed = without(exported.lowered, **{switch: True})
    whole = in_python(model, exported, parity.ROWS[0])
    expected = in_python(model, exported, parity.ROWS[0], program=changed)
    assert apart(whole, expected) > 0.05
    assert apart(in_browser(tab, model, exported, parity.ROWS[0], how={switch: False}), expected) <= WITHIN


def test_a_wrong_weight_shows(tab: Tab) -> None:
    """The comparison above is not blind: one code of one matrix, other than Python's, is beyond the tolerance."""
    model = Model(tiny.decoder())
    exported = export(model)
    expected = in_python(model, exported, parity.ROWS[0])
    place = exported.tensors["decoder.blocks.0.attn.v.weight"]["offset"]
    data = bytearray(exported.data)
    data[place] ^= 0x40
    object.__setattr__(exported, "data", bytes(data))
    assert apart(in_browser(tab, model, exported, parity.ROWS[0]), expected) > WITHIN


def test_what_the_exporter_lets_through_is_what_the_interpreter_has(tab: Tab) -> None:
    assert set(tab.evaluate("Object.keys(operations)")) == set(defined("operation"))
    assert set(tab.evaluate("Object.keys(masks)")) == set(defined("mask"))


def test_a_cache_that_is_full_says_so(tab: Tab) -> None:
    made = "new Cache(2).extend(0, 'k', { shape: [3, 1, 1], data: new Float32Array(3) })"
    assert "holds 2 tokens" in tab.evaluate(
        f"(() => {{ try {{ {made}; }} catch (error) {{ return error.message; }} }})()"
    )


def test_halves_are_read_as_numpy_reads_them(tab: Tab) -> None:
    bits = torch.arange(0, 0x7C00, 7, dtype=torch.int16)
    expected = bits.view(torch.float16).double()
    assert tab.evaluate(f"{json.dumps(bits.tolist())}.map(half)") == expected.tolist()


@pytest.mark.weights
def test_the_webassembly_is_assembled_from_its_source(tmp_path: Path) -> None:
    """By the assembler of a package of PyPI, in a process of its own; tools/assemble.py writes the file anew."""
    command = [sys.executable, str(ROOT / "tools" / "assemble.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    if "could not get" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


# What an earlier run holds: `first` is run before `then`, and `then` also alone.  All values, attention weights and the
# number of vectors that went through a product are compared.
AFTER = """
((section, first, then, source) => {
  const how = (given) => ({ patterns: true, ...given, cuts: new Set(given.cuts ?? []) });
  const model = new LiveModel(section);
  let vectors = 0;
  const { kernel } = model.weights;
  const multiply = kernel.multiply.bind(kernel);
  kernel.multiply = (x, n, matrix) => ((vectors += n), multiply(x, n, matrix));
  const run = ([ids, given], earlier) => {
    const decodes = model.entries.decode;
    const encoder = source || !decodes ? model.encode(source ?? ids, how(given), [earlier?.encoder]) : null;
    const decoder = decodes ? model.decode(ids, how(given), encoder?.memory, null, [earlier?.decoder]) : null;
    return { encoder, decoder };
  };
  const before = run(first);
  vectors = 0;
  const after = run(then, before);
  const spent = vectors;
  vectors = 0;
  const alone = run(then);
  let worst = 0;
  const compare = (a, b) => {
    if (a.length !== b.length) throw new Error(`${a.length} and ${b.length} numbers`);
    a.forEach((x, i) => (worst = Math.max(worst, Math.abs(x - b[i]))));
  };
  for (const part of ["encoder", "decoder"]) {
    if (!alone[part]) continue;
    for (const [name, value] of alone[part].run.values) {
      const own = after[part].run.values.get(name);
      if (String(own.shape) !== String(value.shape)) throw new Error(`${name}: ${own.shape} and ${value.shape}`);
      compare(own.data, value.data);
    }
    for (const [name, { data }] of alone[part].run.patterns) compare(after[part].run.patterns.get(name).data, data);
  }
  return [worst, spent / vectors];
})"""
LONG = [7, 3, 11, 40, 5, 9, 2, 8]
CASES = {
    "goes on": (LONG, {}, [*LONG, 4], {}),
    "other end": (LONG, {}, [*LONG[:6], 1, 1, 1], {}),
    "shorter": (LONG, {}, LONG[:5], {}),
    "other start": (LONG, {}, [1, *LONG[1:]], {}),
    "nothing": (LONG, {}, LONG, {}),
    "cut and goes on": (LONG, {"cuts": ["CUT"]}, [*LONG, 4], {"cuts": ["CUT"]}),
    "cut": (LONG, {}, LONG, {"cuts": ["CUT"]}),
    "put back": (LONG, {"cuts": ["CUT"]}, LONG, {}),
    "other text and a cut": (LONG, {}, [*LONG, 4], {"cuts": ["CUT"]}),
    "scale off": (LONG, {}, LONG, {"scale": False}),
    "mask off": (LONG, {}, LONG, {"mask": False}),
    "goes on without a mask": (LONG, {"mask": False}, [*LONG, 4], {"mask": False}),
}
SPARED = {"goes on", "other end", "shorter", "nothing", "cut and goes on", "cut", "put back"}


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder_decoder"])
@pytest.mark.parametrize("case", CASES)
def test_what_an_earlier_run_holds_is_what_a_whole_run_computes(name: str, case: str, tab: Tab) -> None:
    model = Model(getattr(tiny, name)())
    exported = export(model)
    entry = exported.program["entries"]["encode" if name == "encoder" else "decode"]
    ports = [step["attributes"]["ports"][0] for step in entry["instructions"] if step["op"] == "attend"]
    first, how, then, other = CASES[case]
    cut = f"{ports[-1].rpartition('.')[0]}:1"
    given = json.dumps([[first, how], [then, other]]).replace("CUT", cut)
    source = parity.ROWS[0] if name == "encoder_decoder" else None
    arguments = f"{json.dumps(section(model, exported))}, ...{given}, {json.dumps(source)}"
    worst, spent = tab.evaluate(f"{AFTER}({arguments})")
    assert worst <= 1e-5
    if name == "decoder" and case in SPARED:
        assert spent <= {"nothing": 0, "goes on": 0.15, "other end": 0.4}.get(case, 0.9)
    if name == "decoder" and case not in SPARED:
        assert spent > 0.5


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gpt2", "mistral", "gpt-neox", "t5"])
def test_families_hold_the_first_tokens(name: str, tab: Tab) -> None:
    """Biases, mixtures, soft caps and windows: a text that goes on is what it is in one run."""
    model = parity.ours(name)
    source = parity.ROWS[0] if model.spec.layout == "encoder-decoder" else None
    arguments = f"{json.dumps(section(model, export(model)))}, {json.dumps([LONG, {}])}, {json.dumps([[*LONG, 4], {}])}"
    worst, spent = tab.evaluate(f"{AFTER}({arguments}, {json.dumps(source)})")
    assert worst <= 1e-4
    assert spent < 0.5
