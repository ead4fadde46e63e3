"""Arithmetic as Python has it, and nothing else of Python."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.toolbox.calculator import MAX_EXPRESSION, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 * 23", "391"), ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("-2 ** 2", "-4"), ("2 ^ 3 ^ 2", "512"),
        ("2 ** -1", "0.5"), ("7 // 2", "3"), ("7 % 4", "3"), ("6 / 3", "2"), ("1 / 4", "0.25"), ("0.1 + 0.2", "0.3"),
        ("sqrt(2)", "1.41421356237"), ("max(1, 2.5, -3)", "2.5"), ("round(2.675, 2)", "2.67"), ("3 × 4 ÷ 2", "6"),
        ("2 * pi", "6.28318530718"), ("--3", "3"), (" 1e3 ", "1000"), (".5+.5", "1"), ("abs(-3)", "3"),
        ("9 ** 200", str(9**200)), ("log(8, 2)", "3"), ("１+１", "2"), ("10 - 4 - 3", "3"),
        ("2 * (3", None), ("", None), ("1 +", None),
    ],
)  # fmt: skip
def test_values(expression: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match=r"bracket|ends too soon"):
            calculate(expression)
    else:
        assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9 ** 9 ** 9 ** 9", "2 ** 100000", "(9**900) ** 9", "10 ** 1e9", "9**1200 * 9**1200", "1e300 * 1e300", "1 / 0",
        "5 % 0", "0 ** -1", "(-8) ** 0.5", "sqrt(-1)", "exp(1000)", "(" * 60, "1" * 300, "2 ** " * 50 + "2", "round(1.5, 0.5)",
        "__import__('os')", "os", "1;2", "a.b", "[1]", "lambda: 1", "1 if 1 else 2", "1 and 2", "'a' * 3", "1_000", "0x10", "1j",
        "round(1, 2, 3)", "sqrt 2", "sqrt()", "max()", "1 2", "1,2", ")", "\0", "10 ** -400 ** 2", "1e999", "ceil(1e999)",
        "log(0)", "9 ** (9 ** 99)", "1e", "...",
    ],
)  # fmt: skip
def test_what_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


@given(st.text("0123456789.+-*/%^() ,eabsqrtpi", max_size=MAX_EXPRESSION))
def test_any_text_gives_a_number_or_a_reason(text: str) -> None:
    try:
        value = calculate(text)
    except ValueError as error:
        value = str(error)
    assert value


def test_expressions_as_python_has_them() -> None:
    chance = random.Random(3)

    def made(depth: int) -> str:
        if depth == 0:
            return str(chance.randint(0, 20))
        left, right = made(depth - 1), made(chance.randint(0, depth - 1))
        return chance.choice(
            [f"{left} {chance.choice('+-*')} {right}", f"({left}) - {right}", f"-({left})", f"({left}) * {right}"]
        )

    for _ in range(200):
        expression = made(4)
        assert calculate(expression) == str(eval(expression))
