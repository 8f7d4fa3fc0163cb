"""Replayed logprobs against transformers and against the engine's report."""

import pytest
import torch
from helpers_model import FAMILIES, tiny_hf_model, tiny_model
from helpers_rollout import make_prompts, one_thread  # noqa: F401

from rhotrain.model.packed import packed_weights
from rhotrain.rollout import replay
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.replay import decode_logprobs

SEQUENCES = [(prompt, ids) for prompt, ids in zip(make_prompts(3, 17, 1, 8), make_prompts(9, 1, 5, 12))]


def by_transformers(family: str, temperature: float, vocab: int) -> list[torch.Tensor]:
    """log_softmax(logits / T) in float64, one unpadded forward per sequence."""
    model = tiny_hf_model(family, dtype=torch.float64).eval()
    model.set_attn_implementation("eager")  # SDPA has no softcap: transformers 5.17 leaves gemma2's out silently
    found = []
    for prompt, ids in SEQUENCES:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1, :vocab]
        chosen = torch.log_softmax(logits / temperature, -1)
        found.append(chosen.gather(1, torch.tensor(ids)[:, None])[:, 0])
    return found


@pytest.mark.parametrize(("family", "temperature"), [*((family, 0.6) for family in FAMILIES), ("llama", 1.0)])
def test_equals_transformers_in_float64(family: str, temperature: float) -> None:
    loaded = tiny_model(family, dtype=torch.float64)
    found = decode_logprobs(loaded, SEQUENCES, temperature=temperature, page_size=4)
    for ours, expected in zip(found, by_transformers(family, temperature, loaded.vocab_size), strict=True):
        assert ours.dtype == torch.float64 and ours.device.type == "cpu"
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equals_the_engine(page_size: int) -> None:
    loaded = tiny_model("llama")
    prompts = make_prompts(5, 30, 2)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=14, ignore_eos=True)
    groups = Engine(loaded, num_pages=300, page_size=page_size).generate(prompts, sampling, n=3)
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups) for completion in group]
    found = decode_logprobs(
        loaded, [(prompt, c.token_ids) for prompt, c in pairs], temperature=0.7, page_size=page_size
    )
    for ours, (_, completion) in zip(found, pairs, strict=True):
        torch.testing.assert_close(ours, torch.tensor(completion.logprobs), rtol=0, atol=2e-5)


def test_takes_the_decode_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefill of all prompts, then steps of one token per sequence that shrink as sequences end."""
    loaded = tiny_model("llama")
    steps = []
    hidden = type(loaded).hidden

    def spy(self: object, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self is loaded:  # a server thread of another test may still be decoding
            steps.append((type(loaded.attention.context).__name__, len(ids)))
        return hidden(self, ids, positions)  # type: ignore[arg-type]

    assert loaded.kv_shapes and packed_weights(loaded).why_not  # both run small forwards of their own
    monkeypatch.setattr(type(loaded), "hidden", spy)
    decode_logprobs(loaded, SEQUENCES, temperature=1.0)
    running = [sum(len(ids) > step for _, ids in SEQUENCES) for step in range(1, 12)]
    assert steps == [("PagedContext", n) for n in (29, *running)]


def test_long_prompts_run_in_several_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama")
    whole = decode_logprobs(loaded, SEQUENCES, temperature=1.0)
    monkeypatch.setattr(replay, "PROMPT_TOKENS", 10)
    for a, b in zip(whole, decode_logprobs(loaded, SEQUENCES, temperature=1.0), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_sequences_do_not_see_each_other() -> None:
    """A sequence whose values are NaN, in the pool too, leaves shorter and longer ones as they are without it."""
    loaded, clean = tiny_model("llama"), [SEQUENCES[3], ([9], [10, 11, 12, 13])]
    alone = decode_logprobs(loaded, clean, temperature=1.0, page_size=4)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[77] = torch.nan  # type: ignore[operator]
    both = decode_logprobs(loaded, [*clean, ([77, 77, 77], [5, 6, 7, 8])], temperature=1.0, page_size=4)
    assert both[2].isnan().all()
    for a, b in zip(alone, both):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_empty_completions_and_no_sequences() -> None:
    loaded = tiny_model("llama")
    assert decode_logprobs(loaded, [], temperature=1.0) == []
    empty, one = decode_logprobs(loaded, [([5, 6], []), ([7], [8])], temperature=1.0)
    assert empty.shape == (0,) and one.shape == (1,)


def test_leaves_no_graph_and_no_context() -> None:
    loaded = tiny_model("llama")
    (found,) = decode_logprobs(loaded, SEQUENCES[:1], temperature=1.0)
    assert not found.requires_grad
    assert loaded.attention.context is None


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([([], [5])], {}, "sequence 0: its prompt has no tokens"),
        ([([5], [6]), ([5], [96])], {}, "sequence 1: ids range from 5 to 96; need ids from 0 to 95"),
        ([([5], [6, -1])], {}, "sequence 0: ids range from -1"),
        ([([5] * 200, [6] * 57)], {}, "sequence 0: 257 tokens, but the model has 256 positions"),
        ([([5], [90])], {}, "outside"),  # a padding row of the head
        ([([5], [6])], {"page_size": 0}, "page_size: 0"),
        ([([5], [6])], {"temperature": 0.0}, "temperature: 0.0"),
    ],
)
def test_refuses(sequences: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_logprobs(tiny_model("llama"), sequences, **{"temperature": 1.0, **options})
