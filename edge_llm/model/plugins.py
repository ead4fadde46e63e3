"""Plugins: execution providers that come as packages of their own, the device of each that is used, and what it compiles.

A provider counts as there if its plugin lists such a device by name, never because ONNX Runtime's policies would take some
other instead of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_llm import paths
from edge_llm.errors import SessionError, StorageError
from edge_llm.model.ort_capi import forbid_telemetry
from edge_llm.model.static_folder import StaticForm


@dataclass(frozen=True, slots=True)
class Plugin:
    """A provider that comes as a package of its own, and the one of its devices that is used."""

    name: str
    package: str
    distribution: str
    """what the package index calls the package"""
    requirement: str
    """what to install"""
    device: str
    """the device in words"""
    kind: str
    """of hardware: CPU, GPU or NPU"""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """what tells the device from others of that kind"""
    form: StaticForm = StaticForm.BLOCKS
    """of the graph that its compiler takes"""
    fixed: bool = False
    """whether its compiler wants every size to be known: the cache's too"""
    optimised: bool = True
    """whether it takes what ONNX Runtime's own optimisations make of a graph"""
    contexts: bool = False
    """whether ONNX Runtime keeps what it compiles (EPContext); some do so themselves"""
    options: Mapping[str, str] = field(default_factory=dict)


PLUGINS = {
    "openvino": Plugin(
        name="openvino",
        package="onnxruntime_ep_openvino",
        distribution="onnxruntime-ep-openvino",
        requirement="edge-llm[npu]",
        device="CPU",
        kind="CPU",
        metadata={"ov_device": "CPU"},
    ),
    "qnn": Plugin(
        name="qnn",
        package="onnxruntime_qnn",
        distribution="onnxruntime-qnn",
        requirement="onnxruntime-qnn>=2.4",
        device="Qualcomm NPU",
        kind="NPU",
        form=StaticForm.QNN,
        fixed=True,
        optimised=False,
        contexts=True,
        options={"backend_type": "htp"},
    ),
}
_KEPT = 4
"""folders of compiled graphs, of any model, provider and version, the last used"""
_registered: set[str] = set()
_lock = threading.Lock()


def form_for(provider: str) -> StaticForm:
    """What the graph of a provider looks like, `cpu` or one of PLUGINS."""
    return PLUGINS[provider].form if provider in PLUGINS else StaticForm.BLOCKS


def needs_fixed_sizes(provider: str) -> bool:
    """Whether a slot of its cache has room for nothing or for everything."""
    return provider in PLUGINS and PLUGINS[provider].fixed


def find_device(plugin: Plugin) -> Any:
    """The plugin's device. Its library is registered once a process: another name would double its devices.

    Raises `SessionError`, saying in words why there is none.
    """
    if find_spec(plugin.package) is None:
        raise SessionError(f"{plugin.name} is not installed", hint=f"pip install '{plugin.requirement}'")
    onnxruntime = python_onnxruntime()
    try:
        package = import_module(plugin.package)
        name = package.get_ep_name()
        with _lock:
            others = {device.ep_name for device in onnxruntime.get_ep_devices()}
            if name not in _registered | others:
                # some plugins are called as they were registered, and what they compile asks for its provider by name
                onnxruntime.register_execution_provider_library(name, package.get_library_path())
                _registered.add(name)
        for device in onnxruntime.get_ep_devices():
            kind = device.device.type.name
            if device.ep_name == name and kind == plugin.kind and plugin.metadata.items() <= device.ep_metadata.items():
                return device
    except Exception as error:  # a library for another system, another version of ONNX Runtime, ...
        raise SessionError(f"{plugin.name} does not load: {first_line(error)}") from error
    raise SessionError(f"{plugin.name} finds no {plugin.device} here")


def session_options(plugin: Plugin, device: Any, threads: int, options: Mapping[str, str] | None = None) -> Any:
    """For sessions on the device, which takes the whole graph or nothing: the CPU never stands in for it."""
    made = plain_options(threads)
    made.add_provider_for_devices([device], {**plugin.options, **(options or {})})
    made.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if not plugin.optimised:
        made.graph_optimization_level = python_onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    return made


def given_options(plugin: Plugin, threads: int, keep: Path | None) -> dict[str, str]:
    """Options beside the plugin's own. OpenVINO's: float32 as the graph says, our threads, and where to keep things."""
    if "ov_device" not in plugin.metadata:
        return {}
    settings = {"INFERENCE_NUM_THREADS": str(threads), "INFERENCE_PRECISION_HINT": "f32"}
    if keep is not None:
        settings["CACHE_DIR"] = str(keep)
    return {"load_config": json.dumps({plugin.metadata["ov_device"]: settings})}


def compiled_folder(plugin: Plugin, device: Any, static_folder: Path, sizes: object) -> Path | None:
    """Where to keep what the plugin compiles of a graph, named by all that shapes it; none if no disk takes it."""
    shape = [device.ep_metadata.get("version"), version(plugin), python_onnxruntime().__version__, sizes]
    digest = hashlib.blake2b(json.dumps([*shape, dict(plugin.options)]).encode(), digest_size=8).hexdigest()
    with contextlib.suppress(StorageError):
        root = paths.private_cache("providers")
        folder = paths.private_dir(root / f"{plugin.name}-{static_folder.name}-{digest}")
        with contextlib.suppress(OSError):
            os.utime(folder)
            for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        return folder
    return None


def forget_compiled(name: str, static_folder: Path) -> bool:
    """Drop what a provider has compiled of this folder's graph; whether there was anything."""
    found = list((paths.cache_dir() / "providers").glob(f"{name}-{static_folder.name}-*"))
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(found)


def version(plugin: Plugin) -> str:
    """Of the installed package; empty if nobody says."""
    try:
        return metadata.version(plugin.distribution)
    except metadata.PackageNotFoundError:
        return ""


def python_onnxruntime() -> Any:
    """ONNX Runtime's Python package, which only this layout imports."""
    forbid_telemetry()
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def plain_options(threads: int) -> Any:
    """SessionOptions without a provider."""
    options = python_onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return options


def first_line(error: Exception) -> str:
    """Of what ONNX Runtime says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
