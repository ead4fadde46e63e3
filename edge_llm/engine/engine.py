"""Engine: a loaded model, for Python programs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self, Unpack

from edge_llm.config import EngineConfig
from edge_llm.engine.assembly import Progress, open_engine
from edge_llm.engine.client import EngineClient, ThreadClient
from edge_llm.engine.handle import Handle
from edge_llm.engine.request import Request, RequestOptions
from edge_llm.messages import Finished, Message, Role
from edge_llm.metrics import Statistics
from edge_llm.sampling.params import SamplingParams


class Engine:
    """A model that answers, several requests at a time and from any thread. Use it as a context manager, or `close` it.

        with Engine.load("smollm2-135m-instruct") as engine:
            print(engine.chat([Message.user("What is the capital of France?")]).text())

    `chat` and `complete` give a `Handle`: an iterator of events, or all the text at once by `.text()`. What is wrong
    with a request raises at once: `ParameterError`, `TemplateError`, `ContextLengthError`, `QueueFullError`.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.info = client.info
        """what it is: `name`, `context`, ..."""

    @classmethod
    def load(
        cls, model: str | os.PathLike[str], config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> Self:
        """Load a model: a name of the catalog (fetched once), an installed one, a FILE.gguf, or a model folder.

        `progress` is called with (what is going on, done, total) while something takes long. Raises
        `ModelNotFoundError`, `ModelFormatError` or another `InputError`, and `DownloadError`, `KernelError` or
        `SessionError`.
        """
        # names are the affair of the layer above: the one import that points the other way
        from edge_llm.install.importer import resolve

        folder = resolve(os.fspath(model), progress) if progress else resolve(os.fspath(model))
        return cls.open(folder, config, progress=progress)

    @classmethod
    def open(cls, folder: Path, config: EngineConfig | None = None, *, progress: Progress | None = None) -> Self:
        """As `load`, for a model folder that is known to be whole."""
        return cls(ThreadClient(open_engine(folder, config or EngineConfig(), progress)))

    def chat(
        self, messages: Iterable[Message], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Handle:
        """Answer a conversation; `options` are fields of `Request`."""
        return self.submit(Request.chat(messages, params, **options))

    def complete(self, text: str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Handle:
        """Continue a text as it is, without a chat template; `options` as for `chat`."""
        return self.submit(Request.completion(text, params, **options))

    def reply(self, text: str, finished: Finished) -> Message:
        """The message to go on with after an answer of this engine: its text, its tool calls and its tokens, so that no row
        of it has to be computed again. What was thought before it is no part of it."""
        digest = self.info.tokenizer_digest
        calls, ids = finished.tool_calls, finished.token_ids
        return Message(Role.ASSISTANT, text, tool_calls=calls, token_ids=ids, tokenizer_digest=digest)

    def submit(self, request: Request) -> Handle:
        """Start any request."""
        return self._client.submit(request)

    def tokenize(self, request: Request) -> list[int]:
        """The tokens that a request starts from, the chat template's included, however many."""
        return self._client.tokenize(request)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones included."""
        return self._client.detokenize(token_ids)

    def statistics(self) -> Statistics:
        """What was done since the model was loaded: durations as histograms, counts of tokens and ends, memory."""
        return self._client.statistics()

    def close(self, *, drain: bool = False) -> None:
        """Cancel what runs, or wait for it with `drain`, and free the model. Idempotent."""
        self._client.close(drain=drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
