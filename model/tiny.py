"""The preset `tiny-sums`: a character model of 0.22M parameters and sums that it gets half right.

Questions: `a+b=` and `a-b=` with a in 0..49 and b in 0..9, 1000 in all; the answer is the number and the end token. A
fixed quarter, chosen by a hash of the text, is held out: neither the warm start nor training sees it.

GRPO alone does not learn from random weights in a minute, so the model is warm-started supervised, 300 steps on the 750
training questions and some more where the machine's rounding left it behind (between an AMD EPYC and an Intel Xeon the
same 300 steps end at 0.54 and 0.38 on held-out questions), and stops early: about half of its samples are right. The
rise that training shows then is RL's.
(Tried here, 32 x 8, AdamW, seeds 0 to 2: at lr 3e-4 held-out exact rose from 0.54 to 0.86, 0.81 and 0.76 in 150 updates
and to 0.85, 0.85 and 0.89 in 250; lr 1e-3 goes up and falls back.)
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from rhotrain.model.folders import cached_folder
from rhotrain.model.loaded import quiet_transformers

VERSION = 2
"""Raise it when anything here changes what the checkpoint is; it names the cache folder."""

FIRST, SECOND = 50, 10
HELD_OUT = 250
CHARACTERS = "0123456789+-="
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"

SEED, STEPS, BATCH, PEAK_LR, RAMP = 0, 300, 64, 3e-3, 20
"""The warm start: AdamW, linear ramp, then constant."""
GOOD_ENOUGH, CHECK_EVERY, MOST_STEPS = 0.55, 10, 600
"""After STEPS it goes on until this share of samples of training questions would be right, checked every so often."""

QuestionText = tuple[str, str]
"""(prompt, answer): `("3+4=", "7")`."""


@cache
def all_questions() -> tuple[QuestionText, ...]:
    """All 1000 questions in a fixed order; no two have the same text."""
    pairs = [(a, b) for a in range(FIRST) for b in range(SECOND)]
    return tuple((f"{a}+{b}=", str(a + b)) for a, b in pairs) + tuple((f"{a}-{b}=", str(a - b)) for a, b in pairs)


@cache
def split_questions() -> tuple[tuple[QuestionText, ...], tuple[QuestionText, ...]]:
    """(750 training questions, 250 held-out questions), the same on every machine."""
    ordered = sorted(all_questions(), key=lambda question: hashlib.sha256(question[0].encode()).digest())
    return tuple(ordered[HELD_OUT:]), tuple(ordered[:HELD_OUT])


def sum_question(rng: random.Random) -> QuestionText:
    """One training question, drawn uniformly: (prompt `3+4=`, answer `7`). Held-out ones are never drawn."""
    return rng.choice(split_questions()[0])


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 16 ids; no BOS, no chat template. Other characters become the unknown token."""
    vocabulary = {token: i for i, token in enumerate((PAD, END, UNKNOWN, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Any:
    """The untrained Llama; the same weights for the same seed. The global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread inside: bits depend on the number of threads, and matrices this small gain nothing from two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _table(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Training questions as inputs int64 [N, T] and labels (-100 outside answer and end token)."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in split_questions()[0]]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(inputs, -100)
    for i, (prompt, answer) in enumerate(rows):
        full = [*prompt, *answer, tokenizer.eos_token_id]
        inputs[i, : len(full)] = torch.tensor(full)
        labels[i, len(prompt) : len(full)] = inputs[i, len(prompt) : len(full)]
    return inputs, labels


@torch.no_grad()
def sampled_share(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """The probability that a sample of a question is its answer and the end token, averaged over rows of `_table`."""
    logprobs = model(input_ids=inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    each = logprobs.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(wanted < 0, 0.0)
    return float(each.sum(1).exp().mean())


def warm_start(
    model: Any, tokenizer: PreTrainedTokenizerFast, *, seed: int = SEED, steps: int = STEPS, until: float = 0.0
) -> None:
    """Supervised training in place, deterministic for a seed: own generator, one thread (about 16 ms a step). After
    `steps` it goes on until `sampled_share` of the training questions has reached `until`, to MOST_STEPS at most."""
    inputs, labels = _table(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0)
    model.train()
    with _one_thread():
        for step in range(1, max(steps, MOST_STEPS) + 1):
            if step > steps and (step - steps - 1) % CHECK_EVERY == 0 and sampled_share(model, inputs, labels) >= until:
                break
            rows = torch.randint(0, len(inputs), (BATCH,), generator=generator)
            optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, step / RAMP)
            logits = model(input_ids=inputs[rows], use_cache=False).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows][:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def folder() -> Path:
    """The warm-started model's folder in the cache; made on first use in under 10 s."""
    return cached_folder(f"tiny-sums-{VERSION}", _make)


def _make(target: Path) -> None:
    print("tiny-sums: warm-starting the character model, once (some seconds)", file=sys.stderr)
    tokenizer, model = build_tokenizer(), build_model(SEED)
    warm_start(model, tokenizer, until=GOOD_ENOUGH)
    with quiet_transformers():
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
