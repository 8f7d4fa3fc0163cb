"""AdamW with float32 masters, and the learning-rate schedule.

bf16 has 8 bits of mantissa: an update of lr 1e-6 on a weight of 0.02 is lost in rounding. So when the model computes in
half precision, the optimiser owns float32 masters, gradients are added up in float32 as each micro-batch's backward
ends (a hook frees the half-precision gradient at once), and the compute weights are rounded copies of the masters. A
float32 or float64 model is its own master. Weight decay reaches every parameter.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rhotrain.train.config import OptimConfig


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


class Optimizer:
    """Steps the parameters; gradients are whatever backward passes have added since the last `step` or `zero_grad`."""

    def __init__(self, parameters: list[nn.Parameter], config: OptimConfig) -> None:
        self.config = config
        self.parameters = parameters
        self.masters = [
            p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(p.detach().float()) for p in parameters
        ]
        self._hooks = [
            p.register_post_accumulate_grad_hook(_accumulate_into(master))
            for p, master in zip(parameters, self.masters)
            if p is not master
        ]
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        for p in (*self.masters, *self.parameters):
            p.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip, update, clear the gradients. Returns the gradient norm before clipping.

        Raises StepError, with the weights untouched, when the norm is not finite.
        """
        gradients = [p.grad for p in self.masters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise StepError(
                f"grad_norm: {float(norm)}; the step was not taken. Lower lr, set grad_clip, or use dtype float32"
            )
        if self.config.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.grad_clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.zero_grad()
        self._write_back()
        return float(norm)

    def _write_back(self) -> None:
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters) if p is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def state_dict(self) -> dict[str, Any]:
        masters = [m.detach() for p, m in zip(self.parameters, self.masters) if p is not m]
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        owned = [m for p, m in zip(self.parameters, self.masters) if p is not m]
        for master, saved in zip(owned, state["masters"], strict=True):
            master.copy_(saved)
        self._write_back()


def _accumulate_into(master: nn.Parameter) -> Any:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook
