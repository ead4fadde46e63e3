"""The language of tool calls: for each syntax a grammar in which every call is whole, and its arguments fit their schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edge_llm.errors import ParameterError
from edge_llm.messages import Tool
from edge_llm.sampling.grammar import JSON_STYLE, Grammar, parse_schema
from edge_llm.sampling.schema_recursion import bound_recursion
from edge_llm.text.tool_syntax import CallForm, ToolSyntax

MAX_FORCED_CALLS = 8
"""calls that an answer may have to hold: a small model that may go on does"""


def tool_grammar(tools: Sequence[Tool], syntax: ToolSyntax, ids: Mapping[str, int], *, several: bool) -> Grammar:
    """Calls of `tools`, at least one, with their markers; those that are tokens of their own stand in `ids`.

    Raises `ParameterError` for schemas too large to enforce, or names that the syntax cannot write.
    """
    pythonic = syntax.form is CallForm.PYTHONIC
    rules = [
        rule for n, tool in enumerate(tools) for rule in (_python_call if pythonic else _json_call)(n, tool, syntax)
    ]
    rules.append("one: " + " | ".join(f"t{n}" for n in range(len(tools))))
    more = MAX_FORCED_CALLS - 1 if several else 0
    begin, end = (_marker(text, ids) for text in (syntax.begin, syntax.end))
    if pythonic or (begin and not end):
        calls = f'{begin} "[" one {_repeated(", ", "one", more)} "]" {end}'
    elif begin:
        rules.append(f'call: {begin} "\\n" one "\\n" {end}')
        calls = f"call {_repeated(chr(10), 'call', more)}"
    else:
        calls = "one"
    return Grammar.lark("\n".join([f"start: {calls}", *rules]))


def _repeated(separator: str, rule: str, most: int) -> str:
    return f"({json.dumps(separator)} {rule}){{0,{most}}}" if most else ""


def _marker(text: str, ids: Mapping[str, int]) -> str:
    if not text:
        return ""
    return f"<[{ids[text]}]>" if text in ids else json.dumps(text)


def _json_call(number: int, tool: Tool, syntax: ToolSyntax) -> list[str]:
    before = f'{{"name": {json.dumps(tool.name)}, {json.dumps(syntax.arguments)}: '
    return [f't{number}: {json.dumps(before)} %json {_json(_closed(tool))} "}}"']


def _python_call(number: int, tool: Tool, _syntax: ToolSyntax) -> list[str]:
    """name(a=..., b=...): the required arguments, then any of the others, in the schema's order."""
    schema = _closed(tool)
    properties = schema.get("properties") or {}
    if not all(name.isidentifier() and name.isascii() for name in properties):
        raise ParameterError(f"an argument of the tool {tool.name} has a name that this model cannot write")
    shared: dict[str, Any] = {table: schema[table] for table in ("$defs", "definitions") if table in schema}
    rules = []
    for i, (name, value) in enumerate(properties.items()):
        allowed = {} if value is True else {"not": {}} if value is False else value
        rules.append(f't{number}_{i}: "{name}=" %json {_json({**shared, **allowed})}')
    wanted = [i for i, name in enumerate(properties) if name in schema.get("required", ())]
    others = [i for i in range(len(properties)) if i not in wanted]
    tail = " ".join(f'(", " t{number}_{i})?' for i in others)
    if wanted:
        arguments = ' ", " '.join(f"t{number}_{i}" for i in wanted) + f" {tail}"
    else:  # none, or any first one with those after it
        starts = (
            " ".join([f"t{number}_{i}", *(f'(", " t{number}_{j})?' for j in others[k + 1 :])])
            for k, i in enumerate(others)
        )
        arguments = f"({' | '.join(starts)})?" if others else ""
    return [f't{number}: "{tool.name}(" {arguments} ")"', *rules]


def _closed(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; without a word on others it allows none, and it nests for a while only."""
    return bound_recursion({"type": "object", "additionalProperties": False, **parse_schema(tool.parameters)})


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_STYLE}, ensure_ascii=False)
