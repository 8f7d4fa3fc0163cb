"""What is measured: ops, shapes, their inputs, and the float64 truth that every implementation must match first.

The truth shares nothing with rhotrain's kernels but the uniforms that tokens are drawn with. It is complete where that
is cheap (the loss); for gradients it takes the first and last rows (the last ones are beyond 2^31 elements) and some
rows of the head's gradient.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.philox import philox_uniform
from rhotrain.kernels.spec import Objective

TEMPERATURE = 0.9
LOG_RATIOS = (-0.4, -0.1, 0.1, 0.4)
"""logprob - old_logprob of the rows: inside and outside of both bounds, far enough that rounding flips no clip."""
SEED = 7
EDGE_ROWS = 16
HEAD_IDS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """rows N, vocab V and, for ops that start at hidden states, hidden H."""

    rows: int
    vocab: int
    hidden: int = 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.vocab}" + (f"x{self.hidden}" if self.hidden else "")

    @property
    def sequence(self) -> int:
        """Tokens per sequence: peers take [B, L] with one advantage per sequence."""
        return min(1024, max(1, self.rows // 4))


@dataclass(frozen=True, slots=True)
class Op:
    """kind: what implementations are looked up by. target: share of the limit that is aimed at on an H200.

    logit_bytes: what a head that holds chunks of logits moves per logit beside its GEMMs (their own traffic is in
    their time): float32 logits read twice, bf16 gradients written, 4 + 4 + 2.
    """

    name: str
    kind: str
    entropy: bool = False
    backward: bool = False
    objective: Objective | None = None
    top_k: int = 0
    top_p: float = 1.0
    target: float | None = None
    logit_bytes: int = 0

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def head(self) -> bool:
        return self.kind.startswith("linear")

    @property
    def gemms(self) -> int:
        """GEMMs of 2NVH FLOP each that no implementation can avoid."""
        return 3 if self.backward else 1

    @property
    def passes(self) -> int:
        """Times the logits move: read once; with a gradient read again and written, as a row does not fit on chip."""
        return 3 if self.backward else 1


GRPO = Objective(kind="grpo", ratio_min=0.8, ratio_max=1.2)
CISPO = Objective(kind="cispo", ratio_min=0.0, ratio_max=1.2)

OPS = {
    op.name: op
    for op in (
        Op("token_logprobs fwd", "token_logprobs", target=0.90),
        Op("token_logprobs+entropy fwd", "token_logprobs", entropy=True, target=0.90),
        Op("token_logprobs fwd+bwd", "token_logprobs", backward=True),
        Op("policy_loss grpo fwd+bwd", "policy_loss", backward=True, objective=GRPO, target=0.85),
        Op("policy_loss cispo fwd+bwd", "policy_loss", backward=True, objective=CISPO, target=0.85),
        Op("linear_token_logprobs fwd", "linear_token_logprobs"),
        Op(
            "linear_policy_loss grpo fwd+bwd",
            "linear_policy_loss",
            backward=True,
            objective=GRPO,
            target=0.85,
            logit_bytes=10,
        ),
        Op("sample_tokens", "sample_tokens"),
        Op("sample_tokens top-k top-p", "sample_tokens", top_k=50, top_p=0.95),
    )
}


def cases(device: torch.device) -> Iterator[tuple[Op, Shape]]:
    """All ops at all shapes, the most important shapes first: a run that is cut short has measured what counts."""
    if device.type == "cpu":
        for op in OPS.values():
            rows = 64 if op.kind == "sample_tokens" else 256
            yield op, Shape(rows, 49152, 576 if op.head else 0)
        return
    for rows in (16384, 4096, 65536):
        for vocab in (151936, 49152, 128256):
            for op in OPS.values():
                if op.kind == "sample_tokens":
                    yield op, Shape({16384: 256, 4096: 64, 65536: 1024}[rows], vocab)
                else:
                    for hidden in (4096, 2048, 1024) if op.head else (0,):
                        yield op, Shape(rows, vocab, hidden)


def case_dtype(op: Op, device: torch.device) -> torch.dtype:
    """bf16 on CUDA, as in training; sampling takes the float32 that the head's GEMM gives."""
    return torch.bfloat16 if device.type == "cuda" and op.kind != "sample_tokens" else torch.float32


@dataclass(frozen=True, eq=False)
class Inputs:
    """The same numbers for every implementation. x: logits [N, V], or hidden [N, H] with head [V, H].

    upstream, old_logprobs and the plain logprobs and logsumexp are float32 [N], advantages [B]. x and head are leaves
    that require grad where the op has a backward pass.
    """

    op: Op
    shape: Shape
    x: Tensor
    head: Tensor | None
    token_ids: Tensor
    upstream: Tensor
    plain_logprobs: Tensor
    plain_logsumexp: Tensor
    old_logprobs: Tensor
    advantages_B: Tensor

    @property
    def advantages(self) -> Tensor:
        """Per token, [N]."""
        return self.advantages_B.repeat_interleave(self.shape.sequence)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x] if self.head is None else [self.x, self.head]

    @property
    def counters(self) -> dict[str, Tensor]:
        """Of sample_tokens' random numbers."""
        rows = torch.arange(self.shape.rows, device=self.x.device)
        return {"seeds": torch.full_like(rows, SEED), "samples": rows, "positions": torch.zeros_like(rows)}


def make_inputs(op: Op, shape: Shape, device: torch.device) -> Inputs:
    """Seeded inputs: logits of standard deviation 3, one advantage per sequence, ratios on both sides of the bounds."""
    dtype = case_dtype(op, device)
    g = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device, dtype=dtype)

    token_ids = torch.randint(0, shape.vocab, (shape.rows,), generator=g, device=device)
    if op.head:
        x, head = normal(shape.rows, shape.hidden), normal(shape.vocab, shape.hidden).mul_(3 / math.sqrt(shape.hidden))
    else:
        x, head = normal(shape.rows, shape.vocab).mul_(3), None
    logprobs, logsumexp = _plain(x, head, token_ids)
    steps = torch.tensor(LOG_RATIOS, device=device)
    old = logprobs - steps[torch.randint(0, len(steps), (shape.rows,), generator=g, device=device)]
    advantages_B = torch.randn(-(-shape.rows // shape.sequence), generator=g, device=device)
    upstream = torch.randn(shape.rows, generator=g, device=device)
    for leaf in (x, head):
        if leaf is not None:
            leaf.requires_grad_(op.backward)
    return Inputs(op, shape, x, head, token_ids, upstream, logprobs, logsumexp, old, advantages_B)


def _plain(x: Tensor, head: Tensor | None, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """logprob and logsumexp [N] in float32, a few rows of logits at a time."""
    logprobs, logsumexp = (torch.empty(x.shape[0], device=x.device) for _ in range(2))
    step = max(1, 2**28 // (x.shape[1] if head is None else head.shape[0]))
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        logits = (x[part].float() if head is None else _float32_logits(x[part], head)) / TEMPERATURE
        logsumexp[part] = logits.logsumexp(1)
        logprobs[part] = logits.gather(1, token_ids[part, None])[:, 0] - logsumexp[part]
    return logprobs, logsumexp


def _float32_logits(hidden: Tensor, head: Tensor) -> Tensor:
    if hidden.dtype == torch.float32:
        return hidden @ head.t()
    return torch.mm(hidden, head.t(), out_dtype=torch.float32)


# ---- truth ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What one call gave; what an op or an implementation does not have stays None.

    logprobs, entropy [N]; loss a scalar; grads: of logits ([N, V] or [B, L, V]), or of hidden and head. Sampling:
    token_ids, kept_mass [B].
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] = ()
    token_ids: Tensor | None = None
    kept_mass: Tensor | None = None


def policy_per_token(logprobs: Tensor, old: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """The papers' formulas in plain torch, per token: GRPO's clipped surrogate, CISPO's clamped weight."""
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(objective.ratio_min, objective.ratio_max)
    if objective.kind == "cispo":
        return -clipped.detach() * advantages * logprobs
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _slopes(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(loss, dloss/dlogprob [N]) in float64, at the plain logprobs."""
    logprobs = inputs.plain_logprobs.double().requires_grad_()
    if inputs.op.objective is None:
        loss = (logprobs * inputs.upstream.double()).sum()
    else:
        old, advantages = inputs.old_logprobs.double(), inputs.advantages.double()
        loss = policy_per_token(logprobs, old, advantages, inputs.op.objective).mean()
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def parity_errors(inputs: Inputs, result: Result) -> dict[str, float]:
    """How far `result` is from float64, by name: absolute for values, relative L2 for gradients."""
    if inputs.op.kind == "sample_tokens":
        return _sampling_errors(inputs, result)
    n = inputs.shape.rows
    index = torch.arange(n, device=inputs.x.device)
    rows = torch.cat([index[:EDGE_ROWS], index[max(EDGE_ROWS, n - EDGE_ROWS) :]])
    x = inputs.x.detach()[rows].double()
    head = None if inputs.head is None else inputs.head.detach().double()
    ids = inputs.token_ids[rows, None]
    logp = torch.log_softmax((x if head is None else x @ head.t()) / TEMPERATURE, 1)
    errors = {}
    if result.logprobs is not None:
        errors["logprobs"] = float((result.logprobs.detach()[rows].double() - logp.gather(1, ids)[:, 0]).abs().max())
    if result.entropy is not None:
        errors["entropy"] = float((result.entropy.detach()[rows].double() + (logp.exp() * logp).sum(1)).abs().max())
    if not result.grads:
        return errors
    loss, slopes = _slopes(inputs)
    if result.loss is not None:
        errors["loss"] = float((result.loss.double() - loss).abs())
    dlogits = -logp.exp() * slopes[rows, None]
    dlogits.scatter_add_(1, ids, slopes[rows, None]).div_(TEMPERATURE)
    grads = result.grads
    first = grads[0][rows] if grads[0].dim() == 2 else grads[0][rows // grads[0].shape[1], rows % grads[0].shape[1]]
    errors["grad"] = _relative_l2(first, dlogits if head is None else dlogits @ head)
    if head is not None:
        some = torch.linspace(0, inputs.shape.vocab - 1, HEAD_IDS, device=rows.device).long()
        some = torch.cat([some, inputs.token_ids[:HEAD_IDS]])
        errors["grad head"] = _relative_l2(grads[1][some], _head_gradient(inputs, some, slopes))
    return errors


def _head_gradient(inputs: Inputs, some: Tensor, slopes: Tensor) -> Tensor:
    """Rows `some` of the head's gradient, [K, H], over all N tokens."""
    assert inputs.head is not None
    total = torch.zeros(len(some), inputs.shape.hidden, dtype=torch.float64, device=some.device)
    for part in torch.arange(inputs.shape.rows, device=some.device).split(4096):
        hidden = inputs.x.detach()[part].double()
        logits = hidden @ inputs.head.detach()[some].double().t() / TEMPERATURE
        p = torch.exp(logits - inputs.plain_logsumexp[part, None].double())
        hit = inputs.token_ids[part, None] == some
        total += ((hit.double() - p) * slopes[part, None] / TEMPERATURE).t() @ hidden
    return total


def _relative_l2(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def _sampling_errors(inputs: Inputs, result: Result) -> dict[str, float]:
    """outside: share of tokens that truncation should have cut; draws: standard errors between the mean logprob of
    the drawn tokens and its expectation. For ours also the logprobs, the kept mass and the inverse CDF itself."""
    assert result.token_ids is not None
    op, ids = inputs.op, result.token_ids[:, None]
    logp = torch.log_softmax(inputs.x.double() / TEMPERATURE, 1)
    values, order = logp.sort(dim=1, descending=True, stable=True)
    weights = values.exp()
    if op.top_k:
        weights[:, op.top_k :] = 0
    before = (weights.cumsum(1) - weights) / weights.sum(1, keepdim=True)
    kept = torch.where((before < op.top_p) | (op.top_p >= 1.0), weights, 0.0)
    mass = kept.sum(1)
    q = torch.zeros_like(kept).scatter_(1, order, kept / mass[:, None])
    picked = q.gather(1, ids)[:, 0]
    mean = (q * logp).sum(1)
    variance = (q * logp.square()).sum(1) - mean.square()
    drawn = logp.gather(1, ids)[:, 0]
    errors = {
        "outside": float((picked == 0).double().mean()),
        "draws": float((drawn - mean).sum().abs() / variance.sum().sqrt()),
    }
    if result.logprobs is not None:
        errors["logprobs"] = float((result.logprobs.double() - drawn).abs().max())
    if result.kept_mass is not None:
        uniform = philox_uniform(**inputs.counters).double()
        cdf = q.cumsum(1)
        errors["kept_mass"] = float((result.kept_mass.double() - mass).abs().max())
        # The token's interval of the CDF, with room for float32 sums.
        high = cdf.gather(1, ids)[:, 0]
        errors["inverse cdf"] = float(torch.maximum(uniform - high, high - picked - uniform).clamp(min=0).max())
    return errors


# What a correct implementation stays below. Ours: float32 maths, gradients rounded once to the inputs' type. Peers may
# round logits to bf16 (+-0.06 near 20); their figures stand, with the error beside them.
_OURS = {
    torch.float32: {"logprobs": 1e-4, "entropy": 2e-4, "loss": 1e-5, "grad": 1e-4, "grad head": 1e-4},
    torch.bfloat16: {"logprobs": 1e-3, "entropy": 1e-3, "loss": 1e-4, "grad": 1e-2, "grad head": 1e-2},
}
_PEERS = {
    torch.float32: {"logprobs": 1e-3, "entropy": 1e-3, "loss": 1e-4, "grad": 1e-3, "grad head": 1e-3},
    torch.bfloat16: {"logprobs": 0.15, "entropy": 0.15, "loss": 0.02, "grad": 0.1, "grad head": 0.1},
}
_SAMPLING = {"outside": 0.02, "draws": 6.0, "logprobs": 1e-4, "kept_mass": 1e-4, "inverse cdf": 1e-5}


def parity_failures(inputs: Inputs, errors: dict[str, float], *, ours: bool) -> list[str]:
    """What is out of bounds, as text; empty when the result is right. NaN is out of bounds."""
    bounds = _SAMPLING
    if inputs.op.kind != "sample_tokens":
        bounds = (_OURS if ours else _PEERS)[inputs.x.dtype]
    return [f"{k} off by {v:.2g} (bound {bounds[k]:g})" for k, v in errors.items() if not v <= bounds[k]]
