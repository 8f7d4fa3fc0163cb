"""The preset tiny-sums: its questions, their split, and a warm start that is deterministic and half good."""

import random
from pathlib import Path
from typing import Any

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


def test_warm_start_is_deterministic_and_leaves_no_trace() -> None:
    tokenizer = tiny.build_tokenizer()

    def run() -> dict[str, torch.Tensor]:
        model = tiny.build_model(0)
        tiny.warm_start(model, tokenizer, steps=3)
        return model.state_dict()

    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first = run()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    second = run()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], tiny.build_model(0).state_dict()["lm_head.weight"])


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


def test_the_warm_start_goes_on_until_it_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and then two at a time, until the share asked for is there; the share is a sample's probability."""
    monkeypatch.setattr(tiny, "CHECK_EVERY", 2)
    monkeypatch.setattr(tiny, "MOST_STEPS", 9)
    shares = iter([0.1, 0.2, 0.6, 0.0])
    seen: list[float] = []

    def share(*_: Any) -> float:
        seen.append(next(shares))
        return seen[-1]

    monkeypatch.setattr(tiny, "sampled_share", share)
    steps: list[int] = []
    real = torch.optim.AdamW.step

    def step(self: Any, *args: Any) -> Any:
        steps.append(1)
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    tokenizer = tiny.build_tokenizer()
    tiny.warm_start(tiny.build_model(0), tokenizer, steps=2, until=0.5)
    assert seen == [0.1, 0.2, 0.6] and len(steps) == 2 + 2 + 2
    steps.clear()
    tiny.warm_start(tiny.build_model(0), tokenizer, steps=3)
    assert len(steps) == 3, "0 asks for nothing more"
    steps.clear()
    shares = iter([0.0] * 9)
    tiny.warm_start(tiny.build_model(0), tokenizer, steps=2, until=0.5)
    assert len(steps) == 9, "and there is an end"


def test_the_sampled_share_by_hand() -> None:
    tokenizer, model = tiny.build_tokenizer(), tiny.build_model(0)
    inputs, labels = tiny._table(tokenizer)
    row, wanted = inputs[:1], labels[0]
    p = model(input_ids=row).logits[0].detach().softmax(-1)
    by_hand = 1.0
    for k in range(1, len(wanted)):
        if wanted[k] >= 0:
            by_hand *= float(p[k - 1, wanted[k]])
    assert tiny.sampled_share(model, inputs[:1], labels[:1]) == pytest.approx(by_hand, rel=1e-5)


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
