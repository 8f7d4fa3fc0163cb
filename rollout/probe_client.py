"""Ask a running SGLang or vLLM server for completions with their logprobs; token ids in, token ids out.

For the audit: what does this server report? Standard library only, one request; it is repeated only where a server may
not know the seeds. What comes back is taken as it is, apart from what cannot be a completion at all.

Wire formats, as documented and found in both projects' sources (SGLang 0.5, vLLM 0.12):
    SGLang  POST /generate        input_ids, sampling_params, return_logprob -> meta_info.output_token_logprobs
    vLLM    POST /v1/completions  prompt (ids), n, logprobs 0, return_token_ids -> choices[].token_ids, logprobs
https://docs.sglang.io/basic_usage/native_api.html, https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from rhotrain.rollout.completion import SamplingParams

ServerKind = Literal["auto", "sglang", "vllm"]

BODY_START = 200
"""Characters of an answer that an error message quotes."""

UNKNOWN_FIELD = (400, 422, 500)
"""HTTP statuses with which SGLang servers refuse a sampling parameter that they do not know."""

MODELS_TIMEOUT = 10.0
"""Seconds that finding out the server's kind may take per request; generation has the caller's timeout."""


class ServerError(ValueError):
    """A server that cannot be audited. The message names the address, what came back and the fix."""


class _Refused(Exception):
    """A request with something in it that the server may not know."""


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """One completion as a server reports it; completion_ids and logprobs need not have the same length.

    finish_reason: `stop` or `length`. stop_reason: the id or string that ended it, where the server says so.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    text: str | None = None
    stop_reason: int | str | None = None


def probe(
    url: str,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    n: int,
    timeout: float,
    api_key: str | None = None,
    kind: ServerKind = "auto",
    tell: Callable[[str], None] | None = None,
) -> list[ServerCompletion]:
    """n completions of every prompt, prompt-major. timeout: seconds for the whole request. tell: is called with what
    should be known of how they were asked for.

    Raises ServerError when the server cannot be reached or does not answer with ids and logprobs, ValueError for n or
    prompts that make no request.
    """
    if n < 1 or not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"probe: n={n} and {len(prompts)} prompts; need n >= 1 and prompts with at least one token")
    server = _Server(url, timeout, api_key)
    found, model = server.identify(kind)
    ids = [list(prompt) for prompt in prompts]
    if found == "sglang":
        answers = _sglang(server, ids, sampling, n, tell)
    else:
        answers = _vllm(server, ids, sampling, n, model)
    if len(answers) != len(ids) * n:
        raise server.error(
            f"returned {len(answers)} completions for {len(ids)} prompts x {n}",
            "look at the server's log; it must support several completions per request",
        )
    return [
        ServerCompletion(tuple(ids[index // n]), *_checked(server, index, answer))
        for index, answer in enumerate(answers)
    ]


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class _Server:
    """An address, and how it is asked."""

    def __init__(self, url: str, timeout: float, api_key: str | None) -> None:
        base = url.strip() if "://" in url else f"http://{url.strip()}"
        self.url = base.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            known = False
        if not known:
            raise self.error("is no address", "give one such as http://localhost:30000")
        # A proxy of the environment cannot reach this machine's own addresses.
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self.opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    def error(self, what: str, fix: str) -> ServerError:
        return ServerError(f"{self.url}: {what}; {fix}")

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The JSON answer to a GET, or to a POST of `body`. Raises ServerError; HTTPError stands for its status."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self.headers)
        seconds = timeout or self.timeout
        try:
            with self.opener.open(request, timeout=seconds) as response:
                raw = response.read()
        except urllib.error.HTTPError:
            raise
        except TimeoutError:
            raise self._silent(path, seconds) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise self._silent(path, seconds) from None
            raise self.error(
                f"cannot be reached ({getattr(error, 'reason', None) or error!r})",
                "start the server, or correct host and port",
            ) from None
        try:
            return json.loads(raw)
        except ValueError:
            raise self.error(
                f"{path} did not answer with JSON, but with {_start(raw)}",
                "the address must be that of an SGLang or vLLM server itself",
            ) from None

    def _silent(self, path: str, seconds: float) -> ServerError:
        return self.error(
            f"{path} did not answer within {seconds:g} s", "raise the timeout, or ask for fewer or shorter completions"
        )

    def post(self, path: str, body: dict[str, Any], refusals: Sequence[int] = ()) -> Any:
        """`ask` with a body; an HTTP status other than 2xx is a ServerError too, one of `refusals` is _Refused."""
        try:
            return self.ask(path, body)
        except urllib.error.HTTPError as error:
            with error:
                start = _start(error.read())
            if error.code in refusals:
                raise _Refused(start) from None
            fix = {
                401: "give the server's API key (rhotrain audit reads it from RHOTRAIN_SERVER_KEY)",
                403: "give the server's API key (rhotrain audit reads it from RHOTRAIN_SERVER_KEY)",
                404: "check the address and the kind of server",
            }.get(error.code, "the server's log says why")
            raise self.error(f"{path} answered with HTTP status {error.code}: {start}", fix) from None

    def identify(self, kind: ServerKind) -> tuple[ServerKind, str]:
        """(kind, model name); the name is asked for only where the request needs it."""
        if kind == "sglang":
            return kind, ""
        for path in ("/get_model_info", "/model_info") if kind == "auto" else ():
            answer = self._get(path)
            if isinstance(answer, dict) and "model_path" in answer:
                return "sglang", ""
        answer = self._get("/v1/models")
        listed = answer.get("data") if isinstance(answer, dict) else None
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise self.error(
                "answers neither /get_model_info (SGLang) nor /v1/models (vLLM)",
                "give the address of an SGLang or vLLM server, and its API key if it needs one",
            )
        sglang = kind == "auto" and first.get("owned_by") == "sglang"
        return ("sglang" if sglang else "vllm"), first["id"]

    def _get(self, path: str) -> Any:
        """The answer, None where the server does not know the path or does not answer with JSON."""
        try:
            return self.ask(path, timeout=min(self.timeout, MODELS_TIMEOUT))
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 403):
                    raise self.error(
                        f"{path} answered with HTTP status {error.code}",
                        "give the server's API key (rhotrain audit reads it from RHOTRAIN_SERVER_KEY)",
                    ) from None
            return None
        except ServerError as error:
            if "JSON" in str(error):
                return None
            raise


def _start(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    return repr(text[:BODY_START]) if text else "nothing"


# ---- the two formats ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found in one completion, unchecked."""

    ids: Any
    logprobs: Any
    finish_reason: Any
    text: Any
    stop_reason: Any


def _sglang(
    server: _Server,
    prompts: list[list[int]],
    sampling: SamplingParams,
    n: int,
    tell: Callable[[str], None] | None,
) -> list[_Answer]:
    """Every prompt n times, each with a seed of its own: copies with one seed would all be the same completion."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "n": 1,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop_strings:
        params["stop"] = list(sampling.stop_strings)
    seeds = [(sampling.seed + index) % 2**31 for index in range(len(prompts) * n)]
    body = {
        "input_ids": [prompt for prompt in prompts for _ in range(n)],
        "sampling_params": [{**params, "sampling_seed": seed} for seed in seeds],
        "return_logprob": True,
    }
    try:
        found = server.post("/generate", body, UNKNOWN_FIELD)
    except _Refused as refused:
        # What else may be wrong with the request is wrong without the seeds too, and is told by the second answer.
        found = server.post("/generate", {**body, "sampling_params": [params] * len(seeds)})
        if tell is not None:
            tell(f"{server.url}: refused sampling_seed ({refused}); asked again without, so every run draws anew")
    if not isinstance(found, list) or not all(isinstance(answer, dict) for answer in found):
        raise server.error(f"/generate answered with {found!r:.{BODY_START}}", "need a list, one object per completion")
    return [_sglang_answer(server, index, answer) for index, answer in enumerate(found)]


def _sglang_answer(server: _Server, index: int, answer: dict[str, Any]) -> _Answer:
    meta = answer.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    pairs = meta.get("output_token_logprobs")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
        raise _missing(server, index, "meta_info.output_token_logprobs", "return_logprob must not be switched off")
    reason = meta.get("finish_reason")
    reason = reason if isinstance(reason, dict) else {"type": reason}
    return _Answer(
        ids=[pair[1] for pair in pairs],
        logprobs=[pair[0] for pair in pairs],
        finish_reason=reason.get("type"),
        text=answer.get("text"),
        stop_reason=reason.get("matched"),
    )


def _vllm(server: _Server, prompts: list[list[int]], sampling: SamplingParams, n: int, model: str) -> list[_Answer]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompts,
        "n": n,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if sampling.top_k:  # older servers switch it off with -1 and refuse 0; left out it is off in all
        body["top_k"] = sampling.top_k
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop_strings:
        body["stop"] = list(sampling.stop_strings)
    found = server.post("/v1/completions", body)
    choices = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise server.error(f"/v1/completions answered with {found!r:.{BODY_START}}", "need an object with choices")
    order = sorted(range(len(choices)), key=lambda i: _index(choices[i], i))
    return [_vllm_answer(server, index, choices[i]) for index, i in enumerate(order)]


def _index(choice: dict[str, Any], otherwise: int) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else otherwise


def _vllm_answer(server: _Server, index: int, choice: dict[str, Any]) -> _Answer:
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list):
        raise _missing(server, index, "logprobs.token_logprobs", "the server must allow logprobs")
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        ids = _named_ids(logprobs.get("tokens") if isinstance(logprobs, dict) else None)
    if ids is None:
        raise _missing(server, index, "token_ids", "use vLLM 0.10.2 or newer, which returns token ids")
    return _Answer(ids, values, choice.get("finish_reason"), choice.get("text"), choice.get("stop_reason"))


def _named_ids(tokens: Any) -> list[int] | None:
    """Ids of tokens written as `token_id:123`, what older servers return for return_tokens_as_token_ids."""
    if not isinstance(tokens, list):
        return None
    parts = [str(token).partition("token_id:") for token in tokens]
    if not all(not head and mark and tail.isdecimal() for head, mark, tail in parts):
        return None
    return [int(tail) for _, _, tail in parts]


# ---- checks ---------------------------------------------------------------------------------------------------------


def _missing(server: _Server, index: int, name: str, fix: str) -> ServerError:
    return server.error(f"completion {index} has no {name}", fix)


Fields = tuple[tuple[int, ...], tuple[float, ...], str, str | None, int | str | None]


def _checked(server: _Server, index: int, answer: _Answer) -> Fields:
    """The fields of ServerCompletion after prompt_ids. ServerError for what is no completion."""
    for i, token in enumerate(answer.ids):
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise server.error(f"completion {index}: token {i} is {token!r:.40}, not an id", "need token ids, not text")
    for i, value in enumerate(answer.logprobs):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise server.error(
                f"completion {index}: the logprob of token {i} is {value!r:.40}",
                "its logits were not finite or it left the value out; look at the server's log and dtype",
            )
    if not answer.ids:
        raise server.error(f"completion {index} is empty", "raise max_new_tokens, or look at the server's log")
    reason = answer.finish_reason
    if reason not in ("stop", "length"):
        raise server.error(
            f"completion {index} ended with finish_reason {reason!r}", "need stop or length; look at the server's log"
        )
    return (
        tuple(answer.ids),
        tuple(float(value) for value in answer.logprobs),
        reason,
        answer.text if isinstance(answer.text, str) else None,
        answer.stop_reason if isinstance(answer.stop_reason, int | str) else None,
    )
