"""The calls that `codegen.py` records: every variant that the public functions can launch, as a grid of what matters.

A case is one kind of call, made for several N, temperatures and bounds: none of them may need another binary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from typing import Any, cast

import torch
from torch import Tensor

from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import SavedStats, backward_rows, forward_rows, token_logprobs
from rhotrain.kernels.paged_kernels import decode_triton, write_triton
from rhotrain.kernels.policy_loss import policy_loss
from rhotrain.kernels.policy_rows import PolicyCall, PolicyInputs
from rhotrain.kernels.rows import KeptSet, check_rows
from rhotrain.kernels.sampling import sample_tokens
from rhotrain.kernels.spec import IGNORE_INDEX, KL_KINDS, OBJECTIVE_KINDS, KLKind, Objective, ObjectiveKind
from rhotrain.kernels.upstream import Upstream

COUNTS = (1, 2, 7, 128)
VOCAB = 1001
"""Odd: no row is a whole number of blocks or of 16 bytes. Nothing is compiled for this number."""
BOTH = (True, False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Rows:
    """The rows of one call. skipped: how many rows stand before them in the tensors they are a piece of."""

    logits: Tensor
    token_ids: Tensor
    temperature: float | Tensor
    kept: KeptSet | None
    skipped: int

    def numbers(self) -> Tensor:
        """One float32 number per row."""
        return torch.ones(self.token_ids.shape[0] + self.skipped)[self.skipped :]


def all_rows(
    dtype: torch.dtype, *, aligned: bool = True, kept: bool = False, grad: bool = True, skipped: int = 0
) -> Iterator[Rows]:
    """Every N and every form of temperature. aligned: rows start at multiples of 16 elements, as for a padded head."""
    columns = -(-VOCAB // 16) * 16 if aligned else VOCAB
    forms: tuple[float | None, ...] = (1.0, 0.7, None)  # None: one per row
    for count, form in [(7, form) for form in forms] + [(count, 0.7) for count in COUNTS]:
        sets = KeptSet.from_lists([[0, 5, 7]] * (count + skipped)) if kept else None
        yield Rows(
            torch.zeros(count, columns, dtype=dtype, requires_grad=grad),
            torch.zeros(count + skipped, dtype=torch.int64)[skipped:],
            torch.full((count,), 0.7) if form is None else form,
            None if sets is None else sets.rows(skipped, count + skipped),
            skipped,
        )


# ---- logprob.py -----------------------------------------------------------------------------------------------------


def logprobs(rows: Rows, entropy: bool) -> None:
    """Forward and backward."""
    out = token_logprobs(
        rows.logits,
        rows.token_ids,
        temperature=rows.temperature,
        vocab_size=VOCAB,
        entropy=entropy,
        kept=rows.kept,
        backend="triton",
    )
    values = [value for value in (out.logprobs, out.entropy, out.logsumexp) if value is not None]
    torch.autograd.backward(values, [rows.numbers() for _ in values])


# ---- policy_loss.py -------------------------------------------------------------------------------------------------


def objectives(kind: str, kl: str, bonus: bool) -> Iterator[Objective]:
    """One kind with several bounds and coefficients."""
    first = Objective(
        kind=cast(ObjectiveKind, kind),
        kl=cast(KLKind, kl),
        beta=0.0 if kl == "none" else 0.1,
        entropy_coef=0.01 if bonus else 0.0,
    )
    yield first
    yield replace(first, ratio_min=0.0, ratio_max=float("inf"), sapo_tau_pos=2.0, sapo_tau_neg=1.0)
    yield replace(first, beta=0.0 if kl == "none" else 1.0, entropy_coef=1.0 if bonus else 0.0)
    if kind == "grpo":
        yield replace(first, dual_clip=3.0)


def policy(rows: Rows, objective: Objective, *, all_inputs: bool, inplace: bool) -> None:
    """The loss and, for logits that require grad, their gradient."""
    rest = {name: rows.numbers() if all_inputs else None for name in ("old_logprobs", "importance")}
    inputs = PolicyInputs(
        advantages=rows.numbers(),
        weights=rows.numbers(),
        ref_logprobs=rows.numbers() if objective.uses_reference else None,
        **cast(Any, rest),
    )
    logits = rows.logits * 1 if inplace else rows.logits
    policy_loss(
        logits,
        rows.token_ids,
        inputs,
        objective,
        temperature=rows.temperature,
        vocab_size=VOCAB,
        kept=rows.kept,
        inplace=inplace,
        backend="triton",
    )


@dataclass(frozen=True)
class PolicyCase:
    """Constexprs of the policy kernel. quick: also in the default tests."""

    dtype: torch.dtype = torch.bfloat16
    kind: str = "grpo"
    kl: str = "k3"
    bonus: bool = True
    grad: bool = True
    kept: bool = False
    aligned: bool = True
    all_inputs: bool = True
    quick: bool = False

    def record(self, recorder: Any) -> None:
        with recorder.recording(f"policy_loss {self}"):
            numbers = cycle(product(objectives(self.kind, self.kl, self.bonus), (False, True)))
            for rows in all_rows(self.dtype, aligned=self.aligned, kept=self.kept, grad=self.grad):
                for objective, inplace in islice(numbers, 2):
                    inplace = inplace and self.dtype != torch.float16  # refused
                    policy(rows, objective, all_inputs=self.all_inputs, inplace=inplace)


def policy_cases() -> Iterator[PolicyCase]:
    """Every kind with every KL; for one pair every type, alignment and switch. The two do not meet in the kernel: the
    one is scalar algebra between the passes, the other is in the passes."""
    quick = {("grpo", "k3_unbiased"), ("sapo", "k3")}
    for kind, kl in product(OBJECTIVE_KINDS, KL_KINDS):
        yield PolicyCase(kind=kind, kl=kl, quick=(kind, kl) in quick)
        yield PolicyCase(kind=kind, kl=kl, bonus=False, all_inputs=False)
    for dtype, bonus, grad, kept, aligned in product(DTYPES, BOTH, BOTH, BOTH, BOTH):
        quick_one = kept and bonus and grad and aligned and dtype == torch.bfloat16
        yield PolicyCase(dtype, bonus=bonus, grad=grad, kept=kept, aligned=aligned, quick=quick_one)


# ---- upstream.py ----------------------------------------------------------------------------------------------------


def record_scale(recorder: Any, dtype: torch.dtype, *, aligned: bool) -> None:
    """What a backward pass on a GPU does to a gradient that was formed in the forward pass."""
    columns = -(-VOCAB // 16) * 16 if aligned else VOCAB
    with recorder.recording(f"upstream {dtype} {aligned=}"):
        for count in COUNTS:
            for upstream in (torch.ones(()), torch.ones(2)[1]):
                Upstream()._in_place(0, torch.zeros(count, columns, dtype=dtype), upstream)


# ---- linear.py ------------------------------------------------------------------------------------------------------


def half_chunk(dtype: torch.dtype, rows: Rows, entropy: bool) -> None:
    """What linear.py does on a GPU with a chunk of float32 logits whose gradient the GEMMs take in a half type."""
    out = torch.zeros(rows.logits.shape, dtype=dtype)
    arguments = check_rows(
        rows.token_ids,
        columns=rows.logits.shape[1],
        dtype=torch.float32,
        temperature=rows.temperature,
        vocab_size=VOCAB,
        ignore_index=IGNORE_INDEX,
        kept=rows.kept,
    )
    stats = forward_rows(rows.logits, arguments, entropy=entropy, triton=True)
    upstream = (rows.numbers(), rows.numbers() if entropy else None, None)
    backward_rows(rows.logits, out, arguments, SavedStats(stats.entropy, stats.logsumexp), upstream, triton=True)
    if dtype == torch.float16:  # a loss keeps it in float32, see upstream.py
        return
    inputs = PolicyInputs(old_logprobs=rows.numbers(), advantages=rows.numbers(), weights=rows.numbers())
    PolicyCall(arguments, inputs, Objective(entropy_coef=0.1 * entropy), True).run(rows.logits, out)


def linear(count: int, chunk: int, kept: bool) -> None:
    """Both functions, forward and backward, in chunks of `chunk` rows."""
    hidden, head = torch.zeros(count, 8, requires_grad=True), torch.zeros(VOCAB, 8)
    ids, numbers = torch.zeros(count, dtype=torch.int64), torch.ones(count)
    more: dict[str, Any] = {"kept": KeptSet.from_lists([[0, 5, 7]] * count) if kept else None}
    more |= {"temperature": 0.5 * torch.ones(count), "chunk": chunk, "backend": "triton"}
    out = linear_token_logprobs(hidden, head, ids, entropy=True, **more)
    torch.autograd.backward([out.logprobs, out.logsumexp], [numbers, numbers])
    inputs = PolicyInputs(old_logprobs=numbers, advantages=numbers, weights=numbers)
    linear_policy_loss(hidden, head, ids, inputs, Objective(), **more)


# ---- sampling.py ----------------------------------------------------------------------------------------------------

SAMPLED = (49151, 151935)
"""Two vocabularies, since the sampler's upper level is as long as a row has blocks."""


def samples(logits_BV: Tensor, allowed: KeptSet | None) -> None:
    """Truncated by numbers and by tensors, greedy, with and without kept sets."""
    rows = logits_BV.shape[0]
    counter = torch.zeros(rows, dtype=torch.int64)
    parameters: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.1, "keep_sets": True},
        {"temperature": torch.full((rows,), 0.7), "top_k": torch.full((rows,), 50), "top_p": torch.ones(rows)},
    ]
    for more in parameters:
        counters: dict[str, Any] = {"seeds": counter, "samples": counter, "positions": counter}
        sample_tokens(logits_BV, allowed=allowed, backend="triton", **counters, **more)


def record_sampling(recorder: Any, dtype: torch.dtype, vocab: int, *, aligned: bool, restricted: bool) -> None:
    """One kind of call, for several numbers of rows."""
    columns = -(-vocab // 16) * 16 if aligned else vocab
    with recorder.recording(f"sample_tokens {dtype} {vocab=} {aligned=} {restricted=}"):
        for rows in (1, 2, 7, 32):
            allowed = KeptSet.from_lists([[0, 5, 7]] * rows) if restricted else None
            samples(torch.zeros(rows, columns, dtype=dtype)[:, :vocab], allowed)


# ---- paged_kernels.py -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedCase:
    """Constexprs of the kernels over pages. options: with softcap and sinks. quick: also in the default tests."""

    dtype: torch.dtype = torch.bfloat16
    group: int = 2
    dim: int = 128
    value_dim: int = 128
    page_size: int = 16
    options: bool = False
    quick: bool = False

    def record(self, recorder: Any, skipped: int = 0) -> None:
        with recorder.recording(f"paged {self}"):
            for rows, width in ((1, 1), (2, 40), (7, 33), (300, 2560)):
                self.call(rows, width, skipped)

    def call(self, rows: int, width: int, skipped: int) -> None:
        """One step of decode: keys come with the heads before the tokens, queries (aligned ones) with either order."""
        key_heads = 8
        pools = [torch.zeros(3, self.page_size, key_heads, d, dtype=self.dtype) for d in (self.dim, self.value_dim)]
        keys, values = (
            torch.zeros(key_heads, rows, d, dtype=self.dtype).transpose(0, 1) for d in (self.dim, self.value_dim)
        )
        write_triton(pools[0], pools[1], keys, values, torch.zeros(rows + skipped, dtype=torch.int64)[skipped:])
        heads = key_heads * self.group
        q = torch.zeros(rows + skipped, heads, self.dim, dtype=self.dtype)[skipped:]
        tables = torch.zeros(rows + skipped, width, dtype=torch.int32)[skipped:]
        lens = torch.zeros(rows + skipped, dtype=torch.int32)[skipped:]
        more: dict[str, Any] = {}
        if self.options:
            more = {"softcap": 20.0 + rows, "sinks": torch.zeros(heads)}
        for window in (None, 1, 1000 + rows):
            queries = q if window is None or self.dim % 16 else q.transpose(0, 1).contiguous().transpose(0, 1)
            decode_triton(queries, pools[0], pools[1], tables, lens, scale=0.1 * rows, window=window, **more)


def paged_cases() -> Iterator[PagedCase]:
    """Every type with every dimension, and for one of them every page size, group and option."""
    yield PagedCase(options=True, quick=True)
    for dtype, (dim, value_dim) in product(DTYPES, ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (5, 7))):
        quick = (dtype, dim) in ((torch.float32, 64), (torch.bfloat16, 256))
        yield PagedCase(dtype, dim=dim, value_dim=value_dim, quick=quick)
    for page_size in (1, 24, 64, 256):
        yield PagedCase(page_size=page_size)
    for group in (1, 7, 20):
        yield PagedCase(group=group)


# ---- all ------------------------------------------------------------------------------------------------------------


def record(recorder: Any, *, quick: bool) -> None:
    """Into a `codegen_record.Recorder`: everything, or what the default tests compile."""
    for dtype, entropy, kept, aligned in product(DTYPES, BOTH, BOTH, BOTH):
        if quick and (dtype, entropy, aligned) != (torch.bfloat16, True, True):
            continue
        with recorder.recording(f"token_logprobs {dtype} {entropy=} {kept=} {aligned=}"):
            for rows in all_rows(dtype, aligned=aligned, kept=kept):
                logprobs(rows, entropy)
    for case in policy_cases():
        if case.quick or not quick:
            case.record(recorder)
    for dtype, aligned in product(DTYPES, BOTH):
        if not quick or (dtype, aligned) == (torch.bfloat16, True):
            record_scale(recorder, dtype, aligned=aligned)
    for dtype, kept in product((torch.bfloat16, torch.float16), (False, True)):
        for entropy in (True, False):
            if quick and (dtype, kept, entropy) != (torch.bfloat16, False, True):
                continue
            with recorder.recording(f"linear {dtype} {entropy=} {kept=}"):
                for rows in all_rows(torch.float32, kept=kept, grad=False):
                    half_chunk(dtype, rows, entropy)
    for dtype, vocab, aligned, restricted in product(DTYPES, SAMPLED, BOTH, BOTH):
        if not quick or (dtype, vocab, aligned, restricted) == (torch.bfloat16, SAMPLED[-1], True, False):
            record_sampling(recorder, dtype, vocab, aligned=aligned, restricted=restricted)
    for paged in paged_cases():
        if paged.quick or not quick:
            paged.record(recorder)


def record_pieces(recorder: Any) -> None:
    """Calls whose tensors are pieces of longer ones, as those of a micro-batch are, beside the same with whole ones."""
    for kept in (False, True):
        for skipped in (0, 1, 2, 3):
            for rows in all_rows(torch.bfloat16, kept=kept, skipped=skipped):
                with recorder.recording(f"token_logprobs {kept=}"):
                    logprobs(rows, entropy=True)
                with recorder.recording(f"policy_loss {kept=}"):
                    policy(rows, Objective(kl="k3", beta=0.1), all_inputs=True, inplace=False)
        with recorder.recording(f"linear {kept=}"):
            for count, chunk in ((4, 4), (7, 3), (9, 1)):
                linear(count, chunk, kept)
    for skipped in (0, 1, 2, 3):
        PagedCase(options=True).record(recorder, skipped)
    for start in (0, 1, 2):
        values = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seeds": 0, "samples": 0, "positions": 0}
        per_row: dict[str, Any] = {name: torch.full((start + 4,), value)[start:] for name, value in values.items()}
        with recorder.recording("sample_tokens"):
            sample_tokens(torch.zeros(4, 1024), keep_sets=True, backend="triton", **per_row)
