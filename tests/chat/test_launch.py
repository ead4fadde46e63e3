from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from edge_llm_chat.app import ChatApp
from edge_llm_chat.http_backend import HttpBackend
from edge_llm_chat.launch import Wish, launch
from edge_llm_chat.local_backend import LocalBackend
from edge_llm_chat.preferences import Preferences
from edge_llm_chat.running_server import running_server
from edge_llm_chat.store import Store

from edge_llm import paths
from edge_llm.config import EngineConfig
from edge_llm.errors import EdgeLLMError, InputError, ParameterError, StorageError
from tests.chat.test_store import conversation
from tests.engine.fakes import make_core
from tests.server.harness import running


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ChatApp]:
    """The apps that would have run."""
    apps: list[ChatApp] = []
    monkeypatch.setattr(ChatApp, "run", lambda self: apps.append(self))  # noqa: PLW0108 - a method needs a function
    return apps


def test_what_is_opened(opened: list[ChatApp]) -> None:
    launch(None, EngineConfig(), Wish(system="Be kind.", parameters={"seed": 1}, resume=True))
    launch("m", EngineConfig(private=True), Wish())
    launch("m", EngineConfig(), Wish(server="http://127.0.0.1:9/v1"))
    first, second, third = opened
    assert first.backend.wanted == "smollm2-135m-instruct"
    assert isinstance(first.backend, LocalBackend)
    assert (first.start.system, first.start.parameters, first.start.pick) == ("Be kind.", {"seed": 1}, True)
    assert str(first.store.path) in first.start.notice
    assert (second.store.path, second.start.private, second.backend.wanted) == (None, True, "m")
    assert isinstance(third.backend, HttpBackend)
    assert third.start.notice == "", "said once"


def test_the_last_conversation(opened: list[ChatApp]) -> None:
    with pytest.raises(InputError, match="no conversation to go on with"):
        launch(None, EngineConfig(), Wish(last=True))
    store = Store.open()
    made = conversation("hello")
    store.save_turn(made, made.turns[1])
    store.close()
    launch(None, EngineConfig(), Wish(last=True))
    assert opened[-1].start.conversation == made.id


@pytest.mark.parametrize(
    "wish",
    [Wish(parameters={"temperature": 99}), Wish(tools=("rm",)), Wish(server="ftp://x")],
    ids=lambda wish: repr(wish)[:40],
)
def test_what_is_wrong_is_said_before_the_screen_is_taken(wish: Wish, opened: list[ChatApp]) -> None:
    with pytest.raises(InputError):
        launch(None, EngineConfig(), wish)
    assert not opened


def test_a_damaged_history_is_said_and_private_goes_on(opened: list[ChatApp]) -> None:
    folder = paths.data_dir() / "chats"
    paths.private_dir(paths.data_dir())
    folder.mkdir(mode=0o700)
    (folder / "chats.sqlite3").write_bytes(b"junk" * 1000)
    with pytest.raises(StorageError):
        launch(None, EngineConfig(), Wish())
    launch(None, EngineConfig(private=True), Wish())
    assert len(opened) == 1


def test_a_home_that_takes_nothing_is_said_and_the_chat_opens(
    opened: list[ChatApp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path / "file"))
    launch(None, EngineConfig(), Wish())
    (app,) = opened
    assert (app.store.path, app.start.private) == (None, False)
    assert (
        app.start.notice
        == f"This chat is not kept, and earlier ones are not shown: {tmp_path / 'file'} is not a folder"
    )
    for wish in (Wish(last=True), Wish(resume=True)):
        with pytest.raises(StorageError) as caught:
            launch(None, EngineConfig(), wish)
        assert caught.value.hint


def test_our_own_server_answers_if_it_runs(
    opened: list[ChatApp], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("EDGE_LLM_HOME", str(tmp_path_factory.mktemp("s")))
    socket = paths.server_socket()
    assert running_server() is None
    with running(make_core, uds=socket):
        assert running_server() == socket
        launch(None, EngineConfig(), Wish(shared=True))
        launch(None, EngineConfig(private=True), Wish(shared=True))
        launch("m", EngineConfig(), Wish(shared=True))
        launch(None, EngineConfig(), Wish())
    launch(None, EngineConfig(), Wish(shared=True))
    assert [type(app.backend) for app in opened] == [HttpBackend, *[LocalBackend] * 4]


def test_preferences(opened: list[ChatApp]) -> None:
    file = paths.config_dir() / "chat.toml"
    file.parent.mkdir(parents=True)
    file.write_text('theme = "nord"\n[keys]\n"chat.retry" = "ctrl+g"\n')
    launch(None, EngineConfig(), Wish())
    assert opened[0].theme == "nord"
    assert opened[0]._keymap == {"chat.retry": "ctrl+g"}
    for text in ("theme = 3", "[keys]\nx = 1", "colour = 1", "theme ="):
        file.write_text(text)
        with pytest.raises(ParameterError):
            Preferences.load()


def test_the_screen_needs_nothing_of_the_engine() -> None:
    """It is there at once because what is heavy is loaded behind it."""
    code = "import sys, edge_llm_chat.launch, edge_llm_chat.screens.chat\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numpy", "onnxruntime", "numba", "tokenizers", "jinja2", "httpx", "pygments", "edge_llm.engine.core"}
    assert not heavy & set(loaded)


def test_a_model_loads_and_answers_in_this_process(tiny_folder: Path, kernels: object) -> None:
    """LocalBackend over the tiny model: answers, inspects, forks, counts, and can be closed at any time."""
    import asyncio

    from edge_llm_chat.answering import Answer
    from edge_llm_chat.backend import Ask

    from edge_llm.messages import Message
    from edge_llm.sampling.params import SamplingParams

    async def body() -> None:
        backend = LocalBackend(str(tiny_folder), EngineConfig)
        with pytest.raises(EdgeLLMError, match="not loaded"):
            await backend.answer(Ask((Message.user("Hi"),)))
        assert await backend.count((Message.user("Hi"),)) is None
        info = await backend.load(lambda *_: None)
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True, top_logprobs=4, ignore_eos=True)
        ask = Ask((Message.user("Hi"),), params)
        whole = Answer()
        await whole.run(backend, ask)
        assert whole.finished is not None
        assert len(whole.tokens) == 8
        assert b"".join(info.chosen.data for info in whole.tokens).decode("utf-8", "replace").startswith(whole.text)
        prompt = await backend.count(ask.messages)
        assert prompt == whole.finished.usage.prompt_tokens
        # going on from its own first tokens gives the rest of it
        begun = tuple(info.chosen for info in whole.tokens[:3])
        rest = Answer()
        await rest.run(backend, Ask(ask.messages, params.with_options(max_tokens=5), begun))
        assert rest.finished is not None
        assert rest.finished.token_ids == whole.finished.token_ids[3:]
        assert rest.finished.usage.prompt_tokens == prompt + 3
        assert (backend.kv_bytes() or 0) > 0
        assert info.forks
        await backend.close()
        await backend.close()
        with pytest.raises(EdgeLLMError):
            await backend.answer(ask)

    asyncio.run(body())


def test_a_loading_can_be_left() -> None:
    import asyncio
    import threading

    started = threading.Event()

    def configure() -> EngineConfig:
        started.set()
        return EngineConfig()

    async def body() -> None:
        backend = LocalBackend("no-such-model", configure)
        loading = asyncio.create_task(backend.load(lambda *_: None))
        await asyncio.to_thread(started.wait)
        await backend.close()
        with pytest.raises(EdgeLLMError):
            await loading

    asyncio.run(body())
