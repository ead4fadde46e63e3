"""From grammar to masks: what they let through is in the language, and hostile grammars cost little and nobody else."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from edge_llm.errors import EdgeLLMError, GenerationError, ParameterError
from edge_llm.sampling import grammar_compiler
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.grammar_compiler import GrammarCompiler, Matcher, TokenPrefixes
from tests.sampling.grammar_bombs import BOMBS

END, OTHER_END, CONTROL = 0, 1, 2
TOKENS = [b"<end>", b"<other end>", b"<control>", *(bytes([i]) for i in range(256))]
TOKENS += [b'": ', b'", "', b"true", b"false", b"null", b'{"', b'"}', b"\xc3\xa9", b" the", b"12", b"34", b"", b""]
FIRST_BYTE = 3


IDS = {text: i for i, text in enumerate(TOKENS) if i >= FIRST_BYTE and text}


def encode(text: str) -> list[int]:
    """The longest token first, as a tokenizer of this vocabulary would."""
    data, ids, at = text.encode(), [], 0
    while at < len(data):
        best = next(data[at : at + size] for size in (4, 3, 2, 1) if data[at : at + size] in IDS)
        ids.append(IDS[best])
        at += len(best)
    return ids


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENS, control_ids=[CONTROL], end_ids=[END, OTHER_END], encode=encode)
    yield made
    made.close()


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert not bits[len(TOKENS) :].any()
    return np.flatnonzero(bits).tolist()


def wander(matcher: Matcher, seed: int, steps: int = 400) -> str | None:
    """A random answer, or None if it is not whole after `steps` tokens."""
    choose, answer = random.Random(seed), b""
    for _ in range(steps):
        tokens = allowed(matcher)
        assert CONTROL not in tokens
        # ends and closing tokens are preferred, or random text would never stop
        closing = [i for i in tokens if i in (END, OTHER_END) or TOKENS[i] in (b'"', b"}", b"]", b'"}')]
        token_id = choose.choice(closing if closing and choose.random() < 0.4 else tokens)
        matcher.accept(token_id)
        if token_id in (END, OTHER_END):
            return answer.decode()
        answer += TOKENS[token_id]
        if not matcher.finished:
            answer += b"".join(TOKENS[i] for i in matcher.forced())
        if matcher.finished:
            return answer.decode()
    return None


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "größe": {"enum": ["klein", "groß", "😀"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "größe"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize("schema", [PERSON, TREE, {"anyOf": [{"type": "null"}, {"const": "a b"}]}], ids=str)
def test_what_is_let_through_is_valid(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    validator = Draft202012Validator(schema)
    answers = [wander(compiler.matcher(Grammar.json_schema(schema)), seed) for seed in range(30)]
    whole = [answer for answer in answers if answer is not None]
    assert len(whole) >= 25
    for answer in whole:
        validator.validate(json.loads(answer))


def test_any_object_is_an_object(compiler: GrammarCompiler) -> None:
    for seed in range(10):
        answer = wander(compiler.matcher(Grammar.json_object()), seed)
        assert answer is None or isinstance(json.loads(answer), dict)
        assert answer is None or answer.startswith("{")


@pytest.mark.parametrize("pattern", ["(yes|no)", "[0-9]{3}-[a-f]+", "é?(ab|c)*d"])
def test_the_whole_answer_matches(compiler: GrammarCompiler, pattern: str) -> None:
    whole = [wander(compiler.matcher(Grammar.regex(pattern)), seed) for seed in range(20)]
    assert any(whole)
    assert all(re.fullmatch(pattern, answer) for answer in whole if answer is not None)


def test_what_is_certain_is_not_asked(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar.json_schema({"const": {"a": True}}))
    assert b"".join(TOKENS[i] for i in matcher.forced()) == b'{"a": true}'
    assert matcher.finished


def test_escaped_and_raw_names_make_one_grammar(compiler: GrammarCompiler) -> None:
    """B44: surrogate pairs too."""
    raw = json.dumps(PERSON, ensure_ascii=False)
    escaped = json.dumps(PERSON)
    answers = [
        [wander(compiler.matcher(Grammar.json_schema(text)), seed) for seed in range(8)] for text in (raw, escaped)
    ]
    assert answers[0] == answers[1]


def test_every_end_token_ends(compiler: GrammarCompiler) -> None:
    for end in (END, OTHER_END):
        matcher = compiler.matcher(Grammar.regex("a*"))
        assert end in allowed(matcher)
        matcher.accept(end)
        assert matcher.finished


def test_a_token_that_may_not_follow_ends_the_request_alone(compiler: GrammarCompiler) -> None:
    matcher, other = (compiler.matcher(Grammar.regex("ab")) for _ in range(2))
    with pytest.raises(GenerationError, match="cannot follow"):
        matcher.accept(FIRST_BYTE + ord("x"))
    other.accept(FIRST_BYTE + ord("a"))
    assert allowed(other) == [FIRST_BYTE + ord("b")]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "it allows no text at all"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "it allows no text at all",
        ),
        ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "it allows no text at all"),
        ({"properties": {"x": {"$ref": "#/properties/y"}}}, "/properties/y"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "unknown"}, "unknown"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "format": "weird"}, "weird"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named_before_generation(
    compiler: GrammarCompiler, schema: dict[str, Any], said: str
) -> None:
    """B42, and the next request works."""
    with pytest.raises(ParameterError, match=said):
        compiler.matcher(Grammar.json_schema(schema))
    assert wander(compiler.matcher(Grammar.json_schema({"type": "boolean"})), 1) in ("true", "false")


def test_references_within_the_schema_work(compiler: GrammarCompiler) -> None:
    """B42: `$ref` to a property."""
    schema = {
        "properties": {"x": {"type": "null"}, "y": {"$ref": "#/properties/x"}},
        "required": ["y"],
        "type": "object",
    }
    schema["additionalProperties"] = False
    assert wander(compiler.matcher(Grammar.json_schema(schema)), 0) in ('{"y": null}', '{"x": null, "y": null}')


def test_a_grammar_of_no_text_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(ParameterError, match="cannot be used"):
        compiler.matcher(Grammar.lark("start: start"))


def test_messages_are_one_line_of_ascii(compiler: GrammarCompiler) -> None:
    with pytest.raises(ParameterError) as caught:
        compiler.matcher(Grammar.regex("(\x1b[31m\n"))
    assert re.fullmatch(r"[ -~]+", str(caught.value))


def test_a_failure_in_mid_answer_is_a_short_line_without_the_compilers_state(compiler: GrammarCompiler) -> None:
    class Broken:
        def is_error(self) -> bool:
            return True

        def consume_token(self, token_id: int) -> None: ...

        def get_error(self) -> str:
            return "too complex\n<state>\nTokens: secret\n</state><grammar>" + "x" * 100_000

    matcher = compiler.matcher(Grammar.regex("a"))
    matcher._matcher = Broken()
    with pytest.raises(GenerationError) as caught:
        matcher.accept(0)
    assert str(caught.value) == "the answer cannot follow its grammar: too complex"


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_bombs_are_refused_or_bounded(compiler: GrammarCompiler, number: int) -> None:
    """F23: a hostile grammar gives an error or a matcher that works in small steps, and the compiler lives."""
    try:
        matcher = compiler.matcher(BOMBS[number])
        wander(matcher, number, steps=5)
    except EdgeLLMError as error:
        assert isinstance(error, ParameterError | GenerationError)  # noqa: PT017 - both outcomes are right
    assert wander(compiler.matcher(Grammar.regex("ok")), 0) == "ok"


def test_slow_compilation_is_killed_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENS, control_ids=[CONTROL], end_ids=[END], encode=encode)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "_readable", lambda stream, seconds: False)
        with pytest.raises(ParameterError, match="too long"):
            compiler.matcher(Grammar.regex("a"))
    assert wander(compiler.matcher(Grammar.regex("a")), 0) == "a"
    worker = compiler._worker._process
    assert worker is not None
    worker.kill()
    worker.wait()
    assert wander(compiler.matcher(Grammar.regex("b")), 0) == "b"
    compiler.close()
    compiler.close()
    assert worker.poll() is not None


def test_only_the_last_grammars_are_kept(compiler: GrammarCompiler) -> None:
    for i in range(3 * grammar_compiler.KEPT_GRAMMARS):
        compiler.matcher(Grammar.regex(f"a{i}"))
        assert len(compiler._kept) <= grammar_compiler.KEPT_GRAMMARS


def test_of_long_grammars_fewer_are_kept(compiler: GrammarCompiler) -> None:
    """F23: what is kept is bounded in bytes."""
    for i in range(5):
        long = Grammar.json_schema({"enum": [f"{i} {'x' * 24} {j}" for j in range(1000)]})
        compiler.matcher(long)
        assert long in compiler._kept
        assert sum(len(kept.text) for kept in compiler._kept) <= grammar_compiler.KEPT_CHARACTERS
    assert 2 <= len(compiler._kept) <= 3


def test_threads_share_a_compiler(compiler: GrammarCompiler) -> None:
    answers: list[str | None] = []

    def work(seed: int) -> None:
        answers.append(wander(compiler.matcher(Grammar.regex(f"x{seed % 3}")), seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, answers)) == sorted(f"x{seed % 3}" for seed in range(12))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_constant_is_what_comes_out(compiler: GrammarCompiler, value: Any) -> None:
    answer = wander(compiler.matcher(Grammar.json_schema({"const": value})), 0)
    assert answer is not None
    assert json.loads(answer) == value


def test_what_must_follow_is_not_cut() -> None:
    """A space alone says that a number comes: where ` "` must come, it comes whole or in a longer token."""
    tokens = [*TOKENS, b' "', b' "x', b" 1"]
    spaced = GrammarCompiler(
        tokens, control_ids=[CONTROL], end_ids=[END], encode=lambda text: [FIRST_BYTE + b for b in text.encode()]
    )
    expected = {'k: "[a-z]*"': {b' "', b' "x'}, "k: [0-9]": {b" ", b" 1"}}
    for pattern, follow in expected.items():
        matcher = spaced.matcher(Grammar.regex(pattern))
        for byte in b"k:":
            matcher.accept(FIRST_BYTE + byte)
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        assert {tokens[i] for i in np.flatnonzero(bits)} == follow
    spaced.close()


@given(st.binary(max_size=3).filter(lambda data: b"\xff" not in data))
def test_tokens_that_begin_with_some_bytes(prefix: bytes) -> None:
    bits = np.unpackbits(TokenPrefixes(TOKENS).mask(prefix).view(np.uint8), bitorder="little")
    found = {i for i in np.flatnonzero(bits).tolist() if TOKENS[i] != b"\xff"}
    assert found == {i for i, token in enumerate(TOKENS) if token.startswith(prefix) and token != b"\xff"}


def test_the_worker_s_modules_come_from_where_ours_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that one merely stands in is none of them."""
    (tmp_path / "json.py").write_text("raise SystemExit('taken over')")
    (tmp_path / "edge_llm.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.path.abspath(place) for place in sys.path if place])
    made = GrammarCompiler(TOKENS, control_ids=[CONTROL], end_ids=[END], encode=encode)
    assert allowed(made.matcher(Grammar.regex("a"))) == [FIRST_BYTE + ord("a")]
    made.close()
