"""Arguments of tool calls: JSON values, values of text by a schema, validation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

Schema = dict[str, Any]
_MOST_CHARACTERS = 300
"""Of a message about arguments: it quotes them, and they may be long."""
_MOST_LEVELS = 100
_TYPED = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
"""Keys by which a schema says what a value is."""
_SPACE = re.compile(r"\s*")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def unrepeated(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError if two have one name: which of them is meant would be a guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=unrepeated)


def decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value in ``text`` from ``start`` on, and the position after it and the whitespace around it. Raises ValueError."""
    try:
        value, end = _DECODER.raw_decode(text, _end_of_space(text, start))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return check_json(value), _end_of_space(text, end)


def check_json(value: Any) -> Any:
    """The value. Raises ValueError if it has no JSON in UTF-8: infinity (``1e999``), half of a surrogate pair (``"\\ud800"``).

    Also if it has more than 100 levels: what handles values, such as pickle, is recursive.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it has a character that is no Unicode text") from error
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for parent in level if isinstance(parent, dict | list | tuple) for item in _items(parent)]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def from_text(text: str, schema: Schema) -> Any:
    """Value of a parameter that is written as plain text. The text itself if the schema says no type, or no value of it fits.

    A schema that takes both text and numbers gets the number. Words of Python (True, None) count as those of JSON: chat templates
    write both.
    """
    word = text.strip()
    try:
        value, end = (_WORDS[word], len(word)) if word in _WORDS else decode(word)
        if end < len(word) or not _TYPED & schema.keys():
            return text
        check = Draft202012Validator(_supported(schema))
    except ValueError:  # no JSON, or a schema that cannot be used
        return text
    wrong = _violated(value, check)
    # A value of the right type that is too large, say, is a value all the same.
    return text if wrong and ("type" in wrong or not _violated(text, check)) else value


def _violated(value: Any, check: Draft202012Validator) -> set[str]:
    """Keywords of the schema that the value violates; "type" if the schema cannot be used."""
    try:
        return {str(error.validator) for error in check.iter_errors(value)}
    except Exception as failure:  # any exception of the validator
        return {"type", type(failure).__name__}


def validator(parameters: Schema, *, closed: bool) -> Draft202012Validator:
    """Validator of a tool's arguments. closed: other arguments than the schema's are wrong. Raises ValueError, one line."""
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {_in_words(error.absolute_path, error.message)}") from error
    if parameters.get("type") != "object":
        raise ValueError(f"parameters.type={parameters.get('type')!r}: the parameters of a tool are an object")
    kept = _supported(parameters)
    return Draft202012Validator(kept | {"additionalProperties": False} if closed else kept)


def problem(arguments: Mapping[str, Any], check: Draft202012Validator) -> str | None:
    """What is wrong with the arguments, one line; None if nothing is."""
    try:
        error = best_match(check.iter_errors(arguments))
    except Exception as failure:  # numbers that are too large, references to nowhere
        return f"they cannot be checked: {type(failure).__name__}"
    return None if error is None else _in_words(error.absolute_path, error.message)


def _in_words(path: Any, message: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    text = " ".join(f"{where}: {message}".split()) if where else " ".join(message.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _supported(schema: Any) -> Any:
    """The schema with OpenAPI's ``nullable``, which transformers writes for Optional, as JSON Schema.

    Raises ValueError for references to other documents: a validator would open their addresses.
    """
    if isinstance(schema, list):
        return [_supported(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    for key in ("$ref", "$dynamicRef"):
        if isinstance(to := schema.get(key), str) and not to.startswith("#"):
            raise ValueError(f"{key}={to:.80}: only references within the schema (#...) are supported")
    kept = {name: _supported(value) for name, value in schema.items()}
    # A parameter may have this name: then it is a schema, and never True.
    if kept.get("nullable") is not True:
        return kept
    del kept["nullable"]
    return {"anyOf": [kept, {"type": "null"}]}
