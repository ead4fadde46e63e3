"""The pictures of the documentation, made anew: what they say must not change unnoticed. Colours are the theme's affair."""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path

import pytest

from tools.make_screenshots import FOLDER, SCENES, picture


def words(svg: Path) -> list[str]:
    """The text of a picture, line by line of the terminal, without spaces: how lines are cut into pieces depends on versions."""
    lines: dict[str, str] = {}
    for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]*)</text>', svg.read_text("utf-8")):
        lines[y] = lines.get(y, "") + "".join(html.unescape(text).split())
    return [line for _, line in sorted(lines.items(), key=lambda item: float(item[0]))]


@pytest.mark.parametrize("name", SCENES)
def test_a_picture_shows_what_the_program_shows(name: str, tmp_path: Path) -> None:
    asyncio.run(picture(name, tmp_path))
    made = words(tmp_path / f"{name}.svg")
    assert made == words(FOLDER / f"{name}.svg"), "python -m tools.make_screenshots makes them anew: look at them"
    assert len(made) > 5
