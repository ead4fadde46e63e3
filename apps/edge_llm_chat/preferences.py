"""Preferences: chat.toml in the config folder, written by the user. `theme = NAME`, and under [keys] other keys for bindings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_llm import paths
from edge_llm.errors import ParameterError

NAME = "chat.toml"


@dataclass(frozen=True, slots=True)
class Preferences:
    theme: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    """of bindings by their ids (`chat.retry`), keys as Textual names them (`ctrl+g`, several with commas)"""

    @classmethod
    def load(cls) -> Preferences:
        """Empty if there is no file. Raises `ParameterError`, saying what is wrong with it."""
        file = paths.config_dir() / NAME
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except OSError as error:
            raise ParameterError(
                f"cannot read {file}: {error.strerror}", hint="make it a file that you can read, or move it away"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ParameterError(f"{file} is not sound TOML: {error}") from None
        theme, keys = document.pop("theme", None), document.pop("keys", {})
        if document:
            raise ParameterError(f"unknown setting {next(iter(document))} in {file}", hint="there are theme and [keys]")
        if not (theme is None or isinstance(theme, str)):
            raise ParameterError(f"theme in {file} must be a name")
        if not isinstance(keys, dict) or not all(isinstance(key, str) and key for key in keys.values()):
            raise ParameterError(f"[keys] in {file} must be names of keys, such as 'ctrl+g'")
        return cls(theme, keys)
