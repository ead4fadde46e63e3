"""F26 at unit level: nothing that a terminal obeys gets through, however the text is cut."""

from __future__ import annotations

import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.text.terminal import TerminalFilter, clean, clean_line

ESC = "\x1b"
BIDI = ["\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]
TAGS = [chr(0xE0000 + code) for code in range(0x80)]

SEQUENCES = [
    "[31m", "[0m", "[2J", "[H", "[1;1H", "[6n", "[c", "[>c", "[?25l", "[?1049h", "[?1000h", "[?2004h", "[20t", "[21t",
    "[5i", "[4i", "[!p", "[3J", "[s", "[u", "[999A", "[1K", "[2K", "[M", "[200~", "[8;9999;9999t", "c", "7", "8",
    "D", "M", "Z", "=", ">", "N", "O", "#8", "(0", ")B", "%G", "n", "|", "~", "]0;title\x07", "]2;title\x1b\\",
    "]52;c;cm0gLXJmIC8=\x07", "]8;;https://evil.example\x07click\x1b]8;;\x07", "]8;;file:///etc/passwd\x1b\\",
    "]4;0;rgb:00/00/00\x07", "]10;?\x07", "]11;?\x07", "]12;red\x07", "]50;font\x07", "]7;file://host/tmp\x07",
    "]9;note\x07", "]777;notify;a;b\x07", "]1337;File=inline=1:AAAA\x07", "]1337;CopyToClipboard=\x07",
    "]133;A\x07", "]633;E;rm\x07", 'P$q"p\x1b\\', "P+q544e\x1b\\", "P1$r0m\x1b\\", "_Gi=1,a=T;AAAA\x1b\\",
    "^private\x1b\\", "X string\x1b\\", "k tmux title\x1b\\", "Ptmux;\x1b\x1b]52;c;AA\x07\x1b\\",
]  # fmt: skip
C1 = {
    "[": "\x9b",
    "]": "\x9d",
    "P": "\x90",
    "_": "\x9f",
    "^": "\x9e",
    "X": "\x98",
    "N": "\x8e",
    "O": "\x8f",
    "D": "\x84",
}


def corpus() -> list[str]:
    """Each sequence after ESC, as a C1 control, in a sentence, repeated, and each hostile character by itself."""
    payloads = [ESC + sequence for sequence in SEQUENCES]
    payloads += [C1[sequence[0]] + sequence[1:] for sequence in SEQUENCES if sequence[0] in C1]
    payloads += [f"The answer is {ESC}{sequence} 42.\r\n" for sequence in SEQUENCES]
    payloads += [(ESC + sequence) * 3 for sequence in SEQUENCES[:20]]
    payloads += [f"a{chr(code)}b" for code in (*range(0x20), *range(0x7F, 0xA0))]
    payloads += [f"user{mark}nimda" for mark in BIDI]
    payloads += ["ok" + "".join(TAGS[i : i + 16]) for i in range(0, 0x80, 16)]
    payloads += [
        "\r" * 3 + "$ rm",
        "real\rfake",
        "a\x08\x08b",
        "x\x0b\x0cy",
        "\ud800",
        "\udc9b[31m",
        "p\u2028q\u2029r",
        "\x85next",
    ]
    return payloads


def assert_harmless(shown: str) -> None:
    for character in shown:
        category = unicodedata.category(character)
        assert character in "\n\t" or category not in ("Cc", "Cs", "Co", "Zl", "Zp"), hex(ord(character))
        assert character not in BIDI
        assert character not in TAGS


def in_chunks(chunks: list[str]) -> str:
    visible = TerminalFilter()
    return "".join(map(visible.feed, chunks)) + visible.flush()


def test_f26_corpus_is_large_enough() -> None:
    assert len(set(corpus())) >= 300


@pytest.mark.parametrize("payload", corpus(), ids=ascii)
def test_f26_payload_at_every_cut(payload: str) -> None:
    """F26: no ESC, C0, C1, bidirectional or tag character is left, and each cut in two gives the same."""
    shown = clean(payload)
    assert_harmless(shown)
    assert all(in_chunks([payload[:cut], payload[cut:]]) == shown for cut in range(len(payload) + 1))
    assert in_chunks(list(payload)) == shown
    assert_harmless(clean_line(payload))
    assert "\n" not in clean_line(payload)


def test_f26_random_texts_at_every_cut() -> None:
    rng = random.Random(26)
    alphabet = [*map(chr, range(0xA0)), *BIDI, *TAGS[:40], *"[]0;mABé日😀\u200d\ufe0f\u00a0\u2028\ue000\ud800\r\n"]
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 24)))
        shown = clean(text)
        assert_harmless(shown)
        assert all(in_chunks([text[:cut], text[cut:]]) == shown for cut in range(len(text) + 1))


@given(st.lists(st.text(alphabet=st.characters(), max_size=20)))
def test_any_unicode_in_any_chunks(chunks: list[str]) -> None:
    shown = in_chunks(chunks)
    assert shown == clean("".join(chunks))
    assert_harmless(shown)
    assert clean(shown) == shown


def test_every_code_point() -> None:
    planes_of_nothing = range(0x32000, 0xE0000, 251)
    for code in (*range(0x32000), *planes_of_nothing, *range(0xE0000, 0xE0200), *range(0xF0000, 0x110000, 251)):
        shown = clean(chr(code))
        if shown not in ("", chr(code)):
            assert_harmless(shown)
        elif shown:
            category = unicodedata.category(shown)
            assert category not in ("Cs", "Co", "Zl", "Zp")
            assert category != "Cc" or shown in "\n\t"


@pytest.mark.parametrize(
    "text",
    [
        "", "plain text, with \ttabs\nand lines\n", "naïve café – “quotes” … ±½ €",
        "日本語 한국어 ไทย हिन्दी עברית العربية",
        "e\u0301 combining", "😀 👍🏽 🇫🇷 ❤", "∑∫√ ░▒▓ ┌─┐ ⠿", "a\u00a0b\u3000c", "\u0600\u06dd",
    ],
)  # fmt: skip
def test_ordinary_text_passes_unchanged(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"), ("a\x00b\x7f", "a␀b␡"),
        ("\x9b2J", "\ufffd2J"), ("a\r\nb\rc", "a\nb␍c"),
        ("a\u202eb", "a\ufffdb"), ("a\u2067b\u200fc", "a\ufffdbc"), ("zero\u200bwidth\ufeff", "zerowidth"),
        ("ok" + chr(0xE0041) + chr(0xE007F), "ok\ufffd\ufffd"), ("p\u2028q", "p\nq"), ("\ud83d", "\ufffd"),
        ("\ue0b0", "\ufffd"),
        ("👨\u200d👩\u200d👧", "👨👩👧"), ("❤\ufe0f 1\ufe0f\u20e3", "❤ 1\u20e3"), ("soft\u00adhyphen", "softhyphen"),
        ("\uffff\u0378", "\ufffd\ufffd"), ("\x08\x0b\x0c", "␈␋␌"),
    ],
)  # fmt: skip
def test_what_is_shown_instead(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_one_line() -> None:
    assert clean_line("first\r\nsecond\tthird\x1b") == "first␊second third␛"


def test_emoji_newer_than_this_python_is_kept() -> None:
    unassigned = next(chr(code) for code in range(0x1F000, 0x1FC00) if unicodedata.category(chr(code)) == "Cn")
    assert clean(unassigned) == unassigned
