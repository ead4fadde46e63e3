"""Arithmetic from text, without evaluating any: a parser of its own, with bounds on what it may take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

MAX_EXPRESSION = 256
"""characters"""
MAX_BITS = 4096
"""of an intermediate whole number"""
_MAX_DEPTH = 32

_TOKEN = re.compile(
    r"\s*(\d{1,256}(?:\.\d{0,256})?(?:[eE][+-]?\d{1,3})?|\.\d{1,256}|[A-Za-z_]{1,16}|\*\*|//|[-+*/%^(),×÷·])"
)
_SAME_SIGN = {"^": "**", "×": "*", "·": "*", "÷": "/"}
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., int | float]]] = {
    "abs": (1, 1, abs), "ceil": (1, 1, math.ceil), "cos": (1, 1, math.cos), "exp": (1, 1, math.exp),
    "floor": (1, 1, math.floor), "ln": (1, 1, math.log), "log": (1, 2, math.log), "max": (1, 16, max),
    "min": (1, 16, min), "round": (1, 2, round), "sin": (1, 1, math.sin), "sqrt": (1, 1, math.sqrt), "tan": (1, 1, math.tan),
}  # fmt: skip
"""fewest and most arguments, and what computes them"""

Number = int | float


def calculate(expression: str) -> str:
    """The value of + - * / // % ** (or ^), brackets, and a few functions and constants, over whole and real numbers.

    Raises `ValueError`, in words for whoever asked, for anything else and for numbers out of bounds.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"an expression may have {MAX_EXPRESSION} characters")
    try:
        value = _Parser(_tokens(expression)).whole()
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, TypeError):
        raise ValueError("a number is out of bounds") from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is no number")
        return f"{value:.12g}"
    return str(value)


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError("that is no arithmetic")
        tokens.append(_SAME_SIGN.get(match[1], match[1]))
        at = match.end()
    return tokens


class _Parser:
    """By descent: sums of products of signed powers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = self._depth = 0

    def whole(self) -> Number:
        value = self._sum()
        if self._at < len(self._tokens):
            raise ValueError(f"something is wrong before {self._tokens[self._at]!r}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        """The next token if it is one of these, or nothing."""
        token = self._peek()
        if token not in wanted:
            return ""
        self._at += 1
        return token

    def _sum(self) -> Number:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("it nests too deeply")
        value = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        self._depth -= 1
        return value

    def _product(self) -> Number:
        value = self._signed()
        while sign := self._take("*", "/", "//", "%"):
            value = _bounded(_combined(sign, value, self._signed()))
        return value

    def _signed(self) -> Number:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Number:
        base = self._atom()
        if not self._take("**"):
            return base
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("it nests too deeply")
        exponent = self._signed()
        self._depth -= 1
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
            raise ValueError("the power is too large")
        value = base**exponent
        if isinstance(value, complex):
            raise ValueError("the result is no real number")
        return _bounded(value)

    def _atom(self) -> Number:
        token = self._peek()
        self._at += 1
        if token == "(":
            value = self._sum()
            self._close()
            return value
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in _FUNCTIONS:
            return self._called(token)
        if token[:1].isdigit() or token[:1] == ".":
            return _bounded(int(token) if token.isdigit() else float(token))
        raise ValueError(f"a number is missing before {token!r}" if token else "the expression ends too soon")

    def _called(self, name: str) -> Number:
        fewest, most, function = _FUNCTIONS[name]
        if not self._take("("):
            raise ValueError(f"{name} needs brackets")
        given = [self._sum()]
        while self._take(","):
            given.append(self._sum())
        self._close()
        if not fewest <= len(given) <= most:
            raise ValueError(f"{name} takes {fewest} to {most} numbers")
        if name == "round" and len(given) == 2 and not (isinstance(given[1], int) and abs(given[1]) <= 15):
            raise ValueError("round takes a whole number of digits, at most 15")
        return _bounded(function(*given))

    def _close(self) -> None:
        if not self._take(")"):
            raise ValueError("a bracket is not closed")


def _combined(sign: str, left: Number, right: Number) -> Number:
    if sign == "*":
        return left * right
    if sign == "/":
        exact = isinstance(left, int) and isinstance(right, int) and right != 0 and left % right == 0
        return left // right if exact else left / right
    return left // right if sign == "//" else left % right


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("a number is too large")
    return value
