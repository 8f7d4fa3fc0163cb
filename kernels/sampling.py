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

Sources: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; top-p, Holtzman et al., arXiv
1904.09751; min-p, Nguyen et al., arXiv 2407.01082.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, inverse_temperature, promote, resolve_backend
from rhotrain.kernels.logprob import KeptSet

BLOCK = 1024
"""Vocabulary ids per block of the two-level CDF. Fixed: it decides the rounding, and so the token at a boundary."""

CHUNK = 2**19
"""Elements of a CPU temporary: ten rows of 49152 stay in the cache; 64 at once took 19 ms, not 6 (page faults)."""

BINS_PER_NAT, BINS = 8, 256
"""The histogram that bounds a top-p set: bins of 1/8 below the row's maximum, the last one open."""

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True, slots=True)
class Sample:
    """What `sample_tokens` drew, one entry per row.

    token_ids: int64 [B].
    logprobs: [B], log p of the token over the full real vocabulary at the row's temperature (1 for a greedy
        row),
        whatever was truncated.
    kept_mass: [B], mass under p of the set that the token was drawn from (1 when nothing was cut).
    kept_count: int64 [B], size of that set. kept: the sets themselves, ids ascending, when asked for.
    error: bool [B], rows with NaN or +inf, or with nothing to draw from: token 0, logprob 0, kept_mass 0,
        empty set. logprobs and kept_mass are float32, or float64 for float64 logits.
    """

    token_ids: Tensor
    logprobs: Tensor
    kept_mass: Tensor
    kept_count: Tensor
    kept: KeptSet | None
    error: Tensor


def philox4x32(counter_4B: Tensor, key_2B: Tensor) -> Tensor:
    """Philox4x32-10: four 32-bit words per column from a 128-bit counter and a 64-bit key.

    counter_4B, key_2B: int64 [4,B] and [2,B] holding words in [0, 2^32). Returns int64 [4,B] of such words.
    Products wrap modulo 2^64, so the high word is the arithmetic shift with its sign bits masked off.
    """
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=counter_4B.device)[:, None]
    weyl = torch.tensor(_WEYL, dtype=torch.int64, device=counter_4B.device)[:, None]
    even, odd, key = counter_4B[0::2], counter_4B[1::2], key_2B
    for _ in range(10):
        product = even * multipliers
        even = ((product >> 32) & _MASK32).flip(0) ^ odd ^ key
        odd = (product & _MASK32).flip(0)
        key = (key + weyl) & _MASK32
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def philox_uniform(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """One uniform in [0, 1) per row: the top 24 bits of Philox's first word, exact in float32.

    seeds, samples, positions: int64 [B]; seeds are the key, positions the counter's first word, samples the next two.
    Returns float32 [B].
    """
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & _MASK32, samples & _MASK32, (samples >> 32) & _MASK32, zero))
    key = torch.stack((seeds & _MASK32, (seeds >> 32) & _MASK32))
    return (philox4x32(counter, key)[0] >> 8).to(torch.float32) * 2.0**-24


@dataclass(frozen=True, slots=True)
class _Params:
    """The truncation of each row, tensors [B]; top_k is 0 where it cuts nothing."""

    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def select(self, index: Tensor) -> "_Params":
        return _Params(self.greedy[index], self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def truncates(self) -> Tensor:
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))


def _row_param(name: str, value: float | Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(value, dtype=dtype, device=device)
    if tensor.dim() > 1 or (tensor.dim() == 1 and len(tensor) != rows):
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)} does not fit {rows} rows; give a number or a tensor [{rows}]"
        )
    return tensor.expand(rows)


def _params(
    logits: Tensor, temperature: float | Tensor, top_k: int | Tensor, top_p: float | Tensor, min_p: float | Tensor
) -> tuple[Tensor, _Params]:
    """1/T [B] (1 where greedy) and the truncation. Ranges are checked on a CPU only: a GPU would have to wait."""
    rows, vocab = logits.shape
    device = logits.device
    t = _row_param("temperature", temperature, rows, logits.dtype, device)
    k = _row_param("top_k", top_k, rows, torch.int64, device)
    p = _row_param("top_p", top_p, rows, torch.float64, device)
    m = _row_param("min_p", min_p, rows, torch.float64, device)
    if device.type == "cpu":
        _check_range("temperature", t, (t >= 0.0) & torch.isfinite(t), "a finite value >= 0 (0 is greedy)")
        _check_range("top_k", k, k >= 0, "top_k >= 0 (0 keeps all)")
        _check_range("top_p", p, (p > 0.0) & (p <= 1.0), "0 < top_p <= 1 (1 keeps all)")
        _check_range("min_p", m, (m >= 0.0) & (m <= 1.0), "0 <= min_p <= 1 (0 keeps all)")
    inverse = inverse_temperature(torch.where(t == 0.0, 1.0, t), logits.dtype, device)
    return inverse, _Params(t == 0.0, torch.where(k >= vocab, 0, k), p, m)


def _check_range(name: str, values: Tensor, ok: Tensor, rule: str) -> None:
    if not bool(ok.all()):
        raise ValueError(f"{name}: {values[~ok][0].item()} is out of range; need {rule}")


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
        for part in _chunks(rows, vocab, logits_BV.device):
            x = logits_BV[part] * inverse[part, None]
            torch.amax(x, 1, out=maximum[part])
            x.sub_(maximum[part, None]).exp_()
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


def _threshold(x_BV: Tensor, maximum: Tensor, total: Tensor, params: _Params) -> Tensor:
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


def _cut(x_BV: Tensor, index: Tensor, maximum: Tensor, total: Tensor, params: _Params) -> _Cut:
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


def _truncate(logits_BV: Tensor, inverse: Tensor, dist: _Softmax, params: _Params, rows: Tensor) -> list[_Cut]:
    """Cuts of the rows that `rows` (bool [B]) marks, a chunk of rows each."""
    index = rows.nonzero()[:, 0]
    cuts = []
    for part in _chunks(len(index), logits_BV.shape[1], logits_BV.device):
        some = index[part]
        x = logits_BV[some] * inverse[some, None]
        cuts.append(_cut(x, some, dist.maximum[some], dist.total[some], params.select(some)))
    return cuts


def _may_draw(rows: int, vocab: int, allowed: KeptSet | None, banned: KeptSet | None) -> Tensor | None:
    """bool [B,V], the ids that may be drawn; None for all."""
    for name, sets in (("allowed", allowed), ("banned", banned)):
        if sets is not None and len(sets) != rows:
            raise ValueError(f"{name}: {len(sets)} sets for {rows} rows; give one set per row")
    if banned is None:
        return None if allowed is None else allowed.mask(vocab)
    return ~banned.mask(vocab) if allowed is None else allowed.mask(vocab) & ~banned.mask(vocab)


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


def sample_tokens(
    logits_BV: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seeds: Tensor,
    positions: Tensor,
    samples: Tensor,
    vocab_size: int | None = None,
    allowed: KeptSet | None = None,
    banned: KeptSet | None = None,
    keep_sets: bool = False,
    backend: Backend = "auto",
) -> Sample:
    """Draw one token per row of logits [B,V] (any float type, any row stride); see the module's text for the rules.

    temperature, top_k, top_p, min_p: a number or a tensor [B]. Temperature 0 is greedy: the largest value, the smallest
        id on a tie, its logprob at temperature 1, kept_mass 1 and a kept set of that one id.
    seeds, samples, positions: int64 [B], key and counter of the row's random number; negative values count as bits.
    vocab_size: the real vocabulary; ids from there on do not exist (they are padding of the head).
    allowed: ids that may be drawn, one set per row. banned: ids that may not. Both come before truncation, and neither
        changes the distribution that logprobs and kept_mass speak of.
    keep_sets: return the kept sets. A row that truncates nothing keeps every id it may draw: V numbers.

    ValueError names a parameter out of range (checked on a CPU), a shape that does not fit, or an unknown id.
    """
    resolve_backend(backend, logits_BV)
    rows, vocab = logits_BV.shape
    if vocab_size is not None and not 1 <= vocab_size <= vocab:
        raise ValueError(f"vocab_size: {vocab_size} is not in [1, {vocab}], the columns of the logits")
    logits = promote(logits_BV.detach()[:, :vocab_size])
    vocab = logits.shape[1]
    inverse, params = _params(logits, temperature, top_k, top_p, min_p)
    counters = (("seeds", seeds), ("samples", samples), ("positions", positions))
    uniform = philox_uniform(*(_row_param(name, t, rows, torch.int64, logits.device) for name, t in counters))

    may_draw = _may_draw(rows, vocab, allowed, banned)
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
