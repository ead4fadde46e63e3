"""The program `edge-llm`: its verbs, and how they fail. Exit codes: 0, 1 failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from edge_llm.errors import EdgeLLMError, InputError
from edge_llm_cli import console
from edge_llm_cli.wording import Sections, system_error, usage_error

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@contextlib.contextmanager
def failures_reported() -> Iterator[None]:
    """Turns what may go wrong into lines on stderr and an exit code; a fault of ours still shows its traceback."""
    try:
        yield
    except EdgeLLMError as error:
        console.report(error)
        raise SystemExit(BAD_INPUT if isinstance(error, InputError) else FAILED) from None
    except KeyboardInterrupt:
        console.note("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # the reader has seen enough; without this, Python would complain once more when it flushes at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except MemoryError:
        console.report(EdgeLLMError("not enough memory", hint="use a smaller --context or close other programs"))
        raise SystemExit(FAILED) from None
    except OSError as error:
        console.report(system_error(error))
        raise SystemExit(FAILED) from None


class Program(TyperGroup):
    """The group of all verbs, with one place for failures."""

    def invoke(self, ctx: Any) -> Any:
        with failures_reported():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            with failures_reported():
                try:
                    code = super().main(*args, **{**options, "standalone_mode": False})
                except SystemExit as end:  # typer's own answer to help that nobody reads any more
                    if isinstance(end.__context__, BrokenPipeError):
                        raise end.__context__ from None
                    raise
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's usage errors have it, whatever they are derived from
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                sys.stderr.write(error.format_message() + "\n")
                sys.exit(BAD_INPUT)
            command = getattr(getattr(error, "ctx", None), "command_path", "edge-llm")
            console.report(InputError(usage_error(error.format_message()), hint=f"{command} --help"))
            code = BAD_INPUT
        sys.exit(code if isinstance(code, int) else 0)


_VERBS: dict[str, tuple[str, str | None]] = {
    "run": ("run.run", None),
    "chat": ("chat.chat", "Talk with a model in the terminal or a browser."),
    "serve": ("serve.serve", "Answer over HTTP, as OpenAI's and Ollama's servers do."),
    "batch": ("batch.batch", None),
    "pull": ("models.pull", "Download a model of the catalog and import it."),
    "import": ("models.import_", None),
    "models": ("models.app", None),
    "cache": ("cache.app", None),
    "eval": ("evaluate.evaluate", "Measure how well a model knows a text."),
    "bench": ("bench.bench", "Measure speed, in llama-bench's terms."),
    "tune": ("tune.tune", "Measure which settings are fastest here, and use them."),
    "doctor": ("doctor.doctor", None),
}
"""module and name of each, and what the list of verbs says if that is not the first line of its help"""


def _show_version(wanted: bool) -> None:
    if wanted:
        console.line(f"edge-llm {console.package_version('edge-llm')}")
        raise typer.Exit


def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Small language models on your own machine, offline."""


def application(verbs: Iterable[str] = _VERBS) -> typer.Typer:
    """The program with these verbs."""
    app = typer.Typer(
        cls=Program,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(program)
    for verb in verbs:
        place, short_help = _VERBS[verb]
        module, name = place.split(".")
        what = getattr(importlib.import_module(f"edge_llm_cli.{module}"), name)
        if isinstance(what, typer.Typer):
            app.add_typer(what, name=verb)
        else:
            app.command(verb, cls=Sections, short_help=short_help)(what)
    return app


def load() -> Callable[..., Any]:
    """The program that was asked for: with one verb, for the others cost a start; or with all, for help and mistakes."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    command: Callable[..., Any] = typer.main.get_command(application([verb] if verb in _VERBS else _VERBS))
    return command


def run(program: Callable[..., Any] | None = None) -> None:
    """The program, once it is loaded."""
    console.prepare()
    try:
        (program or load())(prog_name="edge-llm")
    except KeyboardInterrupt:  # another one, while the first was being reported
        console.note("interrupted")
        _end_interrupted()
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
        _end_interrupted()


def _end_interrupted() -> NoReturn:
    """Nothing that is pressed now is news, and Python itself would answer it with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(INTERRUPTED) from None
