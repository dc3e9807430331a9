"""lm-eval's `local-completions` against a running server: `python bench/serve_lm_eval.py MODEL`.

Needs lm-eval 0.4.13 or newer with its extra `api`.  For a decoder, log-likelihoods of pieces of a text, of which some
end with the end token, are compared with the library's own `logits`; the control compares them with those of the
requests one further.  For an encoder-decoder, `generate_until` is compared with `generate`, and log-likelihoods of a
target are read by `decoder_prefix`, which lm-eval's client does not send.
"""

import argparse
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn

import triptych
from triptych.serve.app import Server
from triptych.serve.worker import ModelWorker


@contextmanager
def serving(model: triptych.Model) -> Iterator[str]:
    """The address of a server of this model."""
    server = Server({"model": ModelWorker(model, "model", max_rows=16)})
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error"))
    thread = threading.Thread(target=lambda: running.run([listening]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


def client(address: str, **how: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(base_url=f"{address}/v1/completions", model="model", tokenizer_backend="remote", **how)


def requests_of(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def post(address: str, body: dict[str, Any]) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/completions", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@torch.inference_mode()
def likelihood(model: triptych.Model, source: list[int] | None, before: list[int], after: list[int]) -> float:
    """The log-probability of the ids `after` that follow `before`, by the library."""
    ids = [*before, *after]
    (logits,) = model.logits([ids]) if source is None else model.logits([source], [ids])
    scores = logits[len(before) - 1 : -1].float().log_softmax(-1)
    return float(scores.gather(-1, torch.tensor(after)[:, None]).sum())


def decoder(model: triptych.Model, text: str, count: int) -> None:
    words = model.inputs.words
    pieces = [text[i * 97 : i * 97 + 40 + 7 * (i % 60)] for i in range(count)]
    cuts = [len(piece) // 2 for piece in pieces]
    end = "" if words.eos_id is None else words.tokens([words.eos_id])[0]
    pairs = [
        (piece[:cut], piece[cut:] + end * (i % 5 == 0)) for i, (piece, cut) in enumerate(zip(pieces, cuts, strict=True))
    ]
    with serving(model) as address:
        lm = client(address, batch_size=8, num_concurrent=4)
        rows = [lm._encode_pair(*pair) for pair in pairs]  # it moves spaces from the context to the continuation
        start = time.perf_counter()
        found = lm._loglikelihood_tokens([(pair, *ids) for pair, ids in zip(pairs, rows, strict=True)])
        seconds = time.perf_counter() - start
    ours = [likelihood(model, None, *ids) for ids in rows]
    worst = max(abs(value - own) for (value, _), own in zip(found, ours, strict=True))
    control = max(abs(value - own) for (value, _), own in zip(found, [*ours[1:], ours[0]], strict=True))
    print(f"{len(pairs)} log-likelihoods, {sum(i % 5 == 0 for i in range(count))} end with the end token: largest "
          f"difference {worst:.2e} (control {control:.1f}); {seconds:.1f} s")  # fmt: skip
    assert worst <= 1e-4 < control


def both(model: triptych.Model, text: str, count: int) -> None:
    sources = [text[i * 97 : i * 97 + 40 + 7 * (i % 20)] for i in range(count)]
    settings = {"until": [], "max_gen_toks": 24, "temperature": 0}
    with serving(model) as address:
        lm = client(address, num_concurrent=4, eos_string="</s>")
        written = lm.generate_until(requests_of("generate_until", [(source, dict(settings)) for source in sources]))
        own = [one.text for one in model.generate(sources, max_new_tokens=24, stop=["</s>"])]
        same = sum(a == b for a, b in zip(written, own, strict=True))
        print(f"generate_until: {same} of {count} texts are the library's own")
        worst = 0.0
        start, words = model.spec.start_id(), model.inputs.words
        for source, target in zip(sources, [*sources[1:], sources[0]], strict=True):
            ids = words.encode(target, special=False)[:40]
            body = {"prompt": source, "decoder_prefix": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
            status, answer = post(address, body | {"temperature": 0})
            assert status == 200, answer
            value = sum(answer["choices"][0]["logprobs"]["token_logprobs"][1:-1])
            worst = max(worst, abs(value - likelihood(model, words.encode(source), [start], ids)))
        status, answer = post(address, {"prompt": sources[0], "echo": True, "logprobs": 1, "max_tokens": 1})
        print(f"decoder_prefix: largest difference {worst:.2e}; echo alone: {status} {answer['error']['message']}")
        assert (same, status) == (count, 400)
        assert worst <= 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "README.md")
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    model = triptych.load(options.model)
    text = options.text.read_text("utf-8") * 20
    check = both if model.spec.layout == "encoder-decoder" else decoder
    check(model, text, options.requests)


if __name__ == "__main__":
    main()
