"""Arguments of tool calls: validation messages, and what counts as JSON."""

import datetime
import pickle
from typing import Any

import pytest

from trainer.agents.arguments import decode, from_text, problem, validator

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "nullable": True},
        "units": {"enum": ["C", "F"]},
        "at": {"type": "array", "items": {"type": "number"}},
        "nullable": {"type": "boolean"},
    },
    "required": ["city"],
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "Rom", "days": 3, "units": "C", "at": [1, 2.5], "nullable": True}, None),
        ({"city": "Rom", "days": None}, None),
        ({"city": "Rom", "days": 3.0}, None),
        ({}, "'city' is a required property"),
        ({"city": 3}, "city: 3 is not of type 'string'"),
        ({"city": None}, "city: None is not of type 'string'"),
        ({"city": "Rom", "units": "K"}, "units: 'K' is not one of ['C', 'F']"),
        ({"city": "Rom", "at": [1, "x"]}, "at[1]: 'x' is not of type 'number'"),
        ({"city": "Rom", "nullable": "x"}, "nullable: 'x' is not of type 'boolean'"),
        ({"city": "Rom", "hours": 3}, "Additional properties are not allowed ('hours' was unexpected)"),
    ],
)
def test_wrong_arguments_are_described_in_one_line(arguments: dict[str, Any], expected: str | None) -> None:
    assert problem(arguments, validator(PARAMETERS, closed=True)) == expected


def test_an_open_schema_accepts_other_arguments() -> None:
    assert problem({"city": "Rom", "hours": 3}, validator(PARAMETERS, closed=False)) is None


def test_a_long_value_is_not_repeated_in_full() -> None:
    text = problem({"city": ["x\n" * 10_000]}, validator(PARAMETERS, closed=True))
    assert text is not None and len(text) < 320 and "\n" not in text


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "objekt"}, "not a JSON schema: type: "),
        ({"type": "array"}, "parameters.type='array': the parameters of a tool are an object"),
        ({}, "parameters.type=None"),
    ],
)
def test_a_schema_that_is_none_is_refused_in_one_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        validator(parameters, closed=True)
    assert str(caught.value).startswith(message)


def test_a_value_is_decoded_with_the_space_around_it() -> None:
    assert decode('x  {"a": "é"} \n y', 1) == ({"a": "é"}, 16)


@pytest.mark.parametrize(
    "text",
    ["NaN", "-Infinity", "1e999", '"\\udc00"', "[" * 100_000, "", "tru", "9" * 5_000, '{"a": 1, "a": 1}', "[" * 101 + "]" * 101],
)
def test_what_no_other_program_reads_is_not_json(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_values_may_have_a_hundred_levels() -> None:
    value, _ = decode("[" * 99 + "1" + "]" * 99)
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"const": 3}, "3", 3),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "3", 3),
        ({"$ref": "#/$defs/n"}, "3", "3"),
        ({"$ref": "http://example.com/n"}, "3", "3"),
        ({"enum": [datetime.date(2026, 1, 1), 3]}, "3", 3),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer", "minimum": 0}, "-3", -3),
        ({"type": "string", "maxLength": 1}, "33", "33"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"description": "Anything."}, "3", "3"),
        ({"type": ["integer", "string"]}, "3", 3),
    ],
)
def test_text_becomes_a_value_by_all_that_a_schema_says(schema: Any, text: str, value: Any) -> None:
    assert repr(from_text(text, schema)) == repr(value)


def test_arguments_that_cannot_be_checked_are_wrong() -> None:
    check = validator({"type": "object", "properties": {"x": {"multipleOf": 0.5}, "y": {"$ref": "#/$defs/n"}}}, closed=True)
    assert problem({"x": 10**400}, check) == "they cannot be checked: OverflowError"
    assert str(problem({"y": 1}, check)).startswith("they cannot be checked: ")


def test_a_schema_that_refers_to_other_documents_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^\$ref=http://example.com/n: only references within the schema"):
        validator({"type": "object", "properties": {"x": {"$ref": "http://example.com/n"}}}, closed=True)
