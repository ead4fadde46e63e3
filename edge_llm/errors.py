"""The errors of edge_llm, one tree; each carries a `hint` that tells what to do next.

EdgeLLMError
├── InputError                 something given cannot be used: the caller can mend it (exit code 2)
│   ├── ParameterError         a parameter has a wrong type or lies out of its range
│   ├── ModelNotFoundError     no such model in the catalog or on this machine
│   ├── ModelFormatError       a model file breaks its format's rules, or looks hostile
│   │   └── UnsupportedModelError   a sound file holding something we do not run (named)
│   │       └── OutdatedModelError  a model folder of an older format: import the model again
│   ├── IntegrityError         bytes do not match the digest that was promised
│   ├── ContextLengthError     the prompt does not fit into the context (both numbers)
│   ├── TemplateError          the chat template refused the messages or broke its budget
│   └── StorageError           a disk is full, or a folder cannot be read or written
└── RuntimeFailure             something failed while running (exit code 1)
    ├── DownloadError          the index or the connection failed
    ├── KernelError            the kernels cannot be compiled, loaded or run here
    ├── SessionError           ONNX Runtime refused a model or a step
    ├── GenerationError        one request failed (e.g. logits that are not numbers); others go on
    ├── QueueFullError         the engine's queue is full; carries `retry_after_s`
    └── EngineStoppedError     the engine was closed, or died, before the request ended
"""

from __future__ import annotations


def quoted(name: str) -> str:
    """`name` from a file or a server, fit for a message: ASCII in quotes, so that no control character gets through;
    shortened to 80 characters."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")


class EdgeLLMError(Exception):
    """Root of every error raised on purpose by this package.

    `str(error)` is one line saying what is wrong; `hint` is one line saying what to do, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class InputError(EdgeLLMError):
    """Something given to us cannot be used; the caller can mend it."""


class ParameterError(InputError):
    """A parameter has a wrong type or lies out of its range."""


class ModelNotFoundError(InputError):
    """No model of that name in the catalog or on this machine."""


class ModelFormatError(InputError):
    """A model file breaks the rules of its format (truncated, inconsistent, or hostile)."""


class UnsupportedModelError(ModelFormatError):
    """A sound model file with an architecture, tensor type or tokenizer that we do not run."""


class OutdatedModelError(UnsupportedModelError):
    """A model folder that was written in an older format; its source has to be imported again."""


class IntegrityError(InputError):
    """Bytes do not match the digest that was promised for them."""


class ContextLengthError(InputError):
    """The prompt does not fit into the context.

    `prompt_tokens` and `context` are token counts; the prompt must leave room for one new token.
    """

    def __init__(self, prompt_tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, which exceeds the available context size of {context} tokens",
            hint="shorten the prompt or the conversation, ask for a larger context if the model has one, or let it slide"
            " (context policy slide)",
        )
        self.prompt_tokens = prompt_tokens
        self.context = context

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int]]:
        return (type(self), (self.prompt_tokens, self.context))


class TemplateError(InputError):
    """The chat template refused the messages, or used more time, steps or output than it may."""


class StorageError(InputError):
    """A disk is full, or a folder or file cannot be read or written."""


class RuntimeFailure(EdgeLLMError):  # noqa: N818 - "RuntimeError" is taken
    """Something failed while running."""


class DownloadError(RuntimeFailure):
    """The package index could not be reached, or did not have the file."""


class KernelError(RuntimeFailure):
    """The kernels cannot be compiled, loaded or run on this machine."""


class SessionError(RuntimeFailure):
    """ONNX Runtime refused a model or failed in a step."""


class GenerationError(RuntimeFailure):
    """One request failed; the others go on."""


class QueueFullError(RuntimeFailure):
    """The engine's queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class EngineStoppedError(RuntimeFailure):
    """The engine was closed, or died, before the request ended."""
