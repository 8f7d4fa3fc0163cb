"""Each op by every implementation: rhotrain, plain PyTorch, torch.compile of that, TRL, Liger, Cut Cross Entropy.

Sampling also as the replay of a CUDA graph, which is how a decode step runs it.

A builder takes `Inputs` and returns a call without arguments that does the whole op (forward and, where the op has
one, backward). It raises `Unavailable` where an implementation does not do the op. Peers' own packages compute
everything that they have a function for; what they lack (CCE has no policy loss) is the plain formula around it.
"""

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import TEMPERATURE, Inputs, Op, Result, policy_per_token
from kernel_report import GRAPH, OURS
from torch import Tensor

from rhotrain.kernels.backend import Backend, resolve_backend
from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs, policy_loss
from rhotrain.kernels.sampling import sample_tokens
from rhotrain.kernels.spec import Objective

Call = Callable[[], Result]


class Unavailable(Exception):
    """This implementation does not do this op here; the message says why."""


def with_grads(inputs: Inputs, result: Result, output: Tensor, upstream: Tensor | None = None) -> Result:
    """`result` with the gradients of `output`, if the op has a backward pass."""
    if not inputs.op.backward:
        return result
    grads = torch.autograd.grad(output, inputs.leaves, upstream)
    return Result(logprobs=result.logprobs, entropy=result.entropy, loss=result.loss, grads=grads)


# ---- rhotrain -------------------------------------------------------------------------------------------------------


def our_backend(inputs: Inputs) -> Backend:
    """Triton on CUDA, the reference on a CPU: never the interpreter."""
    return resolve_backend("auto", inputs.x)


def ours(inputs: Inputs) -> Call:
    """The public functions, as the trainer and the engine call them."""
    op, shape, x, ids = inputs.op, inputs.shape, inputs.x, inputs.token_ids
    backend = our_backend(inputs)
    if op.kind == "sample_tokens":
        counters: dict[str, Any] = inputs.counters

        def sample() -> Result:
            drawn = sample_tokens(
                x, temperature=TEMPERATURE, top_k=op.top_k, top_p=op.top_p, **counters, backend=backend
            )
            return Result(token_ids=drawn.token_ids, logprobs=drawn.logprobs, kept_mass=drawn.kept_mass)

        return sample
    if op.objective is None:

        def logprobs() -> Result:
            if inputs.head is None:
                out = token_logprobs(x, ids, temperature=TEMPERATURE, entropy=op.entropy, backend=backend)
            else:
                out = linear_token_logprobs(x, inputs.head, ids, temperature=TEMPERATURE, backend=backend)
            return with_grads(inputs, Result(logprobs=out.logprobs, entropy=out.entropy), out.logprobs, inputs.upstream)

        return logprobs
    objective = op.objective
    weights = torch.full_like(inputs.old_logprobs, 1.0 / shape.rows)
    policy = PolicyInputs(old_logprobs=inputs.old_logprobs, advantages=inputs.advantages, weights=weights)

    def loss() -> Result:
        if inputs.head is None:
            out = policy_loss(x, ids, policy, objective, temperature=TEMPERATURE, backend=backend)
        else:
            out = linear_policy_loss(x, inputs.head, ids, policy, objective, temperature=TEMPERATURE, backend=backend)
        result = Result(logprobs=out.logprobs, entropy=out.entropy, loss=out.loss.detach())
        return with_grads(inputs, result, out.loss)

    return loss


# ---- a peer is a logprob function and, mostly, the plain formula behind it -------------------------------------------

Logprobs = Callable[[Inputs], tuple[Tensor, Tensor | None]]


def from_logprobs(inputs: Inputs, logprobs_of: Logprobs) -> Call:
    """The op of `inputs` by differentiable per-token logprobs."""
    op, advantages = inputs.op, inputs.advantages

    def call() -> Result:
        logprobs, entropy = logprobs_of(inputs)
        result = Result(logprobs=logprobs.detach(), entropy=entropy)
        if op.objective is None:
            return with_grads(inputs, result, logprobs, inputs.upstream.to(logprobs.dtype))
        loss = policy_per_token(logprobs, inputs.old_logprobs, advantages, op.objective).mean()
        return with_grads(inputs, Result(logprobs=logprobs.detach(), loss=loss.detach()), loss)

    return call


def logits_of(inputs: Inputs) -> Tensor:
    return inputs.x if inputs.head is None else inputs.x @ inputs.head.t()


def plain_logprobs(logits: Tensor, token_ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """log_softmax in float32 and gather."""
    logp = torch.log_softmax(logits.float() / TEMPERATURE, -1)
    found = -(logp.exp() * logp).sum(-1) if entropy else None
    return logp.gather(1, token_ids[:, None]).squeeze(1), found


def plain_loss(
    x: Tensor, head: Tensor | None, token_ids: Tensor, old: Tensor, advantages: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """(mean loss, logprobs): one function, so that a compiler sees all of it."""
    logprobs, _ = plain_logprobs(x if head is None else x @ head.t(), token_ids, False)
    return policy_per_token(logprobs, old, advantages, objective).mean(), logprobs


def plain_head(hidden: Tensor, head: Tensor, token_ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    return plain_logprobs(hidden @ head.t(), token_ids, entropy)


def plain_sample(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """softmax and multinomial; with truncation topk or sort first, as in transformers' logits processors."""
    x = logits / TEMPERATURE
    if top_k:
        x = x.masked_fill(x < x.topk(top_k, dim=1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        values, order = x.sort(dim=1, descending=True)
        p = values.softmax(1)
        cut = p.cumsum(1) - p >= top_p
        x = x.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), -torch.inf)
    return torch.multinomial(x.softmax(1), 1).squeeze(1)


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile with its defaults, once per function: it takes shapes as dynamic after the second one."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]


def _torch(inputs: Inputs, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Call:
    op, ids = inputs.op, inputs.token_ids
    if op.kind == "sample_tokens":
        sample = wrap(plain_sample)
        torch.manual_seed(0)
        return lambda: Result(token_ids=sample(inputs.x, op.top_k, op.top_p))
    if op.objective is None:
        if inputs.head is None:
            from_logits = wrap(plain_logprobs)
            return from_logprobs(inputs, lambda i: from_logits(i.x, ids, op.entropy))
        from_hidden = wrap(plain_head)
        return from_logprobs(inputs, lambda i: from_hidden(i.x, i.head, ids, op.entropy))
    whole, old, advantages = wrap(plain_loss), inputs.old_logprobs, inputs.advantages

    def loss() -> Result:
        total, logprobs = whole(inputs.x, inputs.head, ids, old, advantages, op.objective)
        return with_grads(inputs, Result(logprobs=logprobs.detach(), loss=total.detach()), total)

    return loss


def eager(inputs: Inputs) -> Call:
    return _torch(inputs, lambda function: function)


def torch_compile(inputs: Inputs) -> Call:
    return _torch(inputs, compiled)


def trl(inputs: Inputs) -> Call:
    """TRL's logprob and entropy functions (Triton on CUDA), and its trainer's loss on top of them."""
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy  # pyright: ignore

    def logprobs(i: Inputs) -> tuple[Tensor, Tensor | None]:
        if i.op.entropy:
            return selective_log_softmax_and_entropy(logits_of(i), i.token_ids, temperature=TEMPERATURE)
        return selective_log_softmax(logits_of(i), i.token_ids, temperature=TEMPERATURE), None

    return from_logprobs(inputs, logprobs)


# ---- Liger ----------------------------------------------------------------------------------------------------------


def liger(inputs: Inputs) -> Call:
    """Liger's GRPO losses: a Triton kernel on whole logits (CUDA), chunked PyTorch from hidden states."""
    if inputs.op.head:
        return _liger_linear(inputs)
    if not inputs.x.is_cuda:
        raise Unavailable("its kernel needs a GPU")
    return _liger_logits(inputs)


def _liger_logits(inputs: Inputs) -> Call:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax  # pyright: ignore
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss  # pyright: ignore

    op, length = inputs.op, inputs.shape.sequence
    batch = inputs.shape.rows // length
    # Its layout has one more row per sequence, which it drops: [B, L + 1, V].
    logits = inputs.x.detach().new_zeros(batch, length + 1, inputs.shape.vocab)
    logits[:, :-1] = inputs.x.detach().view(batch, length, -1)
    ids, old = (t.view(batch, length) for t in (inputs.token_ids, inputs.old_logprobs))
    if op.objective is None:
        return lambda: Result(logprobs=fused_selective_log_softmax(logits, ids, TEMPERATURE).view(-1))
    logits.requires_grad_()
    kind, eps_high = _liger_loss(op)

    def loss() -> Result:
        total, _ = triton_grpo_loss(
            logits,
            old,
            None,
            ids,
            inputs.advantages_B,
            temperature=TEMPERATURE,
            beta=0.0,
            eps_low=0.2,
            eps_high=eps_high,
            inplace=False,
            loss_type=kind,
            reduce=True,
        )
        (grad,) = torch.autograd.grad(total, logits)
        return Result(loss=total.detach(), grads=(grad[:, :-1],))

    return loss


def _liger_loss(op: Op) -> tuple[str, float]:
    """(its loss_type, its eps_high): both of these average over all tokens; cispo's bound is absolute."""
    assert op.objective is not None
    if op.objective.kind == "cispo":
        return "cispo", op.objective.ratio_max
    return "dapo", op.objective.ratio_max - 1.0


def _liger_linear(inputs: Inputs) -> Call:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore

    kind, eps_high = _liger_loss(inputs.op)
    length, head = inputs.shape.sequence, inputs.head
    module = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        compiled=inputs.x.is_cuda,  # only a few operations on [1, L]; on a CPU not worth a compiler's start
        epsilon_low=0.2,
        epsilon_high=eps_high,
        loss_type=kind,
        temperature=TEMPERATURE,
    )
    ids, old = (t.view(-1, length) for t in (inputs.token_ids, inputs.old_logprobs))
    mask = torch.ones_like(ids)

    def loss() -> Result:
        hidden = inputs.x.view(len(ids), length, -1)
        total, _ = module(hidden, head, ids, mask, inputs.advantages_B, old_per_token_logps=old)
        return with_grads(inputs, Result(loss=total.detach()), total)

    return loss


def liger_scaled_ce(inputs: Inputs) -> Call:
    """Liger's fused linear cross entropy with a temperature: a CuTe kernel on sm_90 where CUTLASS's Python package
    is installed, 512 rows at a time elsewhere."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction  # pyright: ignore

    def logprobs(i: Inputs) -> tuple[Tensor, None]:
        return -LigerFusedLinearScaledCrossEntropyFunction.apply(i.x, i.head, i.token_ids, TEMPERATURE), None

    return from_logprobs(inputs, logprobs)


# ---- Cut Cross Entropy ----------------------------------------------------------------------------------------------


def cut_cross_entropy(inputs: Inputs) -> Call:
    """Apple's kernel; without a filter it gives the whole gradient. It has no temperature: hidden is scaled before."""
    if not inputs.x.is_cuda:
        raise Unavailable("its kernel needs a GPU")
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore

    def logprobs(i: Inputs) -> tuple[Tensor, None]:
        nll = linear_cross_entropy(i.x / TEMPERATURE, i.head, i.token_ids, reduction="none", filter_eps=None)
        return -nll, None

    return from_logprobs(inputs, logprobs)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------

Builder = Callable[[Inputs], Call]


def graphed(build: Builder) -> Builder:
    """The same op as the replay of a CUDA graph."""

    def build_graph(inputs: Inputs) -> Call:
        if not inputs.x.is_cuda:
            raise Unavailable("CUDA graphs need a GPU")
        return captured(build(inputs), inputs.x.device)

    return build_graph


def captured(call: Call, device: torch.device) -> Call:
    """A replay of `call`, captured here; every replay writes into the same tensors. Unavailable when that fails."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # also restores the stream, which a capture that fails leaves as it is
        call()  # compiles
        try:
            # An op that waits spoils its capture, and with it the state of torch's generator: found out before.
            torch.cuda.set_sync_debug_mode("error")
            call()
            torch.cuda.set_sync_debug_mode("default")
            with torch.cuda.graph(graph, stream=stream):
                result = call()
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a broken capture hides what broke it
            raise Unavailable(f"cannot be captured: {cause}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def replay() -> Result:
        graph.replay()
        return result

    return replay


IN_GRAPHS: dict[str, Builder] = {OURS: ours, "eager": eager, "torch.compile": torch_compile}

PEERS: dict[str, Builder] = {
    OURS: ours,
    "eager": eager,
    "torch.compile": torch_compile,
    "trl": trl,
    "liger": liger,
    "liger scaled CE": liger_scaled_ce,
    "cut cross entropy": cut_cross_entropy,
    **{name + GRAPH: graphed(build) for name, build in IN_GRAPHS.items()},
}


def implementations(op: Op) -> list[str]:
    """Names in PEERS that do this op, ours first."""
    names = [OURS, "eager", "torch.compile"]
    if op.kind == "sample_tokens":
        return names + [name + GRAPH for name in IN_GRAPHS]
    names.append("trl")
    if op.objective is not None or (op.kind == "token_logprobs" and not op.backward and not op.entropy):
        names.append("liger")
    if op.head:
        names += ["liger scaled CE", "cut cross entropy"]
    return names
