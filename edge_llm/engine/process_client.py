"""ProcessClient: the door to an engine in a process of its own, which native code may take down without us."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edge_llm.config import EngineConfig
from edge_llm.engine.handle import Handle, Mailbox
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.protocol import Detokenize, Measure, Submit, Tokenize
from edge_llm.engine.request import Request
from edge_llm.engine.supervisor import EngineState, Supervisor

if TYPE_CHECKING:
    from edge_llm.metrics import Statistics

REPLY_TIMEOUT_S = 60.0
"""longer than the checking and tokenising of any request"""


class ProcessClient:
    """An `EngineClient` whose engine runs in a child process, which is started again when it dies.

    Its death ends every open request with `EngineStoppedError`. Requests that come while it is started again wait for it,
    unless it has died several times in short order: then they are refused at once, for longer each time.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        on_state: Callable[[EngineState], None] | None = None,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        """Loads the model of a folder, and waits for it. Raises what `open_engine` raises.

        `on_state` is told of each change, on a thread that must not wait for long. A process that takes longer than
        `reply_timeout_s` to accept or refuse a request hangs, and is killed.
        """
        self._supervisor = Supervisor(folder, config, on_state=on_state, reply_timeout_s=reply_timeout_s)
        self._finalizer = weakref.finalize(self, self._supervisor.stop)
        try:
            self._supervisor.wait_until_loaded()
        except BaseException:
            self._finalizer()
            raise

    @property
    def info(self) -> EngineInfo:
        assert self._supervisor.info is not None, "known since it was loaded"
        return self._supervisor.info

    def submit(self, request: Request) -> Handle:
        mailbox = Mailbox()
        _, cancel = self._supervisor.request(lambda number: Submit(number, request), mailbox)
        return Handle(mailbox, cancel, owner=self)

    def tokenize(self, request: Request) -> list[int]:
        ids, _ = self._supervisor.request(lambda number: Tokenize(number, request))
        return list(cast("tuple[int, ...]", ids))

    def detokenize(self, token_ids: Iterable[int]) -> str:
        text, _ = self._supervisor.request(lambda number: Detokenize(number, tuple(token_ids)))
        return cast("str", text)

    def statistics(self) -> Statistics:
        """As any client's; those of a process that has died are lost with it. Raises `EngineStoppedError`."""
        if self._supervisor.statistics is not None:
            return self._supervisor.statistics
        values, _ = self._supervisor.request(Measure)
        return cast("Statistics", values)

    def close(self, *, drain: bool = False) -> None:
        self._supervisor.stop(drain=drain)
        self._finalizer.detach()
