"""How the processes behind the chat in a browser are started."""

from __future__ import annotations

import json
import sys


def python_command(statements: str) -> list[str]:
    """What runs these statements with the same modules as ours, from nowhere else; their own arguments begin at sys.argv[2]."""
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); {statements}"
    return [sys.executable, "-P", "-c", start, json.dumps([*map(str, sys.path)])]
