"""The local clipboard, by whatever program this desktop has. Terminals that know OSC 52 are told by Textual itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys


def copy_locally(text: str) -> None:
    """Hand `text` to the desktop's clipboard; nothing happens where there is none."""
    command = _command()
    if command is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command,
            input=text.encode("utf-8", "replace"),
            timeout=2,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _command() -> list[str] | None:
    choices = [
        (sys.platform == "darwin", ["pbcopy"]),
        ("WAYLAND_DISPLAY" in os.environ, ["wl-copy"]),
        ("DISPLAY" in os.environ, ["xclip", "-selection", "clipboard"]),
        ("DISPLAY" in os.environ, ["xsel", "--clipboard", "--input"]),
        ("WSL_DISTRO_NAME" in os.environ, ["clip.exe"]),
    ]
    return next((command for usable, command in choices if usable and shutil.which(command[0])), None)
