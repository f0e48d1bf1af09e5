"""Rendering and tokenisation of prompts. Does not import torch, so that tokenising processes start fast.

The sizes of a large data set's prompts are cached: they decide which prompts are too long, and a second run with the same data
then tokenises only the prompts that it draws.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import TemplateError

from trainer.data.processes import in_processes
from workers.controller.logs import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Messages = str | list[Message]
"""Plain text, used verbatim, or messages {role, content} for the chat template."""
Encoded = tuple[str, np.ndarray]
"""Rendered prompt and its token ids, int32 (n,)."""
RENDERING = 3  # part of a cache's name: it grows when prompts are rendered otherwise than before
Truncation = Literal["error", "left", "right", "middle"]


class Refused(ValueError):
    """A chat template rejected the messages."""


def render(tokenizer: PreTrainedTokenizerBase, prompt: Messages, template_kwargs: dict[str, Any]) -> str:
    """Render the prompt with the chat template, up to the start of the response.

    Raises Refused if the template rejects the messages, ValueError if the tokenizer has no template.
    """
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, and the prompts are chat messages: use an "
            "instruct model's tokenizer (actor_rollout_ref.model.tokenizer_path), put a chat_template.jinja into the model's "
            "directory, or provide prompts as plain strings"
        )
    try:
        # Templates raise TemplateError through raise_exception, TypeError for a content that is no text, and transformers
        # ValueError: all three concern this row only.
        text = tokenizer.apply_chat_template(prompt, **({"add_generation_prompt": True} | template_kwargs), tokenize=False)
    except (ValueError, TypeError, TemplateError) as error:
        raise Refused(
            f"the chat template rejects it: {error}; remove {reprlib.repr(prompt)}, or set data.apply_chat_template_kwargs"
        ) from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], template_kwargs: dict[str, Any]) -> list[Encoded]:
    """Text and token ids of each prompt."""
    # A chat template writes its special tokens itself, and adding them again would double BOS; plain text gets the tokenizer's.
    texts = [_rendered(tokenizer, prompt, template_kwargs) for prompt in prompts]
    ids: dict[int, np.ndarray] = {}
    for plain in (False, True):
        where = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) == plain]
        ids |= zip(where, token_ids(tokenizer, [texts[i] for i in where], special=plain), strict=True)
    return [(text, ids[i]) for i, text in enumerate(texts)]


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Messages, template_kwargs: dict[str, Any]) -> str:
    """``render``, of messages with calls as conversations are rendered (Seams.render_calls)."""
    if not isinstance(prompt, str | list):
        raise Refused(f"the prompt is {reprlib.repr(prompt)}, neither a text nor a list of messages; remove the row")
    prompt = with_texts(prompt)
    if isinstance(prompt, list):
        _check_messages(prompt)
    messages = of_file(prompt)
    if messages is prompt or isinstance(messages, str):
        return render(tokenizer, prompt, template_kwargs)
    try:
        values = parsed(messages)
    except (TypeError, AttributeError) as error:  # a value that JSON has not, or a call that is no object
        raise Refused(f"its calls cannot be read: {error}; change {reprlib.repr(prompt)}") from error
    return render_calls(tokenizer, values, template_kwargs)


def _check_messages(messages: list[Any]) -> None:
    """Raise Refused, naming the message, for one without role or text: templates render any value, such as null, as some text."""
    if not messages:
        raise Refused("the prompt has no message; remove the row")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Refused(f"message {i}: it is {reprlib.repr(message)}; expected a message {{role, content}}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise Refused(f"message {i}: the role is {reprlib.repr(role)}; must be text, such as user")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise Refused(f"message {i}: the content is a {type(content).__name__}; only text is supported")


def with_texts(prompt: Messages) -> Messages:
    """The prompt; a content of text parts alone, as in OpenAI's API, becomes a text: not every template renders parts."""
    if not isinstance(prompt, list):
        return prompt
    found = []
    for message in prompt:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and parts and all(_is_text(part) for part in parts):
            message = message | {"content": "".join(part["text"] for part in parts)}
        found.append(message)
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def of_file(prompt: Messages) -> Messages:
    """Messages of a file without what its format adds: null or empty fields where another message of the column has a value.

    A null content next to calls becomes an empty text, as the agents write it: some templates reject null.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt
    if all(message.keys() <= {"role", "content"} for message in prompt):
        return prompt
    found = []
    for message in prompt:
        kept = {name: value for name, value in message.items() if name in ("role", "content") or value not in (None, [], "")}
        if "tool_calls" in kept:
            kept["tool_calls"] = without_null(kept["tool_calls"])
            if kept.get("role") == "assistant" and kept.get("content") is None:
                kept["content"] = ""
        found.append(kept)
    return found


def without_null(value: Any) -> Any:
    """The value without null fields: in a parquet file all structs of a column have the same fields."""
    if isinstance(value, dict):
        return {name: without_null(item) for name, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def render_calls(tokenizer: PreTrainedTokenizerBase, messages: list[Message], template_kwargs: dict[str, Any]) -> str:
    """``render`` of parsed messages, also by a template that wants the arguments of calls as text."""
    try:
        return render(tokenizer, messages, template_kwargs)
    except Refused:
        as_text = [with_text_arguments(message) for message in messages]
        if as_text == messages:
            raise
        return render(tokenizer, as_text, template_kwargs)


def encode_all(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], template_kwargs: dict[str, Any], workers: int | None = None
) -> list[Encoded]:
    """Results of ``encode``, computed in chunks and, for many prompts, in several processes. workers: see in_processes."""
    return in_processes(partial(_encode, tokenizer, template_kwargs), prompts, "prompts are tokenised", workers)


def _encode(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], prompts: Sequence[Messages]) -> list[Encoded]:
    return encode(tokenizer, prompts, template_kwargs)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[np.ndarray]:
    """Token ids of each text, int32 (n,), with the tokenizer's special tokens added if ``special``.

    Raises Refused for a text with a lone surrogate.
    """
    if not texts:
        return []
    try:
        rows = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
    except TypeError as error:
        if problem := next(filter(None, map(lone_surrogate, texts)), None):
            raise Refused(problem) from error
        raise
    # Arrays need a tenth of the memory of lists of Python integers; all prompts of a run are held at once.
    return [np.array(row, dtype=np.int32) for row in rows]


def check_token(where: str, what: str, token: int, vocab_size: int, key: str) -> None:
    """Raise ValueError, one line, if the largest token of the data at ``where`` is not in the model's vocabulary.

    what: subject of the message. key: configuration key of the model.
    """
    if token >= vocab_size:
        raise ValueError(
            f"{where}: {what} contains token {token}, and the model's vocabulary has {vocab_size}; set {key}.tokenizer_path to "
            "the model's tokenizer"
        )


def lone_surrogate(text: str) -> str | None:
    """Part of a message if the text has half of a surrogate pair, which JSON allows and tokenizers do not; else None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is {text[error.start]!a}, half of a surrogate pair, which is no text; replace it"
    return None


class SizeCache:
    """File with the number of tokens and the largest token id of each prompt of a data set, in the user's cache directory.

    Its name is a hash of all that decides them: content of the files, rows, tokenizer, chat template and the arguments of both. A
    file that cannot be read counts as missing.
    """

    def __init__(self, files: Sequence[str], rows: Sequence[int], tokenizer: PreTrainedTokenizerBase, settings: Any) -> None:
        """rows: indices of the prompts over all files. settings: whatever else decides the sizes, as JSON."""
        self.path: Path | None = None
        """None if the tokens may depend on anything else: a tokenizer in Python, a template with today's date."""
        self._n = len(rows)
        template = json.dumps(tokenizer.chat_template, default=str)
        if not tokenizer.is_fast or "strftime_now" in template:
            return
        about = [settings, tokenizer.backend_tokenizer.to_str(), template, tokenizer.special_tokens_map, _packages()]
        found = hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode())
        found.update(np.asarray(rows, dtype=np.int64).tobytes())
        for name in files:
            with Path(name).expanduser().open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self.path = folder / "tandem" / "prompt_sizes" / f"{found.hexdigest()}"

    def read(self) -> np.ndarray | None:
        """Tokens and largest token id of each prompt, int32 (n, 2); None if they are not there."""
        if self.path is None:
            return None
        try:
            found = self.path.read_bytes()
        except OSError:
            return None
        digest, data = found[:32], found[32:]
        if hashlib.sha256(data).digest() != digest or len(data) != 8 * self._n:
            return None
        return np.frombuffer(data, dtype=np.int32).reshape(-1, 2)

    def write(self, sizes: np.ndarray) -> None:
        """Write atomically; a directory without room or permission leaves the sizes to the next run."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".partial", delete=False) as file:
                file.write(hashlib.sha256(sizes.tobytes()).digest() + sizes.tobytes())
            os.replace(file.name, self.path)
        except OSError as error:
            tell(f"{self.path}: {error}; prompts are tokenised again by the next run")


def sizes_of(encoded: Sequence[Encoded], asked: Sequence[Encoded]) -> np.ndarray:
    """Tokens of each prompt and largest token id of what is asked of it, int32 (n, 2); 0 and -1 for one without tokens."""
    pairs = zip(encoded, asked, strict=True)
    return np.array([(len(ids), of_asked.max(initial=-1)) for (_, ids), (_, of_asked) in pairs], dtype=np.int32).reshape(-1, 2)


def _packages() -> list[str]:
    return [metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")]


def truncate(ids: np.ndarray, max_length: int, how: Literal["left", "right", "middle"]) -> np.ndarray:
    """Truncate ``ids`` to max_length tokens; ``how`` names the part that is removed."""
    over = len(ids) - max_length
    if over <= 0:
        return ids
    match how:
        case "left":
            return ids[over:]
        case "right":
            return ids[:max_length]
        case "middle":
            head = max_length // 2
            return np.concatenate([ids[:head], ids[head + over :]])


def parsed(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Deep copies of messages, with the arguments of their calls as values, and without null fields other than content."""
    # Many templates write arguments that are text as a JSON string (Qwen2.5, Llama 3.1), and test only if tool_calls is there.
    kept = [{name: value for name, value in message.items() if value is not None or name == "content"} for message in messages]
    copies = json.loads(json.dumps(kept))
    return [_with_arguments(copy, lambda value: _value(value) if isinstance(value, str) else value) for copy in copies]


def with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text, for templates that concatenate them (DeepSeek-V3)."""
    return _with_arguments(message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _with_arguments(message: Message, change: Any) -> Message:
    def changed(call: Message) -> Message:
        if "function" in call:
            return call | {"function": changed(call["function"])}
        return call | {"arguments": change(call["arguments"])} if "arguments" in call else call

    return message | {"tool_calls": [changed(call) for call in message["tool_calls"]]} if "tool_calls" in message else message


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # what a model wrote need not be JSON
        return text
