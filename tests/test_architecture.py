"""The layers of the package, read from its import statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "edge_llm"
APPS = Path(__file__).parents[1] / "apps"

# Each layer may import those to its left, never one of its own row: siblings stay strangers.
BASE = {"errors", "machine", "paths", "messages", "config", "profile", "metrics"}
ALLOWED = {
    "errors": set(),
    "paths": {"errors"},
    "messages": {"errors"},
    "machine": set(),
    "config": {"errors", "machine", "paths"},
    "profile": {"errors", "machine", "paths", "config"},
    "kernels": BASE,
    "text": BASE | {"kernels"},
    "cache": BASE | {"kernels"},
    "sampling": BASE | {"kernels"},
    "model": BASE | {"kernels"},
    "export": BASE | {"kernels", "text", "cache", "sampling", "model"},
    "toolbox": BASE | {"text", "sampling"},
    "engine": BASE | {"kernels", "text", "cache", "sampling", "model"},
    "install": BASE | {"kernels", "text", "cache", "sampling", "model", "export", "engine"},
}
# Inside functions: the facade resolves a model's name, and the assembly a draft model's; the static form of a model is
# written when first wanted; settings that were measured are one more source of a config.
EXCEPTIONS = {
    ("engine/engine.py", "install"),
    ("engine/assembly.py", "install"),
    ("engine/static.py", "export"),
    ("config.py", "profile"),
}

HOMES = {
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "onnxruntime": {"model"},
    "onnx": {"export"},
    "tokenizers": {"text", "export"},
    "jinja2": {"text"},
    "huggingface_hub": {"install"},
}
# Host code starts without numba: these are all it may import from kernels.
HOST_KERNEL_MODULES = {"layout", "warmup", "block_format"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = layer(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "edge_llm" or len(parts) == 1 or parts[1] == own:
            continue
        if (str(path.relative_to(PACKAGE)), parts[1]) in EXCEPTIONS:
            continue
        assert parts[1] in ALLOWED[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_library_has_one_home(path: Path) -> None:
    for name in imports(path):
        root = name.split(".")[0]
        assert root not in HOMES or layer(path) in HOMES[root], f"{path.name} imports {name}"
        assert root not in {"edge_llm_cli", "tools", "tests"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_host_code_reaches_kernels_by_address(path: Path) -> None:
    if layer(path) == "kernels":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[:2] == ["edge_llm", "kernels"] and len(parts) > 2:
            assert parts[2] in HOST_KERNEL_MODULES, f"{path.name} imports {name}"


def test_fastmath_never_drops_nan() -> None:
    """`fastmath=True` deletes NaN and infinity tests; kernels name the flags they want."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "fastmath":
                assert not (isinstance(node.value, ast.Constant) and node.value.value is True), path
                if isinstance(node.value, ast.Set):
                    assert {e.value for e in node.value.elts} <= {"contract", "arcp", "nsz", "reassoc"}, path


def test_apps_use_only_what_lies_below_them() -> None:
    checked = 0
    for path in APPS.rglob("*.py"):
        for name in imports(path):
            checked += 1
            assert name.split(".")[0] not in {"numba", "llvmlite", "onnxruntime", "onnx", "tokenizers", "jinja2"}, name
    assert checked
