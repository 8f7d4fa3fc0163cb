"""Prompts as token ids, against ids spelled out by hand from the vocabulary."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rhotrain.train.config import ConfigError, TaskConfig
from rhotrain.train.data import EncodedPrompt, PromptData, PromptStream, one_bos
from rhotrain.train.questions import Question

SPECIALS = ["<s>", "</s>", "<|user|>", "<|bot|>", "<|system|>", "<think>"]
CHARACTERS = [chr(c) for c in range(32, 127)]
VOCABULARY = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def make_tokenizer(*, bos: bool = True, adds: bool = False, template: str | None = TURNS) -> PreTrainedTokenizerFast:
    """A character tokenizer; `adds`: its post-processor writes <s> in front and </s> behind."""
    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if adds:
        pair = [("<s>", VOCABULARY["<s>"]), ("</s>", VOCABULARY["</s>"])]
        inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pair)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        additional_special_tokens=SPECIALS[2:],
        **({"bos_token": "<s>"} if bos else {}),
    )
    if not bos:
        tokenizer.add_special_tokens({"pad_token": "<s>"})  # the token exists; it is just nobody's BOS
    tokenizer.chat_template = template
    return tokenizer


def ids(*pieces: str) -> tuple[int, ...]:
    """Ids by hand: a special token by name, any other piece character by character."""
    return tuple(VOCABULARY[t] for p in pieces for t in ([p] if p in SPECIALS else p))


def encode(tokenizer: Any, *questions: Question, **settings: Any) -> PromptData:
    return PromptData.encode(questions, TaskConfig(**settings), tokenizer)


ASK = Question(prompt="3+4=")


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("writes", [0, 1, 2])
@pytest.mark.parametrize("chat", [False, True])
def test_exactly_one_bos_whoever_writes_it(adds: bool, writes: int, chat: bool) -> None:
    template = "{{ bos_token }}" * writes + TURNS
    tokenizer = make_tokenizer(adds=adds, template=template)
    found = encode(tokenizer, ASK, template="chat" if chat else "raw").prompts[0].token_ids
    assert found == (ids("<s>", "<|user|>", "3+4=", "<|bot|>") if chat else ids("<s>", "3+4="))


@pytest.mark.parametrize("template", [TURNS, None])
def test_no_bos_where_the_tokenizer_has_none(template: str | None) -> None:
    found = encode(make_tokenizer(bos=False, template=template), ASK).prompts[0].token_ids
    assert found == (ids("<|user|>", "3+4=", "<|bot|>") if template else ids("3+4="))


def test_chatml_keeps_the_bos_that_opens_later_turns() -> None:
    tokenizer = make_tokenizer(template=TURNS.replace("<|{{ m.role }}|>", "<s>").replace("<|bot|>", "<s>"))
    assert encode(tokenizer, ASK).prompts[0].token_ids == ids("<s>", "3+4=", "<s>")
    assert one_bos([5, 0, 5], 0) == [0, 5, 0, 5] and one_bos([0, 0, 5, 0], 0) == [0, 5, 0]
    assert one_bos([0, 5], None) == [0, 5]


def test_everything_around_the_question() -> None:
    template = TURNS.replace("<|bot|>", "<|bot|>{% if enable_thinking is false %}<think>{% endif %}")
    tokenizer = make_tokenizer(template=template)
    data = encode(
        tokenizer,
        ASK,
        system_prompt="Be brief.",
        prompt_suffix="Number only.",
        assistant_prefill="It is ",
        template_args={"enable_thinking": False},
    )
    prompt = data.prompts[0]
    assert prompt.text == "<|system|>Be brief.<|user|>3+4= Number only.<|bot|><think>It is "
    assert prompt.token_ids == ids(
        "<s>", "<|system|>", "Be brief.", "<|user|>", "3+4= Number only.", "<|bot|>", "<think>", "It is "
    )
    assert prompt.question is ASK and (data.dropped, data.cut) == (0, 0)
    # without the argument the template leaves <think> out
    assert "<think>" not in encode(tokenizer, ASK).prompts[0].text


def test_conversations_and_their_own_system_message() -> None:
    messages = (
        {"role": "system", "content": "own"},
        {"role": "user", "content": "a"},
        {"role": "bot", "content": "b"},
        {"role": "user", "content": "c\n"},
    )
    question = Question(messages=messages)
    text = encode(make_tokenizer(), question, system_prompt="other", prompt_suffix="!").prompts[0].text
    assert text == "<|system|>own<|user|>a<|bot|>b<|user|>c\n!<|bot|>"
    assert messages[3]["content"] == "c\n"  # the question is not changed


def test_suffix_goes_to_the_last_text_part() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image"}]
    template = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
    question = Question(messages=({"role": "user", "content": parts},))
    assert encode(make_tokenizer(template=template), question, prompt_suffix="y").prompts[0].text == "x y"
    assert parts[0]["text"] == "x"


def test_raw_text_is_taken_as_it_is() -> None:
    data = encode(make_tokenizer(template=None), ASK, prompt_suffix="?", assistant_prefill="7")
    assert data.prompts[0].text == "3+4=?7" and data.prompts[0].token_ids == ids("<s>", "3+4=?7")


def test_long_prompts_by_policy() -> None:
    tokenizer = make_tokenizer(template=None)
    questions = [Question(prompt="12"), Question(prompt="123456"), Question(prompt="123")]
    with pytest.raises(ConfigError, match=r"max_prompt_tokens: 4 .* 1 of 3 prompts .* longest has 7 tokens"):
        encode(tokenizer, *questions, max_prompt_tokens=4)
    dropped = encode(tokenizer, *questions, max_prompt_tokens=4, long_prompts="drop")
    assert [p.text for p in dropped.prompts] == ["12", "123"] and dropped.dropped == 1
    assert "1 of 3 prompts were too long and were left out (longest: 7 tokens)" in dropped.note
    tail = encode(tokenizer, *questions, max_prompt_tokens=4, long_prompts="tail")
    assert [p.token_ids for p in tail.prompts] == [ids("<s>", "12"), ids("<s>", "456"), ids("<s>", "123")]
    assert tail.prompts[1].text == "<s>456" and tail.cut == 1 and "tail was kept" in tail.note
    no_bos = encode(make_tokenizer(bos=False, template=None), questions[1], max_prompt_tokens=4, long_prompts="tail")
    assert no_bos.prompts[0].token_ids == ids("3456")
    one = encode(tokenizer, questions[1], max_prompt_tokens=1, long_prompts="tail")
    assert one.prompts[0].token_ids == ids("6")
    with pytest.raises(ConfigError, match="all 1 prompts are longer"):
        encode(tokenizer, questions[1], max_prompt_tokens=4, long_prompts="drop")
    assert encode(tokenizer, *questions, max_prompt_tokens=7).note == ""


@pytest.mark.parametrize(
    "template, settings, words",
    [
        (None, {"template": "chat"}, "no chat template"),
        (None, {"system_prompt": "x"}, "system_prompt: 'x'"),
        (TURNS, {"template": "raw", "template_args": {"a": 1}}, "template_args: {'a': 1}"),
        (TURNS, {"template_args": {"enable_thinking": False}}, "'enable_thinking' does not work.*does not know"),
        (TURNS, {"template_args": {"add_generation_prompt": False}}, "set by rhotrain"),
        ("{{ raise_exception('only users') }}", {}, "refuses the prompt '3\\+4='.*only users"),
    ],
)
def test_settings_without_effect_are_refused(template: str | None, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        encode(make_tokenizer(template=template), ASK, **settings)


def test_messages_need_a_template_and_suffix_a_user() -> None:
    question = Question(messages=({"role": "system", "content": "x"},))
    with pytest.raises(ConfigError, match="messages need a chat template"):
        encode(make_tokenizer(template=None), question)
    with pytest.raises(ConfigError, match="no user message"):
        encode(make_tokenizer(), question, prompt_suffix="!")
    with pytest.raises(ConfigError, match="has no tokens"):
        encode(make_tokenizer(bos=False, template="{{ '' }}"), question)


# The stream


def prompts(n: int) -> list[EncodedPrompt]:
    return [EncodedPrompt((i,), str(i), Question(prompt=str(i))) for i in range(n)]


def test_every_epoch_is_a_new_permutation() -> None:
    stream = PromptStream(prompts(50), seed=3)
    first, second = ([p.token_ids[0] for p in stream.take(50)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != list(range(50))
    assert [p.token_ids[0] for p in PromptStream(prompts(50), seed=3).take(50)] == first
    assert [p.token_ids[0] for p in PromptStream(prompts(50), seed=4).take(50)] != first


@pytest.mark.parametrize("before", [0, 3, 7, 14, 20])
def test_resume_goes_on_exactly(before: int) -> None:
    whole = PromptStream(prompts(7), seed=1).take(before + 30)
    stream = PromptStream(prompts(7), seed=1)
    stream.take(before)
    state = stream.state_dict()
    resumed = PromptStream(prompts(7), seed=1)
    resumed.take(5)  # whatever it did before
    resumed.load_state_dict(state)
    assert resumed.take(30) == whole[before:]


def test_resume_with_other_prompts_is_refused() -> None:
    state = PromptStream(prompts(7), seed=1).state_dict()
    for other in (PromptStream(prompts(8), seed=1), PromptStream(prompts(7), seed=2)):
        with pytest.raises(ConfigError, match="resume"):
            other.load_state_dict(state)
