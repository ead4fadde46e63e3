"""What one render of a chat template may use: steps, processor time, memory, and the length of any one text.

A template is a program by a stranger. Nothing in it may run long or grow large without first asking here: each
operation says beforehand what it will cost, so that the sum stays bounded and no helper process is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain

from edge_llm.errors import TemplateError

MAX_SECONDS = 0.5
SECONDS_PER_INPUT = 1e-6
LONGEST_SECONDS = 1.5
MAX_STEPS = 2_000_000
MAX_CALL_DEPTH = 48
MAX_NESTING = 64
MAX_ITEMS = 65_536
MAX_INTEGER_BITS = 1024
BASE_TEXT = 64 << 10
TEXT_PER_INPUT = 8
BASE_MEMORY = 16 << 20
MEMORY_PER_INPUT = 256

_CHECK_EVERY = 4096
_BYTES_PER_CHARACTER = 5  # four for the character itself at worst, one for its origin
_BYTES_PER_ITEM = 64


class Budget:
    """The allowance of one render, given the conversation's size in characters.

    Each method raises `TemplateError` once the allowance is used up.
    """

    def __init__(self, input_characters: int) -> None:
        self._longest = BASE_TEXT + TEXT_PER_INPUT * input_characters
        self._most = MAX_ITEMS + input_characters
        self._memory = BASE_MEMORY + MEMORY_PER_INPUT * input_characters
        self._steps = MAX_STEPS + input_characters
        self._next_check = self._steps
        # Time of this thread alone, so that a busy machine does not fail a sound template.
        seconds = min(MAX_SECONDS + SECONDS_PER_INPUT * input_characters, LONGEST_SECONDS)
        self._deadline = time.thread_time() + seconds
        self.depth = 0

    def step(self, cost: int = 1) -> None:
        """Spend `cost` units of work, about 100 ns each."""
        self._steps -= cost
        if self._steps < self._next_check:
            self._next_check = self._steps - _CHECK_EVERY
            if self._steps < 0:
                raise _exhausted("steps")
            if time.thread_time() > self._deadline:
                raise _exhausted("time")

    def text(self, length: int) -> None:
        """A text of `length` characters is about to be made."""
        if length > self._longest:
            raise _exhausted("text")
        self._spend(length * _BYTES_PER_CHARACTER)
        self.step(1 + (length >> 6))

    def items(self, count: int) -> None:
        """A list or mapping of `count` entries is about to be made."""
        if count > self._most:
            raise _exhausted("list entries")
        self._spend((count + 1) * _BYTES_PER_ITEM)
        self.step(1 + (count >> 3))

    def _spend(self, size: int) -> None:
        self._memory -= size
        if self._memory < 0:
            raise _exhausted("memory")

    def measure(self, value: object, kinds: tuple[type, ...] = (object,)) -> int:
        """Characters that `value` would print, at least. Walks it all: a list may hold another many times.

        What is no list or mapping must be of one of `kinds`.
        """
        total = 0
        stack: list[Iterator[object]] = [iter((value,))]
        while stack:
            for item in stack[-1]:
                self.step()
                total += len(item) if isinstance(item, str) else 24
                if isinstance(item, Mapping):
                    stack.append(chain(item, item.values()))
                elif isinstance(item, list | tuple):
                    stack.append(iter(item))
                elif isinstance(item, kinds):
                    continue
                else:
                    raise refused(f"the text of a {type(item).__name__}")
                break
            else:
                stack.pop()
            if len(stack) > MAX_NESTING:
                raise _exhausted("nesting")
        self.step(total >> 6)
        return total


def refused(what: str) -> TemplateError:
    return TemplateError(
        f"the chat template uses {what}, which is not allowed", hint="use another template for this model"
    )


def _exhausted(what: str) -> TemplateError:
    return TemplateError(
        f"the chat template used up its budget of {what}",
        hint="the template is faulty or hostile, or the conversation is too long",
    )
