"""The schedule against closed forms, AdamW against its paper, bf16 against float32 sums."""

import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_naive import model_pair
from helpers_train import fake_rollout, make_learner, one_thread
from torch import Tensor, nn

from rhotrain.train.config import AlgoConfig, Config, ConfigError, OptimConfig, RolloutConfig, RunConfig
from rhotrain.train.inner_loop import run_updates
from rhotrain.train.optim import Optimizer, learning_rate
from rhotrain.train.presets import preset
from rhotrain.train.settings import build, merge
from rhotrain.train.setup import build as build_parts


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# ---- schedule -------------------------------------------------------------------------------------------------------


def rates(total: int, **config: Any) -> list[float]:
    return [learning_rate(OptimConfig(lr=2.0, **config), k, total) for k in range(total + 1)]


def test_constant_is_constant() -> None:
    assert rates(5) == [2.0] * 6


def test_linear_closed_form() -> None:
    assert rates(4, schedule="linear") == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates(4, schedule="linear", lr_final=0.5) == [2.0, 1.75, 1.5, 1.25, 1.0]


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_cosine_closed_form(final: float) -> None:
    expected = [2 * final + (2 - 2 * final) * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert rates(8, schedule="cosine", lr_final=final) == pytest.approx(expected, rel=1e-14, abs=1e-16)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(schedule: Any) -> None:
    got = rates(12, schedule=schedule, warmup_steps=4)
    assert got[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    if schedule != "constant":
        assert got[4:] == rates(8, schedule=schedule)  # the rest is the schedule without a warm-up
    assert rates(4, schedule=schedule, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_schedule_reaches_its_end_and_stays_there(schedule: Any, final: float) -> None:
    config = OptimConfig(lr=2.0, schedule=schedule, lr_final=final, warmup_steps=3)
    assert learning_rate(config, 20, 20) == pytest.approx(2.0 * final, abs=1e-15)
    assert learning_rate(config, 25, 20) == pytest.approx(2.0 * final, abs=1e-15)
    assert learning_rate(config, 19, 20) > 2.0 * final


def test_total_updates_counts_every_optimiser_step() -> None:
    config = Config(
        run=RunConfig(steps=7),
        rollout=RolloutConfig(prompts_per_step=8),
        algo=AlgoConfig(num_iterations=3, minibatches_per_rollout=2),
    )
    assert config.total_updates == 7 * 3 * 2


def test_the_inner_loop_walks_the_schedule_to_its_end() -> None:
    """steps x num_iterations x minibatches updates use rates 0 .. total - 1; the next one would be lr_final * lr."""
    loaded, naive = model_pair("llama", torch.float32)
    rollout = fake_rollout(naive, vocab_size=loaded.vocab_size, rewards=[[1.0, 0.0, 0.5, 2.0]] * 6)
    algo = AlgoConfig(num_iterations=2, minibatches_per_rollout=3)
    steps, total = 2, 2 * 2 * 3
    learner = make_learner(loaded, algo, total_updates=total, schedule="linear", lr=0.6, lr_final=0.5)
    used: list[float] = []
    for step in range(steps):
        done = run_updates(learner, rollout.table(algo, torch.float32), 6, rollout_index=step)
        used += [u["learning_rate"] for u in done.updates]
    assert learner.updates == total
    assert used == pytest.approx([0.6 * (0.5 + 0.5 * (1 - k / total)) for k in range(total)], rel=1e-12)
    assert learning_rate(learner.optim, learner.updates, total) == pytest.approx(0.3, rel=1e-12)


# ---- AdamW ----------------------------------------------------------------------------------------------------------


def adamw_by_hand(start: Tensor, gradients: list[Tensor], config: OptimConfig, rates: list[float]) -> Tensor:
    """Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, on one vector, in float64."""
    (b1, b2), x = config.betas, start.double().clone()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for k, (gradient, lr) in enumerate(zip(gradients, rates), start=1):
        g = gradient.double()
        if config.grad_clip > 0:
            g = g * min(1.0, config.grad_clip / float(g.norm()))
        x = x - lr * config.weight_decay * x
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        x = x - lr * (m / (1 - b1**k)) / ((v / (1 - b2**k)).sqrt() + config.eps)
    return x


@pytest.mark.parametrize("clip", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_adamw_with_clipping(clip: float, decay: float) -> None:
    config = OptimConfig(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay, grad_clip=clip)
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, dtype=torch.float64, generator=generator))
    start, rates = parameter.detach().clone(), [0.1, 0.05, 0.2]
    gradients = [torch.randn(6, dtype=torch.float64, generator=generator) * s for s in (1.0, 3.0, 0.1)]
    optimizer = Optimizer([parameter], config)
    assert optimizer.masters[0] is parameter
    for gradient, lr in zip(gradients, rates):
        parameter.grad = gradient.clone()
        assert optimizer.step(lr) == pytest.approx(float(gradient.norm()), rel=1e-12)  # before clipping
        assert parameter.grad is None
    expected = adamw_by_hand(start, gradients, config, rates)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)  # clip adds 1e-6 to the norm
    if clip != 1.0:
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


def test_the_norm_is_over_all_parameters_together() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 3))
    optimizer = Optimizer([a, b], OptimConfig())
    a.grad, b.grad = torch.full((2,), 3.0), torch.full((3, 3), 1.0)
    assert optimizer.step(0.1) == pytest.approx(math.sqrt(2 * 9 + 9))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_not_finite_leaves_the_weights_alone(bad: float, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.randn(4).to(dtype)), nn.Parameter(torch.randn(4).to(dtype))]
    optimizer = Optimizer(parameters, OptimConfig(weight_decay=0.5))
    (parameters[0].sum() * 2 + parameters[1].sum()).backward()
    optimizer.step(0.1)
    before, state = [p.detach().clone() for p in parameters], optimizer.state_dict()
    moments = [state["adamw"]["state"][0][k].clone() for k in ("step", "exp_avg", "exp_avg_sq")]
    (parameters[0].sum() * bad + parameters[1].sum()).backward()
    with pytest.raises(FloatingPointError, match=r"grad_norm: .*not taken.*lr, set grad_clip"):
        optimizer.step(0.1)
    for p, b in zip(parameters, before):
        assert torch.equal(p, b)
    after = optimizer.state_dict()["adamw"]["state"][0]
    for old, name in zip(moments, ("step", "exp_avg", "exp_avg_sq")):
        assert torch.equal(old, after[name])
    optimizer.zero_grad()
    parameters[1].sum().backward()
    optimizer.step(0.1)  # and it can go on


# ---- float32 masters ------------------------------------------------------------------------------------------------


def test_half_precision_gradients_are_summed_in_float32() -> None:
    """256 gradients of 1 / 256 after one of 1: a bf16 sum stays at 1 (half an ulp is lost each time)."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = Optimizer([parameter], OptimConfig())
    terms = [1.0] + [2.0**-8] * 256
    for term in terms:
        (parameter.sum() * term).backward()
        assert parameter.grad is None  # freed at once
    gradient = optimizer.masters[0].grad
    assert gradient is not None and gradient.dtype == torch.float32
    assert gradient.tolist() == [2.0] * 3
    summed = torch.zeros(3, dtype=torch.bfloat16)
    for term in terms:
        summed += torch.tensor(term, dtype=torch.bfloat16)
    assert summed.tolist() == [1.0] * 3  # what a plain bf16 accumulation would have given


def test_updates_below_the_resolution_of_bf16_add_up_in_the_masters() -> None:
    """lr 1e-6 on a weight of 1: one update is far below bf16's 2**-8; 5000 of them are 0.005."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Optimizer([parameter], OptimConfig())
    for k in range(3000):
        parameter.sum().backward()
        optimizer.step(1e-6)
        if k == 0:
            assert parameter.tolist() == [1.0, 1.0] and optimizer.masters[0].tolist() != [1.0, 1.0]
    assert float(optimizer.masters[0][0].detach()) == pytest.approx(1 - 3e-3, rel=1e-4)
    assert parameter.tolist() == [float(torch.tensor(1 - 3e-3).bfloat16())] * 2 != [1.0, 1.0]


def test_bf16_model_accumulates_a_steps_gradient_in_float32() -> None:
    """run_updates on a bf16 model: the masters' gradient is the float32 sum of every micro-batch's bf16 gradient."""
    loaded = tiny_model("llama", dtype=torch.bfloat16)
    _, naive = model_pair("llama", torch.float32)
    rewards = ((1.0, 0.0, 0.5, 2.0),) * 6  # every group runs
    rollout = fake_rollout(naive, vocab_size=loaded.vocab_size, rewards=rewards)
    algo = AlgoConfig(old_logprobs="sampler")
    optimizer = Watcher(loaded.parameters(), OptimConfig())
    assert all(m.dtype == torch.float32 for m in optimizer.masters)
    learner = make_learner(loaded, algo, optimizer=optimizer, token_budget=18, share_prompts=False)
    run_updates(learner, rollout.table(algo, torch.float32), rollout.num_groups, rollout_index=0)
    assert max(len(p) for p in optimizer.pieces) >= 8  # micro-batches
    exact = rounded = 0
    for pieces, total in zip(optimizer.pieces, optimizer.sums):
        float32 = torch.zeros_like(total)
        half = torch.zeros_like(total, dtype=torch.bfloat16)
        for piece in pieces:
            assert piece.dtype == torch.bfloat16
            float32 += piece.float()
            half += piece
        exact += int((float32 == total).sum())
        rounded += int((half.float() == total).sum())
    assert exact == sum(t.numel() for t in optimizer.sums)
    assert rounded < exact / 2  # the test can tell a bf16 sum
    for parameter, master in zip(optimizer.parameters, optimizer.masters):
        assert torch.equal(parameter, master.bfloat16())


class Watcher(Optimizer):
    """Notes every micro-batch's gradient before the accumulating hook frees it, and the sums that reach the step."""

    def __init__(self, parameters: list[nn.Parameter], config: OptimConfig) -> None:
        self.pieces: list[list[Tensor]] = [[] for _ in parameters]
        self.sums: list[Tensor] = []
        for parameter, pieces in zip(parameters, self.pieces):
            parameter.register_post_accumulate_grad_hook(
                lambda p, pieces=pieces: pieces.append(p.grad.clone())  # type: ignore[misc]
            )
        super().__init__(parameters, config)

    def step(self, lr: float) -> float | None:
        self.sums = [m.grad.clone() for m in self.masters if m.grad is not None]
        return super().step(lr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_round_trip_continues_bit_for_bit(dtype: torch.dtype) -> None:
    def fresh() -> tuple[nn.Parameter, Optimizer]:
        p = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64).to(dtype))
        return p, Optimizer([p], OptimConfig(weight_decay=0.1))

    def train(p: nn.Parameter, o: Optimizer, steps: range) -> None:
        for k in steps:
            (p * p * (k + 1)).sum().backward()
            o.step(1e-3)

    straight, optimizer = fresh()
    train(straight, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save({"model": straight.detach(), "optimizer": optimizer.state_dict()}, buffer)
    train(straight, optimizer, range(3, 6))
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, again = fresh()
    with torch.no_grad():
        resumed.copy_(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, range(3, 6))
    assert torch.equal(resumed, straight)
    assert torch.equal(again.masters[0], optimizer.masters[0])


# ---- other places and sizes of the moments --------------------------------------------------------------------------


def problem(optimizer: str, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[list[nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((96, 128), (100,), (17, 4096))
    parameters = [nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for shape in shapes]
    return parameters, Optimizer(parameters, OptimConfig(optimizer=optimizer, **config))  # type: ignore[arg-type]


def walk(parameters: list[nn.Parameter], optimizer: Optimizer, steps: int, first: int = 0, lr: float = 1e-3) -> None:
    """Steps with two micro-batches of noisy gradients of a quadratic."""
    for k in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + k)
        for _ in range(2):
            loss = torch.zeros((), dtype=torch.float64)
            for p in parameters:
                noise = torch.randn(p.shape, generator=generator).to(p.dtype)
                loss = loss + ((p - 0.3 + 0.1 * noise).square().sum() * 0.5).double()
            loss.backward()
        optimizer.step(lr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_offloaded_steps_are_the_same_bits(dtype: torch.dtype, clip: float) -> None:
    """Masters of their own, gradients added up beside the weights, the step in another place: the numbers stay."""
    plain, one = problem("adamw", dtype, grad_clip=clip, weight_decay=0.1)
    apart, two = problem("adamw_offload", dtype, grad_clip=clip, weight_decay=0.1)
    walk(plain, one, 4)
    walk(apart, two, 4)
    assert all(m is not p and m.dtype == torch.float32 for m, p in zip(two.masters, two.parameters))
    assert all(torch.equal(a, b) for a, b in zip(plain, apart))
    assert all(torch.equal(a, b) for a, b in zip(one.masters, two.masters))
    assert all(p.grad is None for p in (*apart, *two.masters))


def test_offloaded_gradients_are_summed_in_float32_and_dropped() -> None:
    (parameter, *_), optimizer = problem("adamw_offload", torch.bfloat16)
    for term in [1.0] + [2.0**-8] * 256:
        (parameter.sum() * term).backward()
        assert parameter.grad is None and optimizer.masters[0].grad is None
    total = optimizer._sums[0].grad
    assert total.dtype == torch.float32 and total.flatten()[:3].tolist() == [2.0] * 3
    optimizer.zero_grad()
    assert optimizer._sums[0].grad is None


@pytest.mark.cuda
def test_offloaded_masters_and_moments_are_on_the_cpu() -> None:
    weight = nn.Parameter(torch.randn(64, 128, device="cuda", dtype=torch.bfloat16))
    optimizer = Optimizer([weight], OptimConfig(optimizer="adamw_offload"))
    before = weight.detach().clone()
    (weight.float() ** 2).sum().backward()
    assert optimizer._sums[0].grad.is_cuda
    optimizer.step(1e-2)
    state = optimizer.adamw.state[optimizer.masters[0]]
    assert optimizer.masters[0].is_pinned() and not state["exp_avg"].is_cuda
    torch.testing.assert_close(weight, (before.float() - 1e-2 * before.float().sign()).bfloat16())


def test_eight_bit_moments_walk_beside_float32_ones() -> None:
    """Within a tenth of the way walked (blocks of 256 share a scale, so the small moments of a block are coarse), and
    tensors too small for it by rounding."""
    pytest.importorskip("bitsandbytes")
    plain, one = problem("adamw")
    small, two = problem("adamw_8bit")
    start = [p.detach().clone() for p in plain]
    walk(plain, one, 8)
    walk(small, two, 8)
    for a, b, s in zip(plain, small, start):
        way, error = float((a - s).detach().norm()), float((a - b).detach().norm())
        assert error <= 0.1 * way
        assert (error > 1e-5 * way) == (a.numel() >= 4096)
    state = two.state_dict()["adamw"]["state"]
    kept = [state[i].get("__bnb_optimizer_quant_state__", state[i]) for i in range(3)]
    assert [s["state1"].dtype for s in kept] == [torch.uint8, torch.float32, torch.uint8]
    assert kept[2]["absmax1"].numel() == 17 * 4096 // 256


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adamw_offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_state_goes_on_bit_for_bit(optimizer: str, dtype: torch.dtype) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    whole, first = problem(optimizer, dtype)
    walk(whole, first, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again, second = problem(optimizer, dtype)
    with torch.no_grad():
        for p, q in zip(again, whole):
            p.copy_(q)
    second.load_state_dict(torch.load(file, weights_only=True))
    walk(whole, first, 3, first=3)
    walk(again, second, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))
    assert all(torch.equal(a, b) for a, b in zip(first.masters, second.masters))


def test_eight_bits_are_refused_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rhotrain.train.optim.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"optimizer: adamw_8bit does not work; .*rhotrain\[optim\]"):
            problem("adamw_8bit")
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match="it has no float64"):
        problem("adamw_8bit", torch.float64)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"optimizer": "adamw_offload"}, "optimizer: adamw_offload"),
        ({"offload_activations": True, "gradient_checkpointing": True}, "offload_activations: True"),
        ({"offload_reference": True, "beta": 0.1}, "offload_reference: True"),
    ],
)
def test_offloading_from_a_cpu_is_refused(values: dict[str, Any], named: str) -> None:
    settings = build(merge([preset("tiny-sums").layer, {**values, "device": "cpu"}]))
    with pytest.raises(ConfigError, match=f"{named} does not work here; the model runs on the CPU"):
        build_parts(settings)


# ---- how many weights an update changed -----------------------------------------------------------------------------


def test_the_share_of_changed_weights_by_hand() -> None:
    """bf16 has steps of 2**-8 at 1 and of 2**-16 at 2**-8: an update of 1e-3 moves the small weights only."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0**-8] * 50).bfloat16())
    other = nn.Parameter(torch.full((300,), 1.0).bfloat16())
    optimizer = Optimizer([weight, other], OptimConfig())
    (weight.sum() + other.sum()).backward()
    optimizer.step(1e-3)
    assert optimizer.changed_share == pytest.approx(50 / 400)
    exact = nn.Parameter(torch.ones(10))
    optimizer = Optimizer([exact], OptimConfig())
    (exact * torch.arange(10.0)).sum().backward()
    optimizer.step(1e-3)
    assert optimizer.changed_share == pytest.approx(0.9), "one weight has no gradient"


# SmolLM2's attention and MLP, Qwen3's key projection, a width of small factors only; rows, columns.
@pytest.mark.parametrize("shape", [(512, 320), (576, 576), (192, 576), (576, 1536), (1024, 1024), (630, 630)])
@pytest.mark.parametrize("every", [2, 3, 5, 7, 9])
def test_the_share_is_a_sample_over_all_columns(shape: tuple[int, int], every: int) -> None:
    """Every k-th column of a matrix changes; the sample finds their share within two percent."""
    weight = nn.Parameter(torch.ones(shape))
    optimizer = Optimizer([weight], OptimConfig())
    (weight[:, ::every] * 2).sum().backward()
    optimizer.step(1e-3)
    changed = len(range(0, shape[1], every)) / shape[1]
    assert optimizer.changed_share == pytest.approx(changed, abs=0.02)


def test_the_share_of_a_scalar() -> None:
    scale = nn.Parameter(torch.tensor(1.0))
    optimizer = Optimizer([scale], OptimConfig())
    (scale * 2).backward()
    optimizer.step(1e-3)
    assert optimizer.changed_share == 1.0
