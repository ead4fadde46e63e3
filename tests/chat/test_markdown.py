from __future__ import annotations

import pytest
from edge_llm_chat.markdown import document, lines
from edge_llm_chat.markdown.document import Document
from edge_llm_chat.markdown.highlight import highlighted
from edge_llm_chat.markdown.leaves import code_blocks
from edge_llm_chat.markdown.palette import Palette
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content

PLAIN = Palette({})
SAMPLE = """# Title

Some *em* and **strong** `code`, a [link](https://example.org "t") and <b>html</b>.
Second line.

- one
- two
  - nested
1. first
2. second

   more of it

> quoted
> again

| a | b |
|---|---|
| cell | x |

```python
def f(x):
    return x
```
---
end
"""


def text(made: Document, width: int = 60) -> list[str]:
    return [line.text.rstrip() for line in made.lines(width, PLAIN)]


def test_what_becomes_of_markdown() -> None:
    assert text(Document(SAMPLE)) == [
        *("Title", ""),
        *("Some em and strong code, a link (https://example.org) and", "<b>html</b>.", "Second line.", ""),
        *("• one", "• two", "  ◦ nested", "", "1. first", "", "2. second", "", "   more of it", ""),
        *("▏ quoted", "▏ again", ""),
        *("a     b", "────  ─", "cell  x", ""),
        *(" def f(x):", "     return x", "", "─" * 40, "", "end"),
    ]


@pytest.mark.parametrize("size", [1, 7, 50])
def test_a_text_in_pieces_ends_as_the_whole(size: int) -> None:
    made = Document(finished=False)
    for start in range(0, len(SAMPLE), size):
        made.feed(SAMPLE[start : start + size])
        made.lines(60, PLAIN)
    made.finish()
    assert text(made) == text(Document(SAMPLE))


@pytest.mark.parametrize(
    "whole",
    [
        "```python\n" + "x = [i for i in range(10)]\n" * 2_000 + "```\n\nafter **it**",
        "word " * 12_000,
        "- item of a list\n" * 800,
        (SAMPLE + "\n") * 60,
    ],
    ids=["code", "one line", "list", "mixed"],
)
def test_a_piece_costs_the_same_however_long_the_answer_is(whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B56: what is drawn for each piece is bounded; in the end everything is there, the block of code too."""
    drawn: list[int] = []
    draw = lines.draw

    def counted(leaves, *arguments, **options):
        leaves = list(leaves)
        drawn.append(sum(len(leaf.content) for leaf in leaves))
        return draw(leaves, *arguments, **options)

    monkeypatch.setattr(document, "draw", counted)
    made = Document(finished=False)
    costs = []
    for start in range(0, len(whole), 300):
        drawn.clear()
        made.feed(whole[start : start + 300])
        made.lines(80, PLAIN)
        costs.append(sum(drawn))
    assert max(costs) < 3 * document.LONGEST_TAIL
    streamed = " ".join(text(made, 80)).split()
    made.finish()
    assert streamed == " ".join(text(made, 80)).split()


def test_a_long_block_of_code_goes_on_as_code_while_it_comes() -> None:
    made = Document(finished=False)
    made.feed("```c\n" + "int **x; // *not* emphasis\n" * 300)
    assert set(text(made)) == {" int **x; // *not* emphasis"}


@pytest.mark.parametrize(
    "payload", ["&#27;[2J", "&#x9b;31m", "[x](http://a/&#27;]0;t&#7;)", "![a](x&#8;)", "```&#27;\n\x1b\n```", "`\x1b`"]
)
def test_nothing_in_markdown_becomes_a_control_character(payload: str) -> None:
    for line in text(Document(f"before {payload} after\n\n{payload}\n\n| {payload} |\n|--|\n| {payload} |")):
        assert line.isprintable()


@settings(max_examples=150)
@given(st.text(alphabet="ab *_`#>|-1.\n\t[]()!&;~東🗼שa", max_size=120), st.integers(10, 40))
def test_no_line_is_wider_than_it_may_be(source: str, width: int) -> None:
    for made in (Document(source), Document(source, finished=False), Document(source, markdown=False)):
        for line in made.lines(width, PLAIN):
            assert line.cell_length == Content(line.text).cell_length
            assert line.cell_length <= width + 40 * source.count(">"), "only deep nesting may ask for more"


def test_code_blocks_are_copied_as_they_were_written() -> None:
    assert code_blocks("a\n```py\n\tx\x1b\n```\n~~~\ny\n~~~") == [("py", "\tx\x1b\n"), ("", "y\n")]


def test_code_is_coloured_unless_it_could_take_long() -> None:
    assert [span.style for span in highlighted("def f(): return 1", "python").spans][:2] == ["keyword", "function"]
    for code, language in (("x = 1", "no-such-language"), ("x" * 2_000, "python"), ("x = 1\n" * 20_000, "python")):
        assert not highlighted(code, language).spans
