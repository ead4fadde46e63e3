"""Conversation: a tree of turns and the path through it that is shown. Pure values and rules, no storage.

Each turn answers or follows its parent. Editing a question or asking again for an answer adds a sibling; what was there stays,
one step to the side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from edge_llm.messages import Finished, FinishReason, Message, Role, TokenInfo, ToolCall
from edge_llm.text.terminal import clean_line

TITLE_LENGTH = 48


class State(StrEnum):
    """How a turn came to its end."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    CUT = "cut"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an answer besides its text; durations in seconds."""

    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    seed: int | None = None
    note: str = ""
    """what else is to be said: the text of an error, which turns fell out"""

    @classmethod
    def of(cls, finished: Finished, model: str) -> Facts:
        usage, timings = finished.usage, finished.timings
        return cls(
            model=model,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            ttft_s=timings.ttft_s,
            tokens_per_s=timings.decode_tokens_per_s,
            seed=finished.seed,
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file that goes with a question."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. `id` is unique in it; `parent` None: the first."""

    id: int
    parent: int | None
    role: Role
    content: str
    state: State = State.COMPLETE
    reasoning: str = ""
    attachments: tuple[Attachment, ...] = ()
    facts: Facts = field(default_factory=Facts)
    token_ids: tuple[int, ...] | None = None
    """the answer's own tokens, so that it need not be read again"""
    tokenizer_digest: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """what an answer asks to run"""
    tool_call_id: str | None = None
    """of which call a tool's turn is the result, and below whose"""
    tool_name: str | None = None
    tokens: tuple[TokenInfo, ...] = field(default=(), compare=False, repr=False)
    """each token with its alternatives; never stored"""
    created: float = field(default_factory=time.time)

    def message(self) -> Message:
        """What the model is told."""
        files = "".join(f"File {item.name}:\n```\n{item.text}\n```\n\n" for item in self.attachments)
        return Message(
            self.role,
            files + self.content,
            name=self.tool_name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
            token_ids=self.token_ids,
            tokenizer_digest=self.tokenizer_digest,
        )


def state_of(finished: Finished) -> State:
    match finished.reason:
        case FinishReason.CANCELLED:
            return State.STOPPED
        case FinishReason.LENGTH:
            return State.CUT
    return State.COMPLETE


@dataclass
class Conversation:
    """The turns by id, and which child of each is shown. `id` is the store's; None until it is stored."""

    id: int | None = None
    title: str = ""
    system: str | None = None
    model: str = ""
    parameters: dict[str, float | int] = field(default_factory=dict)
    """what this chat sets of SamplingParams"""
    tags: tuple[str, ...] = ()
    pinned: bool = False
    turns: dict[int, Turn] = field(default_factory=dict)
    shown: dict[int | None, int] = field(default_factory=dict)
    """of each parent, the child on the path"""

    def path(self) -> list[Turn]:
        """The turns that are shown, first to last."""
        return list(self._walk())

    def _walk(self) -> Iterator[Turn]:
        at: int | None = None
        while (child := self.shown.get(at)) is not None:
            yield self.turns[child]
            at = child

    @property
    def end(self) -> int | None:
        """Id of the last turn that is shown."""
        path = self.path()
        return path[-1].id if path else None

    def messages(self, until: int | None) -> list[Message]:
        """What the model is told of the path from the beginning to the turn `until`, that one included."""
        said = [] if self.system is None else [Message.system(self.system)]
        turns = []
        while until is not None:
            turns.append(self.turns[until])
            until = turns[-1].parent
        return [*said, *(turn.message() for turn in reversed(turns))]

    def forgotten_note(self, finished: Finished, context: int | None) -> str:
        """Which questions of the path the model no longer sees, in words; nothing while it sees all."""
        if not finished.forgotten_tokens:
            return ""
        first = 0 if self.system is None else 1  # the system message is not a turn
        questions = [index for index, turn in enumerate(self.path(), first) if turn.role is Role.USER]
        gone = [number for number, index in enumerate(questions, 1) if {index, index + 1} <= set(finished.forgotten)]
        if not gone:
            return f"the conversation is longer than the context of {context} tokens"
        numbers = f"turn {gone[0]}" if len(gone) == 1 else f"turns {gone[0]} to {gone[-1]}"
        return f"the model no longer sees {numbers} of {len(questions)}"

    def siblings(self, turn: int) -> list[int]:
        """Ids of the turns in the place of `turn`, oldest first."""
        parent = self.turns[turn].parent
        return sorted(other.id for other in self.turns.values() if other.parent == parent)

    def add(self, parent: int | None, role: Role, content: str, **more: object) -> Turn:
        """A new turn after `parent`, shown from now on."""
        turn = Turn(max(self.turns, default=0) + 1, parent, role, whole(content), **more)  # type: ignore[arg-type]
        self.turns[turn.id] = turn
        self.shown[parent] = turn.id
        if not self.title and role is Role.USER:
            self.title = title_of(content)
        return turn

    def change(self, turn: int, **changes: object) -> Turn:
        """The turn with other values."""
        if "content" in changes:
            changes["content"] = whole(str(changes["content"]))
        changed = self.turns[turn] = replace(self.turns[turn], **changes)  # type: ignore[arg-type]
        return changed

    def step(self, turn: int, by: int) -> bool:
        """Show the sibling `by` places to the right of `turn`; False if there is none."""
        siblings = self.siblings(turn)
        place = siblings.index(turn) + by
        if not 0 <= place < len(siblings):
            return False
        self.shown[self.turns[turn].parent] = siblings[place]
        return True

    def remove(self, turn: int) -> list[int]:
        """Delete a turn and all that follows from it; a sibling is shown in its place. Gives the ids that are gone."""
        siblings, parent = self.siblings(turn), self.turns[turn].parent
        gone = [turn]
        for one in gone:
            gone += [other.id for other in self.turns.values() if other.parent == one]
        for one in gone:
            del self.turns[one]
            self.shown.pop(one, None)
        place = siblings.index(turn)
        left = siblings[:place] + siblings[place + 1 :]
        if left:
            self.shown[parent] = left[min(place, len(left) - 1)]
        else:
            self.shown.pop(parent, None)
        return gone


def whole(text: str) -> str:
    """`text` without halves of characters, which can be neither stored nor tokenised."""
    return text.encode("utf-8", "replace").decode("utf-8")


def title_of(text: str) -> str:
    """The first words of a question."""
    words = " ".join(clean_line(" ".join(text[:400].split())).split())
    if len(words) <= TITLE_LENGTH:
        return words
    cut = words[:TITLE_LENGTH]
    return (cut.rsplit(" ", 1)[0] if " " in cut else cut) + "…"
