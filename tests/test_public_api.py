"""The public surface is what __all__ says, and every name of it can be had."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib import metadata
from pathlib import Path

import pytest

import edge_llm
from edge_llm import errors


@pytest.mark.parametrize("name", edge_llm.__all__)
def test_every_name_exists(name: str) -> None:
    assert getattr(edge_llm, name) is not None


def test_names_are_listed_once_and_in_order() -> None:
    assert edge_llm.__all__ == sorted(set(edge_llm.__all__))
    assert dir(edge_llm) == edge_llm.__all__
    assert {*edge_llm._HOME_OF, "__version__"} == set(edge_llm.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(edge_llm.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, a.name) for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert seen == {(module, name) for name, module in edge_llm._HOME_OF.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = edge_llm.nothing


def test_every_error_is_public_and_drawn() -> None:
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert classes <= set(edge_llm.__all__)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in classes)


def test_public_classes_have_docstrings() -> None:
    for name in edge_llm.__all__:
        value = getattr(edge_llm, name)
        if inspect.isclass(value) and value.__module__.startswith("edge_llm"):
            assert importlib.import_module(value.__module__).__doc__
            assert value.__doc__ or issubclass(value, str), name


def test_the_version_is_the_package_s() -> None:
    try:
        installed = metadata.version("edge-llm")
    except metadata.PackageNotFoundError:  # run from a checkout that is on the path only
        installed = edge_llm.__version__
    assert installed == edge_llm.__version__
