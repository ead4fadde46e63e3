"""highlighted(code, language): code with named spans, by Pygments' lexers.

Lexers are regular expressions written for honest code. What a model writes may not be, so very long code or lines stay plain.
"""

from __future__ import annotations

from functools import lru_cache

from textual.content import Content, Span

MOST_CHARACTERS = 60_000
LONGEST_LINE = 1_000


@lru_cache(maxsize=64)
def highlighted(code: str, language: str) -> Content:
    """`code` with spans named as in `palette.STYLES`; as it is for a language that nobody knows."""
    if not language or len(code) > MOST_CHARACTERS or max(map(len, code.split("\n"))) > LONGEST_LINE:
        return Content(code)
    from pygments import token
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    names = {
        token.Comment: "comment",
        token.Keyword: "keyword",
        token.Operator.Word: "keyword",
        token.Name.Tag: "keyword",
        token.Literal.String: "string",
        token.Literal.Number: "number",
        token.Name.Function: "function",
        token.Name.Class: "function",
        token.Name.Builtin: "name",
        token.Name.Decorator: "name",
        token.Name.Attribute: "name",
        token.Operator: "operator",
        token.Generic.Deleted: "error",
        token.Generic.Inserted: "string",
    }
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return Content(code)
    spans: list[Span] = []
    at = 0
    for kind, text in lexer.get_tokens(code):
        while kind not in names and kind.parent is not None:
            kind = kind.parent
        if kind in names:
            spans.append(Span(at, at + len(text), names[kind]))
        at += len(text)
    return Content(code, spans) if at == len(code) else Content(code)
