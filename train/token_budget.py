"""How many packed tokens a micro-batch may have: asked for, or measured at start (footprint.py), and lowered when
memory runs out.

Backing off: a micro-batch that runs out of memory drops the gradients of its optimiser step, the budget is halved, and
the step starts anew from its first micro-batch. The loss is a sum under one denominator, so the result is that of any
other split. This holds for a budget that the user set too: a rare long batch should not end a run of hours.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rhotrain.train.batching import MicroBatch
from rhotrain.train.config import ConfigError

Result = TypeVar("Result")

_TEXTS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What else than torch.OutOfMemoryError says that memory ran out: PyTorch's CPU allocator, cuBLAS, cuDNN."""

KNOBS = (
    "set gradient_checkpointing, lower max_new_tokens or max_prompt_tokens, or free memory with release_memory or a "
    "smaller kv_memory_gib"
)


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a GPU or in the CPU's allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


@dataclass
class TokenBudget:
    """Most packed tokens of a micro-batch. Mutable: `tokens` falls when memory runs out.

    retries: how often that happened. notices: a line for each time, for the log.
    """

    tokens: int
    retries: int = 0
    notices: list[str] = field(default_factory=list)

    def attempt(
        self,
        pack: Callable[[], list[MicroBatch]],
        work: Callable[[list[MicroBatch]], Result],
        *,
        longest: int,
        undo: Callable[[], None] = lambda: None,
    ) -> Result:
        """work(pack()), again with a lower budget for as long as memory runs out; `undo` clears what was half done.

        longest: tokens of the longest trajectory, under which no budget falls. Raises ConfigError when even that does
        not fit.
        """
        while True:
            batches = pack()
            try:
                return work(batches)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                reason = (str(error).splitlines() or [type(error).__name__])[0]
            # The error is gone here, and with it the frames that held the activations.
            undo()
            self.lower(max((batch.num_tokens for batch in batches), default=0), longest, reason)
            del batches
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def take_notices(self) -> list[str]:
        """The notices since the last call."""
        taken, self.notices = self.notices, []
        return taken

    def lower(self, largest: int, longest: int, reason: str) -> None:
        """Halve the budget, or the largest micro-batch if that is smaller. Raises ConfigError at `longest`."""
        before = min(self.tokens, largest)
        if before <= longest:
            raise ConfigError(
                f"token_budget: memory ran out in a micro-batch of {before} tokens, no more than one prompt and its "
                f"completion take ({longest}), so no smaller budget helps; {KNOBS}. The error was: {reason}"
            )
        self.tokens = max(longest, before // 2)
        self.retries += 1
        self.notices.append(
            f"memory ran out in a micro-batch of up to {before} tokens: token_budget is {self.tokens} from now on, and "
            f"the optimiser step runs again from its start ({reason})"
        )
