"""Which of SamplingParams a chat can set, and how they are read from what somebody types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_llm.errors import ParameterError
from edge_llm.sampling.params import USUAL_MAX_TOKENS, SamplingParams


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    help: str
    whole: bool = False


PARAMETERS = (  # at most 43 characters of help: the room for it in a terminal of 80 columns
    Parameter("temperature", "0: the likeliest token; 1: as the model is"),
    Parameter("top_p", "only the likeliest, up to this probability"),
    Parameter("top_k", "only the K likeliest; 0: off", whole=True),
    Parameter("min_p", "none below this share of the likeliest one"),
    Parameter("repetition_penalty", "used tokens become less likely; 1: off"),
    Parameter("presence_penalty", "likewise those of the answer, once each"),
    Parameter("frequency_penalty", "likewise for each time they were used"),
    Parameter("max_tokens", f"most tokens of an answer; usually {USUAL_MAX_TOKENS}", whole=True),
    Parameter("seed", "the same seed gives the same answer", whole=True),
)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def read(name: str, text: str) -> float | int | None:
    """The value of a parameter; None for an empty text, which leaves it to the model. Raises `ParameterError`."""
    if name not in BY_NAME:
        raise ParameterError(f"there is no parameter {name!r}", hint=f"there are: {', '.join(BY_NAME)}")
    if not text.strip():
        return None
    try:
        value: float | int = int(text) if BY_NAME[name].whole else float(text)
    except ValueError:
        kind = "a whole number" if BY_NAME[name].whole else "a number"
        raise ParameterError(f"{name} must be {kind}, not {text!r}") from None
    SamplingParams(**{name: value})  # type: ignore[arg-type]
    return value


def changed(values: Mapping[str, float | int], name: str, text: str) -> dict[str, float | int]:
    """`values` with one of them set, or left out. Raises `ParameterError`."""
    value = read(name, text)
    others = {key: old for key, old in values.items() if key != name}
    return others if value is None else {**others, name: value}
