"""ApiError: what a client is told went wrong: a status, and OpenAI's error body with llama-server's types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from edge_llm import errors

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """Ends a request with `status`. Clients match on `type` and `code`, and read `extra` beside them."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`retry_after_s` becomes a Retry-After header; without it a failed server is not asked again."""
        super().__init__(message)
        self.status = status
        self.kind = kind or TYPES.get(status) or TYPES[400 if status < 500 else 500]
        self.param, self.code, self.retry_after_s = param, code, retry_after_s
        self.extra = dict(extra or {})

    @classmethod
    def invalid(cls, message: str, param: str | None = None, code: str | None = None) -> Self:
        """The request cannot be followed."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def too_many(cls, message: str, retry_after_s: float) -> Self:
        """Come again later."""
        return cls(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)

    @classmethod
    def unavailable(cls, message: str, retry_after_s: float | None = None) -> Self:
        """The server or the model cannot answer now."""
        return cls(503, message, code="unavailable", retry_after_s=retry_after_s)

    @classmethod
    def of(cls, error: errors.EdgeLLMError, param: str | None = None) -> ApiError:
        """What a client is told of an error of a request; `param` is what it gave."""
        message = f"{error} ({error.hint})" if error.hint else str(error)
        match error:
            case errors.ContextLengthError():
                message = f"{error} (send less, or where there is `truncation`, ask for `auto`)"
                numbers = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context}
                kind, code = "exceed_context_size_error", "context_length_exceeded"
                return cls(400, message, kind=kind, param=param, code=code, extra=numbers)
            case errors.ModelNotFoundError():
                return cls(404, message, param="model", code="model_not_found")
            case errors.InputError():
                return cls.invalid(message, param)
            case errors.QueueFullError():
                return cls(429, message, code="queue_full", retry_after_s=error.retry_after_s)
            case errors.EngineStoppedError():  # why is for the log: it may tell of other people's requests
                return cls.unavailable("the engine has stopped before the answer ended; it is started again", 1.0)
        return cls(500, message)

    def body_for(self, path: str) -> dict[str, Any]:
        """The JSON body: Ollama's clients read a text under `error`, all others an object."""
        if path.startswith("/api/"):
            return {"error": str(self)}
        return self.body

    @property
    def body(self) -> dict[str, Any]:
        names = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**names, **self.extra}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is not None:
            return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return {"x-should-retry": "false"} if self.status >= 500 else {}
