"""SentencePiece vocabularies from GGUF: what is written can be read and means the same; what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_llm.errors import ModelFormatError
from edge_llm.export.gguf import read_gguf
from edge_llm.export.gguf_tokenizer import ExportedTokenizer, export_tokenizer
from edge_llm.model.manifest import TokenSpec
from edge_llm.text.sentencepiece import BYTE_PIECES
from edge_llm.text.tokenizer import Tokenizer
from tests.reference.sentencepiece import pieces_of
from tools.tiny_gemma import CONTROL_TOKENS, SMALLEST_VOCAB, USER_DEFINED, sentencepiece_metadata
from tools.tiny_model import write_gguf

TINY = sentencepiece_metadata()
TOKENS: list[str] = TINY["tokenizer.ggml.tokens"]
SCORES: np.ndarray = TINY["tokenizer.ggml.scores"]
KINDS: np.ndarray = TINY["tokenizer.ggml.token_type"]


def export(folder: Path, **keys: Any) -> ExportedTokenizer:
    """The tokenizer of the tiny vocabulary, with keys under tokenizer.ggml replaced (None: left out)."""
    merged = TINY | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    path = folder / "tokenizer.gguf"
    write_gguf(path, {name: value for name, value in merged.items() if value is not None}, {})
    with read_gguf(path) as file:
        return export_tokenizer(file)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_json(export(tmp_path_factory.mktemp("tokenizer")).json)


def test_facts_of_a_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    exported = export(tmp_path)
    assert exported.tokens == TokenSpec(bos=2, eos=(1,), add_bos=True, padding=0)
    assert (exported.vocab, exported.chat_template) == (SMALLEST_VOCAB, None)
    assert tokenizer.vocab_size == SMALLEST_VOCAB
    assert tokenizer.added_tokens == {text: TOKENS.index(text) for text in (*CONTROL_TOKENS, "[multimodal]")}
    assert tokenizer.special_ids == set(range(len(CONTROL_TOKENS)))


@given(st.lists(st.sampled_from([*"▁ aehinotw.,é日😀\n\t", "  ", "the", " hello", "banana", "<b>", "</", "<0x41>"])))
def test_ids_follow_the_scores(tokenizer: Tokenizer, parts: list[str]) -> None:
    """Leftmost of the highest score; what is user-defined is whole, and pieces of no other kind come out."""
    text = "".join(parts)
    order = {TOKENS[i]: -SCORES[i] for i in range(len(TOKENS)) if KINDS[i] == 1}
    expected, rest = [], text
    while rest:
        whole = max((t for t in USER_DEFINED if rest.startswith(t)), key=len, default="")
        ends = [at for t in USER_DEFINED if (at := rest.find(t)) > 0]
        plain = "" if whole else rest[: min(ends, default=len(rest))]
        expected += [whole] if whole else pieces_of(plain.replace(" ", "▁"), order)
        rest = rest[len(whole or plain) :]
    spelled = [p for part in expected for p in ([part] if part in TOKENS else [BYTE_PIECES[b] for b in part.encode()])]
    assert tokenizer.encode_content(text) == [TOKENS.index(piece) for piece in spelled]


def test_the_first_token_and_a_space_before_a_text_are_there_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    silent = export(tmp_path, add_bos_token=None, add_space_prefix=None)
    assert silent.tokens.add_bos
    assert json.loads(silent.json)["model"]["space_prefix"] is True
    spoken = export(tmp_path, add_bos_token=False)
    assert not spoken.tokens.add_bos
    assert json.loads(spoken.json)["model"]["space_prefix"] is False


def test_equal_scores_are_equal_ranks(tmp_path: Path) -> None:
    scores = SCORES.copy()
    first, second = TOKENS.index("▁th"), TOKENS.index("▁an")
    scores[second] = scores[first]
    ranks = json.loads(export(tmp_path, scores=scores).json)["model"]["ranks"]
    assert ranks[first] == ranks[second] < ranks[TOKENS.index("▁the")]


def with_kind(text: str, kind: int) -> np.ndarray:
    kinds = KINDS.copy()
    kinds[TOKENS.index(text)] = kind
    return kinds


def with_score(value: float) -> np.ndarray:
    scores = SCORES.copy()
    scores[7] = value
    return scores


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores"),
        ({"scores": SCORES[:-1]}, "scores"),
        ({"scores": SCORES.astype(np.int32)}, "array of numbers"),
        ({"scores": with_score(np.nan)}, "finite"),
        ({"scores": with_score(-np.inf)}, "finite"),
        ({"token_type": with_kind("<0x41>", 1)}, "255 byte tokens"),
        ({"token_type": with_kind("▁the", 6)}, "257 byte tokens"),
        ({"tokens": [text.replace("<0x41>", "<0x4141>") for text in TOKENS]}, "256 byte tokens, not"),
        ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, "are both"),
        ({"add_space_prefix": 1}, "add_space_prefix"),
        ({"bos_token_id": None}, "does not name it"),
        ({"token_type": np.where(np.arange(SMALLEST_VOCAB) > 300, 4, KINDS).astype(np.int32), "tokens": [
            *TOKENS[:301], *(" " * i for i in range(100, SMALLEST_VOCAB - 201))
        ]}, "white space tokens"),
    ],
)  # fmt: skip
def test_impossible_metadata_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        export(tmp_path, **keys)
    assert str(caught.value).isprintable()


def test_a_control_token_may_look_like_a_piece(tmp_path: Path) -> None:
    """Then it is no piece: what it is made of comes out in its place."""
    tokenizer = Tokenizer.from_json(export(tmp_path, token_type=with_kind("▁the", 3)).json)
    the = TOKENS.index("▁the")
    assert tokenizer.encode_scaffold("▁the") == [the]
    assert the not in tokenizer.encode_content("▁the the ▁the")
    assert tokenizer.decode(tokenizer.encode_content(" the they")) == " the they"
