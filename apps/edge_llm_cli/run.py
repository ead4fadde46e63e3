"""`edge-llm run`: one prompt, one answer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from edge_llm.errors import InputError
from edge_llm.sampling.params import USUAL_MAX_TOKENS, SamplingParams
from edge_llm_cli import answer, beams, console, structure, tools

if TYPE_CHECKING:
    from edge_llm.engine.request import RequestOptions
    from edge_llm_cli.answer import Answer

MAX_STDIN_BYTES = 8 << 20
_sampling, _more_sampling, _beams, _form, _tools = (
    partial(typer.Option, rich_help_panel=section)
    for section in ("Sampling", "More sampling", "Beam search", "Form of the answer", "Tools and reasoning")
)
_LEAST_PREFILL = 16
"""prompt tokens that must be computed before their speed says something"""


def run(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say to the model; piped text is added after it.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Name of a model, its folder, or a FILE.gguf.")
    ] = answer.DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message; default: what the model recommends.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = USUAL_MAX_TOKENS,
    temperature: Annotated[float | None, _sampling(help="0 is greedy; default: what the model recommends.")] = None,
    top_k: Annotated[int | None, _sampling(help="Keep the K most probable tokens; 0 is off.")] = None,
    top_p: Annotated[
        float | None,
        _sampling(help="Keep the most probable tokens up to this probability."),
    ] = None,
    min_p: Annotated[
        float | None,
        _sampling(help="Drop tokens below this share of the most probable one."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling(help="Make tokens that were used less likely; 1 is off.")
    ] = None,
    typical_p: Annotated[float | None, _more_sampling(help="Keep the most typical tokens; 1 is off.")] = None,
    top_n_sigma: Annotated[float | None, _more_sampling(help="Cut N deviations below the best logit.")] = None,
    xtc_probability: Annotated[float | None, _more_sampling(help="XTC: chance to leave out the top choices.")] = None,
    xtc_threshold: Annotated[float | None, _more_sampling(help="XTC: probability of a top choice (0.1).")] = None,
    mirostat_tau: Annotated[float | None, _more_sampling(help="Mirostat 2: surprise in bits to aim at.")] = None,
    mirostat_eta: Annotated[float | None, _more_sampling(help="Mirostat 2: how fast it learns (0.1).")] = None,
    dry_multiplier: Annotated[float | None, _more_sampling(help="DRY: penalty of repeated texts; 0 is off.")] = None,
    dry_base: Annotated[float | None, _more_sampling(help="DRY: its growth with each token (1.75).")] = None,
    dry_allowed_length: Annotated[int | None, _more_sampling(help="DRY: tokens that may be repeated (2).")] = None,
    dry_penalty_last_n: Annotated[int | None, _more_sampling(help="DRY: tokens to look back (8192).")] = None,
    dry_breaker: Annotated[
        list[str] | None,
        _more_sampling(help="DRY: no repeat goes across this; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer; --stats shows it.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    beam_count: Annotated[
        int, _beams("--beams", help="Look for the most probable answer along N beams; 1 (default) is off.")
    ] = 1,
    length_penalty: Annotated[
        float | None, _beams(help="Compare answers by log-probability / tokens^P (1); larger favours long ones.")
    ] = None,
    early_stopping: Annotated[bool, _beams("--early-stopping", help="End as soon as there are N answers.")] = False,
    n_best: Annotated[int | None, _beams(help="Show so many of the answers that were found.")] = None,
    json_schema: Annotated[
        Path | None,
        _form(metavar="FILE", help="The answer is JSON that this schema allows."),
    ] = None,
    regex: Annotated[str | None, _form(help="The whole answer matches this regular expression.")] = None,
    grammar: Annotated[
        Path | None,
        _form(metavar="FILE", help="The answer is in the language of this Lark grammar."),
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,C", help="No answer of its own: which of these labels is the most probable one."),
    ] = None,
    tool: Annotated[
        list[str] | None,
        _tools(
            help="Let the model ask for time, calculator or read:FOLDER, if you allow each call; repeatable.",
        ),
    ] = None,
    tool_choice: Annotated[
        str | None,
        _tools(
            metavar="auto|none|required|NAME",
            help="Whether to call tools first: auto (default), none, required, or a tool's name.",
        ),
    ] = None,
    reasoning: Annotated[
        str | None,
        _tools(
            metavar="on|off",
            help="Think before the answer, where the model has a switch for it: on or off.",
        ),
    ] = None,
    context: answer.ContextOption = None,
    context_policy: answer.PolicyOption = None,
    threads: answer.ThreadsOption = None,
    provider: answer.ProviderOption = None,
    kv_dtype: answer.KvOption = None,
    cache: answer.CacheOption = None,
    speculate: answer.SpeculateOption = None,
    private: answer.PrivateOption = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts and speeds on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is complete.")] = False,
) -> None:
    """Answer one prompt and exit. The first use downloads and imports the model; later ones need no network."""
    from edge_llm.engine.request import Request
    from edge_llm.messages import Message

    if raw and system is not None:
        raise InputError("--system needs a chat template, which --raw leaves out", hint="put the text into the prompt")
    if raw and (tool or tool_choice or reasoning):
        raise InputError("--tool and --reasoning need a chat template, which --raw leaves out", hint="leave out --raw")
    if reasoning not in (None, "on", "off"):
        raise InputError(f"--reasoning must be on or off, not {reasoning!r}")
    belt = tools.Toolbelt([answer.argument_text(name) for name in tool or ()], tool_choice)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(map(answer.argument_text, stop or ())),
        **_given(
            typical_p=typical_p,
            top_n_sigma=top_n_sigma,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            dry_multiplier=dry_multiplier,
            dry_base=dry_base,
            dry_allowed_length=dry_allowed_length,
            dry_penalty_last_n=dry_penalty_last_n,
            dry_sequence_breakers=tuple(map(answer.argument_text, dry_breaker)) if dry_breaker else None,
        ),
    )
    form = structure.response_format(json_schema, regex, grammar)
    labels = structure.labels(map(answer.argument_text, choices or ()), as_they_are=raw)
    text = _whole_prompt(prompt, keep_end=raw)
    wanted: RequestOptions = {
        "response_format": form,
        "choices": labels,
        **beams.request_options(beam_count, length_penalty, n_best, early_stopping=early_stopping),
    }
    Request.completion(text, params, **wanted)  # what is wrong is told before a model is loaded
    options = answer.EngineOptions(
        context,
        threads,
        kv_dtype,
        context_policy,
        cache=cache,
        private=private,
        speculation=speculate,
        slots=beam_count if beam_count > 1 else None,
        provider=provider,
    )
    read = answer.read if as_json else answer.show
    with _told_if_interrupted(model, as_json=as_json), answer.opened(model, options) as (engine, load_s):
        if raw:
            result = read(engine.complete(text, params, **wanted))
        else:
            messages = [Message.system(answer.argument_text(system))] if system is not None else []
            wanted["reasoning"] = None if reasoning is None else reasoning == "on"
            result = belt.converse(engine, [*messages, Message.user(text)], params, read, wanted)
        name, context = engine.info.name, engine.info.context
    if as_json:
        console.data(
            _as_object(result, name, load_s)
            | {"reasoning": result.reasoning, "tool_calls": belt.as_objects()}
            | ({"choices": [dataclasses.asdict(choice) for choice in result.finished.choices]} if labels else {})
            | ({"beams": [dataclasses.asdict(beam) for beam in result.finished.beams]} if beam_count > 1 else {})
        )
    else:
        answer.note_if_cut(result, params)
        if result.finished.choices:
            shares = (f"{choice.label.strip()} {choice.probability:.3f}" for choice in result.finished.choices)
            console.dim_note(", ".join(shares))
        if len(result.finished.beams) > 1:
            beams.show_others(result.finished.beams)
        if result.finished.forgotten_tokens:
            console.dim_note(
                f"the context of {context} tokens was exceeded: the end of the answer no longer saw"
                f" {result.finished.forgotten_tokens} of the tokens before it"
            )
    if stats:
        console.note(_statistics(result, load_s))
    if result.interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _told_if_interrupted(model: str, *, as_json: bool) -> Iterator[None]:
    """The object of an answer that did not begin because somebody had enough of waiting for the model."""
    try:
        yield
    except KeyboardInterrupt:
        if as_json:
            nothing = dict.fromkeys(("seed", "usage", "forgotten_tokens", "timings", "reasoning"))
            console.data({"text": "", "finish_reason": "cancelled", "model": model, **nothing, "tool_calls": []})
        raise


def _given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _whole_prompt(prompt: str | None, *, keep_end: bool) -> str:
    """The argument, an empty line, and what was piped in. Raises `InputError` if both are missing."""
    piped = _piped_text()
    if not keep_end:
        piped = piped.rstrip("\r\n")
    parts = [part for part in (answer.argument_text(prompt) if prompt is not None else "", piped) if part.strip()]
    if not parts:
        raise InputError("there is no prompt", hint='edge-llm run "your question", or pipe a text into it')
    return "\n\n".join(parts)


def _piped_text() -> str:
    if sys.stdin is None or sys.stdin.closed or console.is_terminal(sys.stdin):
        return ""
    if _is_silent(sys.stdin):
        console.note("reading standard input ...")  # a pipe that nobody closes would look like a hang
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise InputError(
            f"standard input holds more than {MAX_STDIN_BYTES >> 20} MiB", hint="no context holds so much; pipe less"
        )
    return data.decode("utf-8", "replace")


def _is_silent(stream: TextIO) -> bool:
    """Whether nothing, not even an end, comes for two seconds."""
    try:
        return os.name == "posix" and not select.select([stream], [], [], 2.0)[0]
    except (OSError, ValueError):  # not a file of the system
        return False


def _as_object(result: Answer, model: str, load_s: float) -> dict[str, object]:
    finished = result.finished
    timings = finished.timings
    return {
        "text": result.text,
        "finish_reason": str(finished.reason),
        "seed": finished.seed,
        "model": model,
        "usage": dataclasses.asdict(finished.usage),
        "forgotten_tokens": finished.forgotten_tokens,
        "timings": {
            "load_s": load_s,
            "ttft_s": timings.ttft_s,
            "prefill_tokens_per_s": _prefill_speed(result),
            "decode_tokens_per_s": timings.decode_tokens_per_s,
            "tpot_s": timings.tpot_s,
            **({} if timings.joules is None else {"joules": timings.joules}),
            "peak_rss_mb": peak_rss_mb(),
        },
    }


def _statistics(result: Answer, load_s: float) -> str:
    usage, timings = result.finished.usage, result.finished.timings
    parts = [
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} tokens ({result.finished.reason})",
        f"load {load_s:.2f} s",
    ]
    if usage.draft_tokens:
        parts.append(f"{usage.accepted_draft_tokens} of {usage.draft_tokens} drafts accepted")
    if timings.ttft_s is not None:
        parts.append(f"first token {timings.ttft_s:.3f} s")
    if (prefill := _prefill_speed(result)) is not None:
        parts.append(f"prefill {prefill:.0f} tokens/s")
    if timings.decode_tokens_per_s is not None:
        parts.append(f"decode {timings.decode_tokens_per_s:.1f} tokens/s")
    if timings.joules is not None and usage.completion_tokens:
        parts.append(f"{timings.joules / usage.completion_tokens:.3f} J a token")
    peak = peak_rss_mb()
    if peak is not None:
        parts.append(f"peak memory {peak:.0f} MB")
    return ", ".join([*parts, f"seed {result.finished.seed}"])


def _prefill_speed(result: Answer) -> float | None:
    """Computed prompt tokens a second; None for too few of them: what they took is mostly the step itself."""
    usage = result.finished.usage
    computed = usage.prompt_tokens - usage.cached_tokens
    return result.finished.timings.prefill_tokens_per_s if computed >= _LEAST_PREFILL else None


def peak_rss_mb() -> float | None:
    """Most memory this process has held, in 10^6 bytes; None where the system does not tell."""
    try:
        # of this program alone; getrusage also counts what the process was before it became this program
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            lines = (line.split() for line in file)
            return next(int(words[1]) * 1024 / 1e6 for words in lines if words[0] == "VmHWM:")
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
