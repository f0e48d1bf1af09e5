"""Tools made of functions, and what they return."""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel
from transformers.utils import get_json_schema

from trainer.agents.tools import FunctionTool, ToolOutput, ToolResponse, function_schema, output_of, tool


def everything(
    text: str,
    count: int,
    share: float,
    flag: bool,
    items: list,
    numbers: list[int],
    table: dict[str, float],
    unit: Literal["C", "F"] = "C",
    near: tuple[float, float] | None = None,
    maybe: Optional[int] = None,  # noqa: UP045
    either: int | str = 0,
) -> str:
    """Everything a schema can have.

    More about it.

    Args:
        text: The text.
        count: The count,
            over two lines.
        share: The share.
        flag: The flag.
        items: Any items.
        numbers: Numbers.
        table: A table.
        unit: The unit.
        near: A place.
        maybe: A number, or none.
        either: Either.

    Returns:
        Nothing of interest.
    """
    return text


def test_a_function_has_the_schema_that_templates_know() -> None:
    function = function_schema(everything)["function"]
    expected = get_json_schema(everything)["function"]
    assert expected.pop("return") is not None
    assert function == expected
    assert function["description"] == "Everything a schema can have.\n\nMore about it."
    properties = function["parameters"]["properties"]
    assert properties["count"] == {"type": "integer", "description": "The count, over two lines."}
    assert properties["numbers"] == {"type": "array", "items": {"type": "integer"}, "description": "Numbers."}
    assert properties["unit"] == {"type": "string", "enum": ["C", "F"], "description": "The unit."}
    assert properties["maybe"] == {"type": "integer", "nullable": True, "description": "A number, or none."}
    assert function["parameters"]["required"] == ["text", "count", "share", "flag", "items", "numbers", "table"]


def test_a_dict_without_types_is_any_dict() -> None:
    def f(table: typing.Dict) -> None:  # noqa: UP006
        """A.

        Args:
            table: A table.
        """

    assert function_schema(f)["function"]["parameters"]["properties"]["table"]["type"] == "object"


@dataclass
class Place:
    name: str


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """A.

    Args:
        a: A number.
    """
    return a


def undescribed(a: int) -> int:
    """A."""
    return a


def classes(place: Place | None) -> None:
    """A.

    Args:
        place: A place.
    """


def keys(table: dict[int, str]) -> None:
    """A.

    Args:
        table: A table.
    """


def deep(places: list[dict[str, set[int]]]) -> None:
    """A.

    Args:
        places: Places.
    """


def unresolved(place: "Absent") -> None:  # type: ignore[name-defined]  # noqa: F821
    """A.

    Args:
        place: A place.
    """


def starred(*numbers: int) -> None:
    """A."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "it has no docstring"),
        (no_hint, "Argument a is missing a type hint"),
        (undescribed, "no description for the argument 'a'"),
        (classes, "the type of place has no JSON schema: <class '.*Place'>; use str, int"),
        (keys, "the type of table has no JSON schema: <class 'int'>"),
        (deep, r"the type of places has no JSON schema: set\[int\]"),
        (unresolved, "its type hints cannot be read: name 'Absent' is not defined"),
        (starred, r"\*numbers: int cannot be called by name"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_in_one_line(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tool(function)
    assert str(caught.value).startswith(f"tool {function.__name__}: ") and "\n" not in str(caught.value)


def test_a_tool_is_still_a_function_and_may_have_another_name_and_schema() -> None:
    bare, named = tool(everything), tool("other")(everything)
    assert isinstance(bare, FunctionTool) and (bare.name, named.name) == ("everything", "other")
    assert (
        named.schema["function"]["name"] == "other"
        and bare(text="x", count=1, share=1, flag=True, items=[], numbers=[], table={}) == "x"
    )
    schema = {
        "type": "function",
        "function": {"name": "given", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    assert tool(schema=schema)(no_docstring).schema == schema
    with pytest.raises(ValueError, match=r"tool_schema .* not a JSON schema"):
        tool(schema={"function": {"name": "x", "parameters": {"type": "object", "properties": {"a": {"type": 3}}}}})(no_docstring)


class Other(BaseModel):
    """ToolResponse of an installed verl."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", ToolOutput("text")),
        ({"a": "é", "p": Path("x")}, ToolOutput('{"a": "é", "p": "x"}')),
        ([1, None], ToolOutput("[1, null]")),
        (2.5, ToolOutput("2.5")),
        (None, ToolOutput("None")),
        (("t",), ToolOutput("t")),
        (ToolResponse(text="hi"), ToolOutput("hi")),
        ((Other(text=None, image=[]), 0.5), ToolOutput("", 0.5)),
        (({"a": 1}, 0.5), ToolOutput('{"a": 1}', 0.5)),
        (("t", None, {"n": 1, "s": "no number", "x": float("nan")}), ToolOutput("t", 0.0, {"n": 1.0})),
    ],
)
def test_results_of_functions_are_text_reward_and_metrics(value: Any, expected: ToolOutput) -> None:
    assert output_of(value) == expected


@pytest.mark.parametrize("value", [(), (1, 2, {}, 4), ("t", "high"), ("t", float("inf")), Other(image=["i"])])
def test_a_result_that_means_nothing_is_an_error(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        output_of(value)


def test_a_response_may_have_only_text() -> None:
    assert ToolResponse(text="x").is_text_only() and not ToolResponse(text="x", image=[1]).is_text_only()
