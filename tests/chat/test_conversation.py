from __future__ import annotations

from edge_llm_chat.conversation import Conversation, title_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_llm.messages import Message, Role
from tests.chat.fakes import finished


def test_editing_and_asking_again_add_siblings() -> None:
    made = Conversation(system="Be kind.")
    question = made.add(None, Role.USER, "one")
    made.add(question.id, Role.ASSISTANT, "a")
    again = made.add(question.id, Role.ASSISTANT, "b")
    assert [turn.content for turn in made.path()] == ["one", "b"]
    assert made.siblings(again.id) == [2, 3]
    assert made.step(again.id, -1)
    assert not made.step(2, -1)
    edited = made.add(None, Role.USER, "two")
    assert [turn.content for turn in made.path()] == ["two"]
    assert made.step(edited.id, -1)
    assert [turn.content for turn in made.path()] == ["one", "a"], "as it was left"
    assert made.messages(2) == [Message.system("Be kind."), Message.user("one"), Message.assistant("a")]


def test_the_title_is_the_first_words() -> None:
    made = Conversation()
    made.add(None, Role.USER, "  What is\nthe   capital of France?\n" + "x" * 100_000)
    assert made.title == "What is the capital of France?…"
    assert title_of("a" * 100) == "a" * 48 + "…"
    assert "\x1b" not in title_of("a\x1b[2J")


def test_which_turns_fell_out() -> None:
    made = Conversation()
    for text in ("one", "a", "two", "b", "three", "c"):
        made.add(made.end, Role.ASSISTANT if len(text) == 1 else Role.USER, text)
    assert made.forgotten_note(finished(), 64) == ""
    assert (
        made.forgotten_note(finished(forgotten_tokens=3), 64)
        == "the conversation is longer than the context of 64 tokens"
    )
    assert made.forgotten_note(finished(forgotten=(0, 1), forgotten_tokens=3), 64).endswith("sees turn 1 of 3")
    made.system = "Be kind."
    note = made.forgotten_note(finished(forgotten=(1, 2, 3, 4), forgotten_tokens=3), 64)
    assert note == "the model no longer sees turns 1 to 2 of 3"


class Tree(RuleBasedStateMachine):
    """Whatever is added, stepped through and removed: the path is one way from the root, and no turn is an orphan."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Conversation()

    @rule(where=st.integers(0, 30))
    def add(self, where: int) -> None:
        parents = [None, *self.made.turns]
        turn = self.made.add(parents[where % len(parents)], Role.USER, "x")
        assert self.made.turns[turn.id] is turn

    @precondition(lambda self: self.made.turns)
    @rule(where=st.integers(0, 30), by=st.sampled_from([-1, 1]))
    def step(self, where: int, by: int) -> None:
        turn = list(self.made.turns)[where % len(self.made.turns)]
        before = dict(self.made.shown)
        if not self.made.step(turn, by):
            assert self.made.shown == before

    @precondition(lambda self: self.made.turns)
    @rule(where=st.integers(0, 30))
    def remove(self, where: int) -> None:
        turn = list(self.made.turns)[where % len(self.made.turns)]
        gone = self.made.remove(turn)
        assert turn in gone
        assert not set(gone) & set(self.made.turns)

    @invariant()
    def sound(self) -> None:
        parent = None
        for turn in self.made.path():
            assert turn.parent == parent
            parent = turn.id
        for turn in self.made.turns.values():
            assert turn.parent is None or turn.parent in self.made.turns
            assert self.made.shown[turn.parent] in self.made.siblings(turn.id)
        assert set(self.made.shown.values()) <= set(self.made.turns)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=30, stateful_step_count=30)
