"""AdamW with float32 masters, its moments in 8 bits or on the CPU if asked, and the learning-rate schedule.

bf16 has 8 bits of mantissa: an update of lr 1e-6 on a weight of 0.02 is lost in rounding. So when the model computes in
half precision, the optimiser owns float32 masters, gradients are added up in float32 as each micro-batch's backward
ends (a hook frees the half-precision gradient at once), and the compute weights are rounded copies of the masters. A
float32 or float64 model is its own master. Weight decay reaches every parameter. float16 has more bits and less range:
its backward passes run under a loss scale (loss_scale.py), which a step takes out of the float32 sums again.

Bytes per half-precision parameter on the GPU: 2 weight, 4 gradient, 4 master, 8 moments; `adamw_8bit` (bitsandbytes,
Dettmers et al., arXiv 2110.02861) 2 of moments; `adamw_offload` 2 weight and 4 gradient, the rest on the CPU, where the
step is taken.
"""

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from rhotrain.model.loaded import quiet_bitsandbytes
from rhotrain.train.config import ConfigError, OptimConfig
from rhotrain.train.loss_scale import LossScale

SMALLEST_8BIT = 4096
"""Elements from which a tensor's moments take 8 bits: bitsandbytes' own bound. Norms and biases stay in float32."""

BLOCK_8BIT = 256
"""Elements that share a float32 scale in bitsandbytes' 8-bit moments."""

WATCHED = 4096
"""Elements per tensor, about, that `changed_share` looks at."""


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """The rate of optimiser step `update` (0-based) of `total_updates`; lr_final * lr is reached at the end.

    Linear warm-up from lr / warmup_steps, then constant, linear or half a cosine (SGDR, arXiv 1608.03983, eq. 5).
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps)
    progress = min(1.0, progress)
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.lr_final + (1.0 - config.lr_final) * shape)


class StepError(FloatingPointError):
    """A number that must not reach the weights. The message names it and the likely cause; no step was taken."""


class _Sum:
    """A float32 gradient beside its parameter, where the master is elsewhere."""

    grad: Tensor | None = None


class Optimizer:
    """Steps the parameters; gradients are whatever backward passes have added since the last `step` or `zero_grad`.

    masters: what is stepped; a float32 or wider parameter is its own, unless `adamw_offload` keeps it on the CPU.
    changed_share: of the latest step, the share of weights, as the model computes with them, that it changed; measured
    on about 4096 elements of every tensor. Half-precision weights round: with small steps most of them stay while the
    masters move.
    loss_scale: of the loss whose backward passes those were; None is 1. It is taken out of the sums, never out of
    `parameter.grad`, so float32 parameters of a float16 model (an adapter's) are divided like the rest.
    """

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimConfig, loss_scale: LossScale | None = None
    ) -> None:
        self.config = config
        self.loss_scale = loss_scale
        self.parameters = parameters
        self.changed_share = 0.0
        offload = config.optimizer == "adamw_offload"
        self.masters = [p if _is_wide(p) and not offload else _master(p, offload) for p in parameters]
        apart = [(p, m) for p, m in zip(parameters, self.masters) if p is not m]
        # Where gradients are added up: beside the weights, since moving every micro-batch's would take too long.
        self._sums: list[Any] = [_Sum() if offload else m for m in self.masters]
        self._hooks = [
            p.register_post_accumulate_grad_hook(_accumulate_into(total))
            for p, m, total in zip(parameters, self.masters, self._sums)
            if p is not m
        ]
        self._apart = apart
        self.adamw = _adamw(self.masters, config)

    def zero_grad(self) -> None:
        for p in (*self.masters, *self.parameters, *self._sums):
            p.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> float | None:
        """Clip, update, clear the gradients. Returns the gradient norm before clipping, of the loss without its scale.

        When the norm is not finite the weights stay as they are: None says that a loss scale above 1 was too large,
        and has been halved; otherwise it is a StepError.
        """
        scale = self.loss_scale
        gradients = [total.grad for total in self._sums if total.grad is not None]
        if scale is not None and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale.value)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            if scale is not None and not scale.exhausted:
                scale.overflowed()
                self.zero_grad()
                return None
            raise StepError(_not_finite(float(norm), scale))
        if scale is not None:
            scale.taken()
        if self.config.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._sums, self.config.grad_clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for master, total in zip(self.masters, self._sums):
            if master is not total and total.grad is not None:
                master.grad, total.grad = total.grad.to(master), None
        before = [_watched(p).clone() for p in self.parameters]
        self.adamw.step()
        self.zero_grad()
        self._write_back()
        self.changed_share = self._share_changed(before)
        return float(norm)

    def _write_back(self) -> None:
        if self._apart:
            torch._foreach_copy_([p for p, _ in self._apart], [m for _, m in self._apart])

    def _share_changed(self, before: list[Tensor]) -> float:
        sizes = torch.tensor([p.numel() for p in self.parameters], dtype=torch.float64)
        shares = torch.stack([(_watched(p) != old).float().mean() for p, old in zip(self.parameters, before)])
        return float((shares.double().cpu() * sizes).sum() / sizes.sum())

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self.adamw.state_dict(),
            "masters": [m.detach() for _, m in self._apart],
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for (_, master), saved in zip(self._apart, state["masters"], strict=True):
            master.copy_(saved)
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self._write_back()


def _not_finite(norm: float, scale: LossScale | None) -> str:
    """Of a gradient that no smaller loss scale would make finite."""
    if scale is None:
        return f"grad_norm: {norm}; the step was not taken. Lower lr, set grad_clip, or use dtype float32"
    return (
        f"grad_norm: {norm} at a loss scale of {scale.value:g}; the step was not taken. No loss scale helps: the "
        "weights have diverged (lower lr, set grad_clip), or float16, which ends at 65504, is too narrow for this "
        "model (use dtype bfloat16 or float32)"
    )


def _is_wide(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)


def _master(parameter: nn.Parameter, offload: bool) -> nn.Parameter:
    """A copy in float32 or wider, on the CPU in pinned memory where it is offloaded."""
    wide = parameter.detach().to(dtype=torch.promote_types(parameter.dtype, torch.float32), copy=True)
    if not offload:
        return nn.Parameter(wide)
    return nn.Parameter(wide.cpu().pin_memory() if parameter.is_cuda else wide.cpu())


def _watched(parameter: nn.Parameter) -> Tensor:
    """About WATCHED elements, evenly spread. The stride shares no factor with the width, so that every column is met:
    with one of 81, a (576, 576) weight would show 64 columns of its 576."""
    flat = parameter.detach().flatten()
    width = parameter.shape[-1] if parameter.dim() else 1
    stride = flat.numel() // WATCHED | 1
    while math.gcd(stride, width) > 1:
        stride += 2
    return flat[::stride]


def _adamw(masters: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Raises ConfigError for what the choice cannot do."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer != "adamw_8bit":
        return torch.optim.AdamW(masters, fused=True, **options)
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "optimizer: adamw_8bit does not work; it is bitsandbytes', which is not installed: "
            "pip install 'rhotrain[optim]', or use adamw"
        )
    if any(m.dtype == torch.float64 for m in masters):
        raise ConfigError("optimizer: adamw_8bit does not work; it has no float64, use adamw with dtype float64")
    with quiet_bitsandbytes():
        from bitsandbytes.optim import AdamW8bit

    eight_bit: torch.optim.Optimizer = AdamW8bit(masters, min_8bit_size=SMALLEST_8BIT, **options)
    return eight_bit


def moment_bytes(parameters: list[nn.Parameter], config: OptimConfig) -> int:
    """Bytes of AdamW's two moments on the parameters' device, which the first step allocates."""
    if config.optimizer == "adamw_offload":
        return 0
    total = 0
    for p in parameters:
        wide = 16 if p.dtype == torch.float64 else 8
        eight_bit = config.optimizer == "adamw_8bit" and p.numel() >= SMALLEST_8BIT
        total += 2 * p.numel() + 8 * -(-p.numel() // BLOCK_8BIT) if eight_bit else wide * p.numel()
    return total


def _accumulate_into(total: Any) -> Any:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total.grad = gradient.to(wide) if total.grad is None else total.grad.add_(gradient)
        parameter.grad = None

    return hook
