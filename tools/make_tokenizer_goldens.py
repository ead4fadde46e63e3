"""Write tests/golden/smollm2_tokens.json, gemma3_tokens.json and pre_tokenizers.json: what llama.cpp makes of many texts.

Needs llama-cpp-python, which nothing else here does; run it from the repository with a Python that has it:

    python -m tools.make_tokenizer_goldens SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf

The first files hold the ids of SmolLM2 and Gemma 3, with control tokens read as text ("plain") and as control tokens
("special", only where it differs). The last holds ids under each pre-tokenizer, of a vocabulary whose merges were learned with no
cuts at all, so that every cut shows in the ids.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edge_llm.text.tokenizer_parts import byte_alphabet
from tools.tiny_model import write_gguf

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")
MERGES = 700

_PROSE = [
    "Hello, world!", "What is the capital of France?", "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say we've done what you'd asked; it's fine, isn't it? I'M SURE THEY'LL, WE'VE, YOU'D.",
    "it’s a ‘curly’ “quote” – an en dash — an em dash… and an ellipsis",
    "e-mail: someone@example.org, see https://example.org/a/b?c=d&e=f#g", "$1,234.56 + 20% = £3.50 or €7, 50 ¢",
    "Dr. Smith et al. (2019), pp. 12-34, vol. II/IV",
    "ALL CAPS AND CamelCase and snake_case and kebab-case and ver1.2.3rc4",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore.",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis", "a", "A", " a", "a ", " ",
    "  ", "\n", "\t", "\r\n", "",
]  # fmt: skip
_DIGITS = [
    "0", "7", "10", "123", "1234", "12345", "1234567890", "3.14159", "1e-05", "0x1F", "2024-02-29T12:34:56Z",
    "１２３ full width", "٠١٢٣ arabic", "½ ¼ ² ³ ① Ⅻ", "a1b22c333d4444", "+1 (555) 010-9999", "1 2  3   4",
]  # fmt: skip
_SPACES = [
    "a  b", "a   b    c     d", "  leading", "trailing  ", "tab\tand\t\ttabs", "line\nbreak", "two\n\nbreaks",
    "three\n\n\nbreaks", "crlf\r\nand\rcr", " \n \n ", "\n  indented", "x \n y", "a\u00a0b", "a\u3000b",
    "a\u2003b\u2009c", "a\u200bb", "a\u0085b", "a\u2028b\u2029c", "\ufeffbom", "end of line   \n   next",
    "\t \t ", "a\n\tb\n\t\tc", " " * 16, " " * 33, "\n" * 9, "\x0b\x0c", "nul\x00and\x01\x1f\x7f",
]  # fmt: skip
_CODE = [
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "if (a && b || !c) { return a->b::c; }",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "<html><body class='x'>&amp;</body></html>",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10;",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); }\n',
    "C:\\Users\\me\\file.txt /usr/local/bin ../..",
    "x = [i for i in range(10) if i % 2 == 0]\n\n\nprint(x)",
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "a==b!=c<=d>=e:=f=>g->h<-i|>j&&k||l??m",
    "```python\nprint('hi')\n```",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "!!! ??? ... ,,, --- ___ *** ### @@@ ~~~",
    "()[]{}<>''\"\"``",
]
_UNICODE = [
    "café naïve résumé Ångström", "cafe\u0301 nai\u0308ve (combining)", "ﬁ ligature ﬀ", "straße GROẞ",
    "İstanbul ıi", "Привет, мир! Как дела?", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया",
    "สวัสดีชาวโลก", "こんにちは世界。カタカナ、ひらがな、漢字。", "你好，世界！今天天气怎么样？",
    "안녕하세요 세계", "Xin chào thế giới", "😀", "😀😃😄 smile", "👩‍👩‍👧‍👦 family", "👍🏽 tone",
    "🇫🇷🇩🇪 flags", "❤️ heart", "☺︎ text", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "∑∏∫√∞≠≤≥ ∀x∈ℝ", "→←↑↓⇒⇔", "♠♣♥♦ ♪♫", "①②③ ㊙ ㎏",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉", "𐍈 gothic 𓀀 egyptian", "\u202eright to left\u202c", "zero\u200dwidth\u200cjoiners",
    "soft\u00adhyphen", "\ue000 private", "\ufffd replacement", "\uffff", "\U0010ffff", "Z̷̨a̸l̵g̶o̴",
    "'S 'T 'RE 'ſ long s", "x'y 'quoted' ''", "l'été d'hiver aujourd'hui",
]  # fmt: skip
_SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    " <|im_end|> ", "text<|im_end|>text", "<|im_end|><|im_end|>", "<|im_end", "im_end|>", "<|im_end|",
    "<| im_end |>", "<|IM_END|>", "<repo_name>a/b<file_sep>c", "<filename>x.py<gh_stars>10",
    "<jupyter_start><jupyter_text>a<jupyter_code>b", "<empty_output>",
    "<issue_start>t<issue_comment>c<issue_closed>", "<|endoftext|>\n\n<|endoftext|>", "1<|im_start|>2",
    "\n<|im_end|>\n", "<<|im_end|>>", "<reponame>", "</s> <s> <unk> [INST]", "<think>a</think>",
]  # fmt: skip
_MESSAGES = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 12 * 12?<|im_end|>\n<|im_start|>assistant\n",
]

_SENTENCEPIECE = [
    "▁", "a▁b", "▁▁", " ▁ ", "a ▁b", "<0x41>", "<0x0A>é<0xFF>", "x> </b> y></b>>▁</", "<b>bold</b><i>", "</ b>", "<B>",
    "<table><tr><td>1</td></tr></table>", "<h1>T</h1>\n\n<ul>\n<li>a</li>\n</ul>", "<div><span>x</span></div><p>y</p>",
    "</s><s>", "<code>a  b</code>", *(character * count for character in " \n\t" for count in (2, 3, 30, 31, 32, 63, 100)),
    "a" + " " * 40 + "b" + "\n" * 40 + "c" + "\t" * 40, " \n  \t\t \n", "aaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababa",
    "hahahahahahaha", "-" * 77, "=" * 10, "..........", "0000000000", "日本語日本語", "\u2581\u2581x \u2581",
    "<bos>", "<eos>a<pad>", "<unused0><unused6241>", "<start_of_turn>user\nHi  there<end_of_turn>\n<start_of_turn>model\n",
    "text<end_of_turn>text", " <end_of_turn> ", "<end_of_turn", "<mask>", "<unk>",
]  # fmt: skip
"""what is peculiar to SentencePiece, and Gemma's control tokens"""


def texts(*more: str) -> list[str]:
    """Hand-written texts, and seeded mixtures of their pieces."""
    written = [*_PROSE, *_DIGITS, *_SPACES, *_CODE, *_UNICODE, *_SPECIAL, *_MESSAGES, *more]
    random = np.random.Generator(np.random.PCG64(7))
    pieces = [text[a : a + 12] for text in written for a in range(0, len(text), 12)]
    mixed = ["".join(pieces[i] for i in random.integers(0, len(pieces), 5)) for _ in range(45)]
    return list(dict.fromkeys(written + mixed))


def learn_merges(samples: list[str], count: int) -> list[tuple[str, str]]:
    """Byte-pair merges over whole texts: the most frequent pair first, the first seen of equals."""
    alphabet = byte_alphabet()
    words = [[alphabet[byte] for byte in text.encode()] for text in samples]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        left, right = max(pairs, key=lambda pair: pairs[pair])
        merges.append((left, right))
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] == left and word[i + 1] == right:
                    word[i : i + 2] = [left + right]
                i += 1
    return merges


def pre_tokenizer_metadata(pre: str, merges: list[str]) -> dict[str, Any]:
    """A vocabulary of bytes and merge results and one control token."""
    tokens = list(dict.fromkeys([*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]))
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 1) + [3], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def main(smollm2: str, gemma3: str) -> None:
    made_with = {"llama-cpp-python": version("llama-cpp-python")}
    _write_model(GOLDEN / "smollm2_tokens.json", made_with, smollm2, texts())
    _write_model(GOLDEN / "gemma3_tokens.json", made_with, gemma3, texts(*_SENTENCEPIECE))
    _write_pre_tokenizers(GOLDEN / "pre_tokenizers.json", made_with)


def ids(llama: Any, text: str, special: bool) -> list[int]:
    return [int(i) for i in llama.tokenize(text.encode(), add_bos=False, special=special)]


def _write_model(path: Path, made_with: dict[str, str], model: str, samples: list[str]) -> None:
    from llama_cpp import Llama

    llama = Llama(model, vocab_only=True, verbose=False)
    rows: list[Any] = []
    for text in samples:
        row: dict[str, Any] = {"text": text, "plain": ids(llama, text, special=False)}
        special = ids(llama, text, special=True)
        rows.append(row | ({"special": special} if special != row["plain"] else {}))
    _write(path, {"made_with": made_with, "model": Path(model).name}, rows)


def _write_pre_tokenizers(path: Path, made_with: dict[str, str]) -> None:
    from llama_cpp import Llama

    samples = [text for text in texts() if text not in _SPECIAL and "<|" not in text]
    merges = [" ".join(pair) for pair in learn_merges(samples, MERGES)]
    llamas = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_TOKENIZERS:
            file = Path(folder) / f"{pre}.gguf"
            write_gguf(file, pre_tokenizer_metadata(pre, merges), {})
            llamas[pre] = Llama(str(file), vocab_only=True, verbose=False)
    rows = [
        {"text": text} | {pre: ids(llama, text, special=False) for pre, llama in llamas.items()} for text in samples
    ]
    _write(path, {"made_with": made_with, "merges": merges}, rows)


def _write(path: Path, head: dict[str, Any], rows: list[Any]) -> None:
    """One row a line, so that a change can be read."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
