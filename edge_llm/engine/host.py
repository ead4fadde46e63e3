"""EngineHost: engines by model name, loaded when they are asked for and as many as a budget of memory holds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from pathlib import Path

from edge_llm.config import EngineConfig, default_context
from edge_llm.engine.client import EngineClient
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.wire import decode, encode
from edge_llm.errors import EdgeLLMError, EngineStoppedError, ModelNotFoundError, QueueFullError, quoted
from edge_llm.metrics import Statistics
from edge_llm.model.manifest import ModelManifest

KEEP_ALIVE_S = 300.0
_RETRY_S = 5.0
_STATIC_COPIES, _PLUGIN_COPIES = 3, 7
"""of the weights, in the static layout and by a plugin that compiles them twice (docs/providers.md)"""
_BASE_BYTES = 64 << 20
"""an interpreter with its libraries and tables"""


def usual_bytes(folder: Path, config: EngineConfig) -> int:
    """Memory that an engine of this model comes to take: its weights, one conversation as long as its context, and what
    any engine needs. Raises `ModelFormatError`."""
    manifest = ModelManifest.read(folder)
    size = manifest.dimensions
    plugin = config.provider not in ("auto", "cpu")
    static = plugin or config.layout == "static"
    kv_type = "f32" if static else config.kv_type or manifest.kv_type
    width = size.head_dim + 4 if kv_type == "int8" else 4 * size.head_dim
    row_bytes = 2 * len(manifest.layers) * size.kv_heads * width
    context = config.context or default_context(size.context, row_bytes)
    weights = manifest.weight_bytes * (_PLUGIN_COPIES if plugin else _STATIC_COPIES if static else 1)
    return weights + context * row_bytes + _BASE_BYTES


class _State(Enum):
    LOADING = auto()
    READY = auto()
    UNLOADING = auto()
    GONE = auto()


class _Entry:
    """One engine. All but the client's own work happens under the host's lock."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.state = _State.LOADING
        self.client: EngineClient | None = None
        self.error: BaseException | None = None
        self.users = 0
        self.last_used = 0.0

    @property
    def idle(self) -> bool:
        return self.state is _State.READY and self.users == 0


class EngineHost:
    """Engines that several callers share, from any thread.

    One that nobody has used for a while is closed; so is the one that was not used for longest, when another needs its
    place. One model is held however large it is. Its engines must come back by themselves when they die
    (`ProcessClient`), or be gone with the host.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        load: Callable[[Path], EngineClient],
        *,
        bytes_of: Callable[[Path], int],
        budget_bytes: int,
        keep_alive_s: float = KEEP_ALIVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folders` are the models by name; `load` takes as long as it takes, and raises what is wrong with a model;
        `bytes_of` says beforehand what its engine takes of `budget_bytes`. `keep_alive_s` may be infinite."""
        self._folders = dict(folders)
        self._load, self._bytes_of = load, bytes_of
        self._budget, self._keep_alive_s, self._clock = budget_bytes, keep_alive_s, clock
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._closing = False
        self._sweeper: threading.Thread | None = None

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[EngineClient]:
        """The engine of a model, which is loaded if it is not, and stays for as long as the block runs.

        Others who ask meanwhile wait for the same load. Raises `ModelNotFoundError`; what `load` raises, to all who wait,
        and the next who asks tries again; `QueueFullError` if those in use leave no memory; `EngineStoppedError`.
        """
        with self._held(self._hold(name)) as client:
            yield client

    def open_ready(self, name: str) -> contextlib.AbstractContextManager[EngineClient] | None:
        """As `open`, but held already, where nothing has to be waited for; else None. To be entered at once."""
        with self._changed:
            entry = self._entries.get(name)
            if self._closing or entry is None or entry.state is not _State.READY:
                return None
            entry.users += 1
        return self._held(entry)

    @contextlib.contextmanager
    def _held(self, entry: _Entry) -> Iterator[EngineClient]:
        """The engine of an entry that is counted as used, until the end of the block."""
        try:
            assert entry.client is not None
            yield entry.client
        finally:
            with self._changed:
                entry.users -= 1
                entry.last_used = self._clock()
                self._sweep_later()
                self._changed.notify_all()

    def loaded(self) -> tuple[EngineInfo, ...]:
        """The engines that are there, the one that was used last first."""
        return tuple(client.info for _, client in self._ready())

    def statistics(self) -> dict[str, Statistics]:
        """Of the engines that are there, by name; one that is just being started again is left out. This is no use of
        them."""
        found = {}
        for name, client in self._ready():
            with contextlib.suppress(EngineStoppedError):
                found[name] = client.statistics()
        return found

    def unload_idle(self) -> None:
        """Close the engines whose time is up, which a thread of the host does by itself."""
        while True:
            with self._changed:
                name, wait_s = self._next_to_go()
                if name is None or wait_s > 0:
                    return
                entry = self._entries[name]
                entry.state = _State.UNLOADING
            self._unload(name, entry)

    def close(self, *, drain: bool = False) -> None:
        """Close all engines, each as `EngineClient.close` does, and load none any more. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            clients = [entry.client for entry in self._entries.values() if entry.client is not None]
        for client in clients:
            client.close(drain=drain)

    def _ready(self) -> list[tuple[str, EngineClient]]:
        with self._changed:
            entries = {} if self._closing else dict(self._entries)
            ready = [(e.last_used, name, e.client) for name, e in entries.items() if e.state is _State.READY]
        return [(name, client) for _, name, client in sorted(ready, key=lambda r: -r[0]) if client is not None]

    # --- loading ---

    def _hold(self, name: str) -> _Entry:
        """The entry of a model whose engine is there, counted as used once more."""
        if name not in self._folders:
            raise ModelNotFoundError(
                f"there is no model {quoted(name)} here", hint=f"there are: {', '.join(self._folders)}"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not self._is(name, _State.UNLOADING))
            if self._closing:
                raise EngineStoppedError("the engines are closed")
            shared = self._entries.get(name)
            if shared is not None:
                self._join(shared)
                return shared
            entry = self._entries[name] = _Entry()
            entry.users = 1
        self._fill(name, entry)
        return entry

    def _join(self, entry: _Entry) -> None:
        """Count as a user of an engine that somebody else loads or has loaded; the lock is held."""
        entry.users += 1  # before it waits: what is not used may be gone again at once
        try:
            self._changed.wait_for(lambda: entry.state is not _State.LOADING)
            if entry.error is not None:
                raise _copy(entry.error)
        except BaseException:
            entry.users -= 1
            raise

    def _is(self, name: str, state: _State) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.state is state

    def _fill(self, name: str, entry: _Entry) -> None:
        """Load the engine of an entry that is ours."""
        client = None
        try:
            self._make_room(name, entry, self._bytes_of(self._folders[name]))
            client = self._load(self._folders[name])
            with self._changed:
                if self._closing:
                    raise EngineStoppedError("the engines are closed")
                entry.client, entry.state, entry.last_used = client, _State.READY, self._clock()
                self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                entry.error, entry.state = error, _State.GONE
                del self._entries[name]
                self._changed.notify_all()
            if client is not None:
                client.close()
            raise

    def _make_room(self, name: str, entry: _Entry, nbytes: int) -> None:
        """Unload others until this many bytes are free, or nobody else is there."""
        while True:
            with self._changed:
                others = {other: e for other, e in self._entries.items() if e is not entry}
                taken = sum(e.nbytes for e in others.values())
                if taken == 0 or taken + nbytes <= self._budget:
                    entry.nbytes = nbytes
                    return
                idle = [other for other, e in others.items() if e.idle]
                if not idle:
                    if not any(e.state is _State.UNLOADING for e in others.values()):
                        raise QueueFullError(
                            f"the models in use leave no memory for {name}",
                            retry_after_s=_RETRY_S,
                            hint="try again when they are not used any more, or allow more memory",
                        )
                    self._changed.wait()
                    continue
                victim = min(idle, key=lambda other: others[other].last_used)
                others[victim].state = _State.UNLOADING
            self._unload(victim, others[victim])

    def _unload(self, name: str, entry: _Entry) -> None:
        """Close an engine that was marked for it."""
        assert entry.client is not None
        try:
            entry.client.close()
        finally:
            with self._changed:
                entry.state = _State.GONE
                del self._entries[name]
                self._changed.notify_all()

    # --- the thread that unloads; there is one while there is something that it may unload ---

    def _next_to_go(self) -> tuple[str | None, float]:
        """The idle engine whose time is up first, and in how many seconds; the lock is held."""
        ends = {name: e.last_used + self._keep_alive_s for name, e in self._entries.items() if e.idle}
        if not ends:
            return None, 0.0
        name = min(ends, key=ends.__getitem__)
        return name, ends[name] - self._clock()

    def _sweep_later(self) -> None:
        """See to it that idle engines are closed in time; the lock is held."""
        if self._sweeper is None and not self._closing and self._keep_alive_s != float("inf"):
            self._sweeper = threading.Thread(target=self._sweep, name="edge-llm host", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        while True:
            self.unload_idle()
            with self._changed:
                if self._closing or not self._entries:
                    self._sweeper = None
                    return
                name, wait_s = self._next_to_go()
                if name is None or wait_s > 0:
                    self._changed.wait(None if name is None else wait_s)  # whoever leaves an engine wakes this


def _copy(error: BaseException) -> BaseException:
    """An error of its own for each who waited: a raised one collects its raiser's traceback."""
    if isinstance(error, EdgeLLMError):
        return decode(encode(error))  # type: ignore[no-any-return]
    return EngineStoppedError(f"the model could not be loaded: {error!r}")
