"""Chat templates that behave like those of known models, and what these models write. Minimal; not the vendors' templates."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.trainer.data.tokenizers import merging_tokenizer
from trainer.data.seam import Seams

Message = dict[str, Any]
CORPUS = (
    'ab ba\n\n<|im_start|>user\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</think>\n\n<|end|> assistant\n\n[INST] a  b\n'
    "<think>\nab ab\n</think>\n\nbb aa user<|eot_id|>\n\nba é"
) * 9


@dataclass(frozen=True)
class Family:
    """A chat template and its tokens.

    write: what a model samples for a message, up to its stop token (included). thinking: name of the field with the thinking.
    most_calls: of a turn.
    """

    name: str
    template: str
    added: tuple[str, ...]
    write: Callable[[Message, Random], str]
    thinking: str = "reasoning_content"
    most_calls: int = 2
    rstrip: bool = False

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        added = [AddedToken(text, special=True, rstrip=self.rstrip) for text in (EOS, *self.added)]
        return merging_tokenizer(CORPUS, *added, chat_template=self.template)

    @cached_property
    def seams(self) -> Seams:
        return QuickSeams(self.tokenizer, {})


class QuickSeams(Seams):
    """Seams without the tokenizer's preparations of every call."""

    def ids(self, text: str) -> list[int]:
        backend: Any = self.tokenizer
        return backend.backend_tokenizer.encode(text, add_special_tokens=False).ids


EOS = "<|endoftext|>"


def dumps(value: Any, rng: Random) -> str:
    """JSON as a model may write it."""
    style = rng.random()
    if style < 0.5:
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, separators=(",", ":")) if style < 0.8 else json.dumps(value, indent=1)


def functions(message: Message) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]


def hermes(message: Message, rng: Random) -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in functions(message)]
    return "\n".join([message["content"]] * bool(message["content"]) + [tool_call(call, rng) for call in calls])


def tool_call(call: Any, rng: Random) -> str:
    return f"<tool_call>\n{dumps(call, rng)}\n</tool_call>"


def thought(message: Message, empty: str = "") -> str:
    thinking = message.get("reasoning_content")
    return f"<think>\n{thinking}\n</think>\n\n" if thinking else empty


TOOLS = "{% if tools %}<|im_start|>system{{ '\n' }}{{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
CHATML = (
    TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    + "{{ '\n' }}<tool_response>{{ '\n' }}{{ m.content }}{{ '\n' }}</tool_response>"
    + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    + "{% else %}<|im_start|>{{ m.role }}{{ '\n' }}THINK{{ m.content or '' }}"
    + "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>{{ '\n' }}"
    + '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    + "{{ '\n' }}</tool_call>{% endfor %}"
    + "<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
THINK_AT_THE_END = (
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>{{ '\n' }}{{ m.reasoning_content or '' }}{{ '\n' }}</think>{{ '\n\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

QWEN25 = Family(
    "qwen2.5",
    CHATML.replace("THINK", ""),
    CHATML_TOKENS,
    lambda message, rng: thought(message) + hermes(message, rng) + "<|im_end|>",
)
QWEN3 = Family(
    "qwen3",
    LAST_USER + CHATML.replace("THINK", THINK_AT_THE_END),
    (*CHATML_TOKENS, "<think>", "</think>"),
    lambda message, rng: thought(message, "<think>\n\n</think>\n\n") + hermes(message, rng) + "<|im_end|>",
)


def llama_text(message: Message, rng: Random) -> str:
    calls = [dumps({"name": name, "parameters": arguments}, rng) for name, arguments in functions(message)]
    return thought(message) + (calls or [message["content"].strip()])[0] + "<|eot_id|>"


LLAMA3 = Family(
    "llama3",
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>{{ '\n\n' + tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>{{ '\n\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '{"name": {{ m.tool_calls[0].function.name | tojson }}, "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ (m.content | tojson) if m.role == 'tool' else (m.content | trim) }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    llama_text,
    most_calls=1,
)


def bracketed(message: Message, rng: Random, before: str, after: str) -> str:
    calls = [{"name": name, "arguments": arguments} for name, arguments in functions(message)]
    return f"{message['content']}{before}{dumps(calls, rng)}{after}" if calls else message["content"]


CALLS = (
    "{% if m.tool_calls %}BEFORE[{% for c in m.tool_calls %}"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]AFTER{% endif %}"
)
PHI3 = Family(
    "phi3",
    "{% if tools %}<|tool|>{{ tools | tojson }}<|end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ '\n' }}{{ m.content or '' }}"
    + CALLS.replace("BEFORE", "<|call|>").replace("AFTER", "")
    + "<|end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% else %}<|endoftext|>{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|call|>"),
    lambda message, rng: thought(message) + bracketed(message, rng, "<|call|>", "") + "<|end|>",
    rstrip=True,
)


def harmony(message: Message, rng: Random) -> str:
    thinking = message.get("thinking")
    analysis = f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant" if thinking else ""
    for name, arguments in functions(message):
        return f"{analysis} to=functions.{name}<|channel|>commentary json<|message|>{dumps(arguments, rng)}<|call|>"
    return f"{analysis}<|channel|>final<|message|>{message['content']}<|return|>"


GPT_OSS = Family(
    "gpt-oss",
    "{% set ns = namespace(final=-1, name='') %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% set rewritten = (not loop.last or add_generation_prompt) %}"
    "{% if m.thinking and (loop.index0 > ns.final if m.tool_calls else not rewritten) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|end|>' if rewritten else '<|return|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    harmony,
    thinking="thinking",
    most_calls=1,
)


def deepseek_text(message: Message, rng: Random) -> str:
    calls = [f"<|call|>{name}<|sep|>{dumps(arguments, rng)}<|end_call|>" for name, arguments in functions(message)]
    return thought(message) + message["content"] + "".join(calls) + "<|eos|>"


DEEPSEEK = Family(
    "deepseek",
    "<|bos|>{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|output|>{{ m.content }}<|end_output|>"
    "{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}<|Assistant|>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments + '<|end_call|>' }}"
    "{% endfor %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|>{% endif %}",
    ("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|output|>", "<|end_output|>", "<|call|>", "<|sep|>", "<|end_call|>"),
    deepseek_text,
)
MISTRAL = Family(
    "mistral",
    LAST_USER
    + "{% set system = messages[0].content if messages[0].role == 'system' else '' %}<s>{% for m in messages %}"
    + "{% if m.role == 'user' %}{% if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    + "[INST]{{ ' ' + (system + '\n\n' if loop.index0 == ns.last and system else '') + m.content }}[/INST]"
    + "{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    + '{"content": {{ m.content | tojson }}, "call_id": {{ m.tool_call_id | tojson }}}[/TOOL_RESULTS]'
    + "{% elif m.role == 'assistant' %}{{ ' ' + m.content if m.content else '' }}"
    + CALLS.replace("BEFORE", "[TOOL_CALLS]").replace("AFTER", "")
    + "</s>{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    lambda message, rng: (
        thought(message)
        + bracketed(message | {"content": message["content"] and " " + message["content"]}, rng, "[TOOL_CALLS]", "")
        + "</s>"
    ),
)
PLAIN = Family(
    "plain",
    "{% for t in tools or [] %}<|tool|>{{ t | tojson }}<|end|>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ '\n' + m.reasoning_content + '\n' }}</think>"
    "{{ '\n\n' }}{% endif %}{{ m.content or '' }}"
    + CALLS.replace("BEFORE", "<|call|>").replace("AFTER", "")
    + "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|call|>"),
    lambda message, rng: thought(message) + bracketed(message, rng, "<|call|>", "") + "<|end|>",
)
FAMILIES = {family.name: family for family in (QWEN25, QWEN3, LLAMA3, PHI3, GPT_OSS, DEEPSEEK, MISTRAL, PLAIN)}
