"""From questions to token ids, and the order in which training sees them. Imports no torch.

Rules: text is tokenised without the tokenizer's own special tokens, and then exactly one BOS stands in front where the
tokenizer has one, whoever would have written it (template, tokenizer, both or neither); a tokenizer without one gets
none. Special tokens that the template writes parse as special tokens. Ids are never decoded and encoded again.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from rhotrain.train.config import ConfigError, TaskConfig
from rhotrain.train.questions import Question

_SET_HERE = ("add_generation_prompt", "continue_final_message", "messages", "tokenize", "bos_token", "eos_token")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model gets it: ids (BOS included), the text that they came from, and the question."""

    token_ids: tuple[int, ...]
    text: str
    question: Question


@dataclass(frozen=True)
class PromptData:
    """Encoded prompts in the order of their questions, and how many were too long.

    dropped: left out (long_prompts = "drop"). cut: shortened to their tail ("tail"). longest: tokens of the longest
    prompt before that.
    """

    prompts: tuple[EncodedPrompt, ...]
    dropped: int = 0
    cut: int = 0
    longest: int = 0

    @staticmethod
    def encode(questions: Sequence[Question], config: TaskConfig, tokenizer: Any) -> "PromptData":
        """Render, tokenise and bound the questions.

        Raises ConfigError when the template cannot do what the configuration asks for, when a prompt is longer than
        max_prompt_tokens and the policy is "error", and when no prompt is left.
        """
        chat = uses_chat(config, tokenizer)
        check_template(config, tokenizer, chat=chat)
        texts = [_render(q, config, tokenizer, chat=chat) for q in questions]
        lines = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        counts: Counter[str] = Counter()
        prompts, longest = [], 0
        for question, text, line in zip(questions, texts, lines):
            ids = one_bos(line, tokenizer.bos_token_id)
            if not ids:
                raise ConfigError(
                    f"task: the prompt {text!r} has no tokens; the model needs at least one to start from"
                )
            longest = max(longest, len(ids))
            if len(ids) > config.max_prompt_tokens:
                counts[config.long_prompts] += 1
                if config.long_prompts != "tail":
                    continue
                ids = _tail(ids, config.max_prompt_tokens, tokenizer.bos_token_id)
                text = tokenizer.decode(ids, skip_special_tokens=False)
            prompts.append(EncodedPrompt(tuple(ids), text, question))
        if counts["error"]:
            raise ConfigError(
                f"max_prompt_tokens: {config.max_prompt_tokens} does not work; {counts['error']} of {len(questions)} "
                f"prompts are longer (the longest has {longest} tokens); raise it, or set long_prompts to drop or tail"
            )
        if questions and not prompts:
            raise ConfigError(
                f"max_prompt_tokens: {config.max_prompt_tokens} does not work; all {len(questions)} prompts are longer "
                f"and were dropped (the longest has {longest} tokens)"
            )
        return PromptData(tuple(prompts), counts["drop"], counts["tail"], longest)

    @property
    def note(self) -> str:
        """What happened to over-long prompts, for the log; empty when nothing did."""
        total = len(self.prompts) + self.dropped
        if self.dropped:
            return f"{self.dropped} of {total} prompts were too long and were left out (longest: {self.longest} tokens)"
        if self.cut:
            return f"{self.cut} of {total} prompts were too long; their tail was kept (longest: {self.longest} tokens)"
        return ""


def uses_chat(config: TaskConfig, tokenizer: Any) -> bool:
    """Whether prompts go through the tokenizer's chat template. Raises ConfigError when it is asked for and missing."""
    has = bool(getattr(tokenizer, "chat_template", None))
    if config.template == "chat" and not has:
        raise ConfigError("template: 'chat' does not work; the tokenizer has no chat template; set template to raw")
    return has and config.template != "raw"


def check_template(config: TaskConfig, tokenizer: Any, *, chat: bool) -> None:
    """Refuse settings that would be silently without effect. Raises ConfigError."""
    if not chat:
        for name, value in (("system_prompt", config.system_prompt), ("template_args", config.template_args)):
            if value:
                raise ConfigError(
                    f"{name}: {value!r} does not work; it needs a chat template, and prompts are raw text here"
                )
        return
    template = tokenizer.chat_template
    source = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
    for name in config.template_args:
        if name in _SET_HERE:
            raise ConfigError(f"template_args: {name!r} does not work; it is set by rhotrain itself")
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise ConfigError(f"template_args: {name!r} does not work; the model's chat template does not know it")


def one_bos(ids: Sequence[int], bos: int | None) -> list[int]:
    """`ids` with exactly one BOS in front. Later ones stay: ChatML models use it to open every turn."""
    if bos is None:
        return list(ids)
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    return [bos, *ids[start:]]


def _tail(ids: list[int], limit: int, bos: int | None) -> list[int]:
    """The last `limit` ids; a BOS in front keeps its place as long as another token fits beside it."""
    if bos is not None and limit > 1:
        return [bos, *ids[len(ids) - limit + 1 :]]
    return ids[len(ids) - limit :]


def _render(question: Question, config: TaskConfig, tokenizer: Any, *, chat: bool) -> str:
    """The prompt's text: template, system prompt, suffix and the start of the assistant's turn."""
    if not chat:
        if question.prompt is None:
            raise ConfigError(
                "template: messages need a chat template, and prompts are raw text here; "
                "give `prompt` texts, or take a chat model"
            )
        return question.prompt + config.prompt_suffix + config.assistant_prefill
    messages = list(question.messages or ({"role": "user", "content": question.prompt},))
    if config.prompt_suffix:
        messages = _with_suffix(messages, config.prompt_suffix)
    if config.system_prompt and messages[0]["role"] != "system":  # a row's own system message wins
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.template_args
        )
    except Exception as error:  # templates raise what they like: jinja2 errors, TypeError for missing content, ...
        raise ConfigError(
            f"template: the chat template refuses the prompt {question.key[:80]!r}: {type(error).__name__}: {error}"
        ) from error
    return str(text) + config.assistant_prefill


def _with_suffix(messages: list[dict[str, Any]], suffix: str) -> list[dict[str, Any]]:
    """`suffix` after the text of the last user message, a blank between them unless one is there."""
    for index in reversed(range(len(messages))):
        if messages[index]["role"] != "user":
            continue
        content = messages[index]["content"]
        parts = [dict(part) for part in content] if isinstance(content, list) else [{"text": content}]
        texts = [part for part in parts if isinstance(part.get("text"), str)]
        if not texts:
            break
        text = texts[-1]["text"]
        texts[-1]["text"] = text + ("" if text[-1:].isspace() or suffix[0].isspace() else " ") + suffix
        new = parts if isinstance(content, list) else parts[0]["text"]
        return [*messages[:index], messages[index] | {"content": new}, *messages[index + 1 :]]
    raise ConfigError(
        f"prompt_suffix: {suffix!r} does not work; a question has no user message with a text to append it to"
    )


class PromptStream:
    """Prompts in a seeded order without end: every epoch is a new permutation. Its state is two numbers.

    Mutable: `epoch` and `position` say what comes next. The order depends on (seed, epoch, number of prompts) only.
    """

    def __init__(self, prompts: Sequence[EncodedPrompt], seed: int) -> None:
        if not prompts:
            raise ValueError("PromptStream: no prompts")
        self.prompts = tuple(prompts)
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._permutation(0)

    def take(self, n: int) -> list[EncodedPrompt]:
        """The next n prompts, going into the next epoch where one ends."""
        taken = []
        for _ in range(n):
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation(self.epoch)
            taken.append(self.prompts[self._order[self.position]])
            self.position += 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready: where the stream is, and a hash of its prompts and seed."""
        return {"epoch": self.epoch, "position": self.position, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ConfigError when the prompts or the seed are others."""
        if state["fingerprint"] != self._fingerprint():
            raise ConfigError(
                "resume: the prompts or their seed are not those of the checkpoint; go on with the same task, "
                "tokenizer, template and seed, or start a new run"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _fingerprint(self) -> str:
        digest = sha256(str(self.seed).encode())
        for prompt in self.prompts:
            digest.update(repr(prompt.token_ids).encode())
        return digest.hexdigest()[:16]
