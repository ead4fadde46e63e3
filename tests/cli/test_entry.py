"""The command from its very first moment: no traceback, whatever is done to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edge_llm.errors import InputError
from edge_llm.install.importer import pull
from tests.cli.conftest import ROOT, stub_command

ENTRY = "from edge_llm_cli.entry import run; run()"


def test_ctrl_c_while_the_program_loads_is_one_line() -> None:
    """The signal comes in the middle of an import, of a module that the program is just about to load."""
    interrupted = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
{ENTRY}
"""
    result = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"interrupted\n")


def test_nothing_is_imported_before_ctrl_c_is_looked_after() -> None:
    """Each module would be some time more in which Ctrl-C is a traceback: Python's own start is long enough."""
    code = "import os, sys; before = {*sys.modules}; import edge_llm_cli.entry; print(*sorted({*sys.modules} - before))"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= {"edge_llm_cli", "edge_llm_cli.entry", "_signal", "__future__"}


def test_once_loaded_ctrl_c_is_handled_as_before() -> None:
    code = (
        "import signal, edge_llm_cli.main as m; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "m.run = lambda _: print(signal.getsignal(signal.SIGINT).__name__)\n" + ENTRY
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == f"{signal.default_int_handler.__name__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_into_a_full_disk_is_one_line(option: str) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run([sys.executable, "-c", ENTRY, option], stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: No space left on device")
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_that_nobody_reads_is_no_failure(option: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-c", ENTRY, option], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_chat_without_standard_input_ends() -> None:
    command = stub_command({"pieces": ["Hello."]}, "chat", "--plain")
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" 0<&-', "sh", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(("name", "hint"), [("hf:owner/repo", "download the GGUF"), ("model.gguf", "edge-llm import")])
def test_pull_tells_what_to_do_instead(name: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        pull(name)
    assert hint in str(error.value.hint)
