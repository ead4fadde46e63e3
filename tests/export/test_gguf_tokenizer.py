"""The exported tokenizer against llama.cpp's ids (tools/make_tokenizer_goldens.py), and against hostile metadata."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from edge_llm.errors import ModelFormatError, UnsupportedModelError
from edge_llm.export.byte_level import PRE_TOKENIZERS
from edge_llm.export.gguf import read_gguf
from edge_llm.export.gguf_tokenizer import (
    MAX_TEMPLATE_BYTES,
    ExportedTokenizer,
    export_tokenizer,
)
from edge_llm.export.gguf_types import block_codes
from edge_llm.model.manifest import TokenSpec
from edge_llm.text.tokenizer_parts import byte_alphabet
from tools.make_tokenizer_goldens import pre_tokenizer_metadata
from tools.tiny_model import CHAT_TEMPLATE, tokenizer_metadata, write_gguf, write_tiny_gguf

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = tokenizer_metadata(331)
TOKENS: list[str] = TINY["tokenizer.ggml.tokens"]
KINDS: np.ndarray = TINY["tokenizer.ggml.token_type"]
MERGES: list[str] = TINY["tokenizer.ggml.merges"]


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def export(folder: Path, metadata: dict[str, Any] | None = None, **keys: Any) -> ExportedTokenizer:
    """The tokenizer of the tiny model's vocabulary, with keys under tokenizer.ggml replaced (None: left out)."""
    merged = {**TINY, **{f"tokenizer.ggml.{name}": value for name, value in keys.items()}, **(metadata or {})}
    path = folder / "tokenizer.gguf"
    write_gguf(path, {name: value for name, value in merged.items() if value is not None}, {})
    with read_gguf(path) as file:
        return export_tokenizer(file)


def ids(tokenizer: Tokenizer, text: str, *, control: bool) -> list[int]:
    tokenizer.encode_special_tokens = not control
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.real_model
def test_smollm2_encodes_as_llama_cpp_does(smollm2_gguf: Path) -> None:
    with read_gguf(smollm2_gguf) as file:
        exported = export_tokenizer(file)
    assert exported.tokens == TokenSpec(bos=1, eos=(2, 0), add_bos=False, padding=2)
    assert exported.vocab == 49152
    assert "<|im_start|>system" in str(exported.chat_template)
    tokenizer = Tokenizer.from_str(exported.json)
    rows = golden("smollm2_tokens.json")["rows"]
    assert len(rows) > 180
    for row in rows:
        assert ids(tokenizer, row["text"], control=False) == row["plain"], row["text"]
        assert ids(tokenizer, row["text"], control=True) == row.get("special", row["plain"]), row["text"]


@pytest.mark.real_model
def test_no_control_token_of_smollm2_comes_from_plain_text(smollm2_gguf: Path) -> None:
    with read_gguf(smollm2_gguf) as file:
        tokenizer = Tokenizer.from_str(export_tokenizer(file).json)
        kinds, texts = file.integers("tokenizer.ggml.token_type"), file.texts("tokenizer.ggml.tokens")
    control = set(np.flatnonzero(kinds == 3).tolist())
    assert len(control) == 17
    for token in control:
        for text in (texts[token], f"a{texts[token]}b", f" {texts[token]}\n" * 3):
            found = ids(tokenizer, text, control=False)
            assert control.isdisjoint(found)
            assert tokenizer.decode(found, skip_special_tokens=False) == text
            assert token in ids(tokenizer, text, control=True)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_is_cut_as_llama_cpp_cuts_it(tmp_path: Path, pre: str) -> None:
    file = golden("pre_tokenizers.json")
    exported = export(tmp_path, pre_tokenizer_metadata(pre, file["merges"]))
    tokenizer = Tokenizer.from_str(exported.json)
    normal_form = pre == "qwen2"  # Qwen's own tokenizer composes characters first; llama.cpp leaves that out
    rows = [row for row in file["rows"] if not normal_form or unicodedata.is_normalized("NFC", row["text"])]
    assert len(rows) > 140
    for row in rows:
        assert ids(tokenizer, row["text"], control=False) == row[pre], row["text"]


def test_cuts_differ_where_they_should() -> None:
    rows = golden("pre_tokenizers.json")["rows"]
    kinds = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"]
    assert all(any(row[a] != row[b] for row in rows) for a in kinds for b in kinds if a < b)


def test_qwen_composes_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(export(tmp_path, pre="qwen2").json)
    assert ids(tokenizer, "e\u0301", control=False) == ids(tokenizer, "é", control=False)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_bytes(tmp_path: Path, pre: str) -> None:
    tokenizer = Tokenizer.from_str(export(tmp_path, pre=pre, add_bos_token=None).json)
    text = "".join(map(chr, range(256))) + " it's 12345  漢字 😀\n\n\tdone "
    found = ids(tokenizer, unicodedata.normalize("NFC", text), control=False)
    assert tokenizer.decode(found, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_the_tiny_models_tokenizer(tmp_path: Path) -> None:
    with read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf")) as file:
        exported = export_tokenizer(file)
    assert exported.tokens == TokenSpec(bos=1, eos=(2, 0), add_bos=False, padding=2)
    assert (exported.vocab, exported.chat_template) == (331, CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_str(exported.json)
    assert tokenizer.get_vocab_size() == 331
    assert [tokenizer.id_to_token(i) for i in ids(tokenizer, " the<|im_end|>", control=True)] == ["Ġthe", "<|im_end|>"]
    assert not {0, 1, 2}.intersection(ids(tokenizer, " the<|im_end|><|im_start|><|endoftext|>", control=False))


def test_the_byte_alphabet_is_the_librarys() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("aé\n ")
    assert pieces[0][0] == "".join(byte_alphabet()[byte] for byte in "aé\n ".encode())


def test_kinds_of_tokens(tmp_path: Path) -> None:
    kinds = KINDS.copy()
    names = ["<tool>", "<unknown>", "<never>"]
    kinds = np.concatenate([kinds, np.array([4, 2, 5], np.int32)])
    exported = export(tmp_path, tokens=[*TOKENS, *names], token_type=kinds)
    tokenizer = Tokenizer.from_str(exported.json)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<tool>": False,
        "<unknown>": True,
    }
    assert ids(tokenizer, "<tool><unknown>", control=True) == [331, 332]
    assert 333 not in ids(tokenizer, "<never>", control=True)
    assert 332 not in ids(tokenizer, "<tool><unknown>", control=False)


@pytest.mark.parametrize(
    ("keys", "template", "expected"),
    [
        ({}, CHAT_TEMPLATE, (2, 0)),
        ({"eos_token_id": 0}, CHAT_TEMPLATE, (0, 2)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": 0, "eot_token_id": 2}, None, (0, 2)),
        ({"eos_token_id": 0, "eom_token_id": 1}, None, (0, 1)),
        ({"eos_token_id": None}, None, (0,)),
        ({"eos_token_id": np.int64(2)}, None, (2, 0)),
    ],
)
def test_end_tokens_come_from_metadata_template_and_known_names(
    tmp_path: Path, keys: dict[str, Any], template: str | None, expected: tuple[int, ...]
) -> None:
    assert export(tmp_path, {"tokenizer.chat_template": template}, **keys).tokens.eos == expected


def test_a_first_token_is_added_where_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    assert export(tmp_path, pre="llama-bpe", add_bos_token=None).tokens.add_bos
    assert not export(tmp_path, pre="llama-bpe", add_bos_token=False).tokens.add_bos
    assert not export(tmp_path, pre="gpt-2", add_bos_token=None).tokens.add_bos
    assert export(tmp_path, bos_token_id=None).tokens.bos is None


def test_an_end_token_is_special_whatever_its_kind(tmp_path: Path) -> None:
    kinds = np.concatenate([KINDS, np.array([1], np.int32)])
    exported = export(tmp_path, tokens=[*TOKENS, "[END]"], token_type=kinds, eos_token_id=331)
    tokenizer = Tokenizer.from_str(exported.json)
    assert ids(tokenizer, "[END]", control=True) == [331]
    assert 331 not in ids(tokenizer, "[END]", control=False)


@pytest.mark.parametrize("model", ["Llama", "bert", "t5", "GPT2", "", "\x1b[2J"])
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, model: str) -> None:
    with pytest.raises(UnsupportedModelError, match="is not supported") as caught:
        export(tmp_path, model=model)
    assert ascii(model) in str(caught.value)


@pytest.mark.parametrize("pre", ["tekken", "smollm2", "Default", " smollm", "a\nb"])
def test_unknown_pre_tokenizers_are_refused_by_name(tmp_path: Path, pre: str) -> None:
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer") as caught:
        export(tmp_path, pre=pre)
    assert ascii(pre) in str(caught.value)
    assert "smollm" in str(caught.value.hint)


def test_a_missing_pre_tokenizer_is_no_guess(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="does not name its pre-tokenizer"):
        export(tmp_path, pre=None)


def replaced(values: list[str], index: int, value: str) -> list[str]:
    return [*values[:index], value, *values[index + 1 :]]


def kinds_with(index: int, kind: int) -> np.ndarray:
    kinds = KINDS.copy()
    kinds[index] = kind
    return kinds


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": 5}, "tokenizer.ggml.model"),
        ({"pre": True}, "tokenizer.ggml.pre"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": np.arange(5)}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, "0 tokens and 331 token types"),
        ({"tokens": TOKENS[:-1]}, "330 tokens and 331 token types"),
        ({"tokens": replaced(TOKENS, 9, TOKENS[3])}, "tokens 3 and 9 are both"),
        ({"tokens": replaced(TOKENS, 9, "")}, "token 9 is empty"),
        ({"tokens": replaced(TOKENS, 300, "a b")}, "not written in the byte alphabet"),
        ({"tokens": replaced(TOKENS, 300, "▁the")}, "not written in the byte alphabet"),
        ({"tokens": replaced(TOKENS, 300, "\x1b[31m")}, r"token 300, '\\x1b\[31m', is not written"),
        ({"token_type": None}, "tokenizer.ggml.token_type"),
        ({"token_type": ["a"]}, "tokenizer.ggml.token_type"),
        ({"token_type": KINDS.astype(np.float32)}, "tokenizer.ggml.token_type"),
        ({"token_type": kinds_with(7, 0)}, "no token type"),
        ({"token_type": kinds_with(7, 7)}, "no token type"),
        ({"token_type": kinds_with(7, -1)}, "no token type"),
        ({"token_type": kinds_with(7, 6)}, "byte tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": np.arange(3)}, "tokenizer.ggml.merges"),
        ({"merges": [*MERGES, MERGES[0]]}, "same merge twice"),
        ({"merges": [""]}, "merge 0"),
        ({"merges": [" "]}, "merge 0"),
        ({"merges": ["Ġt"]}, "merge 0"),
        ({"merges": ["Ġ t h"]}, "merge 0"),
        ({"merges": [" Ġ t"]}, "merge 0"),
        ({"merges": ["Ġ q"]}, "merge 0"),
        ({"merges": ["Ġ \x1b"]}, r"merge 0, '\\u0120 \\x1b'"),
        ({"merges": ["nothing t"]}, "merge 0"),
        ({"bos_token_id": 331}, "bos_token_id"),
        ({"eos_token_id": 2**32 - 1}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": 2.0}, "eos_token_id"),
        ({"eot_token_id": 5000}, "eot_token_id"),
        ({"eom_token_id": 5000}, "eom_token_id"),
        ({"padding_token_id": 5000}, "padding_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"add_bos_token": True, "bos_token_id": None}, "does not name it"),
        ({"eos_token_id": None, "token_type": kinds_with(0, 4)}, "no end token"),
        # control tokens that plain text could make
        ({"token_type": kinds_with(TOKENS.index("Ġthe"), 3)}, "of ordinary text"),
        ({"eos_token_id": TOKENS.index("Ġthe")}, "of ordinary text"),
        ({"token_type": kinds_with(TOKENS.index("a"), 3)}, "can be written as ordinary text"),
        ({"bos_token_id": TOKENS.index("Ċ")}, "can be written as ordinary text"),
        ({"pre": "llama-bpe", "tokens": replaced(TOKENS, 0, "hello")}, "can be written as ordinary text"),
        ({"pre": "llama-bpe", "tokens": replaced(TOKENS, 0, "ĠhelloĠ"[:-1])}, "can be written as ordinary text"),
    ],
)
def test_impossible_metadata_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        export(tmp_path, **keys)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("template", "sound"), [("x" * MAX_TEMPLATE_BYTES, True), ("é" * (MAX_TEMPLATE_BYTES // 2 + 1), False), (7, False)]
)
def test_the_template_has_a_cap(tmp_path: Path, template: Any, sound: bool) -> None:
    if sound:
        assert export(tmp_path, {"tokenizer.chat_template": template}).chat_template == template
    else:
        with pytest.raises(ModelFormatError, match="template"):
            export(tmp_path, {"tokenizer.chat_template": template})
    assert export(tmp_path, {"tokenizer.chat_template": ""}).chat_template is None


def test_mutated_models_give_format_errors_only(tmp_path: Path) -> None:
    good = write_tiny_gguf(
        tmp_path / "good.gguf", vocab=270, hidden=32, heads=2, kv_heads=1, intermediate=32, layers=1
    ).read_bytes()
    metadata_end = good.index(b"token_embd.weight")
    path = tmp_path / "mutated.gguf"
    random = np.random.Generator(np.random.PCG64(21))
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(random.integers(1, 5)):
            at = int(random.integers(0, metadata_end if random.random() < 0.8 else len(data)))
            data[at] = int(random.integers(0, 256))
        path.write_bytes(data)
        try:
            with read_gguf(path) as file:
                export_tokenizer(file)
                for tensor in file.tensors.values():
                    if len(tensor.shape) == 2:
                        block_codes(file.tensor_bytes(tensor), tensor.type, tensor.shape, tensor.name)
        except ModelFormatError:
            refused += 1
    assert refused > 100
