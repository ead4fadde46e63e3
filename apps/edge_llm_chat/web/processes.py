"""How the processes behind the chat in a browser are started, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import Process


def python_command(statements: str) -> list[str]:
    """What runs these statements with the same modules as ours, from nowhere else; their own arguments begin at sys.argv[2]."""
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); {statements}"
    return [sys.executable, "-P", "-c", start, json.dumps([*map(str, sys.path)])]


async def see_end(process: Process, grace_s: float) -> None:
    """Wait for the end of a process; kill it if that does not come in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
