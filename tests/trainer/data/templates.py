"""Small chat templates with the behaviour of well-known families, written for these tests, and a tokenizer for them.

Only what matters for rows of several turns is reproduced: where system prompt and tools are, what ends a turn, what happens to
thinking, and what the generation prompt opens.
"""

import random
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.trainer.data.tokenizers import merging_tokenizer

CHATML_HEAD = """
{%- macro head(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- macro calls(m) %}{% for call in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}{{ '<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}{% endmacro %}
{%- macro result(m, before, after) %}
{%- if before != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if after != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endmacro %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{{ head('system') + first + '\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif first %}{{ head('system') + first + '<|im_end|>\\n' }}{% endif %}"""
QWEN25 = (
    CHATML_HEAD
    + """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ head('user') + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ head('assistant') + (m.content or '') }}{{ calls(m) }}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- result(m, messages[loop.index0 - 1].role, 'end' if loop.last else messages[loop.index0 + 1].role) }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
)
THINKING = """
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ head('user') + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}{% set answer = m.content or '' %}
{%- if not thought and '</think>' in answer %}
{%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- head('assistant') }}
{%- if loop.index0 > ns.query and (KEPT) %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + answer.lstrip('\\n') }}
{%- else %}{{ answer }}{% endif %}
{{- calls(m) }}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- result(m, messages[loop.index0 - 1].role, 'end' if loop.last else messages[loop.index0 + 1].role) }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}OPENED{% endif %}"""
EMPTY_BLOCK = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
QWEN3 = CHATML_HEAD + THINKING.replace("KEPT", "loop.last or thought").replace("OPENED", EMPTY_BLOCK)
QWEN35 = CHATML_HEAD + THINKING.replace("KEPT", "true").replace("OPENED", "{{ '<think>\\n' }}")
GLM = CHATML_HEAD + THINKING.replace("KEPT", "thought").replace("OPENED", "")
LLAMA3 = """{{ '<|begin_of_text|>' }}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- if tools %}{{ head('system') }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ head('ipython') + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{{- head('assistant') + (m.tool_calls[0].function | tojson) + '<|eot_id|>' }}
{%- else %}{{ head(m.role) + (m.content | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
PHI3 = """{% for m in messages %}
{%- if m.role in ('system', 'user', 'assistant') %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
GPT_OSS = """
{%- macro channel(name, content) %}{{ '<|channel|>' + name + '<|message|>' + content }}{% endmacro %}
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|start|>functions' }}{{ channel('commentary', m.content | tojson) + '<|end|>' }}
{%- elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- else %}
{%- set later = messages[loop.index:] | rejectattr('tool_calls', 'defined') | map(attribute='role') | list %}
{%- if m.reasoning_content and 'assistant' not in later %}
{{- '<|start|>assistant' }}{{ channel('analysis', m.reasoning_content) }}{{ '<|end|>' }}{% endif %}
{%- if m.tool_calls %}
{{- '<|start|>assistant to=functions' }}{{ channel('commentary json', m.tool_calls[0].function | tojson) + '<|call|>' }}
{%- else %}{{ '<|start|>assistant' }}{{ channel('final', m.content) }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
DEEPSEEK = """{{ bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|tool|>' + m.content + '<|tool_end|>' }}
{%- elif m.role == 'assistant' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|Assistant|>' }}{% endif %}
{{- (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}{{ '<|call|>' + (call.function | tojson) }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|Assistant|>' }}OPENED{% endif %}"""
DEEPSEEK_V3 = DEEPSEEK.replace("OPENED", "")
DEEPSEEK_R1 = DEEPSEEK.replace("OPENED", "{{ '<think>\\n' }}")
MISTRAL = """{{ bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' }}
{%- if m == asked[-1] and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] ' + (m.tool_calls[0].function | tojson) + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
TEMPLATES = {
    "qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3.5": QWEN35, "glm": GLM, "llama3": LLAMA3, "phi3": PHI3, "gpt-oss": GPT_OSS,
    "deepseek-v3": DEEPSEEK_V3, "deepseek-r1": DEEPSEEK_R1, "mistral": MISTRAL,
}  # fmt: skip
# What a model has to generate at the end of a turn.
ENDS = {
    "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3.5": "<|im_end|>", "glm": "<|im_end|>", "llama3": "<|eot_id|>",
    "phi3": "<|end|>", "gpt-oss": "<|return|>", "deepseek-v3": "</s>", "deepseek-r1": "</s>", "mistral": "</s>",
}  # fmt: skip
SPECIAL = (
    "<pad>", "</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<|start|>", "<|channel|>",
    "<|message|>", "<|call|>", "<|return|>", "<|User|>", "<|Assistant|>", "<|tool|>", "<|tool_end|>", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
TEXT = "\n\n hello, more of it: ha ha\n system user assistant\n\n the answer is 12\n"


@cache
def _merging() -> str:
    return merging_tokenizer(TEXT * 4, *SPECIAL).backend_tokenizer.to_str()


@cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges span words and newlines, with the special tokens of all families.

    Template and EOS are those of ``family``. Shared between tests, which must not change it.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_merging()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|endoftext|>" if family == "phi3" else ENDS[family],
        chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
    )
    # As in Qwen3, these tags are tokens of their own, but not special ones.
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


PIECES = ["hello", " more", "ha ha", "12", "\n", " ", "é", "user", "<", "."]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
]


def conversation(
    rng: random.Random, *, system: float = 0.3, thinking: float = 0.0, inline: float = 0.0, calls: int = 0
) -> list[dict[str, Any]]:
    """Random conversation of 1 to 3 user messages, with up to ``calls`` tool calls after each, one at a time.

    system, thinking, inline: probabilities of a system prompt, and of thinking in a field or in the content of an assistant turn.
    """

    def text() -> str:
        return "".join(rng.choices(PIECES, k=rng.randint(1, 6))) + "!"

    def turn(**fields: Any) -> dict[str, Any]:
        content = fields.pop("content")
        if rng.random() < inline:
            content = f"<think>\n{text()}\n</think>\n\n{content}"
        more = {"reasoning_content": text()} if rng.random() < thinking else {}
        return {"role": "assistant", "content": content} | more | fields

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < system else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        for _ in range(rng.randint(0, calls)):
            call = {"name": "add", "arguments": {"a": rng.randint(0, 99)}}
            messages.append(turn(content="", tool_calls=[{"id": "call00001", "type": "function", "function": call}]))
            messages.append({"role": "tool", "content": str(rng.randint(0, 99)), "tool_call_id": "call00001"})
        messages.append(turn(content=text()))
    return messages
