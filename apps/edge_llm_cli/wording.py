"""What the command line calls things that the library has other names for: the options of verbs, in errors and in help."""

from __future__ import annotations

import errno
import re
import typing
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from edge_llm.errors import ContextLengthError, EdgeLLMError, ParameterError

_OPTIONS: Mapping[str, str] = {
    "kv_type": "--kv-dtype",
    "speculation": "--speculate",
    "dry_sequence_breakers": "--dry-breaker",
    "keep_alive_s": "--keep-alive",
    "grace_s": "--grace",
    "tools": "--tool",
    "lark": "--grammar",
    "schema": "--json-schema",
}
"""options that are not called like their setting"""
_SETTING = re.compile(r"^(each text of )?([a-z]+(?:_[a-z]+)*)( \(argument\))? (?=must |may )")
_FORM = re.compile(r"^the (regex|json_schema|schema|lark)\b")
_TOGETHER = re.compile(r"^[\w, ]+ (exclude one another|cannot be combined with|needs)\b[\w, ]*")
"""errors of several settings, each of which they name"""
_VALUE = re.compile(r'\b([a-z]+(?:_[a-z]+)+) "(\w+)"')
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free some space there, or write to another disk",
    errno.EDQUOT: "free some space there, or write to another disk",
    errno.EACCES: "check who owns it and what its rights are",
    errno.EPERM: "check who owns it and what its rights are",
    errno.EROFS: "this disk can only be read: use another folder",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EISDIR: "give a file, not a folder",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
}
_SUGGESTED_TWICE = re.compile(r"(Did you mean [^?]*\?) \(?Did you mean .*")


def for_command_line(error: EdgeLLMError) -> tuple[str, str | None]:
    """The message and the hint of an error of a verb, with options by the names that a user can type."""
    text, hint = str(error), error.hint
    if isinstance(error, ParameterError):
        text = _SETTING.sub(lambda found: f"{found[1] or ''}{_option(found[2])} ", text)
        text = _FORM.sub(lambda found: _option(found[1]), text)
        text = _TOGETHER.sub(lambda found: _with_options(found[0]), text)
        hint = _VALUE.sub(lambda found: f"{_option(found[1])} {found[2]}", hint) if hint else hint
    if isinstance(error, ContextLengthError) and hint is not None:
        hint = hint.replace("context policy slide", "--context-policy slide")
    return text, hint


def system_error(error: OSError) -> EdgeLLMError:
    """What the system has refused to a verb, with what to do about it. Nobody nearer to it had a name for that."""
    where = f": {error.filename}" if error.filename else ""
    return EdgeLLMError(f"{error.strerror or error}{where}", hint=_REMEDIES.get(error.errno or 0))


def usage_error(text: str) -> str:
    """A message of Click about what was typed: Click 8.4 suggests names, and typer then does so once more."""
    return _SUGGESTED_TWICE.sub(r"\1", text)


def _option(setting: str) -> str:
    return _OPTIONS.get(setting, "--" + setting.replace("_", "-"))


def _with_options(text: str) -> str:
    """`text` with each setting of a request by the name of its option."""
    from edge_llm.engine.request import RequestOptions
    from edge_llm.sampling.grammar import GrammarKind
    from edge_llm.sampling.params import SamplingParams

    settings = {*RequestOptions.__annotations__, *SamplingParams.__annotations__, *map(str, GrammarKind)}
    return re.sub(r"\w+", lambda word: _option(word[0]) if word[0] in settings else word[0], text)


class Sections(TyperCommand):
    """A verb whose help describes its arguments, and shows options under the `rich_help_panel` that they name, without rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self._describe_arguments(ctx)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or usual
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _describe_arguments(self, ctx: Any) -> None:
        """Typer's arguments know their help, but Click 8.5 has a help of its own for them and puts nothing in its place."""
        hints = typing.get_type_hints(self.callback, include_extras=True)
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument" and not getattr(parameter, "help", None):
                said = (getattr(extra, "help", None) for extra in getattr(hints[parameter.name], "__metadata__", ()))
                vars(parameter)["help"] = next(filter(None, said), None)
