"""EngineConfig: everything that can be set about an engine; frozen, validated once, passed down.

A value comes from, later ones winning: the default, what `edge-llm tune` found on this machine (`profile.py`), `[engine]` of
config.toml in the config folder (`private`: `[privacy]`), the environment (`EDGE_LLM_` and the field's name in capitals), an
argument.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from edge_llm import machine, paths
from edge_llm.errors import InputError, ParameterError

CONFIG_NAME = "config.toml"
ENV_PREFIX = "EDGE_LLM_"
_OTHER_VARIABLES = ("EDGE_LLM_HOME", "EDGE_LLM_TEST_", "EDGE_LLM_API_KEYS")  # read by paths.py, our tests, and serve

_RANGES: Mapping[str, tuple[int, int]] = {
    "context": (1, 1 << 24),
    "slots": (1, 1024),
    "threads": (1, 1024),
    "max_chunk": (1, 1 << 16),
    "mixed_chunk": (1, 1 << 16),
    "mixed_pause_ms": (0, 60_000),
    "spin_us": (0, 1_000_000),
    "max_queued_requests": (0, 1 << 20),
    "max_queued_tokens": (0, 1 << 40),
    "prefix_cache_bytes": (0, 1 << 44),
    "kv_budget_bytes": (1, 1 << 50),
    "watts": (1, 100_000),
}
CONTEXT_POLICIES = ("error", "slide")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kv_type": ("int8", "f32"),
    "context_policy": CONTEXT_POLICIES,
    "prefix_cache": ("off", "memory", "disk"),
    "provider": ("auto", "cpu", "openvino", "qnn"),
    "layout": ("auto", "ring", "static"),
}
_FLAGS: Mapping[str, Mapping[str, bool]] = {"private": {"true": True, "1": True, "false": False, "0": False}}
DRAFT_PREFIX = "draft:"
MOST_DEFAULT_CONTEXT = 8192
_OPTIONAL = frozenset({"context", "threads", "kv_type", "max_queued_requests", "kv_budget_bytes", "watts"})


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is built. Raises `ParameterError` for a value of the wrong type or out of range."""

    context: int | None = None
    """tokens that the model sees at once, prompt and answer together; None: the trained context, but at most 8192 and
    what a quarter of the free memory holds"""
    slots: int = 8
    """conversations that can be answered at the same time; one that is not used costs no memory"""
    threads: int | None = None
    """threads that compute, at most one for each CPU that this process may use; None: one for each physical core"""
    kv_type: str | None = None
    """how keys and values are kept: int8, or f32 (four times the memory); None: what the model's manifest recommends"""
    max_chunk: int = 256
    """most rows (tokens) of one step: a long prompt is read in chunks of it"""
    mixed_chunk: int = 64
    """most prompt rows of a step in which others are being answered; how many it takes, the times of earlier steps decide, so
    that their next token is not late"""
    mixed_pause_ms: int = 300
    """milliseconds, about, that answers stand still at most, once in 36 tokens, so that a long prompt is not late; 0: never"""
    spin_us: int = 400
    """microseconds that an idle thread looks for work before it sleeps: longer than the gap between two tokens, far shorter
    than a pause of the user"""
    max_queued_requests: int | None = None
    """requests that may wait for a slot before new ones are refused; None: twice the slots and 8"""
    max_queued_tokens: int = 131_072
    """prompt tokens that may wait for a slot before new requests are refused"""
    kv_budget_bytes: int | None = None
    """bytes of keys and values, of running and ended conversations; a request waits until its longest answer fits. None: half
    of the memory that is free, and one conversation that fills the context"""
    context_policy: str = "error"
    """what happens to a conversation that does not fit into the context, unless its request says otherwise: `error`
    refuses a prompt, naming both numbers, and ends an answer; `slide` goes on without the oldest tokens but the first"""
    prefix_cache: str = "memory"
    """what becomes of the rows of conversations that have ended: `memory` keeps some for those that begin alike, `disk` also
    writes them to files, for later processes; `off` forgets them"""
    prefix_cache_bytes: int = 1 << 30
    """most bytes of these files; the ones that were not used for longest go first"""
    private: bool = False
    """keep nothing of conversations on disk, whatever else is set"""

    speculation: str = "lookup"
    """whether drafts are tried: `lookup` takes them from the text itself, `draft:MODEL` also from a smaller model with the same
    tokenizer; answers stay the same, token for token"""

    provider: str = "auto"
    """what computes: `cpu`; `openvino`, a plugin of ONNX Runtime that must be installed (extra `npu`), on the CPU too; `qnn`,
    another one, on a Qualcomm NPU, where nobody has tried it yet; `auto`: what is fastest of those measured, which is cpu"""
    layout: str = "auto"
    """which graph computes: `ring`, of our own kernels, or `static`, of stock ops, which is slower; `auto`: ring wherever the
    provider can and its kernels can be had"""

    watts: int | None = None
    """watts that this machine needs while it computes, for joules a token where no meter of its own can be read"""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_setting(field.name, field.name, getattr(self, field.name))
        if self.layout == "ring" and self.provider not in ("auto", "cpu"):
            raise ParameterError(
                f"the ring layout runs on the CPU only, not on {self.provider}", hint="leave the layout out"
            )
        if self.max_chunk < self.slots:
            raise ParameterError(
                f"max_chunk is {self.max_chunk}, which is less than one row for each of {self.slots} slots",
                hint=f"raise max_chunk under [engine] of {CONFIG_NAME}, or ask for fewer slots",
            )

    @property
    def queue_limit(self) -> int:
        """Requests that may wait."""
        return 2 * self.slots + 8 if self.max_queued_requests is None else self.max_queued_requests

    @property
    def draft_model(self) -> str | None:
        """The model that drafts are taken from, as the user calls it."""
        return self.speculation.removeprefix(DRAFT_PREFIX) if self.speculation.startswith(DRAFT_PREFIX) else None

    @property
    def stores_prefixes(self) -> bool:
        """Whether conversations leave something on disk."""
        return self.prefix_cache == "disk" and not self.private

    def with_options(self, **changes: Any) -> Self:
        """A changed, validated copy."""
        return replace(self, **changes)


def load_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    tuned: bool = True,
    **arguments: Any,
) -> EngineConfig:
    """The config from profile, file, environment and arguments (None: not given).

    `path` defaults to config.toml in the config folder, which may be missing; a path that is given must exist.
    `defaults` are what a program prefers to our own. `tuned`: whether the profile counts. Raises `ParameterError`, saying where
    an unknown key or a bad value stands.
    """
    usual = dict(defaults or {})
    given = {**_from_file(path), **_from_environment(os.environ if env is None else env)}
    for name, value in arguments.items():
        if value is not None:
            check_setting(name, f"{name} (argument)", value)
            given[name] = value
    config = EngineConfig(**(usual | given))
    if tuned and config.layout != "static" and config.provider in ("auto", "cpu"):  # what was measured
        with contextlib.suppress(ParameterError):  # e.g. more slots than a chunk has rows that the user made small
            return EngineConfig(**(usual | _from_profile() | given))
    return config


def default_threads(root: Path = machine.ROOT) -> int:
    """Physical cores within the affinity mask, and no more than the control group's quota pays for; at least 1."""
    cores = machine.physical_cores(machine.usable_cpus(), root)
    quota = machine.cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def default_context(trained: int, row_bytes: int, root: Path = machine.ROOT) -> int:
    """The trained context, but at most 8192 and what a quarter of the free memory holds at `row_bytes` a token.

    However little memory is free, 256 tokens are tried.
    """
    context = min(trained, MOST_DEFAULT_CONTEXT)
    memory = machine.available_memory(root)
    if memory is not None:
        context = min(context, max(256, memory // 4 // row_bytes))
    return context


def check_setting(name: str, label: str, value: object) -> None:
    """Raises `ParameterError` unless `value` may stand in field `name`; `label` says where it came from."""
    if value is None and name in _OPTIONAL:
        return
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            *others, last = _CHOICES[name]
            raise ParameterError(f"{label} must be {', '.join(others)} or {last}, not {value!r}")
    elif name in _RANGES:
        low, high = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ParameterError(f"{label} must be a whole number, not {value!r}")
        if not low <= value <= high:
            raise ParameterError(f"{label} must be between {low} and {high}, not {value}")
    elif name in _FLAGS:
        if not isinstance(value, bool):
            raise ParameterError(f"{label} must be true or false, not {value!r}")
    elif name == "speculation":
        drafts = isinstance(value, str) and value.startswith(DRAFT_PREFIX) and value != DRAFT_PREFIX
        if not drafts and value not in ("off", "lookup"):
            raise ParameterError(f"{label} must be off, lookup or {DRAFT_PREFIX}MODEL, not {value!r}")
    else:
        raise ParameterError(f"unknown setting {label}", hint=_suggestion(name))


def _suggestion(name: str) -> str:
    known = [*_RANGES, *_CHOICES, *_FLAGS, "speculation"]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the settings are: {', '.join(known)}"


def _from_profile() -> dict[str, int]:
    # it knows of settings, and hardly any other import of this module needs it
    from edge_llm.profile import read_profile

    try:
        profile = read_profile()
    except InputError:  # `edge-llm doctor` says why
        return {}
    return {} if profile is None else profile.settings


def _from_file(path: Path | None) -> dict[str, Any]:
    file = paths.config_dir() / CONFIG_NAME if path is None else path
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if path is None:
            return {}
        raise ParameterError(f"there is no config file {file}") from None
    except OSError as error:
        raise ParameterError(
            f"cannot read {file}: {error.strerror}", hint="make it a file that you can read, or move it away"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParameterError(f"{file} is not sound TOML: {error}") from None
    values: dict[str, Any] = {}
    for section, settings in document.items():
        if section not in ("engine", "privacy") or not isinstance(settings, dict):
            raise ParameterError(
                f"unknown setting {section} in {file}",
                hint="settings stand under [engine], and private under [privacy]",
            )
        for name, value in settings.items():
            if (name in _FLAGS) != (section == "privacy"):
                raise ParameterError(f"unknown setting {name} under [{section}] in {file}", hint=_suggestion(name))
            check_setting(name, f"{name} in {file}", value)
            values[name] = value
    return values


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in sorted(env.items()):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_OTHER_VARIABLES):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        try:
            value: object = int(text) if name in _RANGES else _FLAGS.get(name, {}).get(text.lower(), text)
        except ValueError:
            value = text
        check_setting(name, variable, value)
        values[name] = value
    return values
