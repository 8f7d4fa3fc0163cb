"""The attention function against transformers' eager attention on separate sequences: forward, gradients, decode."""

from typing import Any

import pytest
import torch
from helpers_model import FAMILIES, tiny_hf_model, tiny_model
from torch import Tensor

from rhotrain.kernels.paged_attention import PagedBatch
from rhotrain.model.attention import PackedContext, PagedContext
from rhotrain.model.load import LoadedModel
from rhotrain.model.probe import relative_l2

LENS = (9, 4, 13)
TOLERANCE = 1e-12
PROMPT, COMPLETIONS = 9, (5, 1, 8)


def sequences(lens: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 77, (n,), generator=generator) for n in lens]


def loss_weights(rows: int) -> Tensor:
    return torch.randn(rows, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def eager_model(family: str) -> Any:
    """The unmodified model with transformers' eager attention; eval, because gpt2 has dropout 0.1 in train mode."""
    model = tiny_hf_model(family, dtype=torch.float64).eval()
    model.set_attn_implementation("eager")
    return model


def reference(family: str, rows: list[Tensor], keep: list[slice]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the kept rows of each sequence, run alone, and the gradients of a random projection of them."""
    model = eager_model(family)
    parts = [model(input_ids=ids[None], use_cache=False).logits[0, kept] for ids, kept in zip(rows, keep)]
    logits = torch.cat(parts)
    (logits * loss_weights(len(logits))).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed(
    loaded: LoadedModel, ids: Tensor, positions: Tensor, context: PackedContext, keep: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    with loaded.with_attention(context):
        logits = loaded.head.logits(loaded.hidden(ids, positions)[keep])
        (logits * loss_weights(len(logits))).sum().backward()
    return logits.detach(), {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict], want: tuple[Tensor, dict]) -> None:
    assert relative_l2(got[0], want[0]) < TOLERANCE
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        scale = gradient.norm().clamp(min=1e-9)
        assert (got[1][name] - gradient).norm() / scale < 10 * TOLERANCE, name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str, checkpointing: bool) -> None:
    loaded = tiny_model(family, dtype=torch.float64, gradient_checkpointing=checkpointing)
    rows = sequences(LENS)
    positions = torch.cat([torch.arange(n) for n in LENS])
    got = packed(loaded, torch.cat(rows), positions, PackedContext.make(LENS), torch.arange(sum(LENS)))
    assert_same(got, reference(family, rows, [slice(None)] * len(rows)))
    assert loaded.attention.calls == loaded.num_layers * (2 if checkpointing else 1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompt_equals_separate(family: str, checkpointing: bool) -> None:
    """[prompt, c1, c2, c3]: the prompt is computed once, each completion's keys are the prompt's and its own."""
    loaded = tiny_model(family, dtype=torch.float64, gradient_checkpointing=checkpointing)
    prompt, *completions = sequences((PROMPT, *COMPLETIONS))
    starts = [PROMPT + sum(COMPLETIONS[:i]) for i in range(len(COMPLETIONS))]
    shared = torch.arange(PROMPT)
    index = [shared] + [torch.cat([shared, torch.arange(s, s + n)]) for s, n in zip(starts, COMPLETIONS)]
    context = PackedContext.make((PROMPT, *COMPLETIONS), (PROMPT, *(PROMPT + n for n in COMPLETIONS)), torch.cat(index))
    positions = torch.cat([shared, *(torch.arange(PROMPT, PROMPT + n) for n in COMPLETIONS)])
    keep = torch.arange(PROMPT, PROMPT + sum(COMPLETIONS))
    got = packed(loaded, torch.cat([prompt, *completions]), positions, context, keep)
    rows = [torch.cat([prompt, completion]) for completion in completions]
    assert_same(got, reference(family, rows, [slice(PROMPT, None)] * len(rows)))


class Pool:
    """A paged pool for two sequences whose pages lie in a shuffled order."""

    def __init__(self, loaded: LoadedModel, page_size: int = 4, pages: int = 16) -> None:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
        self.tables = torch.stack([order[: pages // 2], order[pages // 2 :]])
        self.page_size = page_size
        shapes, dtype = loaded.kv_shapes, loaded.dtype
        self.k = [torch.zeros(pages, page_size, heads, d, dtype=dtype) for heads, d, _ in shapes]
        self.v = [torch.zeros(pages, page_size, heads, e, dtype=dtype) for heads, _, e in shapes]

    def context(self, done: list[int], new: list[int]) -> PagedContext:
        slots = []
        for b, (start, count) in enumerate(zip(done, new)):
            at = torch.arange(start, start + count)
            slots.append(self.tables[b, at // self.page_size] * self.page_size + at % self.page_size)
        lens_k = tuple(a + b for a, b in zip(done, new))
        batch = PagedBatch.make(self.tables, new, lens_k, self.page_size)
        return PagedContext(self.k, self.v, torch.cat(slots), batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_paged_prefill_and_decode_equal_separate(family: str) -> None:
    """Prefill in two chunks of different size, then decode one token at a time, against one full forward each."""
    loaded = tiny_model(family, dtype=torch.float64)
    rows = sequences((17, 12))
    pool, done = Pool(loaded), [0, 0]
    collected: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for new in ([5, 3], [6, 2], *([[1, 1]] * 6)):
            ids = torch.cat([row[d : d + n] for row, d, n in zip(rows, done, new)])
            positions = torch.cat([torch.arange(d, d + n) for d, n in zip(done, new)])
            with loaded.with_attention(pool.context(done, new)):
                logits = loaded.head.logits(loaded.hidden(ids, positions))
            for part, piece in zip(collected, logits.split(new)):
                part.append(piece)
            done = [d + n for d, n in zip(done, new)]
        model = eager_model(family)
        want = torch.cat([model(input_ids=row[None, :d], use_cache=False).logits[0] for row, d in zip(rows, done)])
    assert relative_l2(torch.cat([torch.cat(part) for part in collected]), want) < TOLERANCE


def test_order_and_neighbours_do_not_matter() -> None:
    """A sequence's logits do not depend on what it is packed with (the leak that a padding mask would hide)."""
    loaded = tiny_model("llama", dtype=torch.float64)
    a, b, c = sequences((6, 7, 8))

    def logits_of_a(order: list[Tensor]) -> Tensor:
        lens = [len(s) for s in order]
        start = sum(lens[: next(i for i, s in enumerate(order) if s is a)])
        with torch.no_grad(), loaded.with_attention(PackedContext.make(lens)):
            hidden = loaded.hidden(torch.cat(order), torch.cat([torch.arange(n) for n in lens]))
        return loaded.head.logits(hidden[start : start + len(a)])

    assert torch.allclose(logits_of_a([a, b, c]), logits_of_a([c, b, a]), rtol=0, atol=1e-10)


def test_context_must_be_open_in_backward_under_checkpointing() -> None:
    loaded = tiny_model("llama", gradient_checkpointing=True)
    (ids,) = sequences((6,))
    with loaded.with_attention(PackedContext.make([6])):
        total = loaded.hidden(ids, torch.arange(6)).sum()
    with pytest.raises(RuntimeError, match="backward has ended"):
        total.backward()


def test_context_nests_and_is_restored() -> None:
    loaded = tiny_model("llama")
    outer, inner = PackedContext.make([2]), PackedContext.make([3])
    with loaded.with_attention(outer):
        with pytest.raises(KeyError), loaded.with_attention(inner):
            assert loaded.attention.context is inner
            raise KeyError
        assert loaded.attention.context is outer
    assert loaded.attention.context is None


def test_refuses_what_it_cannot_honour() -> None:
    loaded = tiny_model("llama")
    (ids,) = sequences((6,))
    positions = torch.arange(6)
    with pytest.raises(RuntimeError, match="with_attention"):
        loaded.hidden(ids, positions)
    with loaded.with_attention(PackedContext.make([5])), pytest.raises(ValueError, match=r"5 tokens.*6"):
        loaded.hidden(ids, positions)
    with loaded.with_attention(PackedContext.make([6])):
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
        with pytest.raises(ValueError, match="LlamaAttention: an attention mask"):
            loaded.body(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False)
        for module in loaded.model.modules():
            setattr(module, "attention_dropout", 0.1)  # noqa: B010 - not a declared attribute
        with pytest.raises(ValueError, match=r"dropout 0\.1"):
            loaded.hidden(ids, positions)


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "index", "message"),
    [
        ([0, 2], None, None, "lens_q"),
        ([3], [2], torch.arange(2), "lens_k"),
        ([3], [3, 4], torch.arange(7), "lens_k"),
        ([3], [5], None, "kv_index"),
        ([3], [5], torch.arange(4), r"4 entries; need sum\(lens_k\) = 5"),
    ],
)
def test_packed_context_checks_lengths(lens_q: list, lens_k: list, index: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedContext.make(lens_q, lens_k, index)


def test_offsets() -> None:
    context = PackedContext.make([2, 3], [2, 5], torch.tensor([0, 1, 0, 1, 2, 3, 4]))
    assert context.cu_q.dtype == torch.int32 and context.cu_q.tolist() == [0, 2, 5]
    assert context.cu_k.tolist() == [0, 2, 7]
