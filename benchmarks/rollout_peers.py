"""Who samples: our engine, transformers' generate and continuous batching, vLLM, SGLang; each behind one function.

A side is opened for one workload, runs batches, and is closed. Its setting is what a user of it would take; what it
prepares once (memory for K/V, graphs) is not in its seconds, what it does again after every optimiser step is. Each
side is forced to the same number of new tokens per row in its own way: ours and continuous batching take a limit per
request, vLLM and SGLang sampling parameters per request, and generate a stopping criterion that marks rows as done,
which saves it nothing before the longest row ends. Its users pay that too.
"""

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from kernel_peers import Unavailable
from rollout_cases import Batch, Models
from rollout_limits import DecodeClock, StepClock, median_gap_ms, watched

from rhotrain.kernels.backend import resolve_backend
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.sizing import page_bytes

PAGE = 16
BATCH_TOKENS = {"cuda": 8192, "cpu": 4096}
"""Most tokens of a step, of continuous batching and on CUDA ours; on a CPU ours is what the engine chooses."""
SERVER_MEMORY = 0.3
"""Share of the GPU that vLLM and SGLang get: 40 GiB of an H200, room for the K/V of 256 rows of 1500 tokens."""

Ids = list[list[list[int]]]
"""Token ids per prompt and completion."""


@dataclass(kw_only=True, slots=True)
class Run:
    """One batch by one side; None where a side does not say.

    prefill_seconds: until every row has its first token, for ours the steps that ran prompts. decode_seconds: the
    rest; decode_ms: median time between its steps. pack_seconds, capture_seconds: of `seconds`, what derived weights
    and graphs took. peak_mib: memory over what was held before; kv_mib: taken for K/V before. others: what
    other processes took of the CPU (rollout_limits.py). logprobs: ours only.
    """

    seconds: float
    token_ids: Ids
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    decode_ms: float | None = None
    pack_seconds: float | None = None
    capture_seconds: float | None = None
    peak_mib: float | None = None
    kv_mib: float | None = None
    others: float | None = None
    logprobs: list[list[list[float]]] | None = None

    def check(self, batch: Batch) -> "Run":
        """Itself. Raises ValueError unless every row has the number of tokens that was asked for."""
        found = [[len(ids) for ids in group] for group in self.token_ids]
        wanted = [[new] * batch.group for new in batch.new_tokens]
        if found != wanted:
            place = next((p for p, (a, b) in enumerate(zip(found, wanted)) if a != b), "-")
            raise ValueError(
                f"new tokens per completion: {sum(map(sum, found))} in all, {batch.output_tokens} were asked for; "
                f"the first prompt that differs is {place}"
            )
        return self


RunBatch = Callable[[Batch], Run]


# ---- rhotrain -------------------------------------------------------------------------------------------------------


def pages_for(batch: Batch) -> int:
    """Pages that hold the whole batch at once: a group's full prompt pages once, the rest for every member."""
    total = 0
    for prompt, new in zip(batch.prompts, batch.new_tokens):
        shared = len(prompt) // PAGE
        total += shared + batch.group * (-(-(len(prompt) + new) // PAGE) - shared)
    return total + 3 * batch.rows  # pages that a burst of decode steps reserves ahead, and those copied at a fork


@contextmanager
def open_ours(models: Models, largest: Batch) -> Iterator[RunBatch]:
    """The engine, with a pool that holds the batch; every batch is another policy version, as in training, so what is
    derived from the weights is made again and its time counts."""
    device, pages = models.loaded.device, pages_for(largest)
    engine = Engine(
        models.loaded,
        num_pages=pages,
        page_size=PAGE,
        max_batch_tokens=BATCH_TOKENS["cuda"] if device.type == "cuda" else None,
        max_running=max(256, largest.rows),
    )

    def run(batch: Batch) -> Run:
        models.loaded.policy_version += 1
        clock = DecodeClock()

        def on_tokens(count: int) -> None:
            clock.tick(engine.stats.prefill_tokens)

        sampling = SamplingParams(max_new_tokens=max(batch.new_tokens), ignore_eos=True)
        with watched(device) as watch:
            start = time.perf_counter()
            groups = engine.generate(
                batch.prompts, sampling, n=batch.group, max_new_tokens=batch.new_tokens, on_tokens=on_tokens
            )
            seconds = time.perf_counter() - start
        stats = engine.stats
        return Run(
            seconds=seconds,
            token_ids=[[list(c.token_ids) for c in group] for group in groups],
            prefill_seconds=stats.prefill_seconds,
            decode_seconds=stats.decode_seconds,
            decode_ms=clock.median_ms(),
            pack_seconds=stats.pack_seconds,
            capture_seconds=stats.capture_seconds,
            peak_mib=watch.peak_mib,
            others=watch.others,
            kv_mib=pages * page_bytes(models.loaded, PAGE) / 2**20,
            logprobs=[[list(c.logprobs) for c in group] for group in groups],
        )

    yield run


def greedy(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The most probable tokens, as our engine finds them."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    return [list(group[0].token_ids) for group in engine.generate(prompts, sampling)]


def our_name(models: Models) -> str:
    """`rhotrain` with what its kernels run on."""
    return f"rhotrain ({resolve_backend('auto', models.loaded.head.weight)})"


# ---- transformers ---------------------------------------------------------------------------------------------------


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask, int64 [P, longest]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids.to(device), mask.to(device)


def generate_greedy(models: Models, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The most probable tokens, as generate finds them."""
    ids, mask = left_padded(prompts, models.hf.device)
    out = models.hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
    found: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return found


@contextmanager
def open_generate(models: Models, largest: Batch) -> Iterator[RunBatch]:
    """`generate` with its default, the dynamic cache; groups by num_return_sequences, which runs a prompt each time."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    device = models.hf.device

    class ForcedLengths(StoppingCriteria):
        """Row r is done at limits[r] tokens; notes the time of every step."""

        def __init__(self, limits: torch.Tensor) -> None:
            self.limits = limits
            self.clock = StepClock()

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            if device.type == "cuda" and not self.clock.ticks:
                torch.cuda.synchronize(device)  # the prompt has run when the first token is there, not before
            self.clock.tick()
            return input_ids.shape[1] >= self.limits

    def run(batch: Batch) -> Run:
        rows = batch.row_tokens
        with watched(device) as watch:
            start = time.perf_counter()
            ids, mask = left_padded(batch.prompts, device)
            lengths = ForcedLengths(ids.shape[1] + torch.tensor(rows, device=device))
            out = models.hf.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=max(rows),
                num_return_sequences=batch.group,
                stopping_criteria=StoppingCriteriaList([lengths]),
            )
            drawn = out[:, ids.shape[1] :].tolist()
            seconds = time.perf_counter() - start
        kept = [ids[:limit] for ids, limit in zip(drawn, rows)]
        return Run(
            seconds=seconds,
            token_ids=_grouped(kept, batch),
            prefill_seconds=lengths.clock.first_seconds,
            decode_seconds=lengths.clock.rest_seconds,
            decode_ms=lengths.clock.median_ms(),
            peak_mib=watch.peak_mib,
            others=watch.others,
        )

    yield run


@contextmanager
def open_continuous(models: Models, largest: Batch) -> Iterator[RunBatch]:
    """transformers' continuous batching with a manager that lives as long as the workload; requests have their own
    limits, groups are forks (num_return_sequences). It takes flash attention where it is installed."""
    from transformers import GenerationConfig

    try:
        module = importlib.import_module("transformers.generation.configuration_utils")
        settings_class: Any = module.ContinuousBatchingConfig
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"this transformers has no continuous batching ({error})") from error
    hf, device = models.hf, models.hf.device
    page = 256 if device.type == "cuda" else PAGE  # flash-attn's page on CUDA
    names = {f.name for f in fields(settings_class)}
    blocks = sum(-(-(len(p) + n) // page) for p, n in zip(largest.prompts, largest.new_tokens)) * largest.group
    settings = settings_class(
        **{"page_size" if "page_size" in names else "block_size": page},  # renamed after transformers 5.17
        num_blocks=blocks + largest.rows,
        max_batch_tokens=BATCH_TOKENS[device.type],
    )
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max(largest.new_tokens),
        num_return_sequences=largest.group,
        eos_token_id=-1,
        pad_token_id=0,
    )

    def run(batch: Batch) -> Run:
        # Between batches the manager is stopped, which gives the model its own attention back.
        with (
            hf.continuous_batching_context_manager(
                generation_config=sampling, continuous_batching_config=settings, persistent_manager=True
            ) as manager,
            watched(device) as watch,
        ):
            start = time.perf_counter()
            names = [
                manager.add_request(p, max_new_tokens=n, record_timestamps=True)
                for p, n in zip(batch.prompts, batch.new_tokens)
            ]
            results = _collect(manager, batch.rows)
            seconds = time.perf_counter() - start
        stamps = [list(result.timestamps) for result in results.values()]
        started = max(ticks[0] for ticks in stamps)
        return Run(
            seconds=seconds,
            token_ids=[_forks(results, name, batch.group) for name in names],
            prefill_seconds=started - start,
            decode_seconds=start + seconds - started,
            decode_ms=median_gap_ms(stamps),
            peak_mib=watch.peak_mib,
            others=watch.others,
        )

    try:
        yield run
    finally:
        hf.destroy_cached_continuous_batching_manager()


def _collect(manager: Any, count: int) -> dict[str, Any]:
    """The finished requests by name. Raises RuntimeError when one failed or the manager's thread ended."""
    results: dict[str, Any] = {}
    while len(results) < count:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"its thread ended after {len(results)} of {count} requests")
        if result is not None and result.error is not None:
            raise RuntimeError(f"request {result.request_id}: {result.error}")
        if result is not None and result.is_finished():
            results[result.request_id] = result
    return results


def _forks(results: dict[str, Any], name: str, group: int) -> list[list[int]]:
    """A request's completions: its own, and those of the requests forked from it."""
    names = [name, *(f"{name}__child#{i}" for i in range(group - 1))]
    return [list(results[n].generated_tokens) for n in names]


# ---- servers, in this process's hands -------------------------------------------------------------------------------


@contextmanager
def open_vllm(models: Models, largest: Batch) -> Iterator[RunBatch]:
    """vLLM's offline LLM, its own graphs and its prefix cache on; groups are `n`."""
    vllm = _needs("vllm", models)

    def sampling(batch: Batch) -> list[Any]:
        options = {"n": batch.group, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        return [vllm.SamplingParams(max_tokens=new, **options) for new in batch.new_tokens]

    def run(batch: Batch) -> Run:
        prompts = [{"prompt_token_ids": p} for p in batch.prompts]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling(batch), use_tqdm=False)
        seconds = time.perf_counter() - start
        return Run(seconds=seconds, token_ids=[[list(c.token_ids) for c in o.outputs] for o in outputs])

    with models.saved() as folder:
        llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=_longest(largest),
            gpu_memory_utilization=SERVER_MEMORY,
            max_num_seqs=max(256, largest.rows),
            seed=0,
        )
        try:
            yield run
        finally:
            core: Any = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
            if hasattr(core, "shutdown"):
                core.shutdown()


@contextmanager
def open_sglang(models: Models, largest: Batch) -> Iterator[RunBatch]:
    """SGLang's offline Engine, its own graphs and its radix cache on; groups are `n`."""
    sglang = _needs("sglang", models)

    def run(batch: Batch) -> Run:
        options = {"n": batch.group, "temperature": 1.0, "ignore_eos": True}
        sampling = [{"max_new_tokens": new, **options} for new in batch.new_tokens]
        start = time.perf_counter()
        outputs = engine.generate(input_ids=batch.prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
        return Run(seconds=seconds, token_ids=_grouped([list(o["output_ids"]) for o in outputs], batch))

    with models.saved() as folder:
        engine = sglang.Engine(
            model_path=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            context_length=_longest(largest),
            mem_fraction_static=SERVER_MEMORY,
            random_seed=0,
        )
        try:
            yield run
        finally:
            engine.shutdown()


def _needs(package: str, models: Models) -> Any:
    """The package. Raises Unavailable without a GPU or where it is not installed."""
    if models.hf.device.type != "cuda":
        raise Unavailable("measured on a GPU only")
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    return importlib.import_module(package)


def _longest(batch: Batch) -> int:
    return max(len(p) + n for p, n in zip(batch.prompts, batch.new_tokens)) + 1


def _grouped(rows: list[list[int]], batch: Batch) -> Ids:
    """Prompt-major rows as groups."""
    return [rows[i : i + batch.group] for i in range(0, len(rows), batch.group)]


Open = Callable[[Models, Batch], AbstractContextManager[RunBatch]]
PEERS: dict[str, Open] = {
    "generate": open_generate,
    "continuous batching": open_continuous,
    "vllm": open_vllm,
    "sglang": open_sglang,
}


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
