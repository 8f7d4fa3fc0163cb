"""lm_head as data: weight, bias, scale, softcap. The trainer's linear loss and the sampler compute logits
from it.

logits = (hidden @ weight^T + bias) * logit_scale, then softcap * tanh(logits / softcap).
Body + `lm_head` alone is not the logits everywhere: off by 5.0 for gemma2 (softcap), by 6.5 for cohere
(scale), and phi's head has a bias. That the parts found here are right is proven at load: body + head == the
model's own logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config attributes that multiply the logits: cohere, falcon_h1, muse_glimmer."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config attributes that divide them: granite and minicpm3, inkling. hyperclovax multiplies by
logits_scaling."""


@dataclass(frozen=True, slots=True)
class Head:
    """weight [V, H], bias [V] or None; softcap and logit_scale or None. Holds the model's own tensors, not
    copies."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float | None = None

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V], float32 (float64 stays), whatever the dtype of the weights.

        On CUDA a half-precision product leaves the GEMM in float32 (bf16 logits near 20 carry +-0.06).
        """
        return self.finish(_float_product(hidden_NH, self.weight))

    def finish(self, product_NV: Tensor) -> Tensor:
        """hidden @ weight^T, float32 or float64 [N, V], -> logits: bias, scale and softcap."""
        if self.bias is not None:
            product_NV = product_NV + self.bias.to(product_NV.dtype)
        if self.logit_scale is not None:
            product_NV = product_NV * self.logit_scale
        if self.softcap is not None:
            product_NV = torch.tanh(product_NV / self.softcap) * self.softcap
        return product_NV


def _float_product(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """hidden @ weight^T in float32 or wider. Under autograd a half-precision product is upcast first."""
    if hidden_NH.dtype in (torch.float32, torch.float64):
        return hidden_NH @ weight_VH.t()
    if hidden_NH.is_cuda and not torch.is_grad_enabled():
        return torch.mm(hidden_NH, weight_VH.t(), out_dtype=torch.float32)
    return hidden_NH.float() @ weight_VH.t().float()


def head_of(model: nn.Module) -> Head:
    """The head of a Hugging Face causal LM. Raises ValueError when the model has no output embedding."""
    linear: Any = model.get_output_embeddings()  # type: ignore[operator]
    if linear is None or not hasattr(linear, "weight"):
        raise ValueError(f"{type(model).__name__} has no output embedding (lm_head), so it is not a causal LM")
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        softcap=None if not softcap else float(softcap),
        logit_scale=_logit_scale(config),
    )


def _logit_scale(config: Any) -> float | None:
    """The product of the scales that the config asks for, None when it asks for none."""
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= float(getattr(config, name, None) or 1.0)
    for name in DIVISORS:
        value = float(getattr(config, name, None) or 1.0)
        scale *= value if config.model_type.startswith("hyperclovax") else 1.0 / value
    return None if scale == 1.0 else scale
