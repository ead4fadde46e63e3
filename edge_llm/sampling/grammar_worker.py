"""The process in which a grammar is compiled first: what takes too long or too much memory there dies alone.

Once it is ready it writes an empty line. Then it reads lines of JSON on stdin, each a grammar in llguidance's own form, and
answers each with a line: null, or what is wrong with it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

MEMORY_LIMIT = 1 << 30
"""bytes of address space"""


class _Bytes:
    """A vocabulary of single bytes: enough to find out whether a grammar allows any text."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # not on every system

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    print(flush=True)  # noqa: T201 - ready
    for line in sys.stdin:
        print(json.dumps(_fault(tokenizer, json.loads(line))), flush=True)  # noqa: T201 - the protocol


def _fault(tokenizer: Any, grammar: str) -> str | None:
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if wrong:
        return messages[0] if messages else "it is not sound"
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    matcher.compute_bitmask()
    error = matcher.get_error().partition("<state>")[0]
    return "it allows no text at all" if error.startswith("NoExtension") else error or None


if __name__ == "__main__":
    main()
