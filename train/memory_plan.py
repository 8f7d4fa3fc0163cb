"""The memory plan of a run: what lies where, in the rollout and in the update, before either has begun.

Weights, masters, gradients and moments are counted; the KV pool is what the engine will take; the head's chunk is what
kernels/head_gemm.py will take; activations come from a sketch of the model's own passes (memory_sketch.py). What is not
counted: the libraries' workspaces and fragmentation, for which RESERVED is kept free, and rewards that use the GPU.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rhotrain.kernels.head_gemm import default_chunk_rows
from rhotrain.model import sources
from rhotrain.model.adapter import LoraSpec
from rhotrain.model.loaded import LoadedModel, LoadError
from rhotrain.model.lora import is_adapter_folder, lora_of, spec_of
from rhotrain.model.packed import PACKED_TYPES
from rhotrain.model.quantized import largest_dequantized, num_weights, weight_bytes
from rhotrain.rollout.sizing import free_memory, page_bytes, plan_pages
from rhotrain.train.checks import check_quantized
from rhotrain.train.config import Config, ConfigError
from rhotrain.train.footprint import CPU_TOKENS, Footprint
from rhotrain.train.memory_sketch import Sketch, sketch_activations, sketch_model
from rhotrain.train.optim import moment_bytes

GIB = 2**30
RESERVED = {"cuda": 0.07, "cpu": 0.05}
"""Share of the memory that a plan leaves to the CUDA context, the libraries and fragmentation."""

Phase = Literal["rollout", "update"]
POOL = "KV pool"
BEFORE_THE_POOL = ("weights", "masters", "reference")
"""What is allocated when the engine takes its share of the memory that is free; moments and gradients come later."""
PHASES: tuple[Phase, ...] = ("rollout", "update")


@dataclass(frozen=True)
class Part:
    """Bytes of one thing on the device, and the phases in which they are held."""

    name: str
    nbytes: int
    phases: tuple[Phase, ...] = PHASES
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """parts of a run on `device` (cuda or cpu) with `capacity` bytes. budget: packed tokens of a micro-batch that the
    activations are planned for. longest: tokens of the longest trajectory, below which no budget can fall; least: bytes
    of the update with such a budget. unknown: why the activations are not among the parts."""

    parts: tuple[Part, ...]
    device: Literal["cuda", "cpu"]
    capacity: int
    budget: int
    longest: int
    least: int
    unknown: str = ""

    def total(self, phase: Phase) -> int:
        return sum(part.nbytes for part in self.parts if phase in part.phases)

    @property
    def room(self) -> int:
        """Bytes that a plan may use."""
        return int(self.capacity * (1.0 - RESERVED[self.device]))

    @property
    def fits(self) -> bool:
        return max(map(self.total, PHASES)) <= self.room

    @property
    def possible(self) -> bool:
        """Whether it fits at least with micro-batches of one trajectory: what running out of memory falls back to."""
        return max(self.total("rollout"), self.least) <= self.room

    def table(self) -> str:
        """For a terminal: GiB by part and phase."""
        rows: list[tuple[str, ...]] = [("", "rollout", "update", "")]
        for part in self.parts:
            cells = [f"{part.nbytes / GIB:.2f}" if phase in part.phases else "-" for phase in PHASES]
            rows.append((part.name, *cells, part.note))
        rows.append(("total", *(f"{self.total(phase) / GIB:.2f}" for phase in PHASES), "GiB"))
        reserved = f"{self.room / GIB:.2f}"
        rows.append(("may be used", reserved, reserved, f"of {self.capacity / GIB:.2f} GiB"))
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {note}".rstrip() for a, b, c, note in rows]
        if self.unknown:
            lines.append(f"activations are not counted: {self.unknown}")
        elif not self.fits and self.possible:
            lines.append("memory will run out at this token_budget, and it will be halved until it does not")
        return "\n".join(lines)

    def line(self) -> str:
        """One line for the log."""
        names = ", ".join(f"{part.name} {part.nbytes / GIB:.2f}" for part in self.parts if part.nbytes >= GIB // 200)
        peak = max(map(self.total, PHASES)) / GIB
        without = f" (without activations: {self.unknown})" if self.unknown else ""
        return f"memory plan, GiB: {names}; peak {peak:.2f} of {self.capacity / GIB:.2f}{without}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        totals = {phase: self.total(phase) for phase in PHASES}
        return {**asdict(self), "totals": totals, "room": self.room, "fits": self.fits, "possible": self.possible}


Sketches = dict[tuple[bool, LoraSpec | None, str], tuple[LoadedModel, Sketch]]
"""By gradient_checkpointing, adapter and quantize_base: what other settings change needs no new one."""


def make_plan(
    config: Config,
    *,
    device: Literal["cuda", "cpu"],
    capacity: int,
    longest_prompt: int,
    hf_config: Any = None,
    lora: LoraSpec | None = None,
    sketches: Sketches | None = None,
) -> MemoryPlan:
    """The plan of `config` on a device with `capacity` bytes. hf_config: the model's, where it is known already. lora:
    the adapter of a model that has one, whatever the settings say. sketches: those of other plans of the same model.
    Raises LoadError for an unusable model."""
    rollout, sketches = config.rollout, {} if sketches is None else sketches
    adapter = lora or lora_of(config.model.lora_rank, config.model.lora_alpha, config.model.lora_targets)
    key = config.model.gradient_checkpointing, adapter, config.model.quantize_base
    if key not in sketches:
        sketched = sketch_model(
            config.model.model,
            sources.resolve_dtype(config.model.dtype, torch.device(device)),
            hf_config=hf_config,
            gradient_checkpointing=config.model.gradient_checkpointing,
            lora=adapter,
            quantize_base=config.model.quantize_base,
        )
        sketches[key] = (
            sketched,
            sketch_activations(
                sketched,
                prompt_tokens=longest_prompt,
                max_new_tokens=rollout.max_new_tokens,
                members=rollout.group_size,
                share_prompts=config.optim.share_prompts,
            ),
        )
    model, sketch = sketches[key]
    longest = longest_prompt + rollout.max_new_tokens - 1
    group = longest_prompt + rollout.group_size * (rollout.max_new_tokens - 1)
    whole = rollout.prompts_per_step * group
    asked = config.optim.token_budget
    resident = [*_weights(config, model), _reference(config, model)]
    before = sum(part.nbytes for part in resident if part.name in BEFORE_THE_POOL)
    fixed = [
        *resident,
        _kv_pool(config, model, capacity - before, longest_prompt),
        *_rollout_extras(config, model, device),
        *_head(model, device, capacity),
    ]
    held = [part for part in fixed if part.nbytes]
    update = sum(part.nbytes for part in held if "update" in part.phases)
    footprint = _footprint(config, model, sketch)
    if asked == 0 and footprint is not None:  # as footprint.Room will choose
        fits = footprint.tokens_in(capacity * (1.0 - RESERVED[device]) - update)
        most = min(whole, max(CPU_TOKENS, group)) if device == "cpu" else whole
        note = "token_budget is measured at start, about {} tokens"
    else:
        fits, most = asked or whole, whole
        note = "micro-batches of {} tokens"
    tokens = max(longest, min(fits, most))
    activations, least = (0 if footprint is None else int(footprint.bytes_of(n)) for n in (tokens, longest))
    return MemoryPlan(
        parts=(*held, Part("activations", activations, ("update",), note.format(tokens))),
        device=device,
        capacity=capacity,
        budget=tokens,
        longest=longest,
        least=update + least,
        unknown=sketch.why_not,
    )


def _weights(config: Config, model: LoadedModel) -> list[Part]:
    trained = model.parameters()
    offload = config.optim.optimizer == "adamw_offload"
    half = [p for p in trained if p.dtype not in (torch.float32, torch.float64)]
    masters = 0 if offload else 4 * sum(p.numel() for p in half)
    wide = sum(max(4, p.itemsize) * p.numel() for p in trained)
    count = sum(map(num_weights, model.model.parameters()))
    note = f"{count / 1e6:,.0f} M parameters, {sum(p.numel() for p in trained) / 1e6:,.1f} M trained"
    return [
        Part("weights", weight_bytes(model.model), note=note),
        Part("masters", masters, note="float32 copies of what is trained"),
        Part("moments", moment_bytes(trained, config.optim), note=config.optim.optimizer),
        Part("gradients", wide, ("update",), "added up in float32"),
    ]


def _reference(config: Config, model: LoadedModel) -> Part:
    algo, settings = config.algo, config.model
    asked = config.algo.spec().uses_reference or algo.kl_in_reward > 0
    if not asked or (model.adapter is not None and not settings.ref_model):
        return Part("reference", 0)
    adapter = sum(p.nbytes for n, p in model.model.named_parameters() if ".lora_" in n)
    if settings.offload_reference:
        return Part("reference", 0, note="on the CPU")
    return Part("reference", weight_bytes(model.model) - adapter, note="taken to be of the policy's size")


def _kv_pool(config: Config, model: LoadedModel, free: int, longest_prompt: int) -> Part:
    rollout, evaluation = config.rollout, config.eval
    page = page_bytes(model, rollout.page_size)
    if rollout.kv_memory_gib > 0:
        pages = int(rollout.kv_memory_gib * GIB) // page
    else:
        ahead = min(1 + config.rollouts_ahead, max(1, config.run.steps))
        crowds = [(rollout.prompts_per_step * ahead, rollout.group_size)]
        crowds += [(min(evaluation.eval_size, rollout.max_running), evaluation.eval_samples)]
        wanted = max(
            plan_pages(model, [longest_prompt] * prompts, n, rollout.max_new_tokens, rollout.page_size)
            for prompts, n in crowds
            if prompts
        )
        pages = max(1, min(wanted, max(0, free) // 4 // page))
    phases: tuple[Phase, ...] = ("rollout",) if rollout.release_memory else PHASES
    return Part(POOL, pages * page, phases, f"{pages} pages of {rollout.page_size} tokens")


def _rollout_extras(config: Config, model: LoadedModel, device: str) -> list[Part]:
    vocab = model.head.weight.shape[0]
    rows = min(config.rollout.max_running, config.rollout.prompts_per_step * config.rollout.group_size)
    logits = Part("sampler", 2 * 4 * rows * vocab, ("rollout",), f"logits of {rows} rows in float32, twice")
    weight = Part("dequantized weight", largest_dequantized(model.model), ("rollout",), "of one 4-bit layer at a time")
    if device == "cuda":
        return [logits, weight]
    if model.dtype not in PACKED_TYPES:
        return [logits, weight]
    body = [p for n, p in model.body.named_parameters() if p.dim() == 2 and "embed" not in n]
    linear = sum(p.numel() for p in body if p.is_floating_point())
    packed = linear * model.dtype.itemsize + 4 * model.head.weight.numel()
    return [logits, weight, Part("packed weights", packed, ("rollout",), "the sampler's layout of the weights")]


def _head(model: LoadedModel, device: str, capacity: int) -> list[Part]:
    weight, head = model.head.weight, model.head
    plain = head.bias is None and head.softcap is None and head.logit_scale is None
    vocab = weight.shape[0]
    rows = default_chunk_rows(vocab, plain=plain, cuda_memory=capacity if device == "cuda" else None)
    half = weight.dtype in (torch.bfloat16, torch.float16)
    chunk = rows * vocab * ((6 if plain else 14) if half and device == "cuda" else max(4, weight.itemsize))
    parts = [Part("head's chunk", chunk, note=f"{rows} rows of logits")]
    if weight.requires_grad:
        gradient = weight.numel() * (max(4, weight.itemsize) + (weight.itemsize if half else 0))
        parts.append(Part("head's gradient", gradient, ("update",), "before it is added up"))
    return parts


def _footprint(config: Config, model: LoadedModel, sketch: Sketch) -> Footprint | None:
    """The sketch's, less the layer inputs that wait on the CPU."""
    if sketch.footprint is None or not config.model.offload_activations:
        return sketch.footprint
    moved = model.num_layers * model.config.hidden_size * model.dtype.itemsize
    return replace(sketch.footprint, per_token=max(1.0, sketch.footprint.per_token - moved))


MOST_ADVICE = 4
"""Settings that a refusal names: each may take a sketch, and the cheapest come first."""

# ---- what to turn ---------------------------------------------------------------------------------------------------


def knobs(config: Config, pool_gib: float) -> list[tuple[str, Config]]:
    """(what to set, the run with it set), the cheapest in quality and time first. pool_gib: of the plan's KV pool."""
    model, optim, algo = config.model, config.optim, config.algo
    adapted = model.lora_rank > 0 or is_adapter_folder(Path(model.model).expanduser())
    found: list[tuple[str, Config]] = []

    def offer(text: str, **sections: Any) -> None:
        try:
            found.append((text, replace(config, **sections)))
        except ConfigError:  # two settings that do not go together: this run cannot have it
            return

    if pool_gib > 1.0:
        smaller = max(1, int(pool_gib / 4))
        offer(f"kv_memory_gib {smaller}", rollout=replace(config.rollout, kv_memory_gib=float(smaller)))
    if not config.rollout.release_memory:
        offer("release_memory", rollout=replace(config.rollout, release_memory=True))
    if not model.gradient_checkpointing:
        offer("gradient_checkpointing", model=replace(model, gradient_checkpointing=True))
    if not model.offload_reference and (algo.beta > 0 or algo.kl_in_reward > 0) and (model.ref_model or not adapted):
        offer("offload_reference", model=replace(model, offload_reference=True))
    if optim.optimizer == "adamw":
        offer("optimizer adamw_8bit", optim=replace(optim, optimizer="adamw_8bit"))
    checkpointed = replace(model, gradient_checkpointing=True)
    offloaded = replace(checkpointed, offload_activations=True)
    offer("gradient_checkpointing and offload_activations", model=offloaded)
    if optim.optimizer != "adamw_offload":
        apart = replace(optim, optimizer="adamw_offload")
        offer("optimizer adamw_offload", optim=apart)
        offer("optimizer adamw_offload and gradient_checkpointing", optim=apart, model=checkpointed)
    if not adapted:
        offer("lora_rank 16", model=replace(model, lora_rank=16))
        offer("lora_rank 16 and gradient_checkpointing", model=replace(checkpointed, lora_rank=16))
    if model.quantize_base == "none":
        words = "quantize_base nf4" if adapted else "lora_rank 16 and quantize_base nf4"
        four_bit = replace(model, quantize_base="nf4", lora_rank=model.lora_rank if adapted else 16)
        offer(words, model=four_bit)
        offer(f"{words} and gradient_checkpointing", model=replace(four_bit, gradient_checkpointing=True))
    return found


def check_possible(plan: MemoryPlan, config: Config, make: Callable[[Config], MemoryPlan]) -> None:
    """Raises ConfigError, with the table and what would help, for a plan that cannot work even with micro-batches of
    one trajectory. make: the plan of other settings."""
    if plan.possible:
        return
    short = (max(plan.total("rollout"), plan.least) - plan.room) / GIB
    helps: list[str] = []
    pool = sum(part.nbytes for part in plan.parts if part.name == POOL) / GIB
    for text, other in knobs(config, pool):
        if plan.device == "cpu" and "offload" in text:
            continue
        # 4 bits round the weights, so they are for where nothing else helps.
        if len(helps) == MOST_ADVICE or (helps and "quantize_base" in text):
            break
        try:
            changed = make(other)
        except LoadError:  # a package that is not here, or a model that has none of it
            continue
        saved = (max(plan.total("rollout"), plan.least) - max(changed.total("rollout"), changed.least)) / GIB
        if changed.possible:
            helps.append(f"{text} (saves {saved:.1f} GiB)")
    advice = (
        f"one of these makes it fit: {'; '.join(helps)}"
        if helps
        else "no single setting makes it fit; take a smaller model, shorter sequences or a larger GPU"
    )
    raise ConfigError(
        f"model: {config.model.model} does not fit; with micro-batches of one prompt and its completion "
        f"({plan.longest} tokens) {short:.1f} GiB are missing. {advice}\n{plan.table()}"
    )


# ---- for a run, and for a machine that is not there -----------------------------------------------------------------

WORTH_PLANNING = GIB // 4
"""On a CPU models of fewer bytes than this are not planned for: they fit, and planning takes a second."""


def plan_of_run(config: Config, loaded: LoadedModel, longest_prompt: int) -> tuple[MemoryPlan | None, str]:
    """(the plan of a run whose model has just been loaded, a line for the log). None for a small one on a CPU, and for
    a model that cannot be sketched. Raises ConfigError when it cannot work, with what would help.
    """
    weights = weight_bytes(loaded.model)
    if loaded.device.type == "cpu":
        if weights < WORTH_PLANNING:
            return None, ""
        capacity = free_memory(loaded.device) + weights
    else:
        capacity = free_memory(loaded.device) + torch.cuda.memory_reserved(loaded.device)
    adapter = None if loaded.adapter is None else loaded.adapter.spec
    sketches: Sketches = {}

    def make(settings: Config) -> MemoryPlan:
        return make_plan(
            settings,
            device="cpu" if loaded.device.type == "cpu" else "cuda",
            capacity=capacity,
            longest_prompt=longest_prompt,
            hf_config=loaded.model.config,
            lora=adapter,
            sketches=sketches,
        )

    try:
        plan = make(config)
    except LoadError as error:
        return None, str(error)
    check_possible(plan, config, make)
    return plan, plan.line()


def plan_for(config: Config, *, gpu_gib: int) -> MemoryPlan:
    """The plan for a GPU of so many GiB, or (0) for the `device` of the settings on this machine. Prompts are taken to
    be max_prompt_tokens long. Nothing is loaded. Raises ConfigError when it cannot work, LoadError for an unusable
    model or a device that is not here."""
    check_quantized(config)
    if gpu_gib and config.model.device == "cpu":
        raise ConfigError(f"gpu_gib: {gpu_gib} does not go with device cpu; leave one of them out")
    place = torch.device("cuda") if gpu_gib else sources.resolve_device(config.model.device)
    device: Literal["cuda", "cpu"] = "cpu" if place.type == "cpu" else "cuda"
    capacity = gpu_gib * GIB or free_memory(place)
    folder = Path(config.model.model).expanduser()
    adapter = spec_of(folder) if is_adapter_folder(folder) else None
    sketches: Sketches = {}

    def make(settings: Config) -> MemoryPlan:
        prompt = settings.task.max_prompt_tokens
        return make_plan(
            settings, device=device, capacity=capacity, longest_prompt=prompt, lora=adapter, sketches=sketches
        )

    plan = make(config)
    check_possible(plan, config, make)
    return plan
