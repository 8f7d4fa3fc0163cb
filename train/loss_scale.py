"""Dynamic loss scaling: what float16 needs so that small gradients do not vanish.

float16 has no number between 0 and 6e-8, and gradients of a loss that is divided by all its tokens lie there. So the
loss is multiplied by a scale before the backward pass, the float32 sums of the gradients are divided by it, and a
gradient that is not finite, because the scale pushed it beyond 65504, costs that optimiser step and halves the scale
(Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2). Constants and rule are those of
torch.amp.GradScaler, which itself does not fit: it takes gradients from the optimiser's parameters, where those of
`adamw_offload` are not; it finds overflow in a pass of its own, where the gradient norm tells it already; and it halves
without end, where below a scale of 1 an overflow is none of its doing.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
"""Optimiser steps without overflow after which the scale grows."""
LARGEST = 2.0**126
"""The scale and one over it are normal numbers in float32."""


@dataclass
class LossScale:
    """value: what the loss is multiplied by, a power of 2, so that dividing by it rounds nothing. good_steps: steps
    taken since it last changed. skipped: optimiser steps lost to overflow so far."""

    value: float = INITIAL
    good_steps: int = 0
    skipped: int = 0
    growth_interval: int = GROWTH_INTERVAL

    @staticmethod
    def of(dtype: torch.dtype) -> "LossScale | None":
        """For a model that computes in `dtype`; None where gradients have the range of float32."""
        return LossScale() if dtype == torch.float16 else None

    @property
    def exhausted(self) -> bool:
        """Whether a gradient that is not finite has another cause than the scale."""
        return self.value <= 1.0

    def taken(self) -> None:
        """After a step with a finite gradient."""
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(LARGEST, self.value * GROWTH), 0

    def overflowed(self) -> None:
        """After a gradient that was not finite, and whose step was not taken."""
        self.value, self.good_steps = max(1.0, self.value * BACKOFF), 0
        self.skipped += 1

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.value, "skipped_steps": self.skipped}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps, self.skipped = state["value"], state["good_steps"], state["skipped"]
        self.growth_interval = state["growth_interval"]
