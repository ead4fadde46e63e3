from __future__ import annotations

import dataclasses

import pytest
from edge_llm_cli import answer, chat, console

from edge_llm.messages import Message, Role
from edge_llm.sampling.params import SamplingParams
from tests.cli.stub import StubEngine


def test_a_conversation_of_several_turns(invoke, engine) -> None:
    result = invoke("chat", "--plain", "--system", "Be kind.", piped="one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "Hello.\nHello.\n")
    system, hello = Message.system("Be kind."), Message.assistant("Hello.")
    assert [messages for messages, _ in engine.asked] == [
        [system, Message.user("one")],
        [system, Message.user("one"), hello, Message.user("two")],
    ]


@pytest.mark.parametrize("option", [("--server", "http://x"), ("--last",), ("--resume",), ("--tool", "time")])
def test_what_needs_the_full_screen_says_how_to_get_it(invoke, option: tuple[str, ...]) -> None:
    asked, piped = invoke("chat", "--plain", *option), invoke("chat", *option)
    assert (asked.exit_code, piped.exit_code) == (2, 2)
    assert "hint: leave out --plain\n" in asked.stderr
    assert "--plain" not in piped.stderr
    assert "hint: start the chat in a terminal" in piped.stderr


def test_commands(invoke, engine) -> None:
    lines = ["one", "/reset", "two", "/system Be brief.", "three", "/reset", "four", "/system", "five", "/exit", "six"]
    assert invoke("chat", piped="\n".join(lines)).exit_code == 0
    brief = Message.system("Be brief.")
    assert [messages for messages, _ in engine.asked] == [
        [Message.user("one")],
        [Message.user("two")],
        [brief, Message.user("three")],
        [brief, Message.user("four")],
        [Message.user("five")],
    ]


def test_an_unknown_command_is_explained_and_a_path_is_not_one(invoke, engine) -> None:
    result = invoke("chat", piped="/help\n/usr/bin is what?\n")
    assert "/exit leaves" in result.stderr
    assert [messages for messages, _ in engine.asked] == [[Message.user("/usr/bin is what?")]]


def test_a_turn_that_does_not_fit_leaves_the_conversation(invoke, engine) -> None:
    engine.limit = 20
    result = invoke("chat", piped=f"one\n{'x' * 30}\ntwo\n")
    assert (result.exit_code, result.stdout) == (1, "Hello.\nHello.\n"), "into a pipe, the exit code tells it"
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the prompt has 39 tokens")
    assert "/reset" in line
    assert engine.asked[-1][0] == [Message.user("one"), Message.assistant("Hello."), Message.user("two")]


def test_a_turn_that_fails_leaves_the_conversation(invoke, engine) -> None:
    engine.fail = "GenerationError"
    result = invoke("chat", piped="one\ntwo\n")
    assert result.exit_code == 1
    assert result.stderr == "error: it went wrong\nhint: do it right\n" * 2
    assert engine.asked[-1][0] == [Message.user("two")]


def test_parameters_arrive(invoke, engine) -> None:
    assert invoke("chat", "--temperature", "0", "--seed", "4", "--max-tokens", "3", piped="a\n").exit_code == 0
    params = engine.asked[0][1]
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, 4, 3)
    assert invoke("chat", "--temperature", "9", piped="a\n").exit_code == 2


def test_turns_that_fell_out_are_told_once_each_time_it_changes(invoke, engine) -> None:
    engine.seen = 20
    lines = ["one", "two", "six", "ten", "x", "y", "/reset", "z"]  # 5, 14, 23, 32, 39, 46 and 3 characters
    result = invoke("chat", "--system", "Hi", piped="\n".join(lines))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "the conversation is longer than the context of 64 tokens",
        "the model no longer sees turn 1 of 4",
        "the model no longer sees turns 1 to 2 of 6",
    ]


def test_a_stopped_answer_tells_nothing_of_what_fell_out() -> None:
    """It may have been stopped while the conversation was read, when less had fallen out."""
    engine = StubEngine(["a"], seen=1)
    conversation = chat.Conversation(engine, SamplingParams(), None)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "note", told.append)
        patch.setattr(console, "dim_note", told.append)
        patch.setattr(answer, "show", lambda handle: dataclasses.replace(answer.read(handle), interrupted=True))
        conversation._say("long enough")
    assert told == ["stopped; the answer is kept as far as it came"]


def test_a_chat_slides_unless_told_otherwise(invoke, engine) -> None:
    invoke("chat", piped="a\n")
    assert (engine.options.context_policy, engine.options.usual_policy) == (None, "slide")
    invoke("chat", "--context-policy", "error", piped="a\n")
    assert engine.options.context_policy == "error"


def test_no_input_is_no_turn(invoke, engine) -> None:
    assert invoke("chat", piped="").exit_code == 0
    assert engine.asked == []


def test_answers_are_replayed_as_the_engine_says(invoke, engine) -> None:
    """So that a continued chat reads nothing but the new turn."""
    engine.reply = lambda text, finished: Message(Role.ASSISTANT, text, token_ids=(1, 2), tokenizer_digest="d")
    invoke("chat", piped="one\ntwo\n")
    assert [message.token_ids for message in engine.asked[1][0]] == [None, (1, 2), None]
