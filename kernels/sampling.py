"""Draw one token per row: temperature, top-k, top-p, min-p, with the logprob and the mass of what was kept.

The distribution is p = softmax(logits / T) over the real vocabulary, the same as in `logprob.py` and with the same
multiplication by 1/T. Truncation comes after it, in this order: temperature, top-k, top-p, min-p. All of them cut the
total order (value descending, id ascending), so the kept set is a prefix of that order and ties have one answer:

    top-k   the first k ids
    top-p   of the renormalised top-k set, the shortest prefix of mass >= top_p (the id that crosses the mark is kept)
    min-p   ids with p >= min_p * max p

A token is drawn by the inverse CDF in id order from one Philox4x32-10 uniform per row: key = seed, counter = (position,
sample low, sample high, 0). So it depends on neither the batch nor its order. One uniform per vocabulary id (the Gumbel
trick) would cost more than a whole decode step on a CPU: 867 ms for 64 rows of 49152. The CDF has two levels: sums over
fixed blocks of 1024 ids, then the ids of one block.

The kernels (`sampling_kernels.py`) follow the same definitions in float32, from the same uniform: the token is the same
unless the uniform lies within rounding of a boundary of the CDF, the kept set unless a mark does. They read a row once
when nothing is cut, three or four times for the usual top-k, seven for a top-p that keeps most of 49152 ids.

Sources: top-p, Holtzman et al., arXiv 1904.09751; min-p, Nguyen et al., arXiv 2407.01082; Philox in `philox.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, promote, promoted_dtype, resolve_backend
from rhotrain.kernels.philox import philox_uniform
from rhotrain.kernels.rows import KeptSet
from rhotrain.kernels.sampling_kernels import draw_rows, kept_sets
from rhotrain.kernels.sampling_params import RowParams, check_logits, checked, may_draw_mask, row_param, set_tensors

BLOCK = 1024
"""Vocabulary ids per block of the two-level CDF. Fixed: it decides the rounding, and so the token at a boundary."""

CHUNK = 2**19
"""Elements of a CPU temporary: ten rows of 49152 stay in the cache; 64 at once took 19 ms, not 6 (page faults)."""

BINS_PER_NAT, BINS = 8, 256
"""The histogram that bounds a top-p set: bins of 1/8 below the row's maximum, the last one open."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What `sample_tokens` drew, one entry per row.

    token_ids: int64 [B].
    logprobs: [B], log p of the token over the full real vocabulary at the row's temperature (1 for a greedy row),
        whatever was truncated.
    kept_mass: [B], mass under p of the set that the token was drawn from (1 when nothing was cut).
    kept_count: int64 [B], size of that set. kept: the sets themselves, ids ascending, when asked for.
    error: bool [B], rows with NaN or +inf in logits / T, or with nothing to draw from: token 0, logprob 0, kept_mass 0,
        empty set. logprobs and kept_mass are float32, or float64 for float64 logits.
    """

    token_ids: Tensor
    logprobs: Tensor
    kept_mass: Tensor
    kept_count: Tensor
    kept: KeptSet | None
    error: Tensor


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Row maxima of x and sums of exp(x - max) over blocks of ids; those are float64, so that no long tail is lost."""

    maximum: Tensor
    blocks: Tensor

    @staticmethod
    def of(logits_BV: Tensor, inverse: Tensor) -> "_Softmax":
        """Softmax of x = logits * inverse; no [B,V] temporary outlives a chunk of rows."""
        rows, vocab = logits_BV.shape
        blocks = logits_BV.new_empty(rows, -(-vocab // BLOCK))
        maximum = logits_BV.new_empty(rows)
        whole = vocab // BLOCK
        # One pass over [B,V] less: 1.5 of 7 ms at 64 x 49152. A product with 1 changes no bit.
        plain = logits_BV.device.type == "cpu" and bool((inverse == 1.0).all())
        for part in _chunks(rows, vocab, logits_BV.device):
            x = logits_BV[part] if plain else logits_BV[part] * inverse[part, None]
            torch.amax(x, 1, out=maximum[part])
            x = torch.sub(x, maximum[part, None], out=None if plain else x).exp_()
            if whole:
                torch.sum(x[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)), 2, out=blocks[part, :whole])
            if whole < blocks.shape[1]:
                torch.sum(x[:, whole * BLOCK :], 1, out=blocks[part, whole])
        return _Softmax(maximum, blocks.double())

    @property
    def total(self) -> Tensor:
        return self.blocks.cumsum(1)[:, -1]  # in the order of the CDF, and the same for one row as for many

    @property
    def logsumexp(self) -> Tensor:
        return self.maximum.double() + self.total.log()


def _chunks(rows: int, vocab: int, device: torch.device) -> list[slice]:
    step = max(1, CHUNK // vocab) if device.type == "cpu" else max(1, rows)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _first_above(weights: Tensor, cdf: Tensor, target: Tensor) -> Tensor:
    """Column of the first positive weight whose CDF exceeds the target; past the end (rounding) the last positive."""
    positive = weights > 0
    above = positive & (cdf > target[:, None])
    last = positive.shape[1] - 1 - positive.flip(1).to(torch.uint8).argmax(1)
    return torch.where(above.any(1), above.to(torch.uint8).argmax(1), last)


def _draw(logits_BV: Tensor, inverse: Tensor, dist: _Softmax, uniform: Tensor) -> Tensor:
    """Token ids [B] by the two-level inverse CDF in id order; ids of weight 0 are never drawn."""
    vocab = logits_BV.shape[1]
    cdf = dist.blocks.cumsum(1)
    target = uniform.double() * cdf[:, -1]
    block = _first_above(dist.blocks, cdf, target)[:, None]
    before = cdf.gather(1, block) - dist.blocks.gather(1, block)
    ids = block * BLOCK + torch.arange(min(BLOCK, vocab), device=block.device)
    x = logits_BV.gather(1, ids.clamp(max=vocab - 1)) * inverse[:, None]
    weights = (x - dist.maximum[:, None]).exp().double() * (ids < vocab)
    return block[:, 0] * BLOCK + _first_above(weights, weights.cumsum(1), target - before[:, 0])


def _top_p_threshold(x_BV: Tensor, maximum: Tensor, mass: Tensor) -> Tensor:
    """A value [B] such that the ids at or above it hold at least `mass`; -inf where all may be needed."""
    rows = len(x_BV)
    depth = (maximum[:, None] - x_BV).clamp_(max=BINS / BINS_PER_NAT)
    weights = depth.neg().exp_().double()
    bins = depth.mul_(BINS_PER_NAT).to(torch.int64).clamp_(max=BINS - 1)
    bins += torch.arange(rows, device=bins.device)[:, None] * BINS
    histogram = torch.bincount(bins.view(-1), weights.view(-1), minlength=rows * BINS).view(rows, BINS)
    # The margin covers rounding: a bin too many costs nothing, one too few would cut the set.
    last = (histogram.cumsum(1) <= mass[:, None] * (1 + 1e-5)).sum(1)
    floor = maximum - (last + 1).to(x_BV.dtype) / BINS_PER_NAT - 1e-3
    return torch.where(last < BINS - 1, floor, -torch.inf)


def _threshold(x_BV: Tensor, maximum: Tensor, total: Tensor, params: RowParams) -> Tensor:
    """A value [B] at or above which all ids of the kept set lie. Mostly few more do, so that little is left to sort."""
    # Where top-p needs the mass of the top-k set, that set must be whole.
    prunes = (params.top_k == 0) | (params.top_p >= 1.0)
    by_min_p = torch.where(prunes, maximum + params.min_p.log().to(x_BV.dtype) - 1e-3, -torch.inf)
    by_top_k = by_top_p = torch.full_like(maximum, -torch.inf)
    largest_k = int(params.top_k.max())
    if largest_k:
        values = x_BV.topk(largest_k, dim=1).values
        kth = values.gather(1, (params.top_k - 1).clamp(min=0)[:, None])[:, 0]
        by_top_k = torch.where(params.top_k > 0, kth, by_top_k)
    nucleus = (params.top_p < 1.0) & (params.top_k == 0)
    if bool(nucleus.any()):
        by_top_p = torch.where(nucleus, _top_p_threshold(x_BV, maximum, params.top_p * total), by_top_p)
    return torch.maximum(torch.maximum(by_min_p, by_top_k), by_top_p)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Kept sets of the rows `index`: ids [R,C] ascending, which are kept, and their weights exp(x - max), else 0."""

    index: Tensor
    ids: Tensor
    keep: Tensor
    weights: Tensor


def _candidates(x_BV: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Values [B,C] and ids [B,C] at or above the threshold, ids ascending, padded with -inf and 0."""
    row, ids = ((x_BV >= threshold[:, None]) & (x_BV > -torch.inf)).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(x_BV))
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    values_BC = x_BV.new_full((len(x_BV), int(counts.max())), -torch.inf)
    values_BC[row, column] = x_BV[row, ids]
    ids_BC = torch.zeros_like(values_BC, dtype=torch.int64)
    ids_BC[row, column] = ids
    return values_BC, ids_BC


def _cut(x_BV: Tensor, index: Tensor, maximum: Tensor, total: Tensor, params: RowParams) -> _Cut:
    """Cut rows of x by top-k, top-p and min-p in the total order (value descending, id ascending: a stable sort)."""
    values_BC, ids_BC = _candidates(x_BV, _threshold(x_BV, maximum, total, params))
    sorted_BC, order = values_BC.sort(dim=1, descending=True, stable=True)
    weights = (sorted_BC - maximum[:, None]).exp().double()
    cdf = weights.cumsum(1)
    found = (sorted_BC > -torch.inf).sum(1)
    limit = torch.where(params.top_k > 0, params.top_k.minimum(found), found)
    mass = torch.where(params.top_k > 0, cdf.gather(1, limit[:, None] - 1)[:, 0], total)
    keep = torch.arange(weights.shape[1], device=weights.device) < limit[:, None]
    keep &= (cdf - weights < (params.top_p * mass)[:, None]) | (params.top_p >= 1.0)[:, None]
    keep &= weights >= params.min_p[:, None]
    return _Cut(
        index,
        ids_BC,
        torch.zeros_like(keep).scatter_(1, order, keep),
        torch.zeros_like(weights).scatter_(1, order, weights * keep),
    )


def _truncate(logits_BV: Tensor, inverse: Tensor, dist: _Softmax, params: RowParams, rows: Tensor) -> list[_Cut]:
    """Cuts of the rows that `rows` (bool [B]) marks, a chunk of rows each."""
    index = rows.nonzero()[:, 0]
    cuts = []
    for part in _chunks(len(index), logits_BV.shape[1], logits_BV.device):
        some = index[part]
        x = logits_BV[some] * inverse[some, None]
        cuts.append(_cut(x, some, dist.maximum[some], dist.total[some], params.select(some)))
    return cuts


def _kept_sets(
    token_ids: Tensor,
    vocab: int,
    may_draw: Tensor | None,
    cuts: list[_Cut],
    greedy: Tensor,
    error: Tensor,
) -> KeptSet:
    """Cut rows keep what the cut left, greedy rows their token, rows in error nothing, others all they may draw."""
    everything = torch.arange(vocab, device=token_ids.device)
    sets = [everything] * len(token_ids) if may_draw is None else [everything[row] for row in may_draw]
    for cut in cuts:
        for row, ids, keep in zip(cut.index.tolist(), cut.ids, cut.keep):
            sets[row] = ids[keep]
    for row in greedy.nonzero()[:, 0].tolist():
        sets[row] = token_ids[row, None]
    for row in error.nonzero()[:, 0].tolist():
        sets[row] = everything[:0]
    lengths = torch.tensor([0, *(len(ids) for ids in sets)], dtype=torch.int64, device=token_ids.device)
    return KeptSet(lengths.cumsum(0), torch.cat([everything[:0], *sets]).to(torch.int32))


def _reference(logits_BV: Tensor, may_draw: Tensor | None, params: RowParams, keep_sets: bool) -> Sample:
    logits, inverse = promote(logits_BV), params.inverse
    vocab = logits.shape[1]
    uniform = philox_uniform(params.seeds, params.samples, params.positions)
    drawable_BV = logits if may_draw is None else logits.masked_fill(~may_draw, -torch.inf)
    full = _Softmax.of(logits, inverse)
    dist = full if may_draw is None else _Softmax.of(drawable_BV, inverse)
    error = ~(torch.isfinite(full.total) & torch.isfinite(dist.total))

    token_ids, weight = _draw(drawable_BV, inverse, dist, uniform), dist.total
    count = torch.full_like(token_ids, vocab) if may_draw is None else may_draw.sum(1)
    cuts = _truncate(drawable_BV, inverse, dist, params, params.truncates & ~error)
    for cut in cuts:
        cdf = cut.weights.cumsum(1)
        column = _first_above(cut.weights, cdf, uniform[cut.index].double() * cdf[:, -1])
        token_ids[cut.index] = cut.ids.gather(1, column[:, None])[:, 0]
        weight[cut.index], count[cut.index] = cdf[:, -1], cut.keep.sum(1)
    greedy = params.greedy & ~error
    if bool(greedy.any()):
        token_ids[greedy], count[greedy] = drawable_BV[greedy].argmax(1), 1

    token_ids = token_ids.masked_fill(error, 0)
    logprobs = (logits.gather(1, token_ids[:, None])[:, 0] * inverse).double() - full.logsumexp
    log_kept = dist.maximum.double() + weight.log() - full.logsumexp
    kept_mass = log_kept.exp().clamp(max=1.0).masked_fill(greedy, 1.0)
    return Sample(
        token_ids=token_ids,
        logprobs=logprobs.masked_fill(error, 0.0).to(logits.dtype),
        kept_mass=kept_mass.masked_fill(error, 0.0).to(logits.dtype),
        kept_count=count.masked_fill(error, 0),
        kept=_kept_sets(token_ids, vocab, may_draw, cuts, greedy, error) if keep_sets else None,
        error=error,
    )


# ---- Triton ---------------------------------------------------------------------------------------------------------


def _triton(
    logits_BV: Tensor, may_draw: Tensor | None, params: RowParams, keep_sets: bool, may_truncate: bool
) -> Sample:
    drawn = draw_rows(logits_BV, may_draw, params, may_truncate)
    return Sample(
        token_ids=drawn.token_ids,
        logprobs=drawn.values[0],
        kept_mass=drawn.values[1],
        kept_count=drawn.counts,
        kept=kept_sets(logits_BV, may_draw, params, drawn) if keep_sets else None,
        error=drawn.errors,
    )


# ---- public ---------------------------------------------------------------------------------------------------------


def _sample(
    logits_BV: Tensor,
    params: RowParams,
    allowed: list[Tensor],
    banned: list[Tensor],
    keep_sets: bool,
    may_truncate: bool,
    triton: bool,
) -> Sample:
    """`allowed`, `banned`: (offsets, ids) or nothing."""
    vocab = logits_BV.shape[1]
    params = checked(params, vocab)
    may_draw = may_draw_mask(vocab, *(KeptSet(*sets) if sets else None for sets in (allowed, banned)))
    if triton:
        return _triton(logits_BV, may_draw, params, keep_sets, may_truncate)
    return _reference(logits_BV, may_draw, params, keep_sets)


@torch.library.custom_op("rhotrain::sample_tokens", mutates_args=())
def _sample_op(
    logits_BV: Tensor,
    params: list[Tensor],
    allowed: list[Tensor],
    banned: list[Tensor],
    may_truncate: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_sample` without kept sets as one node of a compiled graph."""
    sample = _sample(logits_BV, RowParams(*params), allowed, banned, False, may_truncate, triton)
    # An op may not return two views of one tensor.
    return sample.token_ids, sample.logprobs.clone(), sample.kept_mass.clone(), sample.kept_count, sample.error


@_sample_op.register_fake
def _(
    logits_BV: Tensor,
    params: list[Tensor],
    allowed: list[Tensor],
    banned: list[Tensor],
    may_truncate: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits_BV.shape[0]
    value = torch.float64 if logits_BV.dtype == torch.float64 else torch.float32
    token_ids, logprobs, kept_mass, kept_count, error = (
        logits_BV.new_empty(rows, dtype=dtype) for dtype in (torch.int64, value, value, torch.int64, torch.bool)
    )
    return token_ids, logprobs, kept_mass, kept_count, error


def sample_tokens(
    logits_BV: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seeds: int | Tensor,
    positions: int | Tensor,
    samples: int | Tensor = 0,
    vocab_size: int | None = None,
    allowed: KeptSet | None = None,
    banned: KeptSet | None = None,
    keep_sets: bool = False,
    backend: Backend = "auto",
) -> Sample:
    """Draw one token per row of logits [B,V]; see the module's text for the rules.

    logits_BV: bf16, fp16, fp32 or fp64 with any row stride; V >= 1, B may be 0.
    temperature, top_k, top_p, min_p: a number or a tensor [B]. Temperature 0 is greedy: the largest value, the smallest
        id on a tie, its logprob at temperature 1, kept_mass 1 and a kept set of that one id.
    seeds, positions, samples: an int or an integer tensor [B] (uint64 too), key and counter of the row's random
        number; negative values count as bits. samples tells rows of one seed and position apart.
    vocab_size: the real vocabulary; ids from there on do not exist (they are padding of the head).
    allowed: ids that may be drawn, one set per row. banned: ids that may not. Both come before truncation, and neither
        changes the distribution that logprobs and kept_mass speak of.
    keep_sets: return the kept sets. A row that truncates nothing keeps every id it may draw: V numbers.
    backend: see `resolve_backend`; float64 logits take the reference. On CUDA only keep_sets waits for the device, and
        without it the call is one node of a graph under `torch.compile` (the op `rhotrain::sample_tokens`).

    ValueError, on every device: a wrong type or shape, a tensor that requires grad or lies elsewhere than the logits, a
    Python number out of range. Only for tensors on a CPU: values of temperature (after rounding to the type of the
    maths), top_k, top_p or min_p out of range, and ids or offsets of allowed and banned that are wrong. A GPU would
    have to wait for these: there they are the caller's to keep.
    """
    check_logits(logits_BV, vocab_size)
    triton, rows = resolve_backend(backend, logits_BV) == "triton", logits_BV.shape[0]
    logits, device = logits_BV.detach()[:, :vocab_size], logits_BV.device
    sets = set_tensors("allowed", allowed, rows, device), set_tensors("banned", banned, rows, device)
    share = torch.float32 if triton else torch.float64
    params = RowParams(
        temperature=row_param("temperature", temperature, rows, promoted_dtype(logits), device),
        top_k=row_param("top_k", top_k, rows, torch.int64, device),
        top_p=row_param("top_p", top_p, rows, share, device),
        min_p=row_param("min_p", min_p, rows, share, device),
        seeds=row_param("seeds", seeds, rows, torch.int64, device),
        samples=row_param("samples", samples, rows, torch.int64, device),
        positions=row_param("positions", positions, rows, torch.int64, device),
    )
    # What numbers tell without asking the device; a tensor may hold anything.
    may_truncate = any(
        isinstance(value, Tensor) or value != neutral for value, neutral in ((top_k, 0), (top_p, 1.0), (min_p, 0.0))
    )
    if keep_sets or not torch.compiler.is_compiling():
        return _sample(logits, params, *sets, keep_sets, may_truncate, triton)
    token_ids, logprobs, kept_mass, kept_count, error = _sample_op(
        logits, params.tensors(), *sets, may_truncate, triton
    )
    return Sample(token_ids, logprobs, kept_mass, kept_count, None, error)
