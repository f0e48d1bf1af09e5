"""Arithmetic without Python's own evaluation: only numbers and operators, and results of bounded size."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from trainer.agents.tools import tool

_MOST_CHARACTERS = 1_000
_MOST_BITS = 4_096
"""Of an integer; a power may have more digits than fit into memory."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression with numbers, parentheses and the operators + - * / // % and **.

    Args:
        expression: The expression, for example (3 + 4) * 5.
    """
    return str(evaluate(expression))


def evaluate(expression: str) -> int | float:
    """Value of an arithmetic expression. Raises ValueError, one line, for anything else and for numbers that are too large."""
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MOST_CHARACTERS}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an arithmetic expression: {expression!r:.80}") from error
    except (OverflowError, ZeroDivisionError) as error:
        raise ValueError(str(error)) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is not a finite number")
    return value


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError(f"only numbers and operators can be calculated, not {ast.unparse(node)!r:.80}")


def _power(base: int | float, exponent: int | float) -> int | float:
    # Before the power is taken: 9**9**9 has 370 million digits.
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and abs(base) > 1 and math.log2(abs(base)) * abs(exponent) > _MOST_BITS:
        raise ValueError(f"the power is too large: at most {_MOST_BITS} bits")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return _bounded(value)


def _bounded(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"the number is too large: at most {_MOST_BITS} bits")
    return value
