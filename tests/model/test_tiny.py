"""The preset tiny-sums: its questions, their split, and a warm start that is deterministic and half good."""

import hashlib
import random
from pathlib import Path

import pytest
import torch

from rhotrain.model import tiny
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadedModel, load_model


def test_questions_and_split() -> None:
    questions = tiny.all_questions()
    assert len({prompt for prompt, _ in questions}) == len(questions) == 1000
    for prompt, answer in questions:
        assert str(eval(prompt.rstrip("="))) == answer
    train, held_out = tiny.split_questions()
    assert (len(train), len(held_out)) == (750, 250)
    assert set(train) | set(held_out) == set(questions)
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in held_out}
    assert 0.4 < sum("+" in prompt for prompt, _ in held_out) / 250 < 0.6


def test_sum_question_never_draws_a_held_out_one() -> None:
    rng = random.Random(0)
    drawn = {tiny.sum_question(rng) for _ in range(5000)}
    assert not drawn & set(tiny.split_questions()[1])
    assert len(drawn) > 700
    assert tiny.sum_question(random.Random(7)) == tiny.sum_question(random.Random(7))


def test_tokenizer_is_one_token_per_character() -> None:
    tokenizer = tiny.build_tokenizer()
    assert len(tokenizer) == 16
    ids = tokenizer.encode("12-34=-22")
    assert len(ids) == 9 and len(set(ids)) == 6
    assert tokenizer.decode(ids) == "12-34=-22"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12-34=-22"  # pyright: ignore
    assert tokenizer.encode("x") == [tokenizer.unk_token_id]


def warm(steps: int, seed: int = 0) -> dict[str, torch.Tensor]:
    model = tiny.build_model(seed)
    tiny.warm_start(model, tiny.build_tokenizer(), seed=seed, steps=steps)
    return model.state_dict()


def test_warm_start_is_deterministic_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    first = warm(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    second = warm(3)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], tiny.build_model(0).state_dict()["lm_head.weight"])


def test_untrained_weights_are_transformers_in_size() -> None:
    own, theirs = tiny.build_model(0), tiny.AutoModelForCausalLM.from_config(tiny.build_model(0).config)
    for (name, mine), other in zip(own.named_parameters(), theirs.parameters()):
        assert float(mine.detach().std()) == pytest.approx(float(other.detach().std()), rel=0.1), name
        assert abs(float(mine.detach().mean() - other.detach().mean())) < 2e-3, name
    assert not torch.equal(own.lm_head.weight, tiny.build_model(1).lm_head.weight)


@pytest.mark.parametrize("size", [1e-15, 1e-13, 1e-2])
def test_the_warm_start_forgets_what_a_machine_rounds(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in every gradient, ten and a thousand times float64's rounding, changes no bit; above the grid it does."""
    plain = warm(20)
    real = torch.nn.utils.clip_grad_norm_
    generator = torch.Generator().manual_seed(0)

    def disturbed(parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        norm = real(parameters, max_norm)
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad.dtype == torch.float64
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad.mul_(1 + size * noise)
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", disturbed)
    noisy = warm(20)
    assert all(torch.equal(plain[name], noisy[name]) for name in plain) == (size < 1e-3)


def test_the_warm_start_computes_in_float64_throughout() -> None:
    """transformers' norms and rotary angles would round to float32 on the way."""
    model = tiny.build_model(0)
    twin = tiny._in_float64(model)
    ids = torch.tensor([[3, 4, 5, 13, 6, 15]])
    found, close = twin(input_ids=ids).logits, model(input_ids=ids).logits
    assert found.dtype == torch.float64 and torch.allclose(found.float(), close, atol=1e-5)
    for parameter in twin.parameters():
        parameter.data += 1e-12
    moved = (twin(input_ids=ids).logits - found).abs()
    assert float(moved.detach().min()) > 0 and float(moved.detach().max()) < 1e-9, (
        "a change far below float32's rounding shows"
    )
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.slow
def test_the_preset_has_the_same_bits_everywhere() -> None:
    """As made on an Intel Xeon with AVX-512 and with AVX2 alone."""
    state = warm(tiny.STEPS, tiny.SEED)
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    assert digest.hexdigest()[:16] == "9e8896c66d013df1"


def exact_share(loaded: LoadedModel, questions: tuple[tiny.QuestionText, ...], seed: int) -> float:
    """Share of questions whose sampled completion (T=1) is the answer and the end token."""
    generator = torch.Generator().manual_seed(seed)
    tokenizer = loaded.tokenizer
    rows = [tokenizer.encode(prompt) for prompt, _ in questions]
    starts = [len(row) for row in rows]
    with torch.no_grad():
        for _ in range(4):
            lens = [len(row) for row in rows]
            positions = torch.cat([torch.arange(n) for n in lens])
            ids = torch.tensor([i for row in rows for i in row])
            with loaded.with_attention(PackedContext.make(lens)):
                hidden = loaded.hidden(ids, positions)
            last = torch.tensor(lens).cumsum(0) - 1
            drawn = torch.multinomial(loaded.head.logits(hidden[last]).softmax(-1), 1, generator=generator)
            rows = [[*row, int(token)] for row, token in zip(rows, drawn)]
    wanted = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for _, answer in questions]
    hits = [row[start : start + len(want)] == want for row, start, want in zip(rows, starts, wanted)]
    return sum(hits) / len(hits)


def test_preset_is_half_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in an empty cache; room to rise, and enough right answers for a signal in most groups."""
    monkeypatch.setenv("RHOTRAIN_CACHE", str(tmp_path))
    loaded = load_model("tiny-sums", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == [f"tiny-sums-{tiny.VERSION}"]
    assert sum(p.numel() for p in loaded.parameters()) < 1_000_000
    assert loaded.stop_token_ids == (loaded.tokenizer.eos_token_id,)
    assert loaded.vocab_size == 16
    held_out = tiny.split_questions()[1]
    share = sum(exact_share(loaded, held_out, seed) for seed in (0, 1)) / 2
    assert 0.4 < share < 0.7
    monkeypatch.setattr(tiny, "warm_start", None)  # the second start must not train again
    again = load_model("tiny-sums", device="cpu")
    assert torch.equal(again.head.weight, loaded.head.weight)
