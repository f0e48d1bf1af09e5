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
_SPACE = re.compile(r"\s*")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value in ``text`` from ``start`` on, and the position after it and the whitespace around it. Raises ValueError."""
    try:
        value, end = _DECODER.raw_decode(text, _end_of_space(text, start))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return check_json(value), _end_of_space(text, end)


def check_json(value: Any) -> Any:
    """The value. Raises ValueError if it has no JSON in UTF-8: infinity (``1e999``), half of a surrogate pair (``"\\ud800"``)."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it has a character that is no Unicode text") from error
    return value


def from_text(text: str, schema: Schema) -> Any:
    """Value of a parameter that is written as plain text. The text itself if the schema takes text, or nothing else fits.

    Words of Python (True, None) count as those of JSON: chat templates write both.
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    try:
        value, end = (_WORDS[word], len(word)) if word in _WORDS else decode(word)
    except ValueError:
        return text
    return value if end == len(word) and _fits(value, types) else text


def validator(parameters: Schema, *, closed: bool) -> Draft202012Validator:
    """Validator of a tool's arguments. closed: other arguments than the schema's are wrong. Raises ValueError, one line."""
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {_in_words(error.absolute_path, error.message)}") from error
    if parameters.get("type") != "object":
        raise ValueError(f"parameters.type={parameters.get('type')!r}: the parameters of a tool are an object")
    kept = _nullable(parameters)
    return Draft202012Validator(kept | {"additionalProperties": False} if closed else kept)


def problem(arguments: Mapping[str, Any], check: Draft202012Validator) -> str | None:
    """What is wrong with the arguments, one line; None if nothing is."""
    error = best_match(check.iter_errors(arguments))
    return None if error is None else _in_words(error.absolute_path, error.message)


def _in_words(path: Any, message: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    text = " ".join(f"{where}: {message}".split()) if where else " ".join(message.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _types(schema: Schema) -> set[str]:
    """Names of the JSON types that a schema accepts; {"string"} if it does not say."""
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {*named}
    types |= {_type_of(value) for value in schema.get("enum", [])} if not types else set()
    types |= {name for option in schema.get("anyOf", []) for name in _types(option)}
    return (types or {"string"}) | ({"null"} if schema.get("nullable") else set())


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return types[type(value)]


def _fits(value: Any, types: set[str]) -> bool:
    # As in JSON Schema, an integer is a number, and a number without fraction an integer.
    kind = _type_of(value)
    return (
        kind in types or (kind == "integer" and "number" in types) or (kind == "number" and "integer" in types and value % 1 == 0)
    )


def _nullable(schema: Any) -> Any:
    """The schema with OpenAPI's ``nullable``, which transformers writes for Optional, as JSON Schema."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: _nullable(value) for name, value in schema.items()}
    # A parameter may have this name: then it is a schema, and never True.
    if kept.get("nullable") is not True:
        return kept
    del kept["nullable"]
    return {"anyOf": [kept, {"type": "null"}]}
