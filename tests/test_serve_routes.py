"""Vectors, ranks, labels, masks, recordings and tokens over HTTP are the library's own; so are lazy models, adapters
and figures."""

import http.client
import json
import struct
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra serve")

from served import model, server_of
from serving import running as serving
from test_serve_openai import ask
from triptych.media.audio import write_wav
from triptych.serve.app import Server
from triptych.serve.calls import FIRST
from triptych.serve.worker import ModelWorker
from triptych.tasks.labels import head_outputs

KINDS = ["decoder", "encoder", "labels", "ranks", "sentences", "hears"]
TEXTS = ["the old mill", "the ship came in on the evening tide", "tide"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(server_of(KINDS)) as port:
        yield port


def answered(port: int, route: str, body: Any) -> Any:
    status, answer, _ = ask(port, route, body)
    assert status == 200, answer
    return answer


# ---------------------------------------------------------------- vectors, ranks, labels, masks


def test_vectors_are_those_of_encode(port: int) -> None:
    answer = answered(port, "/v1/embeddings", {"model": "sentences", "input": TEXTS})
    found = torch.tensor([one["embedding"] for one in answer["data"]])
    expected = model("sentences").encode(TEXTS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(found, expected.flip(0), atol=1e-2)  # the control: they are told apart
    ids = model("sentences").ids(TEXTS)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    packed = answered(port, "/v1/embeddings", {"model": "sentences", "input": ids, "encoding_format": "base64"})
    raw = b64decode(packed["data"][1]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(expected[1].tolist(), abs=1e-5)


def test_many_texts_go_in_pieces_between_the_tokens_of_others() -> None:
    worker = ModelWorker(model("decoder"), "decoder", max_rows=8)
    lengths: list[int] = []
    encode = worker.model.encode
    try:
        worker.model.encode = lambda rows: (lengths.append(sum(map(len, rows))), encode(rows))[1]  # type: ignore[method-assign]
        with serving(Server({"decoder": worker})) as port:
            texts = [f"{i} tide" for i in range(300)]
            answer = answered(port, "/v1/embeddings", {"input": texts})
    finally:
        del worker.model.encode
    assert [one["index"] for one in answer["data"]] == list(range(300))
    torch.testing.assert_close(
        torch.tensor(answer["data"][7]["embedding"]), model("decoder").encode(["7 tide"])[0], atol=1e-5, rtol=0
    )
    assert lengths[0] <= FIRST
    assert len(lengths) > 1


def test_a_text_that_would_be_cut_is_refused_unless_it_may_be(port: int) -> None:
    body = {"model": "sentences", "input": "the old mill " * 9}
    status, answer, _ = ask(port, "/v1/embeddings", body)
    assert (status, "of which the model reads 16" in answer["error"]["message"]) == (400, True)
    cut = answered(port, "/v1/embeddings", body | {"truncate": True})
    expected = model("sentences").encode([body["input"]])[0]
    torch.testing.assert_close(torch.tensor(cut["data"][0]["embedding"]), expected, atol=1e-5, rtol=0)
    status, answer, _ = ask(port, "/v1/embeddings", {"model": "sentences", "input": "a", "dimensions": 8})
    assert (status, answer["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize("name", ["ranks", "sentences"])
def test_documents_are_ranked_in_both_shapes(port: int, name: str) -> None:
    one = model(name)
    if name == "ranks":
        scores = [of[0][1] for of in one.classify(["the river"] * 3, second=TEXTS)]
    else:
        unit = torch.nn.functional.normalize(one.encode(["the river", *TEXTS]), dim=-1)
        scores = (unit[1:] @ unit[0]).tolist()
    order = sorted(range(3), key=lambda i: -scores[i])
    cohere = answered(port, "/v1/rerank", {"model": name, "query": "the river", "documents": TEXTS, "top_n": 2})
    assert [of["index"] for of in cohere["results"]] == order[:2]
    assert [of["relevance_score"] for of in cohere["results"]] == pytest.approx(
        [scores[i] for i in order[:2]], abs=1e-5
    )
    tei = answered(port, "/rerank", {"model": name, "query": "the river", "texts": TEXTS, "return_text": True})
    assert [(of["index"], of["text"]) for of in tei] == [(i, TEXTS[i]) for i in order]
    assert [of["score"] for of in tei] == pytest.approx([scores[i] for i in order], abs=1e-5)


def test_a_document_is_cut_for_a_cross_encoder_where_it_may_be(port: int) -> None:
    body = {"model": "ranks", "query": "the river", "texts": ["the old mill " * 40], "raw_scores": True}
    status, answer, _ = ask(port, "/rerank", body)
    assert (status, "reads at most 72" in answer["error"]["message"]) == (400, True)
    (cut,) = answered(port, "/rerank", body | {"truncate": True})
    words = model("ranks").inputs.words
    row = words.encode_with_offsets("the river", body["texts"][0], max_length=72)[0]
    (logit,) = head_outputs(model("ranks").module, [row])
    assert cut["score"] == pytest.approx(float(logit), abs=1e-5)


def test_labels_and_masks_are_the_library_s(port: int) -> None:
    answer = answered(port, "/v1/classify", {"model": "labels", "input": TEXTS})
    for text, of in zip(TEXTS, answer["data"], strict=True):
        ranked = model("labels").classify([text])[0]
        assert of["label"] == ranked[0][0]
        assert dict(zip(answer["labels"], of["probs"], strict=True)) == pytest.approx(dict(ranked), abs=1e-5)
    texts = ["the old [MASK]", "[MASK] ship [MASK]"]
    filled = answered(port, "/v1/fill", {"model": "encoder", "input": texts, "top": 3})
    expected = model("encoder").fill(texts, top=3)
    for of, masks in zip(filled["data"], expected, strict=True):
        assert [[one["token"] for one in mask] for mask in of["masks"]] == [
            [word for word, _ in mask] for mask in masks
        ]
        assert of["masks"][0][0]["probability"] == pytest.approx(masks[0][0][1], abs=1e-5)


# ---------------------------------------------------------------- recordings and tokens


def recorded(port: int, route: str, content: bytes, **fields: str) -> tuple[int, bytes]:
    edge = "edge-of-parts"
    parts = [f'--{edge}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
             for name, value in fields.items()]  # fmt: skip
    file = f'--{edge}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode()
    body = b"".join([*parts, file, content, f"\r\n--{edge}--\r\n".encode()])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", route, body, {"content-type": f"multipart/form-data; boundary={edge}"})
        response = connection.getresponse()
        return response.status, response.read()


def test_a_recording_is_transcribed_and_anything_else_is_415(port: int, tmp_path: Any) -> None:
    sound = np.sin(np.arange(32_000) ** 1.3 / 20).astype(np.float32)
    path = tmp_path / "a.wav"
    write_wav(path, sound)
    expected = model("hears").transcribe(path, language="de", seed=0)
    assert len(expected.segments) > 1
    route, content = "/v1/audio/transcriptions", path.read_bytes()
    status, answer = recorded(port, route, content, model="hears", language="de", response_format="verbose_json")
    whole = json.loads(answer)
    assert (status, whole["text"], whole["language"]) == (200, expected.text, "de")
    assert [(one["start"], one["text"]) for one in whole["segments"]] == [
        (one.start, one.text) for one in expected.segments
    ]
    assert whole["duration"] == pytest.approx(len(sound) / 16_000)
    assert (
        recorded(port, route, content, model="hears", language="de", response_format="text")[1].decode().strip()
        == expected.text
    )
    assert recorded(port, route, content, model="hears", language="de", response_format="srt")[1].startswith(
        b"1\n00:00:"
    )
    for wrong in (b"ID3\x03 no sound", content[:100], b""):
        status, answer = recorded(port, route, wrong, model="hears")
        assert (status, json.loads(answer)["error"]["param"]) == (415, "file")
    status, answer = recorded(port, route, content, model="hears", prompt="names")
    assert (status, "prompt is not supported" in answer.decode()) == (400, True)
    status, answer = recorded(port, route, content, model="decoder")
    assert (status, "does not serve /v1/audio/transcriptions" in answer.decode()) == (400, True)


def test_a_recording_that_is_too_long_is_refused_before_it_is_decoded(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triptych.media.audio as media

    monkeypatch.setattr(media, "_decoded", lambda *_: pytest.fail("it was decoded"))
    header = (
        b"RIFF" + struct.pack("<I", 36 + 4_000_000) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 1000, 1000, 1, 8)
    )
    content = header + b"data" + struct.pack("<I", 4_000_000) + bytes(4_000_000)  # 4,000 s
    status, answer = recorded(port, "/v1/audio/translations", content, model="hears")
    assert (status, "3,600 are the limit" in answer.decode()) == (413, True)


def test_tokens_in_the_shapes_of_vllm_and_llama_cpp(port: int) -> None:
    ids = model("decoder").ids(["tide"])[0]
    vllm = answered(port, "/tokenize", {"model": "decoder", "prompt": "tide", "return_token_strs": True})
    assert (vllm["tokens"], vllm["count"], vllm["token_strs"]) == (ids, 4, list("tide"))
    llama = answered(port, "/tokenize", {"model": "decoder", "content": "tide", "with_pieces": True})
    assert llama["tokens"] == [{"id": token, "piece": piece} for token, piece in zip(ids, "tide", strict=True)]
    chat = {"model": "decoder", "messages": [{"role": "user", "content": "tide"}]}
    rendered = model("decoder").render(chat["messages"])  # type: ignore[arg-type]
    assert answered(port, "/tokenize", chat)["tokens"] == model("decoder").ids([rendered])[0]
    assert answered(port, "/detokenize", {"model": "decoder", "tokens": ids}) == {"prompt": "tide", "content": "tide"}
    assert ask(port, "/detokenize", {"model": "decoder", "tokens": [-1]})[0] == 400
    assert ask(port, "/tokenize", {"model": "decoder", "prompt": "a", "content": "a"})[0] == 400
    assert ask(port, "/tokenizer_info?model=decoder")[1]["chat_template"]


# ---------------------------------------------------------------- the server


def test_figures_count_what_was_asked_and_written() -> None:
    with serving(server_of(["decoder"])) as port:
        answered(port, "/v1/completions", {"prompt": "tide", "max_tokens": 5, "temperature": 0})
        ask(port, "/v1/completions", {"prompt": 5})
        ask(port, "/v9")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    asked = 'triptych_requests_total{method="POST",route="/v1/completions",status="%s"}'
    assert (figures[asked % 200], figures[asked % 400]) == ("1.0", "1.0")
    assert figures['triptych_requests_total{method="GET",route="other",status="404"}'] == "1.0"
    assert figures['triptych_prompt_tokens_total{model="decoder"}'] == "4.0"
    written = float(figures['triptych_generated_tokens_total{model="decoder"}'])
    assert 1 <= written <= 5
    assert figures['triptych_first_token_seconds_count{model="decoder"}'] == "1.0"
    assert float(figures['triptych_between_tokens_seconds_count{model="decoder"}']) == written - 1
    assert figures['triptych_rows_running{model="decoder"}'] == "0.0"
    assert float(figures['triptych_cache_bytes{model="decoder"}']) > 0


def test_every_route_is_described_and_every_description_is_a_route(port: int) -> None:
    from triptych.files import tables_of
    from triptych.serve import openapi

    described = tables_of(openapi.__file__)
    app = server_of(["decoder"]).app()
    known = {route.path.replace(":path}", "}") for route in app.routes}  # type: ignore[attr-defined]
    assert known - {"/openapi.json", "/"} == described["routes"].keys()
    document = answered_get(port, "/openapi.json")
    assert "/v1/audio/transcriptions" in document["paths"]
    assert "/api/chat" in document["paths"]
    for worker in app.state.server.workers.values():
        worker.stop()
    text = json.dumps(document)
    for name in set(text.split('"#/components/schemas/')[1:]):
        assert name.split('"')[0] in document["components"]["schemas"]
    body = document["paths"]["/v1/fill"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["top"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 100}
    assert body["required"] == ["input", "model"]


def answered_get(port: int, route: str) -> Any:
    status, answer, _ = ask(port, route)
    assert status == 200
    return answer


def test_a_lazy_model_is_loaded_once_by_whoever_comes_first() -> None:
    from triptych.serve.cards import card_of_model

    loaded, begun = [], threading.Event()

    def load() -> ModelWorker:
        loaded.append(1)
        begun.wait(60)
        return ModelWorker(model("decoder"), "decoder", max_rows=8)

    def broken() -> ModelWorker:
        raise RuntimeError("a secret of the loader")

    cards = [card_of_model(name, model("decoder")) for name in ("decoder", "broken")]
    server = Server({}, lazy={"decoder": load, "broken": broken}, cards=cards)
    with serving(server) as port:
        assert [one["id"] for one in answered_get(port, "/v1/models")["data"]] == ["decoder", "broken"]
        found: list[int] = []
        body = {"model": "decoder", "prompt": "a", "max_tokens": 2}
        first = [threading.Thread(target=lambda: found.append(ask(port, "/v1/completions", body)[0])) for _ in range(5)]
        for thread in first:
            thread.start()
        assert ask(port, "/health")[0] == 200  # the loop of events goes on
        begun.set()
        for thread in first:
            thread.join(60)
        assert (found, len(loaded)) == ([200] * 5, 1)
        status, answer, _ = ask(port, "/v1/completions", body | {"model": "broken"})
        assert (status, "secret" in json.dumps(answer)) == (503, False)


def test_adapters_share_the_tensors_of_their_base(tmp_path: Any) -> None:
    from cli_models import checkpoint
    from triptych import load
    from triptych.serve.loading import Loader

    base = checkpoint("decoder")
    for i in range(2):
        one = load(base)
        one.add_adapter(rank=2, seed=i)
        for name, parameter in one.module.named_parameters():
            if name.endswith(".up"):
                parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(i))
        one.save_adapter(tmp_path / f"a{i}")
    loader = Loader(max_rows=4)
    models = {"base": loader.model(str(base))} | {f"a{i}": loader.model(str(tmp_path / f"a{i}")) for i in range(2)}
    tensors = {name: {id(p): p.nbytes for p in of.module.parameters()} for name, of in models.items()}
    own = [sum(size for key, size in tensors[f"a{i}"].items() if key not in tensors["base"]) for i in range(2)]
    assert all(tensors["base"].keys() <= tensors[f"a{i}"].keys() for i in range(2))
    assert max(own) <= 4 * sum(p.numel() for p in load(tmp_path / "a0").module.parameters() if p.requires_grad)
    with serving(Server({name: ModelWorker(of, name, max_rows=4) for name, of in models.items()})) as port:
        body = {"prompt": "the mill", "max_tokens": 12, "temperature": 0}
        texts = {
            name: answered(port, "/v1/completions", body | {"model": name})["choices"][0]["text"] for name in models
        }
    assert len(set(texts.values())) == 3  # the control: each changes what is written
    for name, path in (("base", base), ("a0", tmp_path / "a0"), ("a1", tmp_path / "a1")):
        assert texts[name] == load(path).generate(["the mill"], max_new_tokens=12)[0].text
