"""What a chat template may do with values: the filters, methods, operators and look-ups that real templates use.

All else is refused by name. Values are None, bool, int, float, text, lists, tuples, mappings and ranges; no operation
reaches a Python attribute, and each asks the budget first. Results equal Jinja's, as `transformers` sets it up.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from edge_llm.errors import TemplateError
from edge_llm.text.prompt import PromptText, concat, join
from edge_llm.text.template_budget import MAX_INTEGER_BITS, Budget

MAX_WIDTH = 64
"""of an indent, or a number given as text"""
MAX_JSON_INDENT = 8
MAX_DIGITS = 15
MAX_NEEDLE = 256
"""searching from the right takes the product of both lengths"""


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


_WORDS = re.compile(r"([-\s({\[<]+)")


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A method of a text, list or mapping that may be called. Equal only to itself: comparing owners is not free."""

    owner: Any
    name: str


def refused(what: str) -> TemplateError:
    return TemplateError(
        f"the chat template uses {what}, which is not allowed", hint="use another template for this model"
    )


class Library:
    """Operations on values under a budget, which is set before each render.

    `undefined` is the type of missing values.
    """

    def __init__(self, undefined: type) -> None:
        self.budget = Budget(0)
        self._undefined = undefined
        self.tests: dict[str, Callable[..., Any]] = {}
        self.filters: dict[str, Callable[..., Any]] = {
            name.removeprefix("filter_"): getattr(self, name) for name in dir(self) if name.startswith("filter_")
        }
        self.filters["d"] = self.filter_default

    # -- values

    def string(self, value: Any) -> str:
        """As `str(value)`, of the values that may be printed."""
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, bool | int | float | self._undefined):
            return str(value)
        if isinstance(value, Mapping | list | tuple | range):
            self.budget.text(self.budget.measure(value))
            text = str(value)
            self.budget.text(len(text))
            return text
        raise refused(f"the text of a {type(value).__name__}")

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

    # -- methods

    def invoke(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method. `args` and `kwargs` are the template's own."""
        owner, name = method.owner, method.name
        if isinstance(owner, Mapping):
            return self._invoke_mapping(owner, name, *args, **kwargs)
        self.budget.measure(args)
        if not isinstance(owner, str):
            self.budget.measure(owner)
            return getattr(owner, name)(*args, **kwargs)
        if name == "join":
            (items,) = args
            return self.filter_join(items, owner)
        if name == "replace":
            return self.filter_replace(owner, *args, **kwargs)
        if name in ("rfind", "rindex", "rsplit") and any(
            isinstance(arg, str) and len(arg) > MAX_NEEDLE for arg in args
        ):
            raise refused(f"{name} of more than {MAX_NEEDLE} characters")
        self.budget.text(2 * len(owner))
        result = getattr(owner, name)(*args, **kwargs)
        if isinstance(result, list):
            self.budget.items(len(result))
        return result

    def _invoke_mapping(self, owner: Mapping[Any, Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "get":
            return owner.get(self.scalar(args[0]), *args[1:], **kwargs)
        self.budget.items(2 * len(owner))
        return list(getattr(owner, name)(*args, **kwargs))

    # -- filters: text

    def filter_string(self, value: Any) -> str:
        return self.string(value)

    filter_safe = filter_string

    def _changed(self, value: Any, change: Callable[[str], str]) -> str:
        text = self.string(value)
        self.budget.text(2 * len(text))
        return change(text)

    def filter_trim(self, value: Any, chars: str | None = None) -> str:
        return self._changed(value, lambda text: text.strip(chars))

    def filter_upper(self, value: Any) -> str:
        return self._changed(value, lambda text: text.upper())

    def filter_lower(self, value: Any) -> str:
        return self._changed(value, lambda text: text.lower())

    def filter_capitalize(self, value: Any) -> str:
        return self._changed(value, lambda text: text.capitalize())

    def filter_title(self, value: Any) -> str:
        """As Jinja's, where a word also begins after a dash or a bracket."""
        return self._changed(
            value, lambda text: "".join(part[:1].upper() + part[1:].lower() for part in _WORDS.split(text))
        )

    def filter_replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = self.string(value), self.string(old), self.string(new)
        found = text.count(old)
        self.budget.items(found)
        self.budget.text(len(text) + found * max(0, len(new) - len(old)))
        return text.replace(old, new, -1 if count is None else count)

    def filter_indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        indentation = width if isinstance(width, str) else " " * min(width, MAX_WIDTH + 1)
        if len(indentation) > MAX_WIDTH:
            raise refused(f"an indent of more than {MAX_WIDTH}")
        text = self.string(value)
        self.budget.step(len(text))
        lines = (text + "\n").splitlines()
        self.budget.text(len(text) + len(indentation) * len(lines))
        indented = lines[:1] + [indentation + line if line or blank else line for line in lines[1:]]
        return (indentation if first else "") + "\n".join(indented)

    def filter_join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        texts = [self.string(self._path(item, attribute)) for item in self.entries(value)]
        separator = self.string(d)
        self.budget.text(sum(map(len, texts)) + len(separator) * len(texts))
        return join(separator, texts)

    def filter_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As JSON, not escaped for HTML. Its control tokens, if any, are content."""
        if (indent or 0) > MAX_JSON_INDENT or sum(map(len, separators or ())) > MAX_JSON_INDENT:
            raise refused(f"JSON with an indent or separators of more than {MAX_JSON_INDENT}")
        self.budget.text(self.budget.measure(value))
        text = json.dumps(
            value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=sort_keys
        )
        self.budget.text(len(text))
        return text

    # -- filters: numbers

    def filter_int(self, value: Any, default: int = 0, base: int = 10) -> Any:
        try:
            if isinstance(value, str):
                return int(value[:MAX_WIDTH], base) if len(value) <= MAX_WIDTH else default
            return int(value)
        except (TypeError, ValueError, OverflowError):
            try:
                return int(float(value))
            except (TypeError, ValueError, OverflowError):
                return default

    def filter_float(self, value: Any, default: float = 0.0) -> Any:
        try:
            return float(value) if not isinstance(value, str) or len(value) <= MAX_WIDTH else default
        except (TypeError, ValueError, OverflowError):
            return default

    def filter_round(self, value: Any, precision: int = 0) -> Any:
        if abs(precision) > MAX_DIGITS:
            raise refused(f"rounding to more than {MAX_DIGITS} digits")
        return round(value, precision)

    # -- filters: lists and mappings

    def filter_length(self, value: Any) -> int:
        return len(value)

    filter_count = filter_length

    def filter_default(self, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
        return default_value if isinstance(value, self._undefined) or (boolean and not value) else value

    def filter_list(self, value: Any) -> list[Any]:
        return self.entries(value)

    def filter_first(self, value: Any) -> Any:
        return next(iter(self.entries(value)), self._undefined("there is no first item"))

    def filter_last(self, value: Any) -> Any:
        return next(reversed(self.entries(value)), self._undefined("there is no last item"))

    def filter_reverse(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.slice(value, None, None, -1)
        return self.entries(value)[::-1]

    def filter_items(self, value: Any) -> list[Any]:
        if isinstance(value, self._undefined):
            return []
        if not isinstance(value, Mapping):
            raise TypeError("items is of mappings only")
        self.budget.items(2 * len(value))
        return list(value.items())

    def filter_dictsort(self, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> Any:
        if by not in ("key", "value"):
            raise ValueError('dictsort is by "key" or "value"')
        place = ("key", "value").index(by)
        pairs = self.filter_items(value)
        return self._sorted(pairs, lambda pair: pair[place], case_sensitive, reverse)

    def filter_sort(
        self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
    ) -> list[Any]:
        return self._sorted(self.entries(value), lambda item: self._path(item, attribute), case_sensitive, reverse)

    def _sorted(self, items: list[Any], key: Callable[[Any], Any], case_sensitive: bool, reverse: bool) -> list[Any]:
        """Sorted by scalars: comparing lists could take for ever."""
        keys = [self._folded(self.scalar(key(item)), case_sensitive) for item in items]
        self.budget.step(len(items) * len(items).bit_length() * (1 + max(map(_size, keys), default=0) // 64))
        order = sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)
        return [items[i] for i in order]

    def filter_unique(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
        found: dict[Any, Any] = {}
        for item in self.entries(value):
            found.setdefault(self._folded(self.scalar(self._path(item, attribute)), case_sensitive), item)
        return list(found.values())

    def _folded(self, key: Any, case_sensitive: bool) -> Any:
        return key if case_sensitive or not isinstance(key, str) else self.filter_lower(key)

    def filter_map(self, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if "attribute" in kwargs:
            attribute, default = kwargs.pop("attribute"), kwargs.pop("default", None)
            if args or kwargs:
                raise TypeError("map takes an attribute and a default, or a filter with its arguments")
            found = [self._path(item, attribute) for item in self.entries(value)]
            return [default if default is not None and isinstance(item, self._undefined) else item for item in found]
        name, *rest = args
        if name not in self.filters:
            raise refused(f"the filter {name!r}")
        return [self.filters[name](item, *rest, **kwargs) for item in self.entries(value)]

    def _path(self, item: Any, path: Any) -> Any:
        """The attribute of an item at a dotted path; None is the item itself."""
        steps = path.split(".") if isinstance(path, str) else [] if path is None else [path]
        for step in steps:
            item = self.item(item, int(step) if isinstance(step, str) and step.isdigit() else step)
        return item

    def filter_select(self, value: Any, *args: Any) -> list[Any]:
        return [item for item in self.entries(value) if self._passes(item, args)]

    def filter_reject(self, value: Any, *args: Any) -> list[Any]:
        return [item for item in self.entries(value) if not self._passes(item, args)]

    def filter_selectattr(self, value: Any, path: Any, *args: Any) -> list[Any]:
        return [item for item in self.entries(value) if self._passes(self._path(item, path), args)]

    def filter_rejectattr(self, value: Any, path: Any, *args: Any) -> list[Any]:
        return [item for item in self.entries(value) if not self._passes(self._path(item, path), args)]

    def _passes(self, item: Any, test: tuple[Any, ...]) -> bool:
        self.budget.step()
        if not test:
            return bool(item)
        if test[0] not in self.tests:
            raise refused(f"the test {test[0]!r}")
        return bool(self.tests[test[0]](item, *test[1:]))


def _size(key: Any) -> int:
    return len(key) if isinstance(key, str) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise refused(f"a number of more than {MAX_INTEGER_BITS} bits")
