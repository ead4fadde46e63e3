"""The options of `run` that look for the most probable answer, and how others that were found are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_llm_cli import console

if TYPE_CHECKING:
    from edge_llm.engine.request import RequestOptions
    from edge_llm.messages import Beam


def request_options(
    beams: int, length_penalty: float | None, n_best: int | None, *, early_stopping: bool
) -> RequestOptions:
    """The fields of a request that are given."""
    options: RequestOptions = {"beams": beams, "early_stopping": early_stopping}
    if length_penalty is not None:
        options["length_penalty"] = length_penalty
    if n_best is not None:
        options["n_best"] = n_best
    return options


def show_others(beams: Sequence[Beam]) -> None:
    """Write all but the first, which was the answer, each after an empty line; the scores of all go to stderr."""
    for beam in beams[1:]:
        console.line()
        writer = console.AnswerWriter()
        writer.write(beam.text)
        writer.finish()
    console.dim_note("scores " + ", ".join(f"{beam.score:.3f}" for beam in beams))
