"""Does this model, here, compute what it should?  Every fast path against the plain one, and against transformers.

All of it runs in fp32 on a few short rows.  Differences are max |Δ log-softmax| of words, else max |Δ| of what the head
gives, or of the final hidden states where there is none.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych import generate as running
from triptych.errors import InputError
from triptych.model import Model, load
from triptych.nn import NO_TAPS, Row, Taps
from triptych.probe import Plan, Session, sites
from triptych.spec import (
    ClassHead,
    Embed,
    Frames,
    LMHead,
    MaskedLMHead,
    MoE,
    Patches,
    Pooling,
    ReplacedHead,
    SpanHead,
    TokenHead,
)

PEERS = ("transformers", "none")
# Where a config does not name its class: the one with our head.
AUTO: dict[type, str] = {
    LMHead: "AutoModelForCausalLM",
    MaskedLMHead: "AutoModelForMaskedLM",
    ClassHead: "AutoModelForSequenceClassification",
    TokenHead: "AutoModelForTokenClassification",
    SpanHead: "AutoModelForQuestionAnswering",
    ReplacedHead: "AutoModelForPreTraining",
}
UNNORMED = {"vit"}  # families whose last hidden state, over there, comes before the final norm
CHEAP = 1 << 30  # bytes of weights up to which a copy on disk is made
LONGEST = 32  # tokens of a row
TEXTS = (
    "The old mill stands where the river bends, and its wheel has not turned since the war.",
    "Three ships came in on the evening tide, heavy with salt.",
    "She counted the stairs twice: there were thirty-nine of them, and the last one was broken.",
)


@dataclass(frozen=True)
class Finding:
    """One comparison.  `limit` is what `difference` may reach, None where it is told and not judged."""

    name: str
    difference: float
    limit: float | None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        return None if self.limit is None else self.difference <= self.limit  # NaN does not pass


@dataclass(frozen=True)
class Layer:
    """How far one site is from the peer's: max |Δ| over max |theirs|."""

    site: str
    difference: float


@dataclass(frozen=True)
class Report:
    """What `check` found.  `layers` go from the embedding up, empty without a peer."""

    model: str
    threshold: float
    findings: tuple[Finding, ...]
    layers: tuple[Layer, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(finding.passed is not False for finding in self.findings)

    @property
    def first_difference(self) -> str | None:
        """The lowest site that is further from the peer's than the threshold."""
        return next((layer.site for layer in self.layers if not layer.difference <= self.threshold), None)

    def to_dict(self) -> dict[str, Any]:
        findings = [asdict(finding) | {"passed": finding.passed} for finding in self.findings]
        more = {"passed": self.passed, "first_difference": self.first_difference}
        return asdict(self) | {"findings": findings} | more


@dataclass
class _Case:
    """The model and the rows it is tried on; `targets` are the decoder's rows beside an encoder."""

    model: Model
    rows: Sequence[Row]
    targets: list[list[int]] | None
    threshold: float
    findings: list[Finding] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def decoded(self) -> list[list[int]]:
        """The rows whose tokens are predicted."""
        return [list(map(int, row)) for row in self.rows] if self.targets is None else self.targets

    def run(self, items: slice = slice(None), taps: Taps = NO_TAPS) -> list[Tensor]:
        targets = None if self.targets is None else self.targets[items]
        return run(self.model, self.rows[items], targets, taps)

    def found(self, name: str, difference: float, limit: float | None, note: str = "") -> None:
        self.findings.append(Finding(name, difference, limit, note))


def check(
    model: str | Path | Model,
    *,
    against: str | None = None,
    threshold: float = 1e-4,
    offline: bool = False,
    ignore: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Try every path of a model against the plain forward, and the model against a peer.

    `against` is `transformers`, `none`, or None for transformers where it is installed and knows the model.
    `progress` is told what comes next.  Raises InputError when the peer was asked for and cannot be had.
    """
    if against not in (None, *PEERS):
        raise InputError(f"against={against!r} is not one of {', '.join(PEERS)}")
    progress("loading in fp32")
    loaded = model if isinstance(model, Model) else load(model, dtype=torch.float32, offline=offline, ignore=ignore)
    case = _case(loaded, threshold)
    for step in (_alone, _causal, _cached, _chunked, _reading, _saved, _half):
        progress((step.__doc__ or "").partition(".")[0].lower())
        step(case)
    if against != "none" and _wanted(case, asked=against is not None):
        progress("the same rows through transformers")
        _against_transformers(case)
    return Report(
        str(loaded.path or "memory"), threshold, tuple(case.findings), tuple(case.layers), tuple(case.skipped)
    )


def run(model: Model, rows: Sequence[Row], targets: list[list[int]] | None, taps: Taps = NO_TAPS) -> list[Tensor]:
    """One uncached forward: each row's log-probabilities [T, V], other outputs of a head, or hidden states [T, D]."""
    module, device = model.module, model.device
    with torch.inference_mode():
        ids, where = module.flat(rows)
        if module.decoder is None:
            x = module.encode(ids, where, taps=taps)
        elif targets is None:
            x = module.decode(ids, where, taps=taps)
        else:
            held = module.remember(module.encode(ids, where, taps=taps), where, taps=taps)
            ids, where = running.flat(targets, device)
            x = module.decode(ids, where, cross=held, taps=taps)
        if not _headless(model):
            x = _measured(model, module.logits(x, where, taps))
    return list(x) if isinstance(model.spec.head, ClassHead) else where.split(x)


def apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """max |Δ| over rows of equal shapes; two -inf at one place do not differ."""
    return max(
        float(torch.where(a == b, 0.0, (a.double() - b.double()).abs()).max()) if a.numel() else 0.0
        for a, b in zip(ours, theirs, strict=True)
    )


def _measured(model: Model, logits: Tensor) -> Tensor:
    """What is compared of a head's output: of words their log-probabilities, of labels and ends the scores."""
    return torch.log_softmax(logits.double(), -1) if isinstance(model.spec.head, LMHead | MaskedLMHead) else logits


def _headless(model: Model) -> bool:
    return model.spec.head is None or isinstance(model.spec.head, Pooling)


def _case(model: Model, threshold: float) -> _Case:
    """Rows of three different lengths: real text where there is a tokenizer, else ids from a fixed seed.

    Frames and pixels are noise, as long as the model was made for: transformers takes no other length.
    """
    read = [n for n in (model.spec.vocab, model.spec.source_vocab) if n]
    if not read:
        return _Case(model, _noise(model), None, threshold)
    vocab, most = min(read), min(LONGEST, model.spec.context or LONGEST)
    if model.tokenizer is not None:
        rows = [ids[: most - 2 * i] for i, ids in enumerate(model.ids(TEXTS))]
    else:
        random = torch.Generator().manual_seed(0)
        special = {model.spec.ids.pad, model.spec.ids.bos, model.spec.ids.start, *model.spec.ids.eos}
        plain = torch.tensor([i for i in range(vocab) if i not in special])
        rows = [plain[torch.randint(len(plain), (most - 2 * i,), generator=random)].tolist() for i in range(3)]
    if model.spec.layout != "encoder-decoder":
        return _Case(model, rows, None, threshold)
    start = model.spec.ids.start
    if start is None:
        raise InputError(f"{model.path}: the config has no decoder_start_token_id, so the decoder cannot begin")
    source = rows if isinstance(model.spec.reads.embed, Embed) else _noise(model)
    return _Case(model, source, [[start, *row[: most // 2]] for row in (*rows[1:], rows[0])], threshold)


def _noise(model: Model) -> list[Tensor]:
    slot, random = model.spec.reads.embed, torch.Generator().manual_seed(0)
    if isinstance(slot, Frames):
        shape: tuple[int, ...] = (slot.stride * slot.position.length, slot.conv1.inputs)
    else:
        assert isinstance(slot, Patches)
        shape = (slot.channels, slot.image, slot.image)
    return [torch.randn(shape, generator=random) for _ in TEXTS]


def _alone(case: _Case) -> None:
    """A row of a batch against the row alone."""
    alone = [case.run(slice(i, i + 1))[0] for i in range(len(case.rows))]
    case.found("row in a batch = row alone", apart(case.run(), alone), case.threshold)


def _mixture(model: Model) -> bool:
    return any(isinstance(part, MoE) for _, part in model.spec.walk())


def _causal(case: _Case) -> None:
    """The past under a changed future: bit-equal."""
    if case.model.spec.decoder is None:
        return
    vocab = case.model.spec.vocab
    changed = [[*row[:-1], (row[-1] + 1) % vocab] for row in case.decoded]
    other = replace(case, rows=changed) if case.targets is None else replace(case, targets=changed)
    past = [[x[:-1] for x in outputs] for outputs in (case.run(), other.run())]
    # With another last token an expert's group has another size, for which a product may be summed in another order.
    limit, note = (case.threshold, "") if _mixture(case.model) else (0.0, "bit-equal")
    case.found("a changed last token leaves the past", apart(*past), limit, note)


def _cached(case: _Case) -> None:
    """Token by token through the cache against one forward."""
    if case.model.spec.decoder is None or _headless(case.model):
        return
    steps = min(len(row) for row in case.decoded) // 2
    state = _begin(case, [row[:-steps] for row in case.decoded])
    given: list[list[Tensor]] = [[] for _ in case.decoded]
    with torch.inference_mode():
        for step in range(steps + 1):
            for scores, told in zip(given, state.advance(), strict=True):
                scores.append(told)
            if step < steps:
                for row, whole in zip(state.rows, case.decoded, strict=True):
                    row.append(whole[len(row)])
    cached = [torch.log_softmax(torch.stack(row).double(), dim=-1) for row in given]
    plain = [x[-steps - 1 :] for x in case.run()]
    case.found("cached = uncached", apart(cached, plain), case.threshold, f"{steps} steps")


def _chunked(case: _Case) -> None:
    """A prompt read in chunks against one read at once."""
    if case.model.spec.decoder is None or _headless(case.model):
        return
    with torch.inference_mode():
        whole, parts = (
            torch.log_softmax(_begin(case, case.decoded).advance(chunk).double(), dim=-1) for chunk in (None, 5)
        )
    case.found("prefill in chunks = in one", apart([parts], [whole]), case.threshold, "chunks of 5")


def _begin(case: _Case, prompts: list[list[int]]) -> running.State:
    sources = None if case.targets is None else case.rows
    return running.start(case.model.module, prompts, sources=sources)


def _reading(case: _Case) -> None:
    """Reading every site: bit-equal."""
    names = [name for name in sites(case.model.spec) if name != "logits"]
    session = Session(Plan.of(case.model.spec, names))
    read = case.run(slice(1), session.taps)
    session.close()
    case.found(
        "reading inside leaves the output", apart(read, case.run(slice(1))), 0.0, f"{len(names)} sites, bit-equal"
    )


def _saved(case: _Case) -> None:
    """Saved and loaded again."""
    nbytes = sum(p.nbytes for p in case.model.module.parameters())
    if nbytes > CHEAP:
        case.skipped.append(f"save and load again: {nbytes / 2**20:,.0f} MiB of weights would be written")
        return
    with tempfile.TemporaryDirectory() as scratch:
        case.model.save(Path(scratch, "copy"))
        again = replace(case, model=load(Path(scratch, "copy"), device=case.model.device))
        case.found("saved, loaded = itself", apart(again.run(), case.run()), 0.0, "bit-equal")


def _half(case: _Case) -> None:
    """bf16 weights against fp32: told, not judged."""
    small = Model(copy.deepcopy(case.model.module).to(torch.bfloat16), case.model.tokenizer)
    case.found("bf16 against fp32", apart(replace(case, model=small).run(), case.run()), None, "not judged")


def _wanted(case: _Case, *, asked: bool) -> bool:
    """Whether to compare with transformers.  Raises InputError where it was asked for and cannot be done."""
    path, hf = case.model.path, case.model.hf or {}
    needs = ["transformers"] + ["gguf"] * (path is not None and path.suffix == ".gguf")
    missing = [name for name in needs if find_spec(name) is None]
    if path is None or hf.get("model_type") in (None, "triptych"):
        why = "the model has no twin in transformers"
    elif missing:
        why = f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})"
    else:
        return True
    if asked:
        raise InputError(f"cannot check against transformers: {why}")
    case.skipped.append(f"against transformers: {why}")
    return False


def _against_transformers(case: _Case) -> None:
    """Log-probabilities, and how the two drift apart from site to site."""
    peer = _peer(case.model)
    spec = case.model.spec
    prefixes = {name: f"{name}." if spec.layout == "encoder-decoder" else "" for name in spec.stacks}
    asked = [f"{p}{site}" for p in prefixes.values() for site in ("embed", "blocks.*.resid_post", "final")]
    worst: dict[str, float] = {}
    difference = 0.0
    for i, row in enumerate(case.rows):
        session = Session(Plan.of(spec, asked))
        ours = case.run(slice(i, i + 1), session.taps)
        trace = session.close()
        theirs = _their(peer, row, None if case.targets is None else case.targets[i])
        out = _their_output(theirs, case.model)
        difference = max(difference, apart(ours, list(out)))
        for name, stack in spec.stacks.items():
            states = theirs[f"{name}_hidden_states" if prefixes[name] else "hidden_states"]
            middle = [f"blocks.{b}.resid_post" for b in range(len(stack.blocks) - 1)]
            last = f"blocks.{len(stack.blocks) - 1}.resid_post" if spec.family in UNNORMED else "final"
            for site, state in zip(("embed", *middle, last), states, strict=True):
                full = prefixes[name] + site
                relative = apart(trace[full], list(state)) / float(state.abs().max())
                worst[full] = max(worst.get(full, 0.0), relative)
    case.layers += [Layer(site, value) for site, value in worst.items()]
    case.found("transformers", difference, case.threshold, f"{type(peer).__name__}, fp32")


def _peer(model: Model) -> Any:
    """The same checkpoint in transformers, from local safetensors or GGUF alone.  Raises InputError if it cannot."""
    import transformers

    assert model.path is not None
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    asked: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "attn_implementation": "eager"}
    if _mixture(model):
        asked["experts_implementation"] = "eager"  # their grouped kernel refuses some widths
    folder = model.path
    if folder.suffix == ".gguf":
        folder, asked["gguf_file"] = model.path.parent, model.path.name
    else:
        asked["use_safetensors"] = True
    names = (model.hf or {}).get("architectures") or [AUTO.get(type(model.spec.head), "AutoModel")]
    name = names[0]
    if name == AUTO[LMHead] and model.spec.encoder is not None:
        name = "AutoModelForSeq2SeqLM" if isinstance(model.spec.reads.embed, Embed) else "AutoModelForSpeechSeq2Seq"
    kind = getattr(transformers, name, transformers.AutoModel)
    try:
        with redirect_stderr(io.StringIO()):  # it draws a bar of its own whatever it is told
            return kind.from_pretrained(str(folder), **asked).eval()
    except Exception as error:  # it raises from a dozen families
        told = str(error).strip().partition("\n")[0]
        raise InputError(f"transformers cannot load {model.path} ({told}); leave it out with --against none") from error


def _their(peer: Any, row: Row, target: list[int] | None) -> Any:
    """Its outputs on one row, hidden states included; frames lie along its last axis."""
    if isinstance(row, Tensor):
        given = {"input_features": row.T[None]} if row.dim() == 2 else {"pixel_values": row[None]}
    else:
        given = {"input_ids": torch.tensor([row])}
    if target is not None:
        given["decoder_input_ids"] = torch.tensor([target])
    with torch.inference_mode():
        return peer(**given, output_hidden_states=True)


def _their_output(theirs: Any, model: Model) -> Tensor:
    """[1, T, ...] in the form of ours."""
    if _headless(model):
        return theirs["last_hidden_state"]  # type: ignore[no-any-return]
    if isinstance(model.spec.head, SpanHead):
        return torch.stack((theirs["start_logits"], theirs["end_logits"]), dim=-1)
    logits = theirs["logits"]
    return _measured(model, logits.unsqueeze(-1) if isinstance(model.spec.head, ReplacedHead) else logits)
