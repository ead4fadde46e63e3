from __future__ import annotations

from edge_llm.messages import Message


def test_a_conversation_of_several_turns(invoke, engine) -> None:
    result = invoke("chat", "--plain", "--system", "Be kind.", piped="one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "Hello.\nHello.\n")
    system, hello = Message.system("Be kind."), Message.assistant("Hello.")
    assert [messages for messages, _ in engine.asked] == [
        [system, Message.user("one")],
        [system, Message.user("one"), hello, Message.user("two")],
    ]


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
    assert (result.exit_code, result.stdout) == (0, "Hello.\nHello.\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the prompt has 39 tokens")
    assert "/reset" in line
    assert engine.asked[-1][0] == [Message.user("one"), Message.assistant("Hello."), Message.user("two")]


def test_a_turn_that_fails_leaves_the_conversation(invoke, engine) -> None:
    engine.fail = "GenerationError"
    result = invoke("chat", piped="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr == "error: it went wrong\nhint: do it right\n" * 2
    assert engine.asked[-1][0] == [Message.user("two")]


def test_parameters_arrive(invoke, engine) -> None:
    assert invoke("chat", "--temperature", "0", "--seed", "4", "--max-tokens", "3", piped="a\n").exit_code == 0
    params = engine.asked[0][1]
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, 4, 3)
    assert invoke("chat", "--temperature", "9", piped="a\n").exit_code == 2


def test_no_input_is_no_turn(invoke, engine) -> None:
    assert invoke("chat", piped="").exit_code == 0
    assert engine.asked == []
