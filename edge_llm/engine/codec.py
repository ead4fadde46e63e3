"""Codec: from a type's annotations to functions between its values and plain JSON values.

Whatever fields a dataclass has are what is written and read, so a new field needs nothing here. Reading is strict: a value
of another type, a field that is missing or unknown, or one that its class refuses raises `WireError`, and nothing but the
class's own constructor runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from edge_llm import errors
from edge_llm.errors import EdgeLLMError

TAG = "@"
"""names the class of an object where it could be one of several"""


class WireError(ValueError):
    """A value cannot be written, or what was read is none. Tells types and names, never what they hold."""


class Codec(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def codec(hint: Any) -> Codec:
    """The codec of a type: a dataclass, an error of our tree, an enum, bool, int, float, str, bytes, None, a tuple, a
    mapping, a Literal, or a union of such. Raises `TypeError` for any other."""
    origin = get_origin(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin in (Union, types.UnionType):
        return _union(get_args(hint))
    if origin is tuple:
        return _tuple(get_args(hint))
    if origin in (dict, Mapping):
        return _mapping(*get_args(hint))
    if origin is Literal:
        return _choice({value: value for value in get_args(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        by_value = {member.value: member for member in hint}
        return Codec(lambda value: _among(by_value, value).value, lambda raw: _among(by_value, raw))
    if isinstance(hint, type) and issubclass(hint, EdgeLLMError):
        return _error(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    raise TypeError(f"{hint} has no form on the wire")


def _refuse(value: object, expected: str) -> WireError:
    return WireError(f"{type(value).__name__} where {expected} is expected")


def _scalar(kind: type | tuple[type, ...], name: str) -> Codec:
    def same(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _refuse(value, name)
        return value

    return Codec(same, same)


def _encode_bytes(value: Any) -> str:
    if not isinstance(value, bytes):
        raise _refuse(value, "bytes")
    return value.decode("latin-1")


def _decode_bytes(raw: Any) -> bytes:
    try:
        return _SCALARS[str].decode(raw).encode("latin-1")  # type: ignore[no-any-return]
    except UnicodeEncodeError:
        raise WireError("characters where bytes are expected") from None


def _among(values: Mapping[Any, Any], raw: Any) -> Any:
    if not isinstance(raw, str | int) or isinstance(raw, bool) or raw not in values:
        raise _refuse(raw, f"one of {', '.join(map(str, values))}")
    return values[raw]


def _choice(values: Mapping[Any, Any]) -> Codec:
    return Codec(lambda value: _among(values, value), lambda raw: _among(values, raw))


_SCALARS: dict[Any, Codec] = {
    bool: _scalar(bool, "a bool"),
    int: _scalar(int, "a whole number"),
    float: _scalar((float, int), "a number"),
    str: _scalar(str, "a text"),
    bytes: Codec(_encode_bytes, _decode_bytes),
    types.NoneType: _scalar(types.NoneType, "nothing"),
}


# --- several values ------------------------------------------------------------------------------------------------------


def _tuple(hints: tuple[Any, ...]) -> Codec:
    def checked(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _refuse(value, "a sequence")
        return value

    if hints[-1] is Ellipsis:
        item = codec(hints[0])
        return Codec(
            lambda value: [item.encode(x) for x in checked(value)],
            lambda raw: tuple(item.decode(x) for x in checked(raw)),
        )
    items = [codec(hint) for hint in hints]

    def whole(value: Any) -> Any:
        if len(checked(value)) != len(items):
            raise WireError(f"{len(value)} values where {len(items)} are expected")
        return value

    return Codec(
        lambda value: [item.encode(x) for item, x in zip(items, whole(value), strict=True)],
        lambda raw: tuple(item.decode(x) for item, x in zip(items, whole(raw), strict=True)),
    )


def _mapping(key_hint: Any, value_hint: Any) -> Codec:
    """A list of pairs: JSON's keys are texts, ours need not be."""
    pairs = codec(tuple[tuple[key_hint, value_hint], ...])

    def encode(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _refuse(value, "a mapping")
        return pairs.encode(list(value.items()))

    def decode(raw: Any) -> dict[Any, Any]:
        read = pairs.decode(raw)
        result = dict(read)
        if len(result) < len(read):
            raise WireError("a key stands twice in a mapping")
        return result

    return Codec(encode, decode)


def _union(hints: tuple[Any, ...]) -> Codec:
    """None is null, and of several classes each object names its own; of other types the first that fits is meant."""
    optional = types.NoneType in hints
    hints = tuple(hint for hint in hints if hint is not types.NoneType)
    plain = [codec(hint) for hint in hints if not _is_class(hint)]
    classes = [hint for hint in hints if _is_class(hint)]
    if len(classes) > 1 or any(issubclass(hint, EdgeLLMError) for hint in classes):
        plain.append(tagged(classes))
    else:
        plain.extend(map(codec, classes))

    def first(functions: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            if value is None and optional:
                return None
            for function in functions[:-1]:
                try:
                    return function(value)
                except WireError:
                    continue
            return functions[-1](value)

        return convert

    return Codec(first([c.encode for c in plain]), first([c.decode for c in plain]))


def _is_class(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, EdgeLLMError))


# --- objects -------------------------------------------------------------------------------------------------------------


def tagged(classes: list[Any]) -> Codec:
    """Objects of any of these classes, each of which carries its class's name."""
    by_name = {cls.__name__: cls for cls in classes if not issubclass(cls, EdgeLLMError)}
    error = next((codec(cls) for cls in classes if issubclass(cls, EdgeLLMError)), None)

    def encode(value: Any) -> dict[str, Any]:
        cls = type(value)
        if by_name.get(cls.__name__) is cls:
            return {TAG: cls.__name__, **codec(cls).encode(value)}
        if error is None:
            raise _refuse(value, f"one of {', '.join(by_name)}")
        return error.encode(value)  # type: ignore[no-any-return]

    def decode(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise _refuse(raw, "an object")
        name = raw.get(TAG)
        cls = by_name.get(name) if isinstance(name, str) else None
        if cls is not None:
            return codec(cls).decode({key: value for key, value in raw.items() if key != TAG})
        if error is None:
            raise WireError("an object of no known kind")
        return error.decode(raw)

    return Codec(encode, decode)


def _dataclass(cls: Any) -> Codec:
    """An object with the fields that differ from their defaults."""
    hints = get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    codecs = {field.name: codec(hints[field.name]) for field in fields}
    defaults = {field.name: _default(field) for field in fields}
    needed = {name for name, default in defaults.items() if default is MISSING}

    def encode(value: Any) -> dict[str, Any]:
        if type(value) is not cls:
            raise _refuse(value, cls.__name__)
        result = {}
        for name, item in codecs.items():
            content, default = getattr(value, name), defaults[name]
            if content is default or (type(content) is type(default) and content == default):
                continue
            try:
                result[name] = item.encode(content)
            except WireError as error:
                raise WireError(f"{cls.__name__}.{name}: {error}") from None
        return result

    def decode(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise _refuse(raw, cls.__name__)
        if not needed <= raw.keys() <= codecs.keys():
            raise WireError(f"fields of {cls.__name__} are missing or unknown")
        try:
            return cls(**{name: codecs[name].decode(content) for name, content in raw.items()})
        except EdgeLLMError:
            raise WireError(f"{cls.__name__} refuses its fields") from None

    return Codec(encode, decode)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _error(root: type[EdgeLLMError]) -> Codec:
    """An error by its name in errors.py and its constructor's arguments; one of a class that is not there becomes one of
    the nearest that is. What caused it stays behind."""
    classes = {
        name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, EdgeLLMError)
    }
    arguments = {name: _arguments(cls) for name, cls in classes.items()}

    def encode(error: Any) -> dict[str, Any]:
        if not isinstance(error, root):
            raise _refuse(error, root.__name__)
        name = next(cls.__name__ for cls in type(error).__mro__ if classes.get(cls.__name__) is cls)
        values = {key: str(error) if key == "message" else getattr(error, key) for key in arguments[name]}
        return {TAG: name, **{key: item.encode(values[key]) for key, item in arguments[name].items()}}

    def decode(raw: Any) -> EdgeLLMError:
        name = raw.get(TAG) if isinstance(raw, dict) else None
        cls = classes.get(name) if isinstance(name, str) else None
        if not isinstance(name, str) or cls is None or not issubclass(cls, root):
            raise WireError("an object of no known kind")
        if raw.keys() != {TAG, *arguments[name]}:
            raise WireError(f"arguments of {name} are missing or unknown")
        return cls(**{key: item.decode(raw[key]) for key, item in arguments[name].items()})

    return Codec(encode, decode)


def _arguments(cls: type[EdgeLLMError]) -> dict[str, Codec]:
    hints = get_type_hints(cls.__init__)
    return {name: codec(hints[name]) for name in list(inspect.signature(cls.__init__).parameters)[1:]}
