"""Where the installed command begins: loads the program so that Ctrl-C meanwhile is no traceback. Only the standard library."""

# built in: `signal` itself would bring enum and collections, milliseconds in which Ctrl-C is still a traceback
import _signal  # type: ignore[import-not-found]  # typeshed does not know it
import os

_INTERRUPTED = 130


def _leave(_number: int, _frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def run() -> None:
    """The program `edge-llm`."""
    previous = _signal.signal(_signal.SIGINT, _leave)
    import gc

    gc.disable()  # nothing of a program is garbage while it loads
    from edge_llm_cli import main

    program = main.load()
    gc.enable()
    _signal.signal(_signal.SIGINT, previous)
    main.run(program)
