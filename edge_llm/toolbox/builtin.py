"""The tools that come with edge_llm: the time, arithmetic, and the files of one folder. None of them changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from edge_llm.errors import ParameterError, quoted
from edge_llm.messages import Tool
from edge_llm.toolbox.approval import Permission
from edge_llm.toolbox.calculator import MAX_EXPRESSION, calculate
from edge_llm.toolbox.folder import MAX_PATH, ReadableFolder
from edge_llm.toolbox.runner import LocalTool

NAMES = ("time", "calculator", "read:FOLDER")
"""what `builtin` takes"""


def builtin(name: str) -> LocalTool:
    """The tool of a name: `time`, `calculator`, `read:FOLDER`. Raises `ParameterError` for another, or no such folder."""
    kind, _, folder = name.partition(":")
    if name == "time":
        return time_tool()
    if name == "calculator":
        return calculator_tool()
    if kind == "read" and folder:
        return read_tool(Path(folder))
    raise ParameterError(f"there is no tool {quoted(name)}", hint=f"there are {', '.join(NAMES)}")


def time_tool(clock: Callable[[], datetime] = lambda: datetime.now().astimezone()) -> LocalTool:
    tool = Tool("time", "Tell the current date and time.", _schema())
    return LocalTool(tool, lambda _: clock().strftime("%A, %Y-%m-%d %H:%M:%S %Z").strip(), Permission.READ)


def calculator_tool() -> LocalTool:
    tool = Tool(
        "calculator",
        "Compute an arithmetic expression, for example 12 * (3 + 4.5) or sqrt(2).",
        _schema(expression=MAX_EXPRESSION),
    )
    return LocalTool(tool, lambda given: calculate(given["expression"]), Permission.READ)


def read_tool(folder: Path) -> LocalTool:
    """The folder stays open as long as the tool is there."""
    opened = ReadableFolder(folder)
    tool = Tool(
        "read",
        "Read a text file, or list the names in a folder; the path . is the topmost one.",
        _schema(path=MAX_PATH),
    )
    return LocalTool(tool, lambda given: opened.read(given["path"]), Permission.READ)


def _schema(**texts: int) -> str:
    """An object of texts, each of which is needed and has at most so many characters."""
    properties = {name: {"type": "string", "maxLength": most} for name, most in texts.items()}
    schema = {"type": "object", "properties": properties, "required": list(texts), "additionalProperties": False}
    return json.dumps(schema)
