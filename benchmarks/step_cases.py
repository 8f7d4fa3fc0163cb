"""What a step is made of: cases, their prompts as text, one fixed rollout for parity, and the targets.

Every side gets the same files: a folder with model and tokenizer, prompts as JSON lines, and a rollout of ids with
advantages. Prompts have exactly the number of tokens asked for in the model's own tokenizer, completions too: stop ids
are ignored. The reward is the parity of the sum of a completion's ids, so that nearly every group carries signal.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rollout_cases import FIRST_ID, RANDOM_MODELS, numbers_tokenizer, random_model

from rhotrain.model.loaded import quiet_transformers
from rhotrain.model.sources import resolve_spec

WORDS = (
    "red",
    "seven",
    "time",
    "house",
    "water",
    "light",
    "many",
    "small",
    "green",
    "old",
    "day",
    "book",
    "north",
    "two",
)
"""What prompts for a text tokenizer are made of."""
NUM_PROMPTS = 16
"""Lines of the prompt file: enough for several rounds of other prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """P prompts of `prompt_tokens`, G completions each of `new_tokens`, one optimiser step.

    whole: rollout, reward and update; else the update alone is measured. times_trl, least: how many times as fast as
    TRL's a whole step should be. memory: the share of TRL's peak memory that it may take. on: device types.
    checkpointing: activation checkpointing on every side. budget: tokens of our micro-batches; peers take
    `peer_rows` completions at a time, TRL's default, and with `trl_whole` TRL runs once more with all at a time.
    """

    name: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    whole: bool = True
    on: tuple[str, ...] = ("cpu", "cuda")
    checkpointing: bool = False
    budget: int = 1024
    peer_rows: int = 8
    trl_whole: bool = False
    times_trl: float | None = None
    memory: float | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def loss_tokens(self) -> int:
        return self.rows * self.new_tokens

    @property
    def packed_tokens(self) -> int:
        """Each prompt once, and every completion but its last token: what has to go through the model."""
        return self.prompts * (self.prompt_tokens + self.group * (self.new_tokens - 1))

    @property
    def context(self) -> int:
        """Sum over all packed tokens of the tokens that each attends to."""
        own = self.new_tokens - 1
        member = own * self.prompt_tokens + own * (own + 1) // 2
        return self.prompts * (self.prompt_tokens * (self.prompt_tokens + 1) // 2 + self.group * member)


def _context(name: str, tokens: int, on: tuple[str, ...]) -> Case:
    """The update alone on one completion of so many tokens, recomputed layer by layer."""
    return Case(
        name=name,
        prompts=1,
        group=1,
        prompt_tokens=1,
        new_tokens=tokens,
        whole=False,
        on=on,
        checkpointing=True,
        budget=tokens + 1,
        peer_rows=1,
    )


CASES = (
    Case(
        name="short-prompts",
        prompts=4,
        group=8,
        prompt_tokens=60,
        new_tokens=32,
        trl_whole=True,
        times_trl=4.0,
        memory=0.5,
    ),
    Case(name="long-prompts", prompts=4, group=8, prompt_tokens=512, new_tokens=32, times_trl=6.0),
    *(_context(f"context-{k}k", k * 1024, ("cuda",)) for k in (16, 64)),
)
TINY_CASES = (
    Case(name="tiny", prompts=2, group=4, prompt_tokens=12, new_tokens=6, budget=40, peer_rows=4, times_trl=4.0),
    _context("tiny-context", 64, ("cpu", "cuda")),
)
"""With the model `tiny`: every code path in seconds, on any device."""

PRIME_RL = {"context-16k": (11_900.0, 0.111, 12.5)}
"""Published by prime-rl for Qwen3-0.6B's shape on an H100: tokens/s, MFU, GiB. 3 times the rate is aimed at."""


def cases(model: str, device: torch.device) -> tuple[Case, ...]:
    """Those that are measured with this model on this kind of device."""
    return tuple(c for c in (TINY_CASES if model == "tiny" else CASES) if device.type in c.on)


def write_model(spec: str, folder: Path, device: torch.device) -> str:
    """The folder where every side finds model and tokenizer; written below `folder` for random weights."""
    if spec not in RANDOM_MODELS:
        return resolve_spec(spec)[0]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = {**RANDOM_MODELS[spec], "max_position_embeddings": 1 << 17}
    target = folder / spec
    with quiet_transformers():
        random_model(shape, torch.device("cpu"), dtype).save_pretrained(target)
        numbers_tokenizer(shape["vocab_size"]).save_pretrained(target)
    return str(target)


def write_prompts(case: Case, tokenizer: Any, path: Path) -> None:
    """JSON lines {"prompt": text}, each of exactly `prompt_tokens` tokens, none like another."""
    draw = random.Random(case.name)
    numbers = "<7>" in tokenizer.get_vocab()
    pick: Callable[[], str] = (
        (lambda: f"<{draw.randrange(FIRST_ID, len(tokenizer))}>") if numbers else (lambda: draw.choice(WORDS))
    )
    begin = [tokenizer.bos_token] if tokenizer.bos_token else []  # in the text, so that nobody adds another
    lines = []
    for _ in range(NUM_PROMPTS):
        words = [*begin, *(pick() for _ in range(case.prompt_tokens - len(begin)))]
        while len(tokenizer.encode(" ".join(words))) > case.prompt_tokens:  # words of two tokens
            words.pop()
        while len(tokenizer.encode(" ".join(words))) < case.prompt_tokens:
            words.append(pick())
        text = " ".join(words)
        if len(tokenizer.encode(text)) != case.prompt_tokens:
            raise ValueError(f"{case}: no prompt of {case.prompt_tokens} tokens comes of {text[-40:]!r}")
        lines.append(json.dumps({"prompt": text}))
    path.write_text("\n".join(lines) + "\n")


def write_rollout(case: Case, tokenizer: Any, prompts: Path, path: Path) -> None:
    """{"prompts": ids [P][T], "completions": ids [P][G][N], "advantages": [P][G]}; ids above the special ones."""
    draw = random.Random(f"{case.name} rollout")
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()[: case.prompts]]

    def completion() -> list[int]:
        return [draw.randrange(FIRST_ID, len(tokenizer)) for _ in range(case.new_tokens)]

    content = {
        "prompts": [tokenizer.encode(text) for text in texts],
        "completions": [[completion() for _ in range(case.group)] for _ in texts],
        "advantages": [[draw.uniform(-1.5, 1.5) for _ in range(case.group)] for _ in texts],
    }
    path.write_text(json.dumps(content))
