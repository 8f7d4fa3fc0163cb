"""Memory of an optimiser step: linear in the completions' length, and never N x V."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_train import make_learner, one_thread
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rhotrain.kernels import head_gemm
from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.config import AlgoConfig
from rhotrain.train.footprint import PeakMemory
from rhotrain.train.inner_loop import run_updates

VOCAB = 2053
LAYERS, HIDDEN = 2, 64
GROUPS, MEMBERS, PROMPT = 2, 4, 24
CHUNK_ROWS = 16
ALGO = AlgoConfig(old_logprobs="trainer", beta=0.01, entropy_coef=0.01)


@pytest.fixture(autouse=True)
def _small_chunk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logits are held for 16 rows at a time: a step has many times as many."""
    monkeypatch.setattr(head_gemm, "CHUNK_ELEMENTS", CHUNK_ROWS * VOCAB)
    with one_thread():
        yield


def model(checkpointing: bool = False, family: str = "llama") -> LoadedModel:
    """Every row of the head counts: the tiny tokenizer has 77 ids, and the rest would be padding."""
    loaded = tiny_model(family, vocab_size=VOCAB, hidden_size=HIDDEN, gradient_checkpointing=checkpointing)
    loaded.vocab_size = VOCAB
    return loaded


def table(length: int) -> TokenTable:
    def completion(sample: int) -> Completion:
        return Completion(
            token_ids=tuple((sample * 31 + k * 7) % 70 for k in range(length)),
            logprobs=(-3.0,) * length,
            kept_mass=(1.0,) * length,
            finish_reason="length",
            policy_version=0,
            sample=sample,
        )

    groups = [
        (tuple(range(p, p + PROMPT)), [completion(p * MEMBERS + g) for g in range(MEMBERS)]) for p in range(GROUPS)
    ]
    made = make_table(groups)
    made.set_advantages(torch.tensor([[1.0, -1.0, 0.5, -0.5]] * GROUPS))
    made.ref_logprobs = made.sampling_logprobs
    return made


def peak(length: int, checkpointing: bool, budget: int = 1 << 20) -> int:
    """Most bytes that the optimiser step of one rollout makes and holds at once."""
    learner = make_learner(model(checkpointing), ALGO, token_budget=budget, max_new_tokens=length)
    made, memory = table(length), PeakMemory()
    with memory:
        run_updates(learner, made, GROUPS, rollout_index=0)
    return memory.peak


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_peak_memory_is_linear_in_the_length(checkpointing: bool) -> None:
    """In steps of one micro-batch: doubling the length doubles what is added, to 5 %. The slope, bytes per completion
    token and layer over 4 H (float32 activations of width H): below 60 plain and below 25 checkpointed."""
    peaks = {length: peak(length, checkpointing) for length in (64, 128, 192, 256)}
    rises = [peaks[b] - peaks[a] for a, b in ((64, 128), (128, 192), (192, 256))]
    assert min(rises) > 0 and max(rises) <= 1.05 * min(rises), rises
    slope = rises[-1] / (64 * GROUPS * MEMBERS) / LAYERS / (4 * HIDDEN)
    assert slope < (25 if checkpointing else 60)


def test_a_token_budget_bounds_the_peak() -> None:
    """Twice the completions' length under one budget: the same micro-batches, about the same peak."""
    short, long = peak(64, False, budget=160), peak(128, False, budget=160)
    whole = peak(128, False)
    assert long < 1.25 * short and long < 0.5 * whole


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes, and the operator. Weights are left out: `parameters` and
    what has the shape of one (gradients, moments)."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.shapes = {tuple(p.shape) for p in parameters}
        self.elements, self.operator = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) not in self.shapes:
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.elements and tensor.shape[-2:] not in self.shapes:
                    self.elements, self.operator = elements, f"{func} {tuple(tensor.shape)}"
        return out


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_nothing_has_the_size_of_tokens_times_vocabulary(checkpointing: bool) -> None:
    loaded = model(checkpointing)
    learner = make_learner(loaded, ALGO, token_budget=1 << 20, max_new_tokens=64)
    made = table(64)
    with Largest(loaded.parameters()) as largest:
        done = run_updates(learner, made, GROUPS, rollout_index=0)
    assert done.updates and len(made.token_ids) == GROUPS * MEMBERS * 64
    whole = len(made.token_ids) * VOCAB
    head = VOCAB * HIDDEN  # gradients of the head
    assert largest.elements <= max(CHUNK_ROWS * VOCAB, head, whole // 8), largest.operator
    assert largest.elements >= CHUNK_ROWS * VOCAB, "the chunk itself was seen"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_head_allocates_its_chunk_once(family: str) -> None:
    """Scoring and updates of many micro-batches, reference included: one buffer of logits (and one of tanh under a
    softcap), whatever number of rows each has."""
    learner = make_learner(model(family=family), replace(ALGO, num_iterations=2), token_budget=120, max_new_tokens=64)
    made = table(48)
    for some in ([0], [0, 1, 2], list(range(len(made.trajectories)))):  # micro-batches of several sizes
        learner.score(made, some, loaded=model(family=family))
    assert len(run_updates(learner, made, GROUPS, rollout_index=0).updates) == 2
    buffers = 2 if family == "gemma2" else 1
    assert learner.workspace.allocations == buffers
    columns = -(-VOCAB // 16) * 16
    assert learner.workspace.nbytes == buffers * CHUNK_ROWS * columns * 4
