"""What a caller may ask of sampling: frozen, validated when it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from edge_llm.errors import ParameterError
from edge_llm.kernels.layout import MAX_DRY_WINDOW

USUAL_MAX_TOKENS = 1024
"""of our programs: small models sometimes repeat themselves for ever, and nobody wants to read that to the end of the context"""
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_BYTES = 64


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParameterError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be between {low:g} and {high:g}, not {value:g}")


def _texts(name: str, value: object, most: int, most_bytes: int) -> None:
    if not isinstance(value, tuple):
        raise ParameterError(f"{name} must be a tuple of texts")
    if len(value) > most:
        raise ParameterError(f"{name} must be at most {most} texts, not {len(value)}")
    for text in value:
        if not isinstance(text, str) or not 0 < len(text.encode("utf-8", "surrogatepass")) <= most_bytes:
            raise ParameterError(f"each text of {name} must have 1 to {most_bytes} bytes")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be between {low} and {high}, not {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `None` means: what the model's manifest recommends, else the neutral value.

    The order in which they act is fixed (docs/sampling.md): logit bias -> repetition, presence and frequency penalties, DRY
    -> top-n-sigma -> temperature -> top-k -> typical -> top-p -> min-p -> XTC -> draw. Mirostat replaces top-k to XTC.

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
    dry_multiplier: float = 0.0
    """DRY: subtracted from the logit of a token that would lengthen a repeat, times dry_base for each token beyond
    dry_allowed_length; 0 is off"""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """longest sequence, in tokens, that may be repeated without penalty"""
    dry_penalty_last_n: int = 8192
    """how many of the last tokens of prompt and answer are searched for repeats"""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """texts that no repeat goes across"""
    top_n_sigma: float = 0.0
    """drop tokens whose logit lies more than n standard deviations below the largest; 0 is off"""
    typical_p: float = 1.0
    """keep the tokens whose surprise is nearest to the expected one, until their probability reaches p; 1 is off"""
    xtc_probability: float = 0.0
    """chance, at each token, that the most probable ones are left out; 0 is off"""
    xtc_threshold: float = 0.1
    """which ones: all from this probability on but the least probable of them"""
    mirostat_tau: float = 0.0
    """surprise in bits that mirostat steers the tokens to; 0 is off"""
    mirostat_eta: float = 0.1
    """how fast it does"""
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
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("dry_multiplier", 0.0, 100.0),
            ("dry_base", 1.0, 10.0),
            ("top_n_sigma", 0.0, 100.0),
            ("typical_p", 0.0, 1.0),
            ("xtc_probability", 0.0, 1.0),
            ("xtc_threshold", 0.0, 1.0),
            ("mirostat_tau", 0.0, 20.0),
            ("mirostat_eta", 0.0, 1.0),
        ):
            _number(name, getattr(self, name), low, high)
        _integer("dry_allowed_length", self.dry_allowed_length, 1, MAX_DRY_WINDOW)
        _integer("dry_penalty_last_n", self.dry_penalty_last_n, 1, MAX_DRY_WINDOW)
        _texts("dry_sequence_breakers", self.dry_sequence_breakers, MAX_DRY_BREAKERS, MAX_DRY_BREAKER_BYTES)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        _texts("stop", self.stop, MAX_STOPS, MAX_STOP_BYTES)
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


_WITH_BEAMS = ("max_tokens", "stop", "ignore_eos", "seed")


def beyond_beams(params: SamplingParams) -> list[str]:
    """Names of the fields that ask for something that beam search does not do: it takes what is most probable."""
    greedy = {"temperature": 0.0}
    given, nothing = params.with_defaults(greedy), SamplingParams().with_defaults(greedy)
    names = [field.name for field in fields(params) if field.name not in _WITH_BEAMS]
    return [name for name in names if getattr(given, name) != getattr(nothing, name)]
