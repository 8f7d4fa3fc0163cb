"""Records of our own engine with one fault planted in each, and random clean settings.

What a faulty engine or trainer would report is computed by transformers alone (`hf_logprobs`), apart from the faults
that are only a matter of what is left out or divided.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers_model import FAMILIES, tiny_hf_model, tiny_model
from helpers_train import make_learner
from transformers import AutoModelForCausalLM

from rhotrain.kernels.linear import linear_policy_loss
from rhotrain.kernels.policy_loss import PolicyInputs
from rhotrain.model import tiny
from rhotrain.model.load import LoadedModel, load_model
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.train.batching import make_table, pack
from rhotrain.train.budget import Budget, calibrate
from rhotrain.train.config import AlgoConfig, OptimConfig
from rhotrain.train.diagnosis import Scoring, diagnose
from rhotrain.train.inner_loop import run_updates
from rhotrain.train.optim import Optimizer
from rhotrain.train.records import Record, records_of
from rhotrain.train.step import packed_hidden

Pairs = list[tuple[tuple[int, ...], Completion]]
Weights = dict[str, torch.Tensor]

FAULTS = (
    "undetached",
    "temperature",
    "shifted",
    "bf16 weights",
    "stale weights",
    "truncation",
    "padding",
    "eos dropped",
)
"""Planted faults, by the name that each must be given."""


@dataclass(frozen=True)
class Case:
    """A model with prompts for it. hf: makes an untouched transformers model of the same weights."""

    name: str
    make: Callable[[], LoadedModel]
    hf: Callable[[], Any]
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    group_size: int = 8


def tiny_llama_case(seed: int = 0, initializer_range: float = 0.2) -> Case:
    """A random llama; prompts of several lengths. It draws a stop id every 40 tokens or so."""
    rng = random.Random(seed)
    prompts = tuple(tuple(rng.randrange(5, 70) for _ in range(n)) for n in (3, 7, 5, 12))
    return Case(
        f"tiny llama {seed}",
        lambda: tiny_model("llama", seed, initializer_range=initializer_range),
        lambda: tiny_hf_model("llama", seed, initializer_range=initializer_range),
        prompts,
        max_new_tokens=20,
    )


def tiny_sums_case() -> Case:
    """The preset, with four sums of several lengths."""
    tokenizer = tiny.build_tokenizer()
    texts = ("3+4=", "41-9=", "18+5=", "7-2=")
    return Case(
        "tiny-sums",
        lambda: load_model("tiny-sums", device="cpu", dtype="float32", probe=False),
        lambda: AutoModelForCausalLM.from_pretrained(tiny.folder(), dtype=torch.float32),
        tuple(tuple(tokenizer.encode(text)) for text in texts),
        max_new_tokens=6,
        group_size=12,
    )


def sample(loaded: LoadedModel, case: Case, sampling: SamplingParams) -> Pairs:
    """(prompt ids, completion) of the engine."""
    sampling = replace(sampling, max_new_tokens=case.max_new_tokens)
    groups = Engine(loaded, num_pages=400, page_size=4).generate(case.prompts, sampling, n=case.group_size)
    return [(prompt, completion) for prompt, group in zip(case.prompts, groups) for completion in group]


@torch.no_grad()
def hf_logprobs(
    model: Any,
    record: Record,
    *,
    temperature: float,
    vocab: int,
    pads: Sequence[int] = (),
    late: int = 0,
    before: Sequence[int] = (),
) -> tuple[float, ...]:
    """The completion's logprobs by one unpadded forward of transformers. pads, before: ids in front of the prompt, all
    attended. late: read the logits so many rows too late."""
    prompt = [*pads, *before, *record.prompt_ids]
    ids = torch.tensor([[*prompt, *record.completion_ids]])
    logits = model.eval()(ids, use_cache=False).logits[0, :, :vocab].double()
    rows = torch.arange(len(record.completion_ids)) + len(prompt) - 1 + late
    chosen = torch.log_softmax(logits[rows] / temperature, -1)
    return tuple(chosen.gather(1, torch.tensor(record.completion_ids)[:, None])[:, 0].tolist())


def with_logprobs(records: Sequence[Record], make: Callable[[Record], tuple[float, ...]]) -> list[Record]:
    return [replace(record, logprobs=make(record)) for record in records]


@torch.no_grad()
def rounded_parameters(model: Any) -> Any:
    """The model with bfloat16 values in its float32 parameters. Its buffers stay: the frequencies of RoPE are none."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    return model


@dataclass(frozen=True)
class Planted:
    """A faulty pipeline. loaded: the trainer's model. attached: the trainer's own graph goes in as old_logprobs."""

    loaded: LoadedModel
    records: list[Record]
    scoring: Scoring
    earlier: Weights | None = None
    attached: bool = False


def plant(case: Case, fault: str, *, seed: int = 0) -> Planted:
    """The pipeline of `case` with this fault and no other (`none`: without one)."""
    loaded = case.make()
    temperature = 0.6 if fault == "temperature" else 1.0
    sampling = SamplingParams(temperature=temperature, seed=seed, top_p=0.8 if fault == "truncation" else 1.0)
    pairs = sample(loaded, case, sampling)
    records = records_of(pairs)
    scoring = Scoring.of(sampling, replay=False)
    vocab = loaded.vocab_size

    def by_hf(model: Any, **options: Any) -> list[Record]:
        return with_logprobs(records, lambda r: hf_logprobs(model, r, temperature=temperature, vocab=vocab, **options))

    if fault == "temperature":  # the trainer scores at 1 what was sampled and reported at 0.6
        scoring = replace(scoring, temperature=1.0)
    elif fault == "shifted":  # log_softmax(logits)[t].gather(ids[t])
        records = by_hf(case.hf(), late=1)
    elif fault == "bf16 weights":
        records = by_hf(rounded_parameters(case.hf()))
    elif fault == "padding":
        records = by_hf(case.hf(), pads=[loaded.tokenizer.pad_token_id])
    elif fault == "eos dropped":
        records = [drop_eos(record) for record in records]
    earlier = None
    if fault == "stale weights":
        earlier = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
        train(loaded, pairs, updates=3)
    return Planted(loaded, records, scoring, earlier, attached=fault == "undetached")


def drop_eos(record: Record) -> Record:
    """Without the stop token, its id and its logprob."""
    if record.finish_reason != "stop" or len(record.completion_ids) < 2:
        return record
    return replace(record, completion_ids=record.completion_ids[:-1], logprobs=record.logprobs[:-1])


def train(loaded: LoadedModel, pairs: Pairs, *, updates: int, lr: float = 1e-3) -> None:
    """Real optimiser updates on these completions, with advantages of +-1."""
    prompts = list(dict.fromkeys(prompt for prompt, _ in pairs))
    groups = [(prompt, [completion for other, completion in pairs if other == prompt]) for prompt in prompts]
    table = make_table(groups)
    table.set_advantages(torch.tensor([[1.0 - 2.0 * (g % 2) for g in range(len(group))] for _, group in groups]))
    algo = AlgoConfig(num_iterations=updates, old_logprobs="trainer")
    optimizer = Optimizer(loaded.parameters(), OptimConfig(lr=lr))
    learner = make_learner(loaded, algo, optimizer=optimizer, lr=lr)
    before = loaded.policy_version
    run_updates(learner, table, len(groups), rollout_index=0)
    assert loaded.policy_version == before + updates


def guard(planted: Planted) -> str | None:
    """The message of the objective's guard when the trainer hands over its logprobs as the pipeline does."""
    loaded = planted.loaded
    records = [r for r in planted.records if len(r.completion_ids) == len(r.logprobs)]
    blank = [
        Completion(
            token_ids=r.completion_ids,
            logprobs=tuple(min(0.0, x) for x in r.logprobs),
            kept_mass=(1.0,) * len(r.completion_ids),
            finish_reason="length",
            policy_version=0,
            sample=i,
        )
        for i, r in enumerate(records)
    ]
    table = make_table([(r.prompt_ids, [c]) for r, c in zip(records, blank)])
    (batch,) = pack(table, range(len(records)), token_budget=10**6)
    with packed_hidden(loaded, batch) as hidden_MH:
        logits = loaded.head.logits(hidden_MH)[:, : loaded.vocab_size]
        ids = table.token_ids[batch.table_rows]
        current = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        old = current if planted.attached else table.sampling_logprobs[batch.table_rows]
        constants = {"advantages": torch.ones(len(ids)), "weights": torch.full((len(ids),), 1.0 / len(ids))}
        try:
            inputs = PolicyInputs(old_logprobs=old, **constants)
        except ValueError as error:
            return str(error)
        linear_policy_loss(hidden_MH, loaded.head.weight, ids, inputs, AlgoConfig().spec())
    return None


def budget_of(loaded: LoadedModel, records: Sequence[Record], temperature: float) -> Budget:
    """Calibrated on a few of the records, as a run does."""
    few = [(r.prompt_ids, r.completion_ids) for r in records[:: max(1, len(records) // 6)]]
    return calibrate(loaded, few, temperature=temperature, token_budget=4096)


def named(planted: Planted) -> tuple[str, ...]:
    """What guard and diagnosis name, in the order of FAULTS; names that are none of FAULTS come last."""
    message = guard(planted)
    found = ["undetached"] if message is not None and "require" in message and "grad" in message else []
    budget = budget_of(planted.loaded, planted.records, planted.scoring.temperature)
    weights = None if planted.earlier is None else {"3 updates ago": planted.earlier}
    found += diagnose(planted.loaded, planted.records, planted.scoring, budget, weights=weights).names
    return tuple(sorted(found, key=lambda name: FAULTS.index(name) if name in FAULTS else len(FAULTS)))


def fault_table(case: Case) -> dict[str, tuple[str, ...]]:
    """Planted -> named, for every fault alone and for none; printed as a table."""
    table = {fault: named(plant(case, fault)) for fault in (*FAULTS, "none")}
    width = max(map(len, FAULTS)) + 2
    print(f"\n{case.name}: planted (rows) against named (columns)")
    print(" " * width + "".join(f"{fault:>{len(fault) + 2}}" for fault in FAULTS) + "  others")
    for fault, names in table.items():
        cells = "".join(f"{'x' if column in names else '.':>{len(column) + 2}}" for column in FAULTS)
        print(f"{fault:<{width}}{cells}  {', '.join(n for n in names if n not in FAULTS)}")
    return table


# ---- random clean settings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A random setting in which nothing is wrong."""

    family: str
    seed: int
    initializer_range: float
    sampling: SamplingParams
    prompts: tuple[tuple[int, ...], ...]
    group_size: int


def random_setting(number: int) -> Setting:
    """The same for the same number: family, init, temperature, truncation, lengths, prompts."""
    rng = random.Random(number)
    max_new = rng.randint(2, 30)
    return Setting(
        family=FAMILIES[number % len(FAMILIES)],
        seed=rng.randrange(3),
        initializer_range=rng.choice((0.15, 0.2, 0.3, 0.5)),
        sampling=SamplingParams(
            temperature=rng.uniform(0.5, 1.5),
            top_k=rng.choice((0, 0, rng.randint(2, 40))),
            top_p=rng.choice((1.0, 1.0, rng.uniform(0.5, 0.99))),
            min_p=rng.choice((0.0, 0.0, rng.uniform(0.01, 0.3))),
            min_new_tokens=rng.choice((0, 0, 0, min(3, max_new))),
            max_new_tokens=max_new,
            seed=number,
            keep_sets=True,
        ),
        prompts=tuple(tuple(rng.randrange(5, 70) for _ in range(rng.randint(1, 20))) for _ in range(rng.randint(1, 4))),
        group_size=rng.randint(1, 6),
    )


def names_in(setting: Setting, dtype: torch.dtype) -> tuple[str, ...]:
    """What the diagnosis names in a clean setting: with the recorded kept sets, and with sets that it computes."""
    loaded = tiny_model(setting.family, setting.seed, dtype, setting.initializer_range)
    engine = Engine(loaded, num_pages=400, page_size=4)
    groups = engine.generate(setting.prompts, setting.sampling, n=setting.group_size)
    records = records_of((prompt, c) for prompt, group in zip(setting.prompts, groups) for c in group)
    budget = budget_of(loaded, records, setting.sampling.temperature)
    scoring = Scoring.of(setting.sampling, replay=setting.sampling.truncates)
    bare = [replace(record, kept_ids=None) for record in records]
    return tuple(n for some in (records, bare) for n in diagnose(loaded, some, scoring, budget).names)
