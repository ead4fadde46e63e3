"""What is wrong with a grammar, in one line: llguidance's messages are several lines long, and draw pictures of the place."""

from __future__ import annotations

import re

from edge_llm.sampling.grammar import GrammarKind

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
"""line and column of a Lark grammar; those of a regex are llguidance's own, which made a grammar of it"""
_INVALID_REGEX = ('invalid regex "', '" (in regex): ')
"""around an expression that is shown again below"""
_REGEX_FAULT = re.compile(r"regex parse error:\n    (?P<pattern>.*)\n    (?P<before> *)\^+\s*\nerror: (?P<what>.*)")
_PICTURE = re.compile(r"\n +\d+ \| ")
_WORDS = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"not supported: \1"),
    (re.compile(r"Unsatisfiable schema: "), "it allows no text at all: "),
    (re.compile(r"; following (?:are|special tokens are) available: .*", re.DOTALL), ""),
    (re.compile(r" \(at .*\)"), ""),
    (re.compile(r"\. Enable 'coerce_one_of'.*"), "; use anyOf"),
    (re.compile(r"; WordUnicode.*"), ""),
    (re.compile(r"Expected f64 "), "Expected a number "),
    (re.compile(r"lexer error"), "this begins no text, name or expression, or it has no end"),
)
_LONGEST = 300
"""characters of a message; what is wrong often stands at its end"""
_READ = 2000
"""characters of a message that are looked at, at its begin and its end"""
_SHOWN = 20
"""characters of an expression, before the place of its fault and after it"""


def fault_in_one_line(kind: GrammarKind, text: str) -> str:
    """A message of the compiler, which may quote the grammar, fit for a line: where, and what."""
    place = _PLACE.match(text)
    where = ""
    if place is not None:
        text = text[place.end() :]
        where = f"line {place[1]}, column {place[2]}: " if kind is GrammarKind.LARK else ""
    begin, end = _INVALID_REGEX
    before, quoted, after = text.partition(begin)
    if quoted and end in after:
        text = before + after.partition(end)[2]
    if (found := _REGEX_FAULT.search(text)) is not None:
        return one_line(where + _regex_fault(found, quoted=kind is not GrammarKind.REGEX))
    text = _PICTURE.split(text, maxsplit=1)[0]
    if len(text) > 2 * _READ:  # patterns may look at all of it for each sign, and who wrote the grammar has a say in it
        text = text[:_READ] + text[-_READ:]
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return one_line(where + text)


def _regex_fault(found: re.Match[str], *, quoted: bool) -> str:
    """What is wrong with an expression and at which character; with the text around it, and whose it is."""
    pattern, at = found["pattern"], len(found["before"])
    before, after = pattern[max(0, at - _SHOWN) : at], pattern[at : at + _SHOWN]
    shown = f"{'...' * (at > _SHOWN)}{before}{after}{'...' * (len(pattern) > at + _SHOWN)}"
    whose = "a regex in it: " if quoted else ""
    what = found["what"].replace(", including look-ahead and look-behind,", "")
    return f"{whose}{what}, at character {at + 1} of {shown}"


def one_line(text: str) -> str:
    """Whatever the compiler says, as one line of ASCII that is not too long."""
    text = text.partition("<state>")[0]  # after that comes its whole state
    line = ascii(" ".join(text.split()))[1:-1].replace("\\'", "'").replace("\\\\", "\\")
    return line if len(line) <= _LONGEST else line[: _LONGEST // 2] + " ... " + line[-_LONGEST // 2 :]


HINTS = {
    GrammarKind.REGEX: "the syntax is Rust's, without look-around, back-references and \\b; a sign that means itself needs a \\",
    GrammarKind.LARK: 'as in: start: item+ -- item: NAME "\\n" -- NAME: /[a-z]+/ (a rule a line, names of rules in lower case)',
    GrammarKind.JSON_SCHEMA: "use type, properties, required, items, enum, const, anyOf, $ref, pattern and bounds like maxLength",
    GrammarKind.JSON_OBJECT: None,
}
"""what may be written instead, or None"""
