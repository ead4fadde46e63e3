"""Summaries: conversations as a list shows them, and the search for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_llm_chat.search import clause, like

MOST_FOUND = 200
"""conversations that a list shows at once"""


@dataclass(frozen=True, slots=True)
class Summary:
    """A conversation as a list shows it."""

    id: int
    title: str
    updated: float
    turns: int
    pinned: bool
    tags: tuple[str, ...]
    excerpt: str = ""
    """text around what was searched for"""


def find(database: sqlite3.Connection, words: Sequence[str]) -> list[Summary]:
    """Conversations whose title, tags (#tag) or text hold all `words`, pinned and latest first."""
    if not words:
        return _summaries(database, "", ())
    clauses, values = [], []
    for word in words:
        condition, parameters = clause(word)
        clauses.append(condition)
        values += parameters
    found = _summaries(database, "WHERE " + " AND ".join(clauses), tuple(values))
    return [_with_excerpt(database, summary, words) for summary in found]


def _summaries(database: sqlite3.Connection, where: str, values: tuple[str, ...]) -> list[Summary]:
    rows = database.execute(
        "SELECT id, title, updated, (SELECT count(*) FROM turn WHERE conversation=c.id), pinned,"
        " (SELECT group_concat(name, char(10)) FROM tag WHERE conversation=c.id)"
        f" FROM conversation c {where} ORDER BY pinned DESC, updated DESC, id DESC LIMIT {MOST_FOUND}",
        values,
    ).fetchall()
    return [
        Summary(number, title, updated, turns, bool(pinned), tuple(sorted(tags.split("\n"))) if tags else ())
        for number, title, updated, turns, pinned, tags in rows
    ]


def _with_excerpt(database: sqlite3.Connection, summary: Summary, words: Sequence[str]) -> Summary:
    texts = [word for word in words if not word.startswith("#")]
    if not texts:
        return summary
    row = database.execute(
        "SELECT content FROM turn WHERE conversation=? AND content LIKE ? ESCAPE '\\' ORDER BY id LIMIT 1",
        (summary.id, like(texts[0])),
    ).fetchone()
    if row is None:
        return summary
    flat = " ".join(row[0].split())
    at = max(flat.lower().find(texts[0].lower()), 0)
    start = flat.rfind(" ", 0, max(at - 16, 0)) + 1  # at the beginning of a word
    return replace(summary, excerpt=("…" if start else "") + flat[start : at + 80])
