"""`edge-llm chat`: opens the full screen (`edge_llm_chat`), or talks line by line: --plain, and wherever there is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_llm.errors import ContextLengthError, GenerationError, ParameterError, TemplateError
from edge_llm.messages import Finished, Message, Role
from edge_llm.sampling.params import USUAL_MAX_TOKENS, SamplingParams
from edge_llm_cli import answer, console
from edge_llm_cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from edge_llm_chat.launch import Wish

    from edge_llm.config import EngineConfig
    from edge_llm.engine.engine import Engine

_web_option = partial(typer.Option, rich_help_panel="In a browser")
_HELP = "/exit leaves, /reset forgets the conversation, /system TEXT sets the system message and starts anew"


def chat(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help=f"Name of a model, its folder, or a FILE.gguf; {answer.DEFAULT_MODEL}."),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask this OpenAI-compatible server (key: OPENAI_API_KEY).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; default: what the model recommends.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Choose a stored conversation to go on with.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Go on with the last conversation.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Begin a conversation (default).")] = False,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            help="Let the model ask for this tool: time, calculator, read:FOLDER; may be given several times."
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, without the full screen.")] = False,
    web: Annotated[
        bool, _web_option("--web", help="In a browser: prints a link that opens it once; at most four chats.")
    ] = False,
    web_port: Annotated[
        int | None, _web_option(min=0, max=65535, help="Port to listen on (default: 8081); 0 is any that is free.")
    ] = None,
    web_host: Annotated[
        str | None,
        _web_option(metavar="ADDRESS", help="Address to listen on (default: this machine's own, 127.0.0.1)."),
    ] = None,
    web_url: Annotated[
        str | None,
        _web_option(metavar="URL", help="How browsers call it, where that is another address: a proxy's, for example."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Most tokens of one answer; default: {USUAL_MAX_TOKENS}.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: what the model recommends.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    context: Annotated[int | None, answer.engine_option(help="Tokens of the conversation that the model sees.")] = None,
    context_policy: Annotated[
        str | None,
        answer.engine_option(
            metavar="slide|error",
            help="Past the context: slide (default) to go on without the oldest turns, or error.",
        ),
    ] = None,
    threads: answer.ThreadsOption = None,
    provider: answer.ProviderOption = None,
    kv_dtype: answer.KvOption = None,
    cache: answer.CacheOption = None,
    private: answer.PrivateOption = False,
) -> None:
    """Talk with a model: on the full screen of a terminal, line by line, or in a browser."""
    if resume + last + new > 1:
        raise ParameterError("--resume, --last and --new exclude one another")
    options = answer.EngineOptions(
        context,
        threads,
        kv_dtype,
        context_policy,
        cache=cache,
        private=private,
        usual_policy="slide",
        provider=provider,
    )
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    parameters = {name: value for name, value in given.items() if value is not None}
    listen = {"host": web_host, "port": web_port, "url": web_url}
    given_listen = {name: value for name, value in listen.items() if value is not None}
    if web and plain:
        raise ParameterError("--web and --plain exclude one another")
    if given_listen and not web:
        raise ParameterError("--web-host, --web-port and --web-url need --web")
    if web or (not plain and _has_screen()):
        from edge_llm_chat.launch import Wish, launch

        text = None if system is None else answer.argument_text(system)
        tools = tuple(map(answer.argument_text, tool or ()))
        shared = all(given is None for given in (context, context_policy, threads, provider, kv_dtype, cache))
        wish = Wish(last, resume, text, parameters, tools, server, shared)
        if web:
            _launch_web(model, answer.engine_config(options), wish, given_listen)
        else:
            launch(model, answer.engine_config(options), wish)
        return
    if resume or last or server or tool:
        hint = "leave out --plain" if plain else "start the chat in a terminal, with nothing piped into or out of it"
        raise ParameterError("--resume, --last, --server and --tool need the full screen", hint=hint)
    params = SamplingParams(**{"max_tokens": USUAL_MAX_TOKENS, **parameters})  # type: ignore[arg-type]
    with answer.opened(model or answer.DEFAULT_MODEL, options) as (engine, _):
        if console.is_terminal(sys.stdin):
            console.note(f"{engine.info.name}: {_HELP}")
        Conversation(engine, params, None if system is None else answer.argument_text(system)).loop()


def _launch_web(model: str | None, config: EngineConfig, wish: Wish, listen: dict[str, Any]) -> None:
    """In a browser, until Ctrl-C."""
    from edge_llm_chat.web.launch import WebAddress, launch_web

    with ProgressDisplay() as progress:
        launch_web(model, config, wish, WebAddress(**listen), note=console.note, progress=progress)


def _has_screen() -> bool:
    """Whether there is a person at a terminal that can place text."""
    return console.is_terminal(sys.stdin) and console.is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"


class Conversation:
    """The messages so far, and the loop that adds to them."""

    _system: str | None
    _messages: list[Message]

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._failed = False
        self._start(system)

    def _start(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if system is None else [Message.system(system)]
        self._told: list[int] | None = None

    def loop(self) -> None:
        """Reads lines until their end or /exit. On a terminal, Ctrl-C at any moment only ends what is going on.

        Without one, nobody sees that a turn failed: then the exit code says it.
        """
        if sys.stdin is None:  # closed by whoever started us
            return
        interactive = console.is_terminal(sys.stdin) and console.is_terminal(sys.stdout)
        if interactive:
            _enable_editing()
        while True:
            try:
                text = _typed_line() if interactive else sys.stdin.readline()
                if not text or not self._take(text):
                    break
            except KeyboardInterrupt:
                if not interactive:
                    raise
                console.line()
        if self._failed and not interactive:
            raise typer.Exit(1)

    def _take(self, text: str) -> bool:
        """Does what a line asks for; False if that is to leave."""
        command, _, rest = text.strip().partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            self._start(self._system)
        elif command == "/system":
            self._start(rest.strip() or None)
        elif command.startswith("/") and command[1:].isalpha():
            console.note(_HELP)
        elif command:
            self._say(text.rstrip("\r\n"))
        return True

    def _say(self, text: str) -> None:
        """One turn; one that fails leaves the conversation as it was."""
        messages = [*self._messages, Message.user(text)]
        try:
            result = answer.show(self._engine.chat(messages, self._params))
        except ContextLengthError as error:
            console.note(f"error: {error}; the conversation is kept, /reset starts a new one")
            self._failed = True
            return
        except (TemplateError, GenerationError) as error:
            console.report(error)
            self._failed = True
            return
        if result.interrupted:
            console.note("stopped; the answer is kept as far as it came")
        else:
            answer.note_if_cut(result, self._params)
            self._tell_forgotten(messages, result.finished)
        self._messages = [*messages, self._engine.reply(result.text, result.finished)]

    def _tell_forgotten(self, messages: Sequence[Message], finished: Finished) -> None:
        """One line when something else has fallen out of the context than was said before."""
        if not finished.forgotten_tokens:
            return
        questions = [index for index, message in enumerate(messages) if message.role is Role.USER]
        gone = [turn for turn, index in enumerate(questions, 1) if {index, index + 1} <= set(finished.forgotten)]
        if gone == self._told:
            return
        self._told = gone
        if gone:
            numbers = f"turn {gone[0]}" if len(gone) == 1 else f"turns {gone[0]} to {gone[-1]}"
            console.dim_note(f"the model no longer sees {numbers} of {len(questions)}")
        else:
            console.dim_note(f"the conversation is longer than the context of {self._engine.info.context} tokens")


def _typed_line() -> str:
    """The next line with its end, or nothing at the end of input."""
    try:
        return input("> ") + "\n"
    except EOFError:
        console.line()
        return ""


def _enable_editing() -> None:
    """Line editing, and input longer than a terminal's own limit of 4,096 bytes; nothing is kept on disk."""
    try:
        import readline  # noqa: F401 - importing it is what switches it on
    except ImportError:
        return
