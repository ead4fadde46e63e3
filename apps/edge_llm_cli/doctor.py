"""`edge-llm doctor`: what this machine has, what would run on it, and what is wrong with it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_llm.errors import EdgeLLMError, InputError, StorageError
from edge_llm_cli import console
from edge_llm_cli.models import INSTALLED, JsonOption

if TYPE_CHECKING:
    from edge_llm.config import EngineConfig

_AS_IMPORTED = "as imported"
_NO_GOLDEN = "imported before this was stored: import it again"
_LEAST_FREE = 16 << 20
"""bytes on a disk that is not called full: less than a model takes, more than what is kept of one"""
_PACKAGES = ("edge-llm", "onnxruntime", "numba", "llvmlite", "numpy", "tokenizers", "jinja2")


def doctor(
    quality: Annotated[
        bool, typer.Option("--quality", help="Also compare what each model says with what it said at import.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine has and what would run. Exit code 1 if something is in the way."""
    probes: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": _versions,
        "config": _config,
        "cpu": _cpu,
        "threads": _threads,
        "tuning": _tuning,
        "memory": _memory,
        "onnxruntime": _onnxruntime,
        "kernels": _kernels,
        "providers": _providers,
        "folders": _folders,
        "models": _models,
    }
    if quality:
        probes["quality"] = _quality
    findings = {name: _guarded(probe) for name, probe in probes.items()}
    findings["runs"] = {"layout": _what_runs(findings)}
    problems = {section: facts["error"] for section, facts in findings.items() if "error" in facts}
    problems |= {f"{name} folder": reason for name, reason in _folder_faults().items()}
    problems |= {
        f"model {name}": facts["state"]
        for name, facts in findings["models"].items()
        if isinstance(facts, dict) and facts["state"] != INSTALLED
    }
    problems |= {
        f"quality {name}": facts["state"]
        for name, facts in findings.get("quality", {}).items()
        if isinstance(facts, dict) and facts["state"] not in (_AS_IMPORTED, _NO_GOLDEN)
    }
    findings["problems"] = problems
    if as_json:
        console.data(findings)
    else:
        _show(findings)
    if problems:
        raise typer.Exit(1)


def _show(findings: dict[str, dict[str, Any]]) -> None:
    for section, facts in findings.items():
        console.line(section)
        console.table([("", name, _shown(value)) for name, value in facts.items()] or [("", "none", "")])


def _shown(value: Any) -> str:
    return ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)


def _guarded(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a probe finds; a probe that fails says so instead of hiding the others."""
    try:
        return probe()
    except (EdgeLLMError, ImportError, OSError, ValueError) as error:
        return {"error": str(error)}


def _versions() -> dict[str, Any]:
    python = f"{platform.python_version()} ({platform.platform()})"
    return {"python": python, **{package: console.package_version(package) for package in _PACKAGES}}


def _config() -> dict[str, Any]:
    """Where settings come from; what is wrong with one is said here, and the other sections count with the defaults."""
    from edge_llm import paths
    from edge_llm.config import CONFIG_NAME, load_config

    file = paths.config_dir() / CONFIG_NAME
    try:
        load_config()
    except EdgeLLMError as error:
        return {"error": f"{error}: {error.hint}" if error.hint else str(error)}
    return {"file": str(file) if file.exists() else f"{file} (not there: the defaults)"}


def _loaded(*, tuned: bool = True) -> EngineConfig:
    """The config, or the defaults where it cannot be used."""
    from edge_llm.config import EngineConfig, load_config

    try:
        return load_config(tuned=tuned)
    except EdgeLLMError:
        return EngineConfig()


def _cpu() -> dict[str, Any]:
    from edge_llm.kernels.lowering import detect_lowering, target_cpu

    name, _ = target_cpu()
    lowering = detect_lowering()
    return {"model": cpu_model(), "compiled_for": name, "lowering": lowering.name, "lanes": lowering.lanes}


def cpu_model() -> str:
    """What the system calls its CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> dict[str, Any]:
    from edge_llm import machine
    from edge_llm.config import default_threads

    usable = machine.usable_cpus()
    quota = machine.cpu_quota()
    configured, own = _loaded().threads, _loaded(tuned=False).threads
    used = min(configured or default_threads(), len(usable))
    reason = "threads is set" if own else "edge-llm tune found it faster"
    return {
        "used": used,
        "because": reason if configured else "one a physical core that this process may use",
        "cpus_of_machine": os.cpu_count(),
        "cpus_usable": len(usable),
        "physical_cores_usable": machine.physical_cores(usable),
        "quota": "none" if quota is None else quota,
    }


def _tuning() -> dict[str, Any]:
    """What `edge-llm tune` has found here; a profile that does not count is no fault, the defaults do."""
    from edge_llm.profile import read_profile

    try:
        profile = read_profile()
    except InputError as error:
        return {
            "state": f"the defaults: the profile is ignored, {error}",
            "remedy": "edge-llm tune, or edge-llm tune --reset",
        }
    if profile is None:
        return {"state": "the defaults: edge-llm tune measures whether others are faster here"}
    config, found = _loaded(), {}
    for decision in profile.decisions:
        used = getattr(config, decision.setting)
        set_otherwise = decision.changes and used != decision.chosen
        found[decision.setting] = f"{used}, which is set" if set_otherwise else str(decision)
    return {"state": f"measured on {profile.measured} with {profile.model}"} | found


def _memory() -> dict[str, Any]:
    from edge_llm import machine

    available = machine.available_memory()
    return {"available_mb": "unknown" if available is None else available // 10**6}


def _onnxruntime() -> dict[str, Any]:
    from edge_llm.model.ort_capi import library_path, ort_api

    return {"library": str(library_path()), "version": ort_api().version}


def _kernels() -> dict[str, Any]:
    from edge_llm.kernels.warmup import cache_state

    folder, there = cache_state()
    return {"folder": str(folder), "state": "compiled" if there else "will be compiled at the next start, once"}


def _providers() -> dict[str, Any]:
    """Of plugins that are installed, what they really compute on."""
    from edge_llm.model.plugins import PLUGINS
    from edge_llm.model.providers import provider_state

    facts = {}
    for name in PLUGINS:
        try:
            facts[name] = f"computes on {provider_state(name)}"
        except EdgeLLMError as error:
            facts[name] = f"{error}: {error.hint}" if error.hint else str(error)
    return facts


def _folders() -> dict[str, Any]:
    """Looks without creating anything."""
    import shutil

    from edge_llm import paths

    facts, faults = {}, _folder_faults()
    for name, folder in (("config", paths.config_dir()), ("data", paths.data_dir()), ("cache", paths.cache_dir())):
        if name in faults:
            state = f"not usable: {faults[name]}"
        else:
            state = f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free" if folder.exists() else "not made yet"
        facts[name] = f"{folder} ({state})"
    return facts


def _folder_faults() -> dict[str, str]:
    """Why nothing can be kept in the data or the cache folder, or not in all of it; the config is only read."""
    import shutil

    from edge_llm import paths

    faults: dict[str, str] = {}
    for name, root in (("data", paths.data_dir()), ("cache", paths.cache_dir())):
        inside = [path for path in root.iterdir() if path.is_dir()] if os.access(root, os.R_OK | os.X_OK) else []
        for folder in (root, *sorted(inside)):
            reason = paths.obstacle(folder)
            if reason is None and folder.exists():
                try:
                    paths.private_dir(folder)
                except StorageError as error:
                    reason = str(error)
            if reason is None and folder.exists() and shutil.disk_usage(folder).free < _LEAST_FREE:
                reason = f"the disk of {folder} is full"
            if reason is not None:
                faults.setdefault(name, reason)
    return faults


def _models() -> dict[str, Any]:
    from edge_llm.install.store import ModelStore
    from edge_llm_cli.models import summary

    store = ModelStore()
    facts = {}
    for model in (summary(store, name) for name in store.names()):
        facts[model["name"]] = {"state": model["state"], "size_mb": model["size"] // 10**6}
        if model["remedy"] is not None:
            facts[model["name"]]["remedy"] = model["remedy"]
        if model["context"] is not None:
            facts[model["name"]]["context"] = _usable_context(store.path(model["name"]))
    return facts


def _quality() -> dict[str, Any]:
    """How far each model is from what it said when it was imported, as it would run now."""
    from edge_llm.install.store import ModelStore

    store = ModelStore()
    facts = {}
    for name in store.names():
        try:
            facts[name] = _quality_of(store.path(name))
        except EdgeLLMError as error:
            facts[name] = {"state": str(error)}
    return facts


def _quality_of(folder: Path) -> dict[str, Any]:
    from edge_llm.install import golden

    then = golden.Golden.read(folder)
    if then is None:
        return {"state": _NO_GOLDEN}
    with golden.opened(folder, _loaded()) as client:
        found = golden.drift(then, client)
    state = _AS_IMPORTED if found.ok else f"says something else than at import: KL {found.kl:.3g} nats a token"
    return {"state": state, "kl": found.kl, "worst_kl": found.worst}


def _usable_context(folder: Path) -> int:
    """What `run` would take without --context, by the memory that is free now."""
    from edge_llm.config import default_context
    from edge_llm.engine.assembly import cache_geometry
    from edge_llm.kernels.layout import KvType
    from edge_llm.model.manifest import ModelManifest

    manifest, config = ModelManifest.read(folder), _loaded()
    row_bytes = cache_geometry(manifest).row_bytes(KvType[(config.kv_type or manifest.kv_type).upper()])
    return config.context or default_context(manifest.dimensions.context, row_bytes)


def _what_runs(findings: dict[str, dict[str, Any]]) -> str:
    if "error" in findings["config"]:
        return "nothing: see the errors above"
    config = _loaded()
    wanted = findings["providers"].get(config.provider, "")
    if "computes on" in wanted:
        return f"static, {wanted}"
    instead = f"; not on {config.provider}: {wanted}" if wanted else ""
    faults = [name for name in ("cpu", "onnxruntime", "kernels") if "error" in findings[name]]
    if faults or config.layout == "static":
        if find_spec("onnxruntime") is None:
            return "nothing: see the errors above"
        why = f"see the errors of {', '.join(faults)}" if faults else "as the setting layout says"
        return f"static, on the CPU by stock ops, which is slower: {why}{instead}"
    return f"ring, on the CPU, with {findings['threads'].get('used', '?')} threads{instead}"
