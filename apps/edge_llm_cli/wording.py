"""What the command line calls things that the library has other names for: the options of verbs, in errors and in help."""

from __future__ import annotations

import re
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
}
"""options that are not called like their setting"""
_SETTING = re.compile(r"^(each text of )?([a-z]+(?:_[a-z]+)*)( \(argument\))? (?=must |may )")


def for_command_line(error: EdgeLLMError) -> tuple[str, str | None]:
    """The message and the hint of an error of a verb, with options by the names that a user can type."""
    text, hint = str(error), error.hint
    if isinstance(error, ParameterError):
        text = _SETTING.sub(lambda found: f"{found[1] or ''}{_option(found[2])} ", text)
    if isinstance(error, ContextLengthError) and hint is not None:
        hint = hint.replace("context policy slide", "--context-policy slide")
    return text, hint


def _option(setting: str) -> str:
    return _OPTIONS.get(setting, "--" + setting.replace("_", "-"))


class Sections(TyperCommand):
    """A verb whose help shows options under the `rich_help_panel` that they name, without rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
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
