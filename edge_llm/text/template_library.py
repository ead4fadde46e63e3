"""The filters and methods that chat templates use; all others are refused by name.

Results equal Jinja's, as `transformers` sets it up. Each asks the budget before it makes anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from edge_llm.text.prompt import join
from edge_llm.text.template_budget import refused
from edge_llm.text.template_values import Method, Values

MAX_WIDTH = 64
"""of an indent, or a number given as text"""
MAX_JSON_INDENT = 8
MAX_DIGITS = 15
MAX_NEEDLE = 256
"""searching from the right takes the product of both lengths"""

_WORDS = re.compile(r"([-\s({\[<]+)")


class Library(Values):
    """Filters by name, and the methods of values. `tests` are those that `select` and its kin may name."""

    def __init__(self, undefined: type) -> None:
        super().__init__(undefined)
        self.tests: dict[str, Callable[..., Any]] = {}
        self.filters: dict[str, Callable[..., Any]] = {
            name.removeprefix("filter_"): getattr(self, name) for name in dir(self) if name.startswith("filter_")
        }
        self.filters["d"] = self.filter_default

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
        self.budget.text(self.budget.measure(value, self._printed))
        text = json.dumps(
            value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=sort_keys
        )
        self.budget.text(len(text))
        return text

    # -- filters: numbers

    def filter_int(self, value: Any, default: int = 0, base: int = 10) -> Any:
        try:
            if isinstance(value, str):
                return int(value, base) if len(value) <= MAX_WIDTH else default
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
