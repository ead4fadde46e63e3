"""SQL for what somebody searches for in the conversations."""

from __future__ import annotations


def clause(word: str) -> tuple[str, list[str]]:
    """SQL for conversations that hold `word`."""
    if word.startswith("#") and len(word) > 1:
        return "EXISTS (SELECT 1 FROM tag WHERE conversation=c.id AND name LIKE ? ESCAPE '\\')", [like(word[1:])[1:]]
    title = "c.title LIKE ? ESCAPE '\\'"
    if len(word) < 3:  # the index knows sequences of three characters and more
        return (
            f"({title} OR EXISTS (SELECT 1 FROM turn WHERE conversation=c.id AND content LIKE ? ESCAPE '\\'))",
            [like(word), like(word)],
        )
    quoted = '"' + word.replace('"', '""') + '"'
    text = "c.id IN (SELECT turn.conversation FROM turn_text JOIN turn ON turn.key=turn_text.rowid WHERE turn_text MATCH ?)"
    return f"({title} OR {text})", [like(word), quoted]


def like(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"
