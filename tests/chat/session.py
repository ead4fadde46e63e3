"""The full-screen chat over the fake backend, its chats on the disk: `python -m tests.chat.session [WORD...]` (the answer)."""

from __future__ import annotations

import sys

from edge_llm_chat.store import Store

from tests.chat.conftest import app_of
from tests.chat.fakes import FakeBackend

if __name__ == "__main__":
    app = app_of(FakeBackend("ANSWERED"), Store.open())
    app.run()
    sys.exit(app.return_code)
