"""The options of `run` that say what the answer must look like."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from edge_llm.errors import InputError, quoted

if TYPE_CHECKING:
    from edge_llm.sampling.grammar import Grammar


def response_format(json_schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    """The grammar of the one option that is given. Raises `InputError` for two of them or a file that cannot be read."""
    from edge_llm.sampling.grammar import Grammar

    if sum(option is not None for option in (json_schema, regex, grammar)) > 1:
        raise InputError("--json-schema, --regex and --grammar exclude one another", hint="give one of them")
    if json_schema is not None:
        return Grammar.json_schema(_text(json_schema))
    if grammar is not None:
        return Grammar.lark(_text(grammar))
    return None if regex is None else Grammar.regex(regex)


def labels(options: Iterable[str], *, as_they_are: bool) -> tuple[str, ...]:
    """The labels of `--choices`, which are set apart by commas; spaces around them go, unless they are as they are."""
    found = [label if as_they_are else label.strip() for option in options for label in option.split(",")]
    if not all(found):
        raise InputError("one of the choices is empty", hint="for example --choices yes,no")
    return tuple(found)


def _text(path: Path) -> str:
    from edge_llm.sampling.grammar import MAX_GRAMMAR_BYTES

    try:
        if not path.is_file():  # a pipe would wait for its writer
            what = "is not a regular file" if path.exists() else "does not exist"
            raise InputError(f"{quoted(str(path))} {what}", hint="check the path")
        with path.open("rb") as file:
            return file.read(MAX_GRAMMAR_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"{quoted(str(path))} cannot be read: {error.strerror}", hint="check the path and its rights"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{quoted(str(path))} is not UTF-8", hint="convert it first") from None
