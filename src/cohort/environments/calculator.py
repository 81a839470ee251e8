"""The tool "calculator": exact arithmetic that cannot hang."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from fractions import Fraction

MAX_LENGTH = 1000
"""Maximum number of characters of an expression."""
MAX_BITS = 4096
"""Maximum size of numerators and denominators: about 1,200 digits."""
EXACT_DIGITS = 50
"""Results of at most that many digits are shown exactly, others rounded to ``ROUNDED_DIGITS``."""
ROUNDED_DIGITS = 15
_CHARACTERS = re.compile(r"[0-9.eE_+\-*/%()\s]+", re.ASCII)
_SYNTAX = "cannot read the expression; it may have numbers, + - * / // % ** and parentheses"
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, as in Python, for example "(3 + 4.5) * 2 ** 10".

    Returns:
        The result, rounded to 15 digits if it has no short exact form; or "error:" and the reason.

    >>> calculator("0.1 + 0.2"), calculator("2 ** 100"), calculator("2 / 3"), calculator("1 / 0")
    ('0.3', '1267650600228229401496703205376', '0.666666666666667', 'error: division by zero')
    """
    try:
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
        source = expression.strip()
        if not _CHARACTERS.fullmatch(source):
            raise ValueError(_SYNTAX)
        return _shown(_value(ast.parse(source, mode="eval").body, source))
    except (SyntaxError, MemoryError, RecursionError):  # the last two: too many parentheses or signs
        return f"error: {_SYNTAX}"
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = _number(node, source)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _value(node.operand, source)
        value = -operand if isinstance(node.op, ast.USub) else operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left, source), _value(node.right, source))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = Fraction(_BINARY[type(node.op)](_value(node.left, source), _value(node.right, source)))
    else:
        raise ValueError(_SYNTAX)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _number(node: ast.Constant, source: str) -> Fraction:
    """A number as it is written: 0.1 is a tenth, not the nearest double."""
    if isinstance(node.value, int):
        return Fraction(node.value)
    written = Decimal((ast.get_source_segment(source, node) or "").replace("_", ""))
    if abs(written.adjusted()) > MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(written)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("the exponent must be an integer")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and (bits - 1) * abs(exponent) > MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(base ** int(exponent))


def _shown(value: Fraction) -> str:
    for digits in (EXACT_DIGITS, ROUNDED_DIGITS):
        context = Context(prec=digits, Emax=10 * MAX_BITS, Emin=-10 * MAX_BITS)
        result = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
        if not context.flags[Inexact]:
            break
    return f"{result:f}" if -7 < result.adjusted() < digits else f"{result}".replace("E", "e")
