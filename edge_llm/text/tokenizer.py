"""Text to token ids and back. Only what a template wrote can become a control token; what anybody said cannot.

There is one encoder, and it knows no added tokens but those that are text themselves (`AddedToken.is_content`). The
others are found first, in the text whose origin is the template; all text between them, scaffold and content together,
goes through the encoder as one piece, so that ids are those of `transformers` for any content that does not hold the
text of a token that steers.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edge_llm.errors import ModelFormatError, ParameterError, quoted
from edge_llm.messages import Message
from edge_llm.text.added_tokens import MAX_ID, AddedToken, TextFinder, added_tokens
from edge_llm.text.detokenizer import Detokenizer
from edge_llm.text.places import message_places, token_spans
from edge_llm.text.prompt import SCAFFOLD, RenderedPrompt
from edge_llm.text.tokenizer_parts import build_encoder, bytes_of_tokens, vocabulary

MAX_FILE_BYTES = 64 << 20
MAX_TEXT_CHARACTERS = 8 << 20

_WORD = re.compile(r"\w")
_KEPT_TOKENS = 4096
"""tokens whose bytes are kept once they were asked for: those of 262,144 would take 30 MB in time"""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a prompt whose ids are known: a control token, or an answer replayed as it was sampled."""

    start: int
    end: int
    ids: tuple[int, ...]


class Tokenizer:
    """Made by `from_file` or `from_json`. May be used by several threads at once."""

    def __init__(self, data: bytes) -> None:
        self.digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        """BLAKE2b-256 of the file, in hex"""
        document = _parse(data)
        added = added_tokens(document)
        self._added = {token.text: token for token in added if not token.is_content}
        ids = {token.id: token.text for token in added}
        vocab = vocabulary(document)
        used = set(vocab.values())
        if not used or min(used) < 0 or max((*used, *ids)) > MAX_ID or len(used) < len(vocab):
            raise ModelFormatError("tokenizer.json has ids out of range, or used twice")
        self.vocab_size = 1 + max((*used, *ids))
        """one more than the highest id"""
        texts = [""] * self.vocab_size
        for text, i in vocab.items():
            texts[i] = text
        # one string in place of many: a seventh of the memory
        self._all_texts = "".join(texts)
        self._text_ends = array("I", accumulate(map(len, texts), initial=0))
        self.added_tokens: Mapping[str, int] = MappingProxyType({text: t.id for text, t in self._added.items()})
        """ids by text of the tokens that are control, markers included that are not `special`"""
        self.special_ids = frozenset(token.id for token in added if token.special)
        """ids that are never shown"""
        self._control_ids = frozenset(token.id for token in self._added.values())
        self._known_bytes = {i: text.encode("utf-8", "replace") for i, text in ids.items()}
        self._most_known = len(ids) + _KEPT_TOKENS
        self._bytes_of_text = bytes_of_tokens(document)
        self._finder = TextFinder(self._added)
        self._encode = build_encoder(
            document,
            vocab,
            gone={text for i in self._control_ids if (text := texts[i])},
            whole={token.text: token.id for token in added if token.is_content},
        )

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Raises `ModelFormatError` for a file that is not sound, `UnsupportedModelError` for a kind we do not run."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ModelFormatError(
                f"{path.name} cannot be read: {error.strerror}", hint="import the model again"
            ) from None
        return cls.from_json(data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Tokenizer:
        """Raises as `from_file`."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if len(data) > MAX_FILE_BYTES:
            raise ModelFormatError(f"tokenizer.json is larger than {MAX_FILE_BYTES} bytes")
        try:
            return cls(data)
        except (ModelFormatError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is no Exception
            raise ModelFormatError(
                f"tokenizer.json is not sound: {quoted(str(error))}", hint="import the model again"
            ) from None

    # -- text to ids

    def encode_content(self, text: str, *, begins: bool = True) -> list[int]:
        """Ids of what somebody said: never a control token. (Bytes for which the model has no token are left out.)

        `begins` is False where the text goes on from other text: some tokenizers put a space before a beginning.

        Raises `ParameterError` for a text that is too long.
        """
        if not text:
            return []
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ParameterError(f"a text may have {MAX_TEXT_CHARACTERS} characters, not {len(text)}")
        if not text.isascii():  # halves of a surrogate pair are joined, lone ones become U+FFFD
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._encode(text, begins=begins)

    def estimate_beyond(self, text: str, most: int) -> int | None:
        """About how many tokens a long text has whose beginning alone has more than `most`; None if that is not so."""
        part = text[: 8 * most]
        if len(text) < 2 * len(part):
            return None
        tokens = len(self.encode_content(part))
        return tokens * len(text) // len(part) if tokens > most else None

    def encode_scaffold(self, text: str) -> list[int]:
        """Ids of what we wrote ourselves: added tokens are recognised."""
        return self.encode_prompt(RenderedPrompt(text, SCAFFOLD * len(text)))

    def encode_raw(self, text: str, bos: int | None = None) -> list[int]:
        """Ids of a text to be continued, as content, after the first token `bos` if the model wants one."""
        ids = self.encode_content(text)
        return ids if bos is None else [bos, *ids]

    def encode_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """Ids of a rendered prompt. Added tokens of its scaffold are control; the same text in content is plain text.

        An answer that carries its ids is replayed as it was sampled if they are of this tokenizer and give exactly the
        text in the prompt; else its text is encoded.
        """
        return [token_id for part in self._parts(prompt) for token_id in part.ids]

    def encode_conversation(self, prompt: RenderedPrompt) -> tuple[list[int], tuple[range, ...]]:
        """As `encode_prompt`, and for each message where its tokens lie (see `message_places`)."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for part in self._parts(prompt):
            ids += part.ids
            spans += token_spans(prompt.text, part.start, part.end, [self.token_bytes(i) for i in part.ids])
        return ids, message_places(prompt, spans)

    def _parts(self, prompt: RenderedPrompt) -> Iterable[_Piece]:
        """The whole prompt: its pieces, and the text between them encoded."""
        text = prompt.text
        done, begins = 0, True
        for piece in self._pieces(prompt):
            yield _Piece(done, piece.start, tuple(self.encode_content(text[done : piece.start], begins=begins)))
            yield piece
            done, begins = piece.end, self._control_ids.issuperset(piece.ids)  # not after an answer
        yield _Piece(done, len(text), tuple(self.encode_content(text[done:], begins=begins)))

    def _pieces(self, prompt: RenderedPrompt) -> Iterable[_Piece]:
        """In order, without overlap."""
        done = 0
        for start, end, origin in prompt.runs():
            if origin == SCAFFOLD:
                for first, last in self._finder.spans(prompt.text, start, end):
                    token = self._added[prompt.text[first:last]]
                    if token.single_word and _inside_word(prompt.text, first, last):
                        continue
                    piece = _widened(prompt.text, max(done, first), last, token, done)
                    yield piece
                    done = piece.end
            elif (index := prompt.message_of(origin)) is not None:
                message = prompt.messages[index]
                ids = self._replay(message) if prompt.text[start:end] == message.content and start >= done else None
                if ids is not None:
                    yield _Piece(start, end, ids)
                    done = end

    def _replay(self, message: Message) -> tuple[int, ...] | None:
        """The ids that say exactly the message's content, without the end token after it; None if they do not."""
        ids = message.token_ids
        if ids is None or message.tokenizer_digest != self.digest or not all(0 <= i < self.vocab_size for i in ids):
            return None
        while ids and ids[-1] in self.special_ids:
            ids = ids[:-1]
        same = b"".join(map(self.token_bytes, ids)) == message.content.encode("utf-8", "replace")
        return ids if same and self._control_ids.isdisjoint(ids) else None

    # -- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, maybe half a character; of an added token its text, of an unknown id none."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = b""
            if 0 <= token_id < self.vocab_size:
                start, end = self._text_ends[token_id : token_id + 2]
                known = self._bytes_of_text(self._all_texts[start:end])
                if len(self._known_bytes) < self._most_known:
                    self._known_bytes[token_id] = known
        return known

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        silent = self.special_ids if skip_special else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in silent).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special: bool = True, shown: Set[int] = frozenset()) -> Detokenizer:
        """A new incremental decoder, whose deltas joined are `decode` of all; `shown` are special ids that it shows anyway."""
        return Detokenizer(self.token_bytes, self.special_ids - shown if skip_special else ())


def _parse(data: bytes) -> dict[str, Any]:
    document = json.loads(data.decode("utf-8"))
    if not isinstance(document, dict):
        raise ModelFormatError("tokenizer.json is not an object")
    return document


def _inside_word(text: str, start: int, end: int) -> bool:
    return bool(_WORD.match(text[start - 1 : start]) or _WORD.match(text[end : end + 1]))


def _widened(text: str, start: int, end: int, token: AddedToken, done: int) -> _Piece:
    """The piece of a token with the white space that it takes along."""
    if token.lstrip:
        start = done + len(text[done:start].rstrip())
    if token.rstrip:
        while end < len(text) and text[end].isspace():
            end += 1
    return _Piece(start, end, (token.id,))
