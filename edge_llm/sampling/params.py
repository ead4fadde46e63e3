"""What a caller may ask of sampling: frozen, validated when it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from edge_llm.errors import ParameterError

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**64 - 1


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParameterError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be between {low:g} and {high:g}, not {value:g}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be between {low} and {high}, not {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `None` means: what the model's manifest recommends, else the neutral value.

    The order in which they act is fixed (docs/sampling.md): logit bias -> repetition, presence and frequency penalties ->
    temperature -> top-k -> top-p -> min-p -> draw.

    Raises `ParameterError` for a value of the wrong type or out of range.
    """

    max_tokens: int | None = None
    """most tokens to generate; None: until the context is full"""
    temperature: float | None = None
    """0 is argmax (the lowest id wins a tie); 1 leaves the distribution as it is; at most 5"""
    top_k: int | None = None
    """keep the k most probable tokens; 0 is off"""
    top_p: float | None = None
    """keep the smallest set of most probable tokens whose probability reaches p; 1 is off"""
    min_p: float | None = None
    """drop tokens less probable than min_p times the most probable one; 0 is off"""
    repetition_penalty: float | None = None
    """once a distinct token of prompt or answer: positive logits are divided by it, negative ones multiplied; 1 is off"""
    presence_penalty: float = 0.0
    """subtracted from the logit of each token already generated"""
    frequency_penalty: float = 0.0
    """subtracted once for each time the token was generated"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """added to the logits of these ids; -100 and below bans the token"""
    seed: int | None = None
    """None: one is drawn and reported"""
    stop: tuple[str, ...] = ()
    """the answer ends before the first of these texts"""
    logprobs: bool = False
    """report the log-probability of each chosen token"""
    top_logprobs: int = 0
    """and of this many most probable ones"""
    ignore_eos: bool = False
    """go on past end tokens (benchmarks)"""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        for name, low, high in (
            ("temperature", 0.0, 5.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 10.0),
        ):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), low, high)
        if self.top_k is not None:
            _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not isinstance(self.stop, tuple) or len(self.stop) > MAX_STOPS:
            raise ParameterError(f"stop must be a tuple of at most {MAX_STOPS} texts")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text.encode("utf-8", "surrogatepass")) <= MAX_STOP_BYTES:
                raise ParameterError(f"each stop must be a text of 1 to {MAX_STOP_BYTES} bytes")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens, not {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias key", token_id, 0, 2**31 - 1)
            _number("logit_bias value", bias, -1e4, 1e4)

    def with_options(self, **changes: Any) -> Self:
        """A changed, validated copy."""
        return replace(self, **changes)

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """A copy whose unset fields come from `defaults` (the manifest's), else are neutral (temperature 1, all filters off)."""
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        unset: dict[str, Any] = {
            name: defaults.get(name, value) for name, value in neutral.items() if getattr(self, name) is None
        }
        if "top_k" in unset:
            unset["top_k"] = int(unset["top_k"])
        return replace(self, **unset)
