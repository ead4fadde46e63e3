"""The catalog: recipes of models that can be fetched by name.

A recipe says where the weights are and which bytes they must be. It is models/<name>/recipe.toml, shipped inside the
package (in a checkout: beside it).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from edge_llm.errors import ModelFormatError, ModelNotFoundError, ParameterError, quoted
from edge_llm.install.store import is_model_name
from edge_llm.sampling.params import SamplingParams

RECIPE_NAME = "recipe.toml"
DEFAULT_MODEL = "smollm2-135m-instruct"

_MAX_PARTS = 256
_DIGEST = "a sha256 is 64 lower-case hexadecimal digits"


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ModelFormatError(f"recipe: {what}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and value != ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 40


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A piece of a file inside a wheel of the Python package index. The wheel is only read, never installed."""

    package: str
    version: str
    wheel_size: int
    """bytes"""
    wheel_sha256: str
    member: str
    """path of the piece inside the wheel"""
    size: int
    """bytes of the piece"""

    def __post_init__(self) -> None:
        # both end up in a command line: plain words only
        _require(
            re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", self.package) is not None, "bad package name"
        )
        _require(
            re.fullmatch(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)*", self.version) is not None, "bad version"
        )
        _require(_is_digest(self.wheel_sha256), _DIGEST)
        _require(_is_size(self.wheel_size) and _is_size(self.size), "sizes are positive numbers of bytes")
        parts = PurePosixPath(self.member).parts
        _require(bool(parts) and "\\" not in self.member and not {"/", ".."} & set(parts), "bad member name")


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside wheels of the Python package index: whole in one, or in pieces that follow one another."""

    file: str
    """name of the GGUF"""
    sha256: str
    """of the whole GGUF"""
    parts: tuple[WheelPart, ...]
    kind: str = "pypi-wheels"

    def __post_init__(self) -> None:
        _require(self.kind == "pypi-wheels", f"unknown kind of source {self.kind!r}")
        _require(is_model_name(self.file), f"bad file name {self.file!r}")
        _require(_is_digest(self.sha256), _DIGEST)
        _require(0 < len(self.parts) <= _MAX_PARTS, f"a source has 1 to {_MAX_PARTS} parts")

    @property
    def size(self) -> int:
        """Bytes of the GGUF."""
        return sum(part.size for part in self.parts)

    @property
    def download_size(self) -> int:
        """Bytes of all wheels."""
        return sum(part.wheel_size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model of the catalog gets onto a machine, and what is known of it. Raises `ModelFormatError` if unsound."""

    name: str
    description: str
    license: str
    architecture: str
    context: int
    """trained context, tokens"""
    layout: str
    kv_type: str
    source: WheelSource
    license_url: str | None = None
    """where the terms are, for a licence that whoever downloads must be told of"""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """defaults of SamplingParams that the model's authors recommend"""
    system_prompt: str | None = None
    """stands in for a system message in a conversation that has none"""
    quality: Mapping[str, float] = field(default_factory=dict)
    """measured by `edge-llm eval`"""

    def __post_init__(self) -> None:
        _require(is_model_name(self.name), f"bad name {self.name!r}")
        for text in (self.description, self.license, self.architecture):
            _require(_is_text(text), "description, license and architecture are texts of one line")
        _require(
            self.license_url is None or (_is_text(self.license_url) and self.license_url.startswith("https://")),
            "license_url is an address that starts with https://",
        )
        _require(_is_size(self.context), "context is a positive number of tokens")
        _require(self.layout == "ring", f"unknown layout {self.layout!r}")
        _require(self.kv_type in ("int8", "f32"), f"unknown kv_type {self.kv_type!r}")
        _require(self.system_prompt is None or _is_text(self.system_prompt), "system_prompt is a text of one line")
        for values in (self.sampling, self.quality):
            _require(all(map(_is_number, values.values())), "sampling and quality hold numbers")
        try:
            SamplingParams(**dict(self.sampling))  # type: ignore[arg-type]  # it checks the names as well
        except (TypeError, ParameterError) as error:
            raise ModelFormatError(f"recipe: sampling: {error}") from None

    @classmethod
    def from_toml(cls, name: str, text: str) -> Recipe:
        """The recipe called `name` that `text` describes. Raises `ModelFormatError`."""
        try:
            raw: dict[str, Any] = tomllib.loads(text)
            parts = tuple(WheelPart(**part) for part in raw["source"]["parts"])
            return cls(**{**raw, "name": name, "source": WheelSource(**{**raw["source"], "parts": parts})})
        except (tomllib.TOMLDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ModelFormatError(f"the recipe of {name} is not sound: {error}") from None


def recipes_dir() -> Path:
    """Folder of the recipes: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    if not (package / "models").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "models"
    return package / "models"


def names() -> list[str]:
    """Names in the catalog, sorted."""
    return sorted(path.parent.name for path in recipes_dir().glob(f"*/{RECIPE_NAME}"))


def has(name: str) -> bool:
    """Whether the catalog has a recipe of this name."""
    return is_model_name(name) and (recipes_dir() / name / RECIPE_NAME).is_file()


def get(name: str) -> Recipe:
    """The recipe called `name`. Raises `ModelNotFoundError` with the closest names as hint."""
    if not has(name):
        raise unknown_model(name, names())
    return Recipe.from_toml(name, (recipes_dir() / name / RECIPE_NAME).read_text("utf-8"))


def of_source(sha256: str) -> Recipe | None:
    """The recipe whose weights have this digest, if there is one."""
    return next((recipe for recipe in map(get, names()) if recipe.source.sha256 == sha256), None)


def unknown_model(name: str, known: Iterable[str]) -> ModelNotFoundError:
    """The error for a name that none of the `known` models has; its hint lists those that begin so, or the closest ones."""
    candidates = sorted(set(known))
    wanted = name.lower()
    begun = [known for known in candidates if wanted and known.lower().startswith(wanted)]
    close = begun[:3] or difflib.get_close_matches(wanted, candidates, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known models: {', '.join(candidates) or 'none'}"
    return ModelNotFoundError(f"no model is called {quoted(name)}", hint=hint)
