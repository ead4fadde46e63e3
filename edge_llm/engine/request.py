"""Request: what a caller asks of an engine; plain values, so that it can cross a process border."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypedDict, Unpack

from edge_llm.config import CONTEXT_POLICIES
from edge_llm.errors import ParameterError, quoted
from edge_llm.messages import TOOL_CHOICES, Message, Tool
from edge_llm.sampling.grammar import Grammar, parse_schema
from edge_llm.sampling.params import SamplingParams, beyond_beams

MAX_TOOLS = 128
MAX_CHOICES = 256
MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10.0
EMBEDDINGS = ("mean", "last")
PRIORITIES = ("interactive", "normal", "batch")
"""the most urgent first"""


class RequestOptions(TypedDict, total=False):
    """The fields of a `Request` that say how it is answered, beside its sampling."""

    context_policy: str | None
    response_format: Grammar | None
    cache: bool
    namespace: str
    owner: str
    tools: tuple[Tool, ...]
    tool_choice: str
    parallel_tool_calls: bool
    reasoning: bool | None
    priority: str
    timeout_s: float | None
    embedding: str | None
    choices: tuple[str, ...]
    beams: int
    length_penalty: float
    early_stopping: bool
    n_best: int


@dataclass(frozen=True, slots=True)
class Request:
    """Exactly one of `messages` (a chat to answer), `text` (to continue as it is) and `token_ids` (likewise).

    Raises `ParameterError` otherwise.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    context_policy: str | None = None
    """what happens past the context: `error`, `slide`, or None for what the engine's config says"""
    response_format: Grammar | None = None
    """what the whole answer must look like"""
    cache: bool = True
    """rows of its tokens may be taken from, and left to, other requests of the same `namespace`"""
    namespace: str = ""
    owner: str = ""
    """whose it is: those who wait share the engine evenly by owner, however much each asks for"""
    tools: tuple[Tool, ...] = ()
    """what the model may ask for; nothing here runs a tool"""
    tool_choice: str = "auto"
    """`none`: no calls; `auto`: the model decides; `required`: one or more calls; a tool's name: a call of that one"""
    parallel_tool_calls: bool = True
    """an answer may hold several calls"""
    reasoning: bool | None = None
    """think before the answer, or do not, where the model's template has a switch for it; None: what the template does"""
    priority: str = "normal"
    """`interactive` goes before `normal`, and that before `batch`; but who has waited long goes before who just came"""
    timeout_s: float | None = None
    """seconds from submit on after which the answer ends where it is, in the queue too; None: it may take any time"""

    embedding: str | None = None
    """no answer, but a vector of its tokens' last hidden states: their `mean`, or that of the `last`"""
    choices: tuple[str, ...] = ()
    """no answer of the model's own, but how probable each of these labels is as one; nothing is sampled"""

    beams: int = 1
    """2 and more: nothing is sampled, but the most probable answer looked for along so many at a time, each in a slot"""
    length_penalty: float = 1.0
    """answers are compared by log-probability / tokens ** length_penalty: larger ones favour long answers, 0 short ones"""
    early_stopping: bool = False
    """end as soon as there are as many answers as beams, though a beam that still runs may become a better one"""
    n_best: int = 1
    """how many of the answers are told in `Finished.beams`"""

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.messages, self.text, self.token_ids)) != 1:
            raise ParameterError("a request takes exactly one of messages, text and token_ids")
        if self.text is not None and not isinstance(self.text, str):
            raise ParameterError(f"the text to continue must be a str, not {type(self.text).__name__}")
        if self.messages is not None and not all(isinstance(message, Message) for message in self.messages):
            raise ParameterError("messages must be Message values", hint="for example [Message.user('Hello')]")
        if not isinstance(self.params, SamplingParams):
            raise ParameterError("params must be SamplingParams", hint="for example SamplingParams(temperature=0.7)")
        if self.response_format is not None and not isinstance(self.response_format, Grammar):
            raise ParameterError("response_format must be a Grammar", hint="for example Grammar.json_schema({...})")
        if self.messages == ():
            raise ParameterError("there are no messages to answer")
        if self.context_policy is not None and self.context_policy not in CONTEXT_POLICIES:
            raise ParameterError(f"context_policy must be {' or '.join(CONTEXT_POLICIES)}, not {self.context_policy!r}")
        if not isinstance(self.cache, bool) or not isinstance(self.namespace, str) or not isinstance(self.owner, str):
            raise ParameterError("cache must be True or False, namespace and owner a str")
        if not isinstance(self.parallel_tool_calls, bool) or not isinstance(self.reasoning, bool | None):
            raise ParameterError("parallel_tool_calls must be True or False, and reasoning True, False or None")
        self._check_tools()
        if self.priority not in PRIORITIES:
            raise ParameterError(f"priority must be {', '.join(PRIORITIES)}, not {self.priority!r}")
        self._check_reading()
        self._check_beams()
        timeout = self.timeout_s
        if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < math.inf):
            raise ParameterError(f"timeout_s must be a number above 0, or None, not {timeout!r}")

    def _check_reading(self) -> None:
        """Whether nothing contradicts that no token is chosen."""
        if self.embedding is not None and self.embedding not in EMBEDDINGS:
            raise ParameterError(f"embedding must be {' or '.join(EMBEDDINGS)}, not {self.embedding!r}")
        choices = self.choices
        if not isinstance(choices, tuple) or not all(isinstance(label, str) and label for label in choices):
            raise ParameterError("choices must be a tuple of texts that are not empty")
        if len(choices) > MAX_CHOICES:
            raise ParameterError(f"choices must be at most {MAX_CHOICES} labels, not {len(choices)}")
        if len(set(choices)) < len(choices):
            twice = next(label for label in choices if choices.count(label) > 1)
            raise ParameterError(
                f"choices must differ, and {quoted(twice)} is given twice", hint="give each label once"
            )
        together = {
            "embedding": self.embedding is not None,
            "choices": choices,
            "tools": self.tools,
            self._form: self.response_format is not None,
        }
        given = [name for name, is_given in together.items() if is_given]
        if (choices or self.embedding is not None) and len(given) > 1:
            raise ParameterError(
                f"{', '.join(given[:-1])} and {given[-1]} exclude one another", hint="leave out all but one of them"
            )

    @property
    def _form(self) -> str:
        """What the form of the answer is called in errors: by its kind, which is what users have given."""
        return "response_format" if self.response_format is None else str(self.response_format.kind)

    def _check_beams(self) -> None:
        """Whether beams are a number of them, and nothing is asked for that they do not do."""
        if type(self.beams) is not int or not 1 <= self.beams <= MAX_BEAMS:
            raise ParameterError(f"beams must be a whole number from 1 to {MAX_BEAMS}, not {self.beams!r}")
        if type(self.n_best) is not int or self.n_best < 1 or self.n_best > self.beams > 1:
            raise ParameterError(f"n_best must be a whole number from 1 to the {self.beams} beams, not {self.n_best!r}")
        penalty = self.length_penalty
        if type(penalty) not in (int, float) or not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
            raise ParameterError(f"length_penalty must be a number from -10 to 10, not {penalty!r}")
        if not isinstance(self.early_stopping, bool):
            raise ParameterError("early_stopping must be True or False")
        if self.beams == 1:
            needy = {"length_penalty": penalty != 1.0, "early_stopping": self.early_stopping, "n_best": self.n_best > 1}
            for name, given in needy.items():
                if given:
                    raise ParameterError(f"{name} needs beams", hint="ask for 2 beams or more")
            return
        others = {
            "tools": self.tools,
            self._form: self.response_format,
            "embedding": self.embedding,
            "choices": self.choices,
            "context_policy slide": self.context_policy == "slide",
        }
        refused = [name for name, given in others.items() if given] + beyond_beams(self.params)
        if refused:
            raise ParameterError(
                f"beams cannot be combined with {', '.join(refused)}",
                hint="ask without beams, or without what is named",
            )

    def _check_tools(self) -> None:
        if not isinstance(self.tools, tuple) or not all(isinstance(tool, Tool) for tool in self.tools):
            raise ParameterError("tools must be a tuple of Tool values")
        names = {tool.name for tool in self.tools}
        if len(self.tools) > MAX_TOOLS or len(names) < len(self.tools):
            raise ParameterError(f"a request takes at most {MAX_TOOLS} tools, no two of one name")
        if self.tool_choice not in (*TOOL_CHOICES, *names):
            raise ParameterError(
                f"tool_choice must be {', '.join(TOOL_CHOICES)} or the name of a tool, not {self.tool_choice!r}"
            )
        if self.tools and self.messages is None:
            raise ParameterError("tools need messages: a text to continue has no place for them")
        if self.tool_choice == "required" and not self.tools:
            raise ParameterError("tool_choice is required, but there are no tools")
        if self.response_format is not None and self.tools and self.tool_choice != "none":
            raise ParameterError(
                f"tools and {self._form} exclude one another", hint='ask without tools, or with tool_choice "none"'
            )
        for tool in self.tools:
            _check_parameters(tool)

    @classmethod
    def chat(
        cls, messages: Iterable[Message], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Self:
        """Answer a conversation."""
        return cls(messages=tuple(messages), params=params or SamplingParams(), **options)

    @classmethod
    def completion(cls, text: str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Self:
        """Continue a text, without a template."""
        return cls(text=text, params=params or SamplingParams(), **options)


def _check_parameters(tool: Tool) -> None:
    try:
        schema = parse_schema(tool.parameters)
    except ParameterError as error:
        raise ParameterError(f"the parameters of the tool {tool.name}: {error}", hint=error.hint) from None
    if schema.get("type", "object") != "object":
        raise ParameterError(f"the parameters of the tool {tool.name} must be the schema of an object")
