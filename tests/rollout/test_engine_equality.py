"""The engine against transformers: greedy tokens, and the logprobs of sampled ones."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from helpers_flash import StandIn, flash_stand_in
from helpers_model import FAMILIES, tiny_hf_model, tiny_model
from helpers_rollout import one_thread  # noqa: F401
from transformers import AutoModelForCausalLM

from rhotrain.kernels.logprob import token_logprobs
from rhotrain.model import smollm2
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadedModel, load_model
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine

NEW = 20
TIE = 1e-4
"""Positions where the two best logits lie closer than this are excused and counted."""

TIGHT: dict[str, Any] = {"num_pages": 24, "page_size": 4, "max_batch_tokens": 16}
"""Room for about two of the sequences below: chunks, mixed steps and preemption."""


SEEDS = {
    "llama": (2, 4),
    "qwen2": (1, 3),
    "qwen3": (2, 1),
    "qwen3_moe": (1, 5),
    "mistral": (1, 0),
    "gemma2": (2, 2),
    "phi3": (1, 2),
    "gpt2": (1, 5),
}
"""Seed of the model and of the prompts with which every row has many distinct tokens; asserted below."""


def load(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return tiny_model(family, SEEDS[family][0], dtype)


def load_hf(family: str) -> Any:
    """The same weights, as transformers runs them."""
    model = tiny_hf_model(family, SEEDS[family][0]).eval()
    model.set_attn_implementation("eager")
    return model


def make_prompts(family: str, vocab: int) -> list[list[int]]:
    rng = random.Random(SEEDS[family][1])
    return [[rng.randrange(5, vocab) for _ in range(n)] for n in (1, 3, 7, 12, 19, 26, 33, 40)]


Truth = list[tuple[list[int], list[float]]]


@cache
def truth(family: str) -> Truth:
    """Per prompt: transformers' greedy tokens, and at each position the gap between the two best logits."""
    vocab = load(family).vocab_size
    return hf_greedy(load_hf(family), make_prompts(family, vocab), vocab)


def hf_greedy(model: Any, prompts: list[list[int]], vocab: int) -> Truth:
    model.generation_config.eos_token_id = None
    padding = list(range(vocab, model.get_output_embeddings().weight.shape[0]))
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
            do_sample=False,
            max_new_tokens=NEW,
            suppress_tokens=padding or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best_two = torch.stack([step[0, :vocab] for step in out.logits]).topk(2).values
        gaps = (best_two[:, 0] - best_two[:, 1]).tolist()
        found.append((out.sequences[0, len(prompt) :].tolist(), gaps))
    return found


def assert_greedy(expected: Truth, groups: list[list[Completion]]) -> None:
    """Tokens equal; a row may leave the truth only at a tie. The rows that do are counted: at most one in twenty."""
    excused = 0
    for (tokens, gaps), group in zip(expected, groups, strict=True):
        assert len(set(tokens)) >= 5, "this row says little: choose another seed"
        for completion in group:
            assert completion.finish_reason == "length" and len(completion.token_ids) == NEW
            differing = [i for i in range(NEW) if completion.token_ids[i] != tokens[i]]
            if differing:
                assert gaps[differing[0]] < TIE, f"token {differing[0]} differs, {gaps[differing[0]]} apart"
                excused += 1
    assert excused <= sum(map(len, groups)) / 20, f"{excused} rows excused by ties: too many to prove equality"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    loaded = load(family)
    engine = Engine(loaded, num_pages=400, page_size=16)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    assert_greedy(truth(family), engine.generate(make_prompts(family, loaded.vocab_size), greedy, n=2))
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_forked_groups_in_a_tight_pool_and_shuffled_equal_transformers(family: str) -> None:
    """top_k=1 draws the best id through the sampling path, so that groups are really forked."""
    loaded = load(family)
    engine = Engine(loaded, **TIGHT)
    prompts = make_prompts(family, loaded.vocab_size)
    order = [5, 0, 7, 2, 6, 1, 4, 3]
    best = SamplingParams(top_k=1, max_new_tokens=NEW, ignore_eos=True)
    groups = engine.generate([prompts[i] for i in order], best, n=3)
    assert_greedy([truth(family)[i] for i in order], groups)
    stats = engine.stats
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0
    assert stats.prefill_tokens == sum(map(len, prompts)), "every prompt is run once for its whole group"
    assert stats.decode_tokens == len(prompts) * 3 * NEW
    assert engine.pool.free == engine.pool.num_pages


def full_logits(model: Any, prompt: list[int], completion: Completion, vocab: int) -> torch.Tensor:
    """Logits [N, vocab] that the completion's tokens are drawn from, by one plain forward over everything."""
    ids = torch.tensor([[*prompt, *completion.token_ids]], device=model.device)
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1, :vocab]


def logprobs_of(logits_NV: torch.Tensor, completion: Completion, temperature: float) -> torch.Tensor:
    x_NV = (logits_NV.double() / temperature).log_softmax(-1)
    return x_NV[torch.arange(len(x_NV)), list(completion.token_ids)]


def trainer_logprobs(
    loaded: LoadedModel, prompt: list[int], completion: Completion, temperature: float
) -> torch.Tensor:
    """What the trainer computes: packed forward, head, token_logprobs."""
    ids_T = torch.tensor([*prompt, *completion.token_ids], device=loaded.device)
    positions_T = torch.arange(len(ids_T), device=loaded.device)
    with torch.no_grad(), loaded.with_attention(PackedContext.make([len(ids_T)], device=loaded.device)):
        hidden_TH = loaded.hidden(ids_T, positions_T)
    logits_NV = loaded.head.logits(hidden_TH[len(prompt) - 1 : -1])
    targets_N = ids_T[len(prompt) :]
    return token_logprobs(logits_NV, targets_N, temperature=temperature, vocab_size=loaded.vocab_size).logprobs.cpu()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_logprobs_are_those_of_trainer_and_transformers(family: str, temperature: float) -> None:
    """Weights of std 0.15: with 0.5 two float32 paths, the trainer's among them, are 3 bounds from the truth."""
    loaded = tiny_model(family, initializer_range=0.15)
    model = tiny_hf_model(family, initializer_range=0.15).eval()
    model.set_attn_implementation("eager")
    prompts = make_prompts(family, loaded.vocab_size)[2:6]
    params = SamplingParams(temperature=temperature, max_new_tokens=NEW, seed=3)
    engine = Engine(loaded, **TIGHT)
    differences = []
    for prompt, group in zip(prompts, engine.generate(prompts, params, n=3), strict=True):
        for completion in group:
            found = torch.tensor(completion.logprobs, dtype=torch.float64)
            logits = full_logits(model, prompt, completion, loaded.vocab_size)
            bound = 1e-5 * max(1.0, float(logits.abs().max()) / temperature / 10)
            for expected in (
                logprobs_of(logits, completion, temperature),
                trainer_logprobs(loaded, prompt, completion, temperature).double(),
            ):
                assert (found - expected).abs().max() <= bound
                differences.append((found - expected).abs())
    assert torch.cat(differences).mean() < 1e-5
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_sampler_and_trainer_agree_to_rounding(family: str) -> None:
    loaded = load(family, torch.float64)
    prompts = make_prompts(family, loaded.vocab_size)[2:5]
    params = SamplingParams(temperature=0.7, max_new_tokens=NEW, seed=1)
    engine = Engine(loaded, **TIGHT)
    for prompt, group in zip(prompts, engine.generate(prompts, params, n=2)):
        for completion in group:
            expected = trainer_logprobs(loaded, prompt, completion, 0.7)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-11
            )


# ---- every attention backend ----------------------------------------------------------------------------------------

BACKENDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "flash_attn3": ({}, ("flash_attn_with_kvcache",)),
    "flash_attn4": ({}, ("flash_attn_varlen_func",)),
    "flash_attn": ({"page_size": 256, "num_pages": 7}, ("flash_attn_varlen_func", "flash_attn_with_kvcache")),
    "torch_varlen": ({"page_size": 256, "num_pages": 7}, ("varlen_attn",)),
    "torch_varlen 2.11": ({}, ("varlen_attn",)),
}
"""Stand-ins that compute what the libraries document: sizes of the engine (two of them read pages of 256 only), and
functions that must have run."""


@pytest.fixture(params=BACKENDS)
def library(request: pytest.FixtureRequest) -> Iterator[tuple[StandIn, dict[str, Any]]]:
    """Inside, the CPU counts as a GPU with one attention library; yields it, and the engine's sizes."""
    size, functions = BACKENDS[request.param]
    with flash_stand_in(request.param) as stand_in:
        yield stand_in, {**TIGHT, **size}
    for name in functions:
        assert stand_in.calls[name] > 0, f"{name} was not called"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_equals_transformers_over_every_library(family: str, library: tuple[StandIn, dict[str, Any]]) -> None:
    loaded = load(family)
    prompts = make_prompts(family, loaded.vocab_size)[3:7]
    best = SamplingParams(top_k=1, max_new_tokens=NEW, ignore_eos=True)
    engine = Engine(loaded, **library[1])
    assert_greedy(truth(family)[3:7], engine.generate(prompts, best, n=2))
    assert engine.stats.preemptions > 0 or engine.pool.page_size == 256


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_in_float64_every_library_agrees_with_the_trainer(family: str, library: tuple[StandIn, dict[str, Any]]) -> None:
    """The trainer's forward takes the same library, and PyTorch's own attention for comparison."""
    loaded = load(family, torch.float64)
    prompts = make_prompts(family, loaded.vocab_size)[3:5]
    params = SamplingParams(temperature=0.7, max_new_tokens=NEW, seed=1)
    for prompt, group in zip(prompts, Engine(loaded, **library[1]).generate(prompts, params, n=2)):
        for completion in group:
            found = torch.tensor(completion.logprobs, dtype=torch.float64)
            for backend in ("auto", "sdpa"):
                loaded.attention.backend = backend  # type: ignore[assignment]
                expected = trainer_logprobs(loaded, prompt, completion, 0.7)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def smollm2_prompts(loaded: LoadedModel) -> list[list[int]]:
    texts = ["What is 3 + 4?", "Name three colours and one animal.", "Reply with the number only: 12 - 5 ="]
    prompts = []
    for text in texts:
        rendered = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(loaded.tokenizer.encode(rendered, add_special_tokens=False))
    return prompts


@pytest.mark.slow
def test_smollm2_equals_transformers_and_the_trainer() -> None:
    loaded = load_model("smollm2", device="cpu")
    prompts = smollm2_prompts(loaded)
    engine = Engine(loaded, num_pages=60)
    for temperature in (0.6, 1.0, 1.3):
        params = SamplingParams(temperature=temperature, max_new_tokens=NEW, seed=2)
        differences = []
        for prompt, group in zip(prompts, engine.generate(prompts, params, n=2)):
            for completion in group:
                expected = trainer_logprobs(loaded, prompt, completion, temperature)
                differences.append((torch.tensor(completion.logprobs) - expected).abs())
        joined = torch.cat(differences)
        assert joined.max() <= 1e-4 and joined.mean() < 1e-5
    best = SamplingParams(top_k=1, max_new_tokens=NEW, ignore_eos=True)
    groups = engine.generate(prompts, best, n=2)
    model = AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32).eval()
    assert_greedy(hf_greedy(model, prompts, loaded.vocab_size), groups)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_on_cuda(family: str) -> None:
    loaded = load(family)
    loaded.model.to("cuda")
    prompts = make_prompts(family, loaded.vocab_size)
    expected = hf_greedy(load_hf(family).to("cuda"), prompts, loaded.vocab_size)
    engine = Engine(loaded, **TIGHT)
    best = SamplingParams(top_k=1, max_new_tokens=NEW, ignore_eos=True)
    assert_greedy(expected, engine.generate(prompts, best, n=3))
    assert engine.stats.preemptions > 0
