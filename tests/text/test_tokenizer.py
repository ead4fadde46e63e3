"""Reading a tokenizer.json, hostile ones too; ids as the tokenizers library gives them; answers replayed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from edge_llm.errors import ModelFormatError, ParameterError, UnsupportedModelError
from edge_llm.export.byte_level import PRE_TOKENIZERS
from edge_llm.export.gguf import read_gguf
from edge_llm.export.gguf_tokenizer import export_tokenizer
from edge_llm.messages import Message, Role
from edge_llm.text import tokenizer as tokenizer_module
from edge_llm.text.chat_template import ChatTemplate
from edge_llm.text.prompt import CONTENT, SCAFFOLD, RenderedPrompt
from edge_llm.text.tokenizer import Tokenizer
from tests.text.tiny import (
    MARKERS,
    SPECIAL,
    document,
    oracle,
    sentencepiece_document,
    tiny_sentencepiece,
    tiny_tokenizer,
)

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENIZER = tiny_tokenizer()
ORACLE = oracle()


def test_facts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document()))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.digest == hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()
    assert tokenizer.vocab_size == ORACLE.get_vocab_size()
    assert tokenizer.added_tokens == {text: ORACLE.token_to_id(text) for text in (*SPECIAL, *MARKERS)}
    assert tokenizer.special_ids == {ORACLE.token_to_id(text) for text in SPECIAL}


def test_importing_the_module_does_not_load_the_library() -> None:
    code = "import sys, edge_llm.text.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text(max_size=80))
def test_content_has_the_ids_of_the_library(text: str) -> None:
    if not any(token in text for token in TOKENIZER.added_tokens):
        assert TOKENIZER.encode_content(text) == ORACLE.encode(text, add_special_tokens=False).ids


scaffolds = st.lists(st.sampled_from([*SPECIAL[:4], *MARKERS, " ", "\n", "  x", "hello", "a", "é", "_"]), max_size=10)


@given(scaffolds, st.sampled_from([{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}]))
def test_scaffold_has_the_ids_of_the_library(parts: list[str], flags: dict[str, bool]) -> None:
    added = [entry | flags for entry in document()["added_tokens"]]
    expected = oracle(added_tokens=added).encode("".join(parts), add_special_tokens=False).ids
    assert tiny_tokenizer(added_tokens=added).encode_scaffold("".join(parts)) == expected


@given(st.text("a <b>\n\t", max_size=30))
def test_white_space_tokens_of_a_byte_level_vocabulary_are_found_in_content(text: str) -> None:
    """As in the library, which finds every added token that is not special; these have no id in the vocabulary proper."""
    marker, first = document()["added_tokens"][-1], TOKENIZER.vocab_size
    more = [{**marker, "id": first + i, "content": t} for i, t in enumerate(("  ", "   ", "\n\n", "<b>"))]
    changes = {"added_tokens": document()["added_tokens"] + more}
    expected = oracle(**changes).encode(text, add_special_tokens=False).ids
    assert tiny_tokenizer(**changes).encode_content(text) == expected


def test_longest_added_token_wins() -> None:
    added = document()["added_tokens"]
    added.append({**added[0], "id": 5000, "content": "<|im_end|>>"})
    tokenizer = tiny_tokenizer(added_tokens=added)
    assert tokenizer.encode_scaffold("<|im_end|>>") == [5000]
    assert tokenizer.vocab_size == 5001


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans())
def test_ids_decode_as_in_the_library(ids: list[int], skip_special: bool) -> None:
    assert TOKENIZER.decode(ids, skip_special=skip_special) == ORACLE.decode(ids, skip_special_tokens=skip_special)


def test_bytes_of_tokens() -> None:
    (hello,) = TOKENIZER.encode_content("hello")
    first, *_ = TOKENIZER.encode_content("日")
    assert TOKENIZER.token_bytes(hello) == b"hello"
    assert TOKENIZER.token_bytes(first) == b"\xe6"
    assert TOKENIZER.token_bytes(TOKENIZER.added_tokens["▁pad"]) == "▁pad".encode()
    assert TOKENIZER.token_bytes(10**6) == TOKENIZER.token_bytes(-1) == b""


def test_not_all_bytes_of_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_KEPT_TOKENS", 5)
    made = tiny_tokenizer()
    most = len(made._known_bytes) + 5
    for _ in range(2):
        said = [made.token_bytes(i) for i in range(made.vocab_size)]
        assert said == [TOKENIZER.token_bytes(i) for i in range(TOKENIZER.vocab_size)]
        assert len(made._known_bytes) == most


def test_the_library_keeps_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so for each thread, and tells nobody how many."""
    given: list[Any] = []

    def noted(*, original: Any = models.BPE, **options: Any) -> Any:
        given.append(options["cache_capacity"])
        return original(**options)

    monkeypatch.setattr(models, "BPE", noted)
    assert tiny_tokenizer().encode_content("hello world") == TOKENIZER.encode_content("hello world")
    assert given == [1000]


def test_surrogates() -> None:
    """Halves of a pair make their character; a lone one becomes U+FFFD."""
    assert TOKENIZER.decode(TOKENIZER.encode_content("a\ud83d\ude00b\ud800")) == "a😀b\ufffd"


def test_b9_a_first_token_only_where_asked_for() -> None:
    """B9: a raw text gets the first token if the model wants one; nothing else does."""
    bos = TOKENIZER.added_tokens["<|begin|>"]
    assert TOKENIZER.encode_raw("hello", bos) == [bos, *TOKENIZER.encode_raw("hello")]
    assert TOKENIZER.encode_raw("", bos) == [bos]
    processed = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    assert bos not in tiny_tokenizer(post_processor=processed).encode_content("hello")


def test_too_long_a_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_CHARACTERS", 10)
    assert TOKENIZER.encode_content("x" * 10)
    with pytest.raises(ParameterError, match="10 characters, not 11"):
        TOKENIZER.encode_content("x" * 11)


# -- replayed answers


def replayed(answer: Message, source: str = "{{ messages[0].content }}<|im_end|>") -> list[int]:
    return TOKENIZER.encode_prompt(ChatTemplate(source).render([answer]))


def letters(text: str) -> tuple[int, ...]:
    """Ids of a text that encoding it would not give: one for each byte."""
    return tuple(id_ for character in text for id_ in TOKENIZER.encode_content(character))


def answer(content: str, ids: tuple[int, ...], digest: str = TOKENIZER.digest) -> Message:
    return Message(Role.ASSISTANT, content, token_ids=ids, tokenizer_digest=digest)


END = TOKENIZER.added_tokens["<|im_end|>"]


def test_an_answer_is_replayed_as_it_was_sampled() -> None:
    ids = letters("hello hello")
    assert list(ids) != TOKENIZER.encode_content("hello hello")
    assert replayed(answer("hello hello", ids)) == [*ids, END]
    assert replayed(answer("hello hello", (*ids, END))) == [*ids, END]
    assert replayed(answer("日本", letters("日本"))) == [*letters("日本"), END]


@pytest.mark.parametrize(
    "message",
    [
        answer("hello", letters("hello"), digest="another"),
        answer("hello", letters("hell")),
        answer("hello ", letters("hello")),
        answer("hello", (10**6,)),
        answer("hello", (-1,)),
        answer("a<think>b", (*letters("a"), TOKENIZER.added_tokens["<think>"], *letters("b"))),
        answer("a<|im_end|>b", (*letters("a"), END, *letters("b"))),
        answer("ab", (*letters("a"), END, *letters("b"))),
    ],
    ids=["other tokenizer", "too few", "too many", "unknown id", "negative id", "marker", "special", "hidden end"],
)
def test_ids_that_do_not_say_the_text_are_not_used(message: Message) -> None:
    assert replayed(message) == [*TOKENIZER.encode_content(message.content), END]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content|trim }}<|im_end|>", "{{ messages[0].content.split('</think>')[-1] }}<|im_end|>",
        "{{ messages[0].content|upper }}<|im_end|>", "{{ messages[0].content[1:] }}<|im_end|>",
    ],
)  # fmt: skip
def test_a_changed_answer_is_encoded_as_text(source: str) -> None:
    message = answer(" he</think>llo", letters(" he</think>llo"))
    prompt = ChatTemplate(source).render([message])
    assert TOKENIZER.encode_prompt(prompt) == [*TOKENIZER.encode_content(prompt.text[: -len("<|im_end|>")]), END]


def test_an_unchanged_answer_is_replayed_through_trim_and_between_scaffold() -> None:
    source = "<|im_start|>assistant\n{% set c = messages[0].content|trim %}{{ 'x' ~ c }}<|im_end|>"
    before = TOKENIZER.encode_scaffold("<|im_start|>assistant\nx")
    assert replayed(answer("hello", letters("hello")), source) == [*before, *letters("hello"), END]


def test_the_same_message_twice_is_replayed_twice() -> None:
    message = answer("hello", letters("hello"))
    prompt = ChatTemplate("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}").render([message, message])
    assert TOKENIZER.encode_prompt(prompt) == [*letters("hello"), END] * 2


def test_what_follows_an_answer_is_no_beginning() -> None:
    """Some vocabularies put a space before a beginning: after a control token it is one, after an answer it is not."""
    model = sentencepiece_document()["model"] | {"space_prefix": True}
    tokenizer = tiny_sentencepiece(model=model)
    end = tokenizer.added_tokens["<|im_end|>"]
    space = tokenizer.encode_content(" ", begins=False)
    assert tokenizer.encode_scaffold("x<|im_end|>x") == [
        *tokenizer.encode_content("x"),
        end,
        *tokenizer.encode_content("x"),
    ]
    assert tokenizer.encode_content("x") == [*space, *tokenizer.encode_content("x", begins=False)]
    ids = tuple(tokenizer.encode_content("hello", begins=False))
    said = Message(Role.ASSISTANT, "hello", token_ids=ids, tokenizer_digest=tokenizer.digest)
    prompt = ChatTemplate("{{ messages[0].content }} <|im_end|>").render([said])
    assert tokenizer.encode_prompt(prompt) == [*ids, *space, end]


# -- files


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_what_the_gguf_importer_writes_can_be_read(name: str) -> None:
    pre = PRE_TOKENIZERS[name]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    changes = {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre.steps, last]},
    }
    text = "I'm 12345 years old,\n\n  isn't  it? 日本語 e\u0301"
    assert tiny_tokenizer(**changes).encode_content(text) == oracle(**changes).encode(text).ids


def fallback_document() -> dict[str, Any]:
    texts = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "ab", "▁ab"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parts = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": texts[i], **flags} for i in (0, 1)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": parts},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": [["a", "b"], ["▁", "ab"]],
        },
    }


@given(st.text("abc é日😀<unk>s", max_size=20))
def test_byte_fallback(text: str) -> None:
    """Tokens of characters with bytes for the rest, as SentencePiece's models have them."""
    import tokenizers

    data = json.dumps(fallback_document())
    tokenizer = Tokenizer.from_json(data)
    ids = tokenizer.encode_content(text)
    assert tokenizer.decode(ids) == text
    if "<unk>" not in text and "<s>" not in text:
        assert ids == tokenizers.Tokenizer.from_str(data).encode(text, add_special_tokens=False).ids


def changed_model(**changes: Any) -> dict[str, Any]:
    return document(model=document()["model"] | changes)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PIECES = sentencepiece_document()["model"]["pieces"]


def changed_pieces(**changes: Any) -> dict[str, Any]:
    return sentencepiece_document(model=sentencepiece_document()["model"] | changes)


UNSUPPORTED = {
    "pieces that are normalised": sentencepiece_document(normalizer={"type": "NFC"}),
    "pieces that are cut": sentencepiece_document(pre_tokenizer={"type": "Digits"}),
    "pieces without a prefix": changed_pieces(space_prefix=None),
    "unigram model": changed_model(type="Unigram"),
    "dropout": changed_model(dropout=0.1),
    "subword prefix": changed_model(continuing_subword_prefix="##"),
    "pattern that never ends": document(pre_tokenizer={**SPLIT, "pattern": {"Regex": "(a+)+$"}}),
    "unknown pattern": document(pre_tokenizer={**SPLIT, "pattern": {"Regex": r"\w+"}}),
    "long literal": document(pre_tokenizer={**SPLIT, "pattern": {"String": "a" * 100}}),
    "prefix space": document(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}),
    "metaspace": document(pre_tokenizer={"type": "Metaspace"}),
    "normalizer with a pattern": document(normalizer={"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}),
    "precompiled normalizer": document(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "decoder": document(decoder={"type": "WordPiece"}),
}
BROKEN = {
    "no pieces": changed_pieces(pieces=None),
    "pieces by id": changed_pieces(pieces={"a": 1}),
    "pieces of numbers": changed_pieces(pieces=[*PIECES[1:], 7]),
    "empty pieces": changed_pieces(pieces=[], ranks=[]),
    "piece twice": changed_pieces(pieces=[*PIECES[1:], PIECES[1]]),
    "no bytes": changed_pieces(pieces=[piece.replace("<0x", "0x") for piece in PIECES]),
    "no ranks": changed_pieces(ranks=None),
    "too few ranks": changed_pieces(ranks=[1]),
    "ranks of texts": changed_pieces(ranks=["1"] * len(PIECES)),
    "ranks of fractions": changed_pieces(ranks=[1.5] * len(PIECES)),
    "a list": [],
    "nothing": {},
    "no model": {**document(), "model": None},
    "no vocabulary": changed_model(vocab=None),
    "vocabulary of texts": changed_model(vocab={"a": "b"}),
    "empty vocabulary": changed_model(vocab={}, merges=[]),
    "negative id": changed_model(vocab={"a": -1}, merges=[]),
    "huge id": changed_model(vocab={"a": 2**31}, merges=[]),
    "id twice": changed_model(vocab={"a": 1, "b": 1}, merges=[]),
    "id a boolean": changed_model(vocab={"a": True}, merges=[]),
    "merge of one": changed_model(merges=["ab"]),
    "merge of three": changed_model(merges=["a b c"]),
    "merge of numbers": changed_model(merges=[[1, 2]]),
    "merge of unknown": changed_model(merges=["zz yy"]),
    "merges a number": changed_model(merges=7),
    "added without id": document(added_tokens=[{"content": "x"}]),
    "added without text": document(added_tokens=[{"id": 1, "content": ""}]),
    "added id a text": document(added_tokens=[{"id": "1", "content": "x"}]),
    "added id huge": document(added_tokens=[{"id": 2**40, "content": "x"}]),
    "added twice": document(added_tokens=[{"id": 1, "content": "x"}, {"id": 1, "content": "y"}]),
    "added too many": document(added_tokens=[{"id": i, "content": str(i)} for i in range(20_000)]),
    "added too long": document(added_tokens=[{"id": 1, "content": "x" * 257}]),
    "added a number": document(added_tokens=7),
    "pre-tokenizer a text": document(pre_tokenizer="ByteLevel"),
    "sequence in a sequence": document(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": []}]}
    ),
    "unknown behaviour": document(pre_tokenizer={**SPLIT, "pattern": {"String": " "}, "behavior": "Odd"}),
}


@pytest.mark.parametrize("made", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_we_do_not_run_is_named(made: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="not supported"):
        Tokenizer.from_json(json.dumps(made))


@pytest.mark.parametrize("made", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused(made: Any) -> None:
    with pytest.raises(ModelFormatError) as caught:
        Tokenizer.from_json(json.dumps(made))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"null", b"[" * 100_000, b'{"a":' * 50_000, b'{"model": 1e999}', b"9" * 10_000],
    ids=["empty", "cut", "no UTF-8", "null", "deep list", "deep object", "infinity", "long number"],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ModelFormatError):
        Tokenizer.from_json(data)


def test_added_tokens_that_would_take_ages_to_look_for_are_refused() -> None:
    """Thousands of long ones with a common beginning, compared at every place of a prompt."""
    added = [{"id": 1000 + i, "content": "<" * 250 + f"{i:05}", "special": True} for i in range(1100)]
    with pytest.raises(ModelFormatError, match="characters of added tokens"):
        tiny_tokenizer(added_tokens=added)


def test_missing_and_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFormatError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "none.json")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document()))
    monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(ModelFormatError, match="larger than 100 bytes"):
        Tokenizer.from_file(path)


@given(st.data())
def test_damaged_files_raise_only_model_format_errors(data: st.DataObject) -> None:
    text = bytearray(json.dumps(document()).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        tokenizer = Tokenizer.from_json(bytes(text))
    except ModelFormatError:
        return
    assert isinstance(tokenizer.encode_content("hello"), list)


def test_a_panic_of_the_library_is_an_ordinary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As pyo3's PanicException, which is no Exception."""

    def panic(*_: object, **__: object) -> None:
        raise Panic("range end index 5 out of range")

    monkeypatch.setattr(tokenizer_module, "build_encoder", panic)
    with pytest.raises(ModelFormatError, match="range end index"):
        tiny_tokenizer()


def test_a_marker_needs_all_its_characters_from_the_scaffold() -> None:
    text = "<|im_end|>"
    end = TOKENIZER.added_tokens[text]
    assert TOKENIZER.encode_prompt(RenderedPrompt(text, SCAFFOLD * 10)) == [end]
    for place in range(10):
        origins = SCAFFOLD * place + CONTENT + SCAFFOLD * (9 - place)
        assert end not in TOKENIZER.encode_prompt(RenderedPrompt(text, origins))


def golden_rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((GOLDEN / name).read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 150
    return rows


@pytest.mark.real_model
def test_ids_of_the_real_tokenizer(smollm2_gguf: Path) -> None:
    """As llama.cpp gives them, with markers read as text and as control (tools/make_tokenizer_goldens.py)."""
    tokenizer = exported(smollm2_gguf)
    for row in golden_rows("smollm2_tokens.json"):
        assert tokenizer.encode_content(row["text"]) == row["plain"]
        assert tokenizer.encode_scaffold(row["text"]) == row.get("special", row["plain"])


@pytest.mark.real_model
def test_ids_of_gemmas_tokenizer(gemma3_gguf: Path) -> None:
    """As llama.cpp gives them, but for `</s>`: it spells it out, whatever the file says, and it is a tag of web pages."""
    tokenizer = exported(gemma3_gguf)
    assert tokenizer.vocab_size == 262_144
    for row in golden_rows("gemma3_tokens.json"):
        text = row["text"]
        expected = f" {' '.join(map(str, row['plain']))} "
        if "</s>" in text:
            expected = expected.replace(" 954 236751 236813 ", " 212 ")
        assert tokenizer.encode_content(text) == [int(i) for i in expected.split()], text
        assert tokenizer.encode_scaffold(text) == row.get("special", row["plain"]), text
        assert tokenizer.decode(tokenizer.encode_content(text)) == text.replace("\u2581", " ")


def exported(gguf: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, by way of the file that the importer writes."""
    with read_gguf(gguf) as file:
        return Tokenizer.from_json(export_tokenizer(file).json)


def test_far_too_long_texts_are_known_by_their_beginning() -> None:
    text = "a b " * 1000
    exact = len(TOKENIZER.encode_content(text))
    assert TOKENIZER.estimate_beyond(text, exact) is None
    assert TOKENIZER.estimate_beyond(text[:20], 3) is None
    assert abs((TOKENIZER.estimate_beyond(text, 100) or 0) - exact) < 0.02 * exact
