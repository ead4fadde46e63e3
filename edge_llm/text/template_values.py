"""What the operators and look-ups of a chat template do with values.

Values are None, bool, int, float, text, lists, tuples, mappings and ranges. No operation reaches a Python attribute,
and each asks the budget first. Results equal Jinja's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any

from edge_llm.text.prompt import PromptText, concat
from edge_llm.text.template_budget import MAX_INTEGER_BITS, Budget, refused


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXT_METHODS = words(
    "capitalize count endswith find index isalnum isalpha isdigit islower isnumeric isspace isupper join lower lstrip "
    "removeprefix removesuffix replace rfind rindex rsplit rstrip split splitlines startswith strip title upper"
)
METHODS: tuple[tuple[type | UnionType, frozenset[str]], ...] = (
    (str, TEXT_METHODS),
    (Mapping, words("get items keys values")),
    (list | tuple, words("count index")),
)

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A method of a text, list or mapping that may be called. Equal only to itself: comparing owners is not free."""

    owner: Any
    name: str


class Values:
    """Operations on values under a budget, which is set before each render.

    `undefined` is the type of missing values.
    """

    def __init__(self, undefined: type) -> None:
        self.budget = Budget(0)
        self._undefined = undefined
        self._printed = (str, int, float, range, NoneType, undefined)

    def string(self, value: Any) -> str:
        """As `str(value)`, of the values that may be printed."""
        if isinstance(value, str):
            return value
        self.budget.text(self.budget.measure(value, self._printed))
        text = str(value)
        self.budget.text(len(text))
        return text

    def entries(self, value: Any) -> list[Any]:
        """The items of anything that a loop may run over."""
        if not isinstance(value, str | Mapping | list | tuple | range | self._undefined):
            raise TypeError(f"{type(value).__name__} is not a sequence")
        self.budget.items(len(value))  # type: ignore[arg-type]
        return list(value)  # type: ignore[call-overload,no-any-return]

    def item(self, value: Any, key: Any) -> Any:
        """`value[key]`, else the method of that name, else undefined."""
        self.budget.step()
        if not (key is None or isinstance(key, str | int | float)):
            return self._undefined(obj=value, name=None)
        if isinstance(value, Mapping):
            if key in value:
                return value[key]
        elif isinstance(value, str | list | tuple | range) and isinstance(key, int) and -len(value) <= key < len(value):
            return value[key]
        return self._method(value, key) or self._undefined(obj=value, name=key)

    def attribute(self, value: Any, name: str) -> Any:
        """The method of that name, else `value[name]`, else undefined: `x.items()` works where x has a key "items"."""
        return self._method(value, name) or self.item(value, name)

    def _method(self, value: Any, name: Any) -> Method | None:
        for kind, names in METHODS:
            if isinstance(value, kind):
                return Method(value, str(name)) if name in names else None
        return None

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        if not isinstance(value, str | list | tuple | range):
            raise TypeError(f"a {type(value).__name__} has no parts")
        part = slice(start, stop, step)
        size = len(range(*part.indices(len(value))))
        self.budget.text(size) if isinstance(value, str) else self.budget.items(size)
        return value[part]

    def collect(self, value: Any) -> Any:
        """A list, tuple or mapping that the template writes out."""
        self.budget.items(len(value))
        return value

    def scalar(self, value: Any) -> Any:
        """A key: hashing a nested tuple could take for ever."""
        if value is None or isinstance(value, str | int | float):
            return value
        raise TypeError(f"a {type(value).__name__} cannot be a key")

    # -- operators

    def compare(self, operations: str, *values: Any) -> bool:
        """The values compared in a row, as in `a < b < c`; `operations` are keys of _COMPARE with spaces between."""
        for value in values:
            self.budget.measure(value)
        steps = zip(operations.split(), values, values[1:], strict=False)
        return all(_COMPARE[operation](left, right) for operation, left, right in steps)

    def concat(self, *values: Any) -> PromptText:
        """The operator ~."""
        return self.concat_texts([self.string(value) for value in values])

    def concat_texts(self, texts: Sequence[str]) -> PromptText:
        self.budget.text(sum(map(len, texts)))
        return concat(texts)

    def arithmetic(self, sign: str, left: Any, right: Any) -> Any:
        """A binary operator of numbers, texts and lists; `%` of a text is refused."""
        self.budget.step()
        if isinstance(left, str) and isinstance(right, str) and sign == "+":
            return self.concat_texts((left, right))
        if isinstance(left, str) and sign == "%":
            raise refused("formatting by %")
        if isinstance(left, list | tuple) and sign == "+" and isinstance(right, list | tuple):
            self.budget.items(len(left) + len(right))
        elif sign == "*" and isinstance(right, str | list | tuple):
            left, right = right, left
        if sign == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            size = len(left) * max(right, 0)
            self.budget.text(size) if isinstance(left, str) else self.budget.items(size)
        if sign == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        result = _ARITHMETIC[sign](left, right)
        if isinstance(result, int):
            _check_bits(result.bit_length())
        return result


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise refused(f"a number of more than {MAX_INTEGER_BITS} bits")
