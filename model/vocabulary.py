"""What tokenizer and generation_config say: the real vocabulary, the stop ids, and what is never applied."""

from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import TemplateError

NOT_SETTINGS = frozenset(
    {
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "_from_model_config",
        "cache_implementation",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    }
)
"""Fields of a generation_config that do not change which tokens are drawn (stop ids are used, not reported)."""


def real_vocabulary(tokenizer: Any, head_rows: int) -> int:
    """max(len(tokenizer), largest special id + 1), at most `head_rows`.

    Rows above it are padding (Qwen's head has hundreds): late in training they get drawn and crash a detokeniser.
    """
    special = [i for i in tokenizer.all_special_ids if isinstance(i, int)]
    return min(max([len(tokenizer), *(i + 1 for i in special)]), head_rows)


def _ids(value: int | Iterable[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def stop_ids(tokenizer: Any, config: Any, generation_config: Any, head_rows: int) -> tuple[int, ...]:
    """Union of the end ids of generation_config, configuration, tokenizer and chat template, ascending."""
    found = _ids(getattr(generation_config, "eos_token_id", None)) | _ids(getattr(config, "eos_token_id", None))
    found |= _ids(tokenizer.eos_token_id) | template_stop_ids(tokenizer)
    return tuple(sorted(i for i in found if 0 <= i < head_rows))


def template_stop_ids(tokenizer: Any) -> set[int]:
    """The special token that the chat template puts after an assistant's message, if it is one; else nothing.

    A template that cannot render this conversation (it may want other roles) tells nothing about its end of turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        return set()
    marker = "rhotrain-end-of-turn"
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return set()
    tail = text[text.rindex(marker) + len(marker) :].lstrip() if marker in text else ""
    ids = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {ids[0]} if ids and ids[0] in special else set()


def generation_notes(generation_config: Any) -> tuple[str, ...]:
    """One note that lists the sampling settings of a checkpoint that are not applied; empty without any."""
    if generation_config is None:
        return ()
    settings = generation_config.to_diff_dict()
    asked = {k: v for k, v in settings.items() if k not in NOT_SETTINGS and v is not None}
    if not asked:
        return ()
    text = ", ".join(f"{name}={value}" for name, value in sorted(asked.items()))
    return (f"generation_config asks for {text}: not applied, only its stop ids are used",)
