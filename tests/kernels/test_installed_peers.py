"""Against the code of installed peers (make bench installs them): TRL's GRPO loss, Liger's fused losses.

test_peer_formulas.py writes the published formulas out and needs no peer; here their own functions are called.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from rhotrain.kernels.backend import INTERPRETED
from rhotrain.kernels.linear import linear_policy_loss
from rhotrain.kernels.logprob import token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs, policy_loss
from rhotrain.kernels.spec import Objective

pytestmark = pytest.mark.slow

B, T, V, H = 4, 7, 61, 16
TEMPERATURE, BETA, MAX_LENGTH = 0.9, 0.04, 9
LENGTHS = torch.tensor([7, 3, 1, 5])
MASK = torch.arange(T) < LENGTHS[:, None]

# loss_type of TRL and Liger -> our objective and the weight of each token
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"kind": "cispo", "ratio_min": 0.0, "ratio_max": 1.3},
    "sapo": {"kind": "sapo"},
}


def weights_of(loss_type: str) -> Tensor:
    """[B, T]: mask times the loss type's normaliser, for one micro-batch per step."""
    mask = MASK.double()
    if loss_type in ("grpo", "sapo"):
        return mask / mask.sum(1, keepdim=True) / B
    if loss_type == "dr_grpo":
        return mask / (B * MAX_LENGTH)
    return mask / mask.sum()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def problem(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """hidden [B * T, H], weight [V, H], ids, old and ref logprobs and importance [B, T], advantages [B]."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    p = {"hidden": randn(B * T, H), "weight": randn(V, H), "advantages": randn(B)}
    p["ids"] = torch.randint(0, V, (B, T), generator=g)
    logits = p["hidden"] @ p["weight"].t()
    lp = token_logprobs(logits, p["ids"].flatten(), temperature=TEMPERATURE).logprobs.view(B, T)
    p["old"], p["ref"] = lp + 0.3 * randn(B, T), lp + 0.3 * randn(B, T)
    p["importance"] = randn(B, T).abs()
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in p.items()}


def inputs_of(p: dict[str, Tensor], loss_type: str, *, importance: bool) -> PolicyInputs:
    return PolicyInputs(
        old_logprobs=p["old"].flatten(),
        advantages=p["advantages"].repeat_interleave(T),
        weights=weights_of(loss_type).flatten().to(p["old"].dtype),
        ref_logprobs=p["ref"].flatten(),
        importance=p["importance"].flatten() if importance else None,
        sequence_ids=torch.arange(B).repeat_interleave(T),
    )


def objective_of(loss_type: str, **change: Any) -> Objective:
    return Objective(**{"kl": "k3", "beta": BETA, **OBJECTIVES[loss_type], **change})


VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((loss_type, {}, {}) for loss_type in OBJECTIVES),
    ("dapo", {"delta": 1.25}, {"dual_clip": 1.25}),
    ("grpo", {"importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
    ("dapo", {"use_bias_correction_kl": True}, {"kl": "k3_unbiased"}),
]


@pytest.mark.parametrize(("loss_type", "theirs", "ours"), VARIANTS)
def test_trl_loss(loss_type: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """GRPOTrainer._compute_loss itself, on logprobs that it is handed; float64, loss and gradient of the logits."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")
    p = problem()
    logits = (p["hidden"] @ p["weight"].t()).requires_grad_()
    logp = torch.log_softmax(logits.view(B, T, V) / TEMPERATURE, -1)
    per_token = logp.gather(2, p["ids"][..., None]).squeeze(2)
    entropy = -(logp.exp() * logp).sum(-1).detach()
    arguments = {"delta": None, "use_bias_correction_kl": False, **theirs}
    level = arguments.pop("importance_sampling_level", "token")
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (per_token, entropy, None)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather.side_effect = lambda x: x
    trainer._metrics = {"train": defaultdict(list)}
    for name, value in {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": level,
        "beta": BETA,
        "loss_type": loss_type,
        "epsilon_low": 0.2,
        "epsilon_high": 1.3 if loss_type == "cispo" else 0.2,
        "use_vllm": False,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(
            steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, **arguments
        ),
    }.items():
        setattr(trainer, name, value)
    batch = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(B, 1, dtype=torch.int64),
        "completion_ids": p["ids"],
        "completion_mask": MASK.long(),
        "advantages": p["advantages"],
        "old_per_token_logps": p["old"],
        "ref_per_token_logps": p["ref"],
        "num_items_in_batch": MASK.sum(),
    }
    with default_dtype(torch.float64):  # SAPO's temperatures become a tensor of the default type there
        expected = trainer_module.GRPOTrainer._compute_loss(trainer, MagicMock(), batch)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    out = policy_loss(
        logits,
        p["ids"].flatten(),
        inputs_of(p, loss_type, importance=False),
        objective_of(loss_type, **ours),
        temperature=TEMPERATURE,
    )
    (grad,) = torch.autograd.grad(out.loss, logits)
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-14)


def test_trl_logprob_and_entropy() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    p = problem()
    logits = (p["hidden"] @ p["weight"].t()).view(B, T, V)
    out = token_logprobs(logits.view(B * T, V), p["ids"].flatten(), entropy=True)
    expected = utils.selective_log_softmax(logits, p["ids"])
    torch.testing.assert_close(out.logprobs.view(B, T), expected, rtol=1e-12, atol=1e-13)
    assert out.entropy is not None
    torch.testing.assert_close(out.entropy.view(B, T), utils.entropy_from_logits(logits), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize(("loss_type", "theirs", "ours"), VARIANTS)
def test_liger_fused_linear_loss(
    loss_type: str, theirs: dict[str, Any], ours: dict[str, Any], importance: bool
) -> None:
    """LigerFusedLinearGRPOLoss (chunked PyTorch) in float32, hidden and head gradients included."""
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    p = problem(torch.float32)
    peer = liger.LigerFusedLinearGRPOLoss(
        beta=BETA,
        compiled=False,
        use_ref_model=True,
        epsilon_low=0.2,
        epsilon_high=1.3 if loss_type == "cispo" else 0.2,
        loss_type=loss_type,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        **theirs,
    )
    results = []
    for mine in (False, True):
        hidden, weight = (p[name].clone().requires_grad_() for name in ("hidden", "weight"))
        if mine:
            loss = linear_policy_loss(
                hidden,
                weight,
                p["ids"].flatten(),
                inputs_of(p, loss_type, importance=importance),
                objective_of(loss_type, **ours),
                temperature=TEMPERATURE,
            ).loss
        else:
            loss, _ = peer(
                hidden.view(B, T, H),
                weight,
                p["ids"],
                MASK.float(),
                p["advantages"],
                ref_per_token_logps=p["ref"],
                old_per_token_logps=p["old"],
                vllm_is_ratio=p["importance"] if importance else None,
            )
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for theirs_value, ours_value in zip(*results):
        torch.testing.assert_close(ours_value, theirs_value, rtol=1e-4, atol=2e-6)


@pytest.mark.skipif(not INTERPRETED, reason="both kernels run in the interpreter here")
@pytest.mark.parametrize(("loss_type", "theirs", "ours"), VARIANTS)
def test_liger_triton_loss(loss_type: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Liger's Triton kernel and ours, both in the interpreter, on the same float32 logits."""
    liger = pytest.importorskip("liger_kernel.transformers.grpo_loss")
    p = problem(torch.float32)
    logits = (p["hidden"] @ p["weight"].t()).view(B, T, V)
    leaf = torch.cat([logits, torch.zeros(B, 1, V)], 1).requires_grad_()
    loss, _ = liger.triton_grpo_loss(
        leaf,
        p["old"],
        p["ref"],
        p["ids"],
        p["advantages"],
        completion_mask=MASK.long(),
        temperature=TEMPERATURE,
        beta=BETA,
        eps_low=0.2,
        eps_high=1.3 if loss_type == "cispo" else 0.2,
        inplace=False,
        loss_type=loss_type,
        max_completion_length=MAX_LENGTH,
        reduce=True,
        **theirs,
    )
    (expected,) = torch.autograd.grad(loss, leaf)
    mine = logits.reshape(B * T, V).clone().requires_grad_()
    out = policy_loss(
        mine,
        p["ids"].flatten(),
        inputs_of(p, loss_type, importance=False),
        objective_of(loss_type, **ours),
        temperature=TEMPERATURE,
        backend="triton",
    )
    (grad,) = torch.autograd.grad(out.loss, mine)
    torch.testing.assert_close(out.loss.detach(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.view(B, T, V), expected[:, :T], rtol=1e-4, atol=1e-6)
