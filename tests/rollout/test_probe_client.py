"""The probe client against stand-ins of both servers: their documented formats, on top of our own engine."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import pytest
from helpers_model import tiny_model
from helpers_rollout import make_prompts, one_thread  # noqa: F401

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.probe_client import ServerCompletion, ServerError, probe
from rhotrain.rollout.replay import decode_logprobs

PROMPTS = make_prompts(4, 9)
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=12, seed=3)


@cache
def served() -> LoadedModel:
    return tiny_model("llama")


@dataclass
class StandIn:
    """What a server does. kind: which API it has. change: called on an answer before it is sent, may replace it.
    status: of generating requests. refuses: status of requests with seeds, None where they are known.
    requests: (path, body, headers) that came in."""

    kind: str
    change: Any = None
    status: int = 200
    raw: bytes | None = None
    delay: float = 0.0
    key: str | None = None
    owner: str = "vllm"
    requests: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    refuses: int | None = None
    drawn: Iterator[int] = field(default_factory=count)

    @property
    def loaded(self) -> LoadedModel:
        return served()

    def get(self, path: str) -> Any:
        """The answer to a GET, None for 404."""
        if path == "/get_model_info" and self.kind == "sglang":
            return {"model_path": "tiny", "tokenizer_path": "tiny", "is_generation": True}
        if path == "/v1/models" and self.kind in ("vllm", "sglang, old"):
            return {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": self.owner}]}
        return None

    def post(self, path: str, body: Any) -> Any:
        if path == "/generate" and self.kind.startswith("sglang"):
            return [self._sglang(ids, p) for ids, p in zip(body["input_ids"], body["sampling_params"], strict=True)]
        if path == "/v1/completions" and self.kind == "vllm":
            return self._vllm(body)
        return None

    def _complete(self, ids: list[int], n: int, seed: int, sampling: SamplingParams) -> list[Completion]:
        engine = Engine(self.loaded, num_pages=100)
        return engine.generate([ids], sampling, n=n, first_sample=1000 * seed)[0]

    def _text(self, completion: Completion) -> str:
        return self.loaded.tokenizer.decode(list(completion.token_ids))

    def _sglang(self, ids: list[int], p: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=p["temperature"],
            top_p=p["top_p"],
            top_k=max(0, p["top_k"]),
            min_p=p["min_p"],
            max_new_tokens=p["max_new_tokens"],
            min_new_tokens=p["min_new_tokens"],
            stop_token_ids=tuple(p.get("stop_token_ids", ())),
            stop_strings=tuple(p.get("stop", ())),
        )
        # Without a seed every copy draws what it draws.
        (c,) = self._complete(ids, p["n"], p.get("sampling_seed", len(ids) + 7 * next(self.drawn)), sampling)
        stop = {"type": "stop", "matched": c.stop_reason}
        reason = stop if c.finish_reason == "stop" else {"type": "length", "length": len(c.token_ids)}
        meta = {
            "id": "x",
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "completion_tokens": len(c.token_ids),
            "output_token_logprobs": [[x, i, None] for x, i in zip(c.logprobs, c.token_ids)],
        }
        return {"text": self._text(c), "output_ids": list(c.token_ids), "meta_info": meta}

    def _vllm(self, p: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=p["temperature"],
            top_p=p["top_p"],
            top_k=p.get("top_k", 0),
            min_p=p["min_p"],
            max_new_tokens=p["max_tokens"],
            min_new_tokens=p["min_tokens"],
            stop_token_ids=tuple(p.get("stop_token_ids", ())),
            stop_strings=tuple(p.get("stop", ())),
        )
        choices: list[dict[str, Any]] = []
        for ids in p["prompt"]:
            for c in self._complete(ids, p["n"], p["seed"], sampling):
                logprobs = {"tokens": [f"token_id:{i}" for i in c.token_ids], "token_logprobs": list(c.logprobs)}
                own_stop = c.stop_reason in self.loaded.stop_token_ids
                choice = {
                    "index": len(choices),
                    "text": self._text(c),
                    "token_ids": list(c.token_ids) if p["return_token_ids"] else None,
                    "prompt_token_ids": ids,
                    "finish_reason": c.finish_reason,
                    "stop_reason": None if own_stop else c.stop_reason,
                    "logprobs": logprobs if p["logprobs"] is not None else None,
                }
                choices.append(choice)
        return {"id": "cmpl-1", "object": "text_completion", "choices": choices[::-1], "usage": {}}


@contextmanager
def running(server: StandIn) -> Iterator[str]:
    """The address of a server that runs inside."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, found: Any, status: int) -> None:
            if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                found, status = {"error": "unauthorized"}, 401
            raw = json.dumps({"detail": "Not Found"} if found is None else found).encode()
            if server.raw is not None and self.command == "POST":
                raw = server.raw
            self.send_response(404 if found is None else status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            server.requests.append((self.path, None, dict(self.headers)))
            self.answer(server.get(self.path), 200)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((self.path, body, dict(self.headers)))
            time.sleep(server.delay)
            seeds = any("sampling_seed" in p for p in body.get("sampling_params", ()))
            if server.refuses is not None and seeds:
                self.answer({"error": "unexpected keyword argument 'sampling_seed'"}, server.refuses)
                return
            found = server.post(self.path, body)
            if server.change is not None:
                found = server.change(found)
            self.answer(found, server.status)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def ask(server: StandIn, **options: Any) -> list[ServerCompletion]:
    with running(server) as url:
        return probe(url, PROMPTS, options.pop("sampling", SAMPLING), **{"n": 3, "timeout": 30.0, **options})


def check(server: StandIn, found: list[ServerCompletion]) -> None:
    """Prompt-major, and every completion's logprobs are those of our engine for its ids."""
    assert [list(c.prompt_ids) for c in found] == [prompt for prompt in PROMPTS for _ in range(3)]
    assert len({c.completion_ids for c in found}) == 6, "copies: the members of a group had one seed"
    pairs = [(c.prompt_ids, c.completion_ids) for c in found]
    for c, ours in zip(found, decode_logprobs(server.loaded, pairs, temperature=0.8)):
        assert c.logprobs == pytest.approx(ours.tolist(), abs=2e-5)
        assert c.text == server.loaded.tokenizer.decode(list(c.completion_ids))
        stopped = c.completion_ids[-1] in server.loaded.stop_token_ids
        assert c.finish_reason == ("stop" if stopped else "length")


# ---- both formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "found out"])
def test_ids_in_ids_out(kind: str, asked: bool) -> None:
    server = StandIn(kind)
    check(server, ask(server, kind=kind if asked else "auto"))
    bodies = [body for _, body, _ in server.requests if body is not None]
    assert len(bodies) == 1


def test_an_sglang_that_only_lists_its_model() -> None:
    server = StandIn("sglang, old", owner="sglang")
    check(server, ask(server))


def test_what_sglang_is_asked() -> None:
    server = StandIn("sglang")
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        min_p=0.1,
        max_new_tokens=5,
        min_new_tokens=2,
        stop_token_ids=(7,),
        stop_strings=("z",),
    )
    ask(server, sampling=sampling, kind="sglang")
    ((path, body, _),) = server.requests
    assert path == "/generate" and body["return_logprob"] is True
    assert body["input_ids"] == [prompt for prompt in PROMPTS for _ in range(3)]
    assert [p["sampling_seed"] for p in body["sampling_params"]] == list(range(6))
    first = body["sampling_params"][0]
    assert (first["top_k"], first["top_p"], first["min_p"], first["temperature"]) == (-1, 0.9, 0.1, 0.8)
    assert (first["max_new_tokens"], first["min_new_tokens"], first["n"]) == (5, 2, 1)
    assert (first["stop_token_ids"], first["stop"], first["no_stop_trim"]) == ([7], ["z"], True)


def test_what_vllm_is_asked() -> None:
    server = StandIn("vllm")
    ask(server, sampling=SamplingParams(temperature=0.8, top_k=9, max_new_tokens=5, seed=4), kind="vllm")
    (path, body, _) = server.requests[-1]
    assert path == "/v1/completions" and body["model"] == "tiny"
    assert (body["prompt"], body["n"], body["seed"]) == (PROMPTS, 3, 4)
    assert (body["top_k"], body["temperature"], body["max_tokens"]) == (9, 0.8, 5)
    assert (body["logprobs"], body["return_token_ids"], body["skip_special_tokens"]) == (0, True, False)
    assert "stop" not in body and "stop_token_ids" not in body


def test_vllm_is_not_asked_for_a_top_k_of_0() -> None:
    """Older servers refuse 0; newer ones take it for off, as they do its absence."""
    server = StandIn("vllm")
    check(server, ask(server))
    assert "top_k" not in server.requests[-1][1]


@pytest.mark.parametrize("status", [400, 422, 500])
def test_an_sglang_that_does_not_know_seeds_is_asked_once_more(status: int) -> None:
    server, told = StandIn("sglang", refuses=status), list[str]()
    check(server, ask(server, kind="sglang", tell=told.append))
    assert [["sampling_seed" in p for p in body["sampling_params"]] for _, body, _ in server.requests] == [
        [True] * 6,
        [False] * 6,
    ]
    (text,) = told
    assert text.startswith("http://127.0.0.1:") and "refused sampling_seed" in text and "without" in text


def test_an_sglang_that_refuses_something_else_is_asked_twice_at_most() -> None:
    told: list[str] = []
    server = StandIn("sglang", lambda found: {"message": "too long"}, status=400)
    with pytest.raises(ServerError, match=r"/generate answered with HTTP status 400: .*too long"):
        ask(server, kind="sglang", tell=told.append)
    assert len(server.requests) == 2 and not told


def test_stop_reasons_come_along() -> None:
    sampling = SamplingParams(temperature=0.8, max_new_tokens=40, stop_token_ids=tuple(range(5, 20)))
    for kind in ("sglang", "vllm"):
        found = ask(StandIn(kind), sampling=sampling)
        named = [c for c in found if c.stop_reason is not None]
        assert named and all(c.finish_reason == "stop" and c.completion_ids[-1] == c.stop_reason for c in named)


def test_an_older_vllm_names_ids_in_its_tokens() -> None:
    def change(found: Any) -> Any:
        for choice in found["choices"]:
            del choice["token_ids"]
        return found

    server = StandIn("vllm", change)
    check(server, ask(server))


def test_the_key_is_sent() -> None:
    server = StandIn("vllm", key="secret")
    assert len(ask(server, api_key="secret")) == 6
    for options in ({}, {"api_key": "wrong"}):
        with pytest.raises(ServerError, match="HTTP status 401; give the server's API key"):
            ask(StandIn("vllm", key="secret"), **options)


def test_proxies_of_the_environment_are_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert len(ask(StandIn("sglang"))) == 6


@pytest.mark.parametrize("form", ["{}/", "{}/v1", "{}/v1/"])
def test_forms_of_the_address(form: str) -> None:
    server = StandIn("sglang")
    with running(server) as url:
        assert len(probe(form.format(url), PROMPTS, SAMPLING, n=1, timeout=30)) == 2
        assert len(probe(url.removeprefix("http://"), PROMPTS, SAMPLING, n=1, timeout=30)) == 2


def test_lengths_that_differ_are_left_to_the_audit() -> None:
    """An id without its logprob is a finding, not an error."""

    def change(found: Any) -> Any:
        found["choices"][0]["logprobs"]["token_logprobs"].pop()
        return found

    found = ask(StandIn("vllm", change))
    assert sum(len(c.completion_ids) - len(c.logprobs) for c in found) == 1


# ---- servers that misbehave -----------------------------------------------------------------------------------------


def edit_sglang(**meta: Any) -> Any:
    def change(found: Any) -> Any:
        found[2]["meta_info"].update(meta)
        return found

    return change


def edit_vllm(**fields: Any) -> Any:
    def change(found: Any) -> Any:
        next(c for c in found["choices"] if c["index"] == 2).update(fields)
        return found

    return change


def values(*logprobs: Any) -> dict[str, Any]:
    return {"tokens": None, "token_logprobs": list(logprobs)}


BAD = {
    "sglang, no logprobs": (
        StandIn("sglang", edit_sglang(output_token_logprobs=None)),
        "completion 2 has no meta_info.output_token_logprobs; return_logprob must not",
    ),
    "sglang, null": (
        StandIn("sglang", edit_sglang(output_token_logprobs=[[-1.0, 5, None], [None, 6, None]])),
        "completion 2: the logprob of token 1 is None; its logits",
    ),
    "sglang, NaN": (
        StandIn("sglang", edit_sglang(output_token_logprobs=[[float("nan"), 5, None]])),
        "completion 2: the logprob of token 0 is nan",
    ),
    "sglang, -inf": (
        StandIn("sglang", edit_sglang(output_token_logprobs=[[float("-inf"), 5, None]])),
        "completion 2: the logprob of token 0 is -inf",
    ),
    "sglang, text for an id": (
        StandIn("sglang", edit_sglang(output_token_logprobs=[[-1.0, "a", None]])),
        "completion 2: token 0 is 'a', not an id",
    ),
    "sglang, empty": (StandIn("sglang", edit_sglang(output_token_logprobs=[])), "completion 2 is empty"),
    "sglang, aborted": (
        StandIn("sglang", edit_sglang(finish_reason={"type": "abort"})),
        "completion 2 ended with finish_reason 'abort'; need stop or length",
    ),
    "sglang, one answer": (StandIn("sglang", lambda found: found[0]), "/generate answered with {.*need a list"),
    "sglang, too few": (StandIn("sglang", lambda found: found[:5]), "returned 5 completions for 2 prompts x 3"),
    "vllm, no logprobs": (StandIn("vllm", edit_vllm(logprobs=None)), r"completion 2 has no logprobs.token_logprobs"),
    "vllm, no ids": (
        StandIn("vllm", edit_vllm(token_ids=None, logprobs={"tokens": ["a"], "token_logprobs": [-1.0]})),
        "completion 2 has no token_ids; use vLLM 0.10.2",
    ),
    "vllm, null": (
        StandIn("vllm", edit_vllm(logprobs=values(None, -1.0), token_ids=[5, 6])),
        "completion 2: the logprob of token 0 is None",
    ),
    "vllm, too many": (
        StandIn("vllm", lambda found: {"choices": found["choices"] * 2}),
        "returned 12 completions for 2 prompts x 3",
    ),
    "vllm, no choices": (StandIn("vllm", lambda found: {"error": "busy"}), "/v1/completions answered with {'error'"),
    "status": (
        StandIn("vllm", lambda found: {"message": "n must be 1"}, status=400),
        "HTTP status 400: .*n must be 1.*; the server's log says why",
    ),
    "not JSON": (StandIn("sglang", raw=b"<html>hello"), "/generate did not answer with JSON, but with '<html>hello'"),
    "another server": (StandIn("other"), "answers neither /get_model_info .SGLang. nor /v1/models .vLLM."),
}


@pytest.mark.parametrize("name", BAD)
def test_misbehaving_servers_are_named(name: str) -> None:
    server, message = BAD[name]
    with pytest.raises(ServerError, match=message) as caught:
        ask(server)
    assert str(caught.value).startswith("http://127.0.0.1:")
    assert "; " in str(caught.value), "an error ends with what to do"


def test_the_wrong_kind_is_named() -> None:
    with pytest.raises(ServerError, match=r"/generate answered with HTTP status 404.*check the address and the kind"):
        ask(StandIn("vllm"), kind="sglang")
    with pytest.raises(ServerError, match="answers neither"):
        ask(StandIn("sglang"), kind="vllm")


def test_a_slow_server_is_named() -> None:
    with pytest.raises(ServerError, match=r"/generate did not answer within 0.2 s; raise the timeout"):
        ask(StandIn("sglang", delay=1.0), timeout=0.2)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=rf"127.0.0.1:{port}: cannot be reached .*refused.*; start the server"):
        probe(f"http://127.0.0.1:{port}", PROMPTS, SAMPLING, n=1, timeout=5)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "http://host:port", "ftp://host"])
def test_no_address(url: str) -> None:
    with pytest.raises(ServerError, match="is no address; give one such as"):
        probe(url, PROMPTS, SAMPLING, n=1, timeout=5)


@pytest.mark.parametrize(("prompts", "n"), [([], 1), ([[]], 1), (PROMPTS, 0)])
def test_no_request(prompts: list, n: int) -> None:
    with pytest.raises(ValueError, match="probe: n="):
        probe("http://127.0.0.1:1", prompts, SAMPLING, n=n, timeout=5)


def test_imports_no_torch() -> None:
    """The client is for scripts too; only the settings' dataclass comes along."""
    code = "import sys, rhotrain.rollout.probe_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
