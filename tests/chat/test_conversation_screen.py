from __future__ import annotations

import asyncio

import pytest
from edge_llm_chat.app import ChatApp
from edge_llm_chat.backend import Ask
from edge_llm_chat.conversation import State
from edge_llm_chat.store import Store
from edge_llm_chat.widgets.status import Machine, line
from textual import events
from textual.geometry import Region
from textual.screen import Screen
from textual.selection import Selection

from edge_llm.errors import EdgeLLMError, GenerationError, ModelFormatError, ModelNotFoundError
from edge_llm.messages import Message, PromptProgress, Role, TextDelta
from tests.chat.conftest import app_of, chat, say, screen_of, settle, shown, texts, wait_until
from tests.chat.fakes import DIGEST, FakeAnswering, FakeBackend, answer_of, finished


def run(coroutine) -> None:
    asyncio.run(coroutine)


def test_a_question_is_answered() -> None:
    async def body() -> None:
        backend = FakeBackend("Hello **you**.", "Fine.")
        async with chat(backend, (80, 24)) as pilot:
            await say(pilot, "Hi there")
            assert texts(pilot) == ["Hi there", "Hello **you**."]
            assert "Hello you." in shown(pilot)
            await say(pilot, "And?")
        first, second = (ask.messages for ask in backend.asked)
        assert first == (Message.user("Hi there"),)
        # the answer goes back as its own tokens
        answer = Message(Role.ASSISTANT, "Hello **you**.", token_ids=(0, 1), tokenizer_digest=DIGEST)
        assert second == (Message.user("Hi there"), answer, Message.user("And?"))

    run(body())


def test_typing_and_asking_work_while_the_model_loads() -> None:
    async def body() -> None:
        loading = asyncio.Event()
        backend = FakeBackend("Hello.", loading=loading)
        async with chat(backend, (80, 24)) as pilot:
            await pilot.press(*"Hi", "enter")
            assert "Hi" in shown(pilot)
            assert "loading" in shown(pilot)
            assert not backend.asked
            loading.set()
            await settle(pilot)
            assert texts(pilot) == ["Hi", "Hello."]

    run(body())


def test_a_question_that_waits_can_be_taken_back() -> None:
    async def body() -> None:
        loading = asyncio.Event()
        backend = FakeBackend("Hello.", loading=loading)
        async with chat(backend) as pilot:
            await pilot.press(*"Hi", "enter", "escape")
            loading.set()
            await settle(pilot)
            assert not backend.asked

    run(body())


def test_a_model_that_cannot_be_loaded_is_said() -> None:
    async def body() -> None:
        error = ModelNotFoundError("no model is called 'x'", hint="did you mean y?")
        async with chat(FakeBackend(load=lambda progress: error), (100, 24)) as pilot:
            await wait_until(lambda: "did you mean y?" in shown(pilot), pilot)
            assert "no model is called 'x'" in shown(pilot)

    run(body())


def test_keys_of_the_composer() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with chat(backend) as pilot:
            await pilot.press(*"one", "shift+enter", *"two", "ctrl+j", *"three", "enter")
            await settle(pilot)
            assert backend.asked[0].messages[-1].content == "one\ntwo\nthree"
            await pilot.press("enter", "space", "enter")
            await settle(pilot)
            assert len(backend.asked) == 1, "nothing to send"

    run(body())


def test_keys_in_one_burst_stay_in_order() -> None:
    """A terminal may deliver a line and its Enter at once (tmux, a fast typist over a slow line)."""

    async def body() -> None:
        backend = FakeBackend()
        async with chat(backend) as pilot:
            await settle(pilot)
            for key in "hello":
                pilot.app.post_message(events.Key(key, key))
            pilot.app.post_message(events.Key("enter", "\r"))
            await wait_until(lambda: backend.asked, pilot)
            assert backend.asked[0].messages[-1].content == "hello"

    run(body())


@pytest.mark.parametrize("said", [0, 3])
def test_escape_stops_at_once_and_keeps_what_was_said(said: int) -> None:
    """B58: during the prompt, and in the middle of the answer; a second press changes nothing."""

    async def body() -> None:
        script = [PromptProgress(32, 512), *answer_of("one two three four")[1:]]
        backend = FakeBackend(script, held=True)
        async with chat(backend, (80, 24)) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            backend.answers[0].step(1 + said)
            await wait_until(lambda: screen_of(pilot).answer.progress is not None, pilot)
            await pilot.press("escape", "escape")
            await settle(pilot)
            assert backend.answers[0].cancelled >= 1
            turn = screen_of(pilot).transcript.views[-1].turn
            assert (turn.content, turn.state) == ("one two three" if said else "", State.STOPPED)
            assert "stopped" in shown(pilot)
            assert screen_of(pilot).composer.has_focus

    run(body())


def test_the_prompt_is_seen_being_read() -> None:
    async def body() -> None:
        backend = FakeBackend([PromptProgress(256, 1024), *answer_of("Yes.")], held=True)
        async with chat(backend, (80, 24)) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            backend.answers[0].step()
            await wait_until(lambda: "reading 256 of 1,024 tokens" in shown(pilot), pilot)
            backend.answers[0].release()
            await settle(pilot)
            assert "reading" not in shown(pilot)

    run(body())


def test_an_error_before_the_first_word_leaves_the_question() -> None:
    async def body() -> None:
        backend = FakeBackend([GenerationError("it broke", hint="mend it")], "Hello.")
        async with chat(backend, (80, 24)) as pilot:
            await say(pilot, "Hi")
            assert texts(pilot) == ["Hi"]
            assert "it broke" in shown(pilot)

    run(body())


def test_an_error_after_some_words_keeps_them() -> None:
    async def body() -> None:
        backend = FakeBackend([TextDelta("half an"), GenerationError("it broke")])
        async with chat(backend, (80, 24)) as pilot:
            await say(pilot, "Hi")
            assert texts(pilot) == ["Hi", "half an"]
            assert "failed · it broke" in shown(pilot)

    run(body())


def test_leaving_ends_with_code_0_also_while_an_answer_comes() -> None:
    async def body() -> None:
        backend = FakeBackend(held=True)
        app = app_of(backend)
        async with chat(app) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            await pilot.press("ctrl+q")
        assert app.return_code == 0
        assert backend.closed

    run(body())


def test_control_c_copies_or_hints_and_never_leaves() -> None:
    async def body() -> None:
        app = app_of(FakeBackend())
        async with chat(app, (100, 24)) as pilot:
            await settle(pilot)
            await pilot.press("ctrl+c")
            await wait_until(lambda: "Ctrl+Q leaves" in shown(pilot), pilot)
            await pilot.press(*"copy me")
            screen_of(pilot).composer.select_all()
            await pilot.press("ctrl+c")
            await wait_until(lambda: app.clipboard == "copy me", pilot)
            assert app.is_running

    run(body())


def test_a_long_paste_arrives_whole() -> None:
    """B55: 50 KB in 10,000 lines, with emoji and code, as one message."""
    text = "".join(f"x{i} = 🗼\n" for i in range(10_000)).rstrip("\n")
    assert len(text.encode()) > 50_000

    async def body() -> None:
        backend = FakeBackend()
        async with chat(backend, (80, 24)) as pilot:
            await settle(pilot)
            pilot.app.post_message(events.Paste(text))
            await wait_until(lambda: len(screen_of(pilot).composer.text) == len(text), pilot)
            await pilot.press("enter")
            await settle(pilot)
            assert backend.asked[0].messages[-1].content == text
            assert "9,989 more lines" in shown(pilot)

    run(body())


def test_the_reader_is_followed_only_at_the_end() -> None:
    async def body() -> None:
        backend = FakeBackend(answer_of([f"line {i}\n\n" for i in range(200)]), held=True)
        async with chat(backend, (80, 24)) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            transcript = screen_of(pilot).transcript
            backend.answers[0].step(60)
            await wait_until(lambda: "line 58" in shown(pilot), pilot)
            await pilot.press("pageup")
            await pilot.pause()
            at = transcript.scroll_y
            backend.answers[0].step(60)
            await wait_until(lambda: transcript.max_scroll_y > at + 100, pilot)
            assert transcript.scroll_y == at
            await pilot.press("pagedown")
            while transcript.scroll_y < transcript.max_scroll_y:
                await pilot.press("pagedown")
            await wait_until(lambda: transcript.following, pilot)
            backend.answers[0].release()
            await settle(pilot)
            assert "line 199" in shown(pilot)

    run(body())


def test_a_window_that_changes_while_an_answer_comes() -> None:
    async def body() -> None:
        backend = FakeBackend(answer_of(["word " * 30] * 40), held=True)
        async with chat(backend, (100, 30)) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            for size in ((40, 12), (120, 40), (20, 8), (80, 24)):
                backend.answers[0].step(8)
                await pilot.resize_terminal(*size)
                await wait_until(lambda size=size: pilot.app.screen._compositor.size == size, pilot)
                assert all(len(line) <= size[0] for line in shown(pilot).splitlines())
            backend.answers[0].release()
            await settle(pilot)
            assert texts(pilot)[-1] == "word " * 30 * 40
            assert screen_of(pilot).transcript.following

    run(body())


def test_the_status_line_tells_the_turn() -> None:
    async def body() -> None:
        async with chat(FakeBackend(), (100, 24)) as pilot:
            await say(pilot, "Hi")
            (line,) = [line for line in shown(pilot).splitlines() if "fake-1b" in line]
            for part in ("ctx 1% of 8.2k", "kv 4.8 MB", "hit 75%", "ttft 41 ms", "96 tok/s"):
                assert part in line

    run(body())


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (90, "● smollm2-135m-instruct · ctx 4% of 8.2k · kv 4.8 MB · hit 5% · ttft 1.7 s · 118 tok/s"),
        (80, "● smollm2-135m-instruct · ctx 4% of 8.2k · hit 5% · ttft 1.7 s · 118 tok/s"),
        (60, "● smollm2-135m-instruct · ctx 4% of 8.2k · 118 tok/s"),
        (50, "● smollm2-135m-instruct · ctx 4% · 118 tok/s"),
        (40, "● smollm2-135m-instruct · ctx 4%"),
        (20, "● smollm2-135m-in…"),
    ],
)
def test_the_status_line_keeps_what_is_needed_most(width: int, shown: str) -> None:
    machine = Machine(
        *("smollm2-135m-instruct", "ready"),
        **{
            "context_used": 328,
            "context": 8192,
            "kv_bytes": 4_800_000,
            "cached": 0.05,
            "ttft_s": 1.7,
            "tokens_per_s": 118.0,
        },
    )
    assert line(machine, width).plain == shown


def test_turns_that_fell_out_are_named() -> None:
    async def body() -> None:
        script = [TextDelta("Yes."), finished(forgotten=(0, 1), forgotten_tokens=70)]
        async with chat(FakeBackend("One.", script), (80, 24)) as pilot:
            await say(pilot, "first")
            await say(pilot, "second")
            assert "the model no longer sees turn 1 of 2" in shown(pilot)

    run(body())


def test_an_answer_that_is_cut_by_leaving_is_kept() -> None:
    store = Store(None)

    async def body() -> None:
        backend = FakeBackend(answer_of("one two three"), held=True)
        async with chat(app_of(backend, store)) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            backend.answers[0].step(3)
            await wait_until(lambda: screen_of(pilot).answer.text, pilot)
            await pilot.pause()
            await pilot.press("ctrl+q")

    run(body())
    turn = store.load(store.last()).path()[-1]
    assert (turn.content, turn.state) == ("one two", State.STOPPED)


def test_faults_end_an_answer_or_a_loading_and_not_the_chat() -> None:
    async def body() -> None:
        class Faulty(FakeBackend):
            async def answer(self, ask: Ask) -> FakeAnswering:
                raise ZeroDivisionError("a fault")

        async with chat(Faulty(), (100, 24)) as pilot:
            await say(pilot, "Hi")
            assert "the answer failed: ZeroDivisionError" in shown(pilot)
        raising = FakeBackend(load=lambda progress: 1 / 0)
        async with chat(raising, (100, 24)) as pilot:
            await wait_until(lambda: "cannot be loaded: ZeroDivisionError" in shown(pilot), pilot)

    run(body())


def test_a_history_that_cannot_be_written_is_said_and_the_chat_goes_on() -> None:
    store = Store(None)

    async def body() -> None:
        async with chat(app_of(FakeBackend("a", "b"), store), (100, 24)) as pilot:
            await say(pilot, "one")
            store.close()
            await say(pilot, "two")
            assert texts(pilot) == ["one", "a", "two", "b"]
            assert "cannot be used" in shown(pilot)
            await pilot.press("shift+tab", "r")
            await settle(pilot)
            await pilot.press("left", "ctrl+o")
            await pilot.pause()
            await pilot.press("escape")

    run(body())


def test_a_model_that_cannot_be_loaded_is_said_in_the_conversation_and_the_question_waits_for_another() -> None:
    def load(_progress: object) -> EdgeLLMError:
        return ModelFormatError("manifest.json has format version 1", hint="import the model again")

    made: list[FakeBackend] = []

    def connect(name: str) -> FakeBackend:
        made.append(FakeBackend("Here I am.", name=name))
        return made[-1]

    async def body() -> None:
        app = ChatApp(FakeBackend(load=load), Store(None), connect=connect)
        async with chat(app, (100, 30)) as pilot:
            screen = screen_of(pilot)
            await wait_until(lambda: "import the model again" in shown(pilot), pilot)
            for question in ("Hello?", "Anybody?"):
                screen.composer.insert(question)
                await pilot.press("enter")
                await wait_until(lambda question=question: question in texts(pilot), pilot)
                await pilot.pause()
                pilot.app.clear_notifications()
                await wait_until(lambda: not pilot.app.screen.query("Toast"), pilot)
                said = shown(pilot)
                assert "✕ manifest.json has format version 1" in said
                assert said.index(question) < said.index("✕ manifest") < said.index("import the model again")
            screen.composer.insert("/model other-2b")
            await pilot.press("enter")
            await wait_until(lambda: made and made[0].asked, pilot)
            await settle(pilot)
            assert texts(pilot) == ["Hello?", "Anybody?", "Here I am."]
            assert "format version" not in shown(pilot)

    run(body())


def test_what_was_selected_looks_as_before_when_it_is_not_any_more() -> None:
    async def body() -> None:
        async with chat(FakeBackend()) as pilot:
            await say(pilot, "Hi")
            view = screen_of(pilot).transcript.views[0]
            before = view.render_lines(view.size.region)
            pilot.app.screen.selections = {view: Selection(None, None)}
            assert view.render_lines(view.size.region) != before
            pilot.app.screen.clear_selection()
            assert view.render_lines(view.size.region) == before

    run(body())


def test_a_stored_chat_says_too_that_its_model_cannot_be_loaded() -> None:
    store = Store(None)

    async def body() -> None:
        async with chat(app_of(FakeBackend(), store)) as pilot:
            await say(pilot, "Hi")
        broken = FakeBackend(load=lambda _: ModelFormatError("damaged", hint="import it again"))
        async with chat(app_of(broken, store, conversation=store.last())) as pilot:
            await wait_until(lambda: "✕ damaged" in shown(pilot) and "import it again" in shown(pilot), pilot)

    run(body())


def test_notices_leave_the_composer_to_be_seen() -> None:
    async def body() -> None:
        async with chat(FakeBackend(), (100, 30)) as pilot:
            await settle(pilot)
            screen_of(pilot).tell("A notice")
            await wait_until(lambda: "A notice" in shown(pilot), pilot)
            lines = shown(pilot).splitlines()
            (at,) = [y for y, line in enumerate(lines) if "A notice" in line]
            assert at < screen_of(pilot).composer.region.y - 10

    run(body())


def test_no_context_is_more_than_full() -> None:
    """What a long conversation has slid out of it counts as its prompt, and fills nothing."""
    assert "ctx 100% of 1k" in line(Machine(model="m", context_used=24_000, context=1000), 80).plain


def test_where_a_high_composer_was_the_messages_are_drawn() -> None:
    async def body() -> None:
        async with chat(FakeBackend(), (80, 24)) as pilot:
            await settle(pilot)
            await say(pilot, "Hi")
            screen = screen_of(pilot)
            screen.composer.insert("a\n" * 30)
            await pilot.pause()
            high = screen.composer.region
            screen.composer.clear()
            await pilot.pause()
            left = high.height - screen.composer.region.height
            assert left > 3
            assert Region(high.x, high.y, high.width, left) in screen.transcript.region

    run(body())


def test_what_is_to_be_seen_already_is_not_said_again() -> None:
    async def body() -> None:
        async with chat(FakeBackend(), (60, 20)) as pilot:
            await settle(pilot)
            for _ in range(5):
                await pilot.press("ctrl+c")
            await wait_until(lambda: "Nothing is selected" in shown(pilot), pilot)
            screen_of(pilot).tell("something else")
            await wait_until(lambda: "something else" in shown(pilot), pilot)
            assert shown(pilot).count("Nothing is selected") == 1

    run(body())


def test_a_line_that_grows_moves_nothing_and_a_new_one_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[bool] = []
    layout = Screen._refresh_layout
    monkeypatch.setattr(Screen, "_refresh_layout", lambda *a, **k: layouts.append(True) or layout(*a, **k))

    async def body() -> None:
        backend = FakeBackend(answer_of([*["line\n\n"] * 40, "last", *[" word"] * 20, "\n\nend"]), held=True)
        async with chat(backend, (80, 24)) as pilot:
            await settle(pilot)
            await pilot.press(*"Hi", "enter")
            await wait_until(lambda: backend.answers, pilot)
            backend.answers[0].step(42)
            await wait_until(lambda: "last" in shown(pilot), pilot)
            await pilot.pause(0.05)
            layouts.clear()
            for text in ("last word", "last word word"):
                backend.answers[0].step(1)
                await wait_until(lambda text=text: text in shown(pilot), pilot)
            assert not layouts
            backend.answers[0].step(18)
            await wait_until(lambda: ("last" + " word" * 20)[-60:] in shown(pilot).replace("\n   ", " "), pilot)
            await pilot.pause(0.05)
            layouts.clear()
            backend.answers[0].step(1)
            await wait_until(lambda: "end" in shown(pilot), pilot)
            await pilot.pause(0.05)
            assert len(layouts) == 1
            backend.answers[0].release()
            await settle(pilot)

    run(body())


def test_what_is_typed_right_after_enter_is_the_next_message() -> None:
    async def body() -> None:
        async with chat(FakeBackend("a"), (80, 24)) as pilot:
            await settle(pilot)
            composer = screen_of(pilot).composer
            composer.insert("/set temperature 0.5")
            composer.action_send()
            composer.insert("and what")  # before anybody has read what was sent
            await settle(pilot)
            assert composer.text == "and what"
            composer.clear()
            composer.insert("/nonsense x")
            composer.action_send()
            await settle(pilot)
            assert composer.text == "/nonsense x"  # put back

    run(body())
