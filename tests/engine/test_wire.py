"""The wire: what goes in comes out, for all that may be said; what else comes is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm import errors
from edge_llm.config import EngineConfig
from edge_llm.engine import wire
from edge_llm.engine.codec import WireError, codec
from edge_llm.engine.info import EngineInfo
from edge_llm.engine.protocol import FromEngine, Happened, Loading, Submit, ToEngine
from edge_llm.engine.request import Request
from edge_llm.errors import ContextLengthError, EdgeLLMError, QueueFullError
from edge_llm.messages import Event, Message, Role, TextDelta, TokenInfo, TokenLogprob, ToolCall
from edge_llm.sampling.grammar import Grammar
from edge_llm.sampling.params import SamplingParams

ERRORS = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, EdgeLLMError)]
KINDS = [*get_args(ToEngine), *get_args(FromEngine), Request, *get_args(Event), EngineInfo, EngineConfig]

texts = st.text(max_size=8) | st.sampled_from(["\ud83d\ude00", "\ud800", "é🗼", '"\\\n\0', "@"])
scalars = {
    bool: st.booleans(),
    int: st.integers(-(2**70), 2**70),
    float: st.floats(allow_nan=False) | st.integers(-5, 5),
    str: texts,
    bytes: st.binary(max_size=6),
    types.NoneType: st.none(),
}
messages = st.builds(
    Message,
    st.sampled_from(Role),
    texts,
    tool_calls=st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
    token_ids=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
grammars = st.sampled_from([Grammar.json_object(), Grammar.json_schema({"type": "string"}), Grammar.regex("a é\n")])
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 99),
    temperature=st.sampled_from([None, 0, 0.7, 1]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(texts.filter(bool), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    logprobs=st.booleans(),
)
requests = st.builds(
    lambda prompt, **rest: Request(**prompt, **rest),
    st.lists(messages, min_size=1, max_size=3).map(lambda many: {"messages": tuple(many)})
    | texts.map(lambda text: {"text": text})
    | st.lists(st.integers(0, 999), max_size=4).map(lambda ids: {"token_ids": tuple(ids)}),
    params=params,
    response_format=st.none() | grammars,
    context_policy=st.sampled_from([None, "slide"]),
    cache=st.booleans(),
    namespace=texts,
)
KNOWN: dict[Any, Any] = {**scalars, Request: requests, EngineConfig: st.builds(EngineConfig, slots=st.integers(1, 9))}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything of a type, as its annotations say."""
    if hint in KNOWN:
        return KNOWN[hint]
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if get_origin(hint) is dict:
        return st.dictionaries(*(values(argument) for argument in arguments), max_size=3)
    if get_origin(hint) is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, EdgeLLMError):
        return st.sampled_from(ERRORS).flatmap(made)
    hints = get_type_hints(hint)
    return st.builds(hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)})


def made(cls: type[EdgeLLMError]) -> st.SearchStrategy[EdgeLLMError]:
    hints = get_type_hints(cls.__init__)
    return st.builds(cls, **{name: values(hints[name]) for name in list(inspect.signature(cls).parameters)})


def plain(value: Any) -> Any:
    """With errors, which are equal to none but themselves, as what they hold."""
    if isinstance(value, EdgeLLMError):
        return type(value), str(value), vars(value)
    if dataclasses.is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def there_and_back(value: Any) -> Any:
    (result,) = wire.FrameReader().feed(wire.frame([value]))
    return result


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_what_goes_in_comes_out(kind: Any, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    assert plain(there_and_back(value)) == plain(value)


@settings(max_examples=100)
@given(data=st.data())
def test_errors_come_back_with_what_they_carry(data: st.DataObject) -> None:
    error = data.draw(st.sampled_from(ERRORS).flatmap(made))
    assert plain(there_and_back(error)) == plain(error)


def test_an_error_s_numbers_and_hint_are_kept() -> None:
    error = there_and_back(ContextLengthError(5000, 4096))
    assert (error.prompt_tokens, error.context) == (5000, 4096)
    full = there_and_back(QueueFullError("full", retry_after_s=1.5, hint="later"))
    assert (str(full), full.retry_after_s, full.hint) == ("full", 1.5, "later")


def test_an_error_of_another_tree_becomes_the_nearest_of_ours() -> None:
    class OddError(QueueFullError):
        pass

    assert plain(there_and_back(OddError("full", retry_after_s=2.0))) == plain(
        QueueFullError("full", retry_after_s=2.0)
    )


def test_fields_that_are_as_usual_cost_nothing() -> None:
    assert wire.encode(TextDelta("hi")) == {"@": "TextDelta", "text": "hi"}
    assert wire.encode(Request(text="x")) == {"@": "Request", "text": "x"}


def test_text_is_written_short_and_loses_nothing() -> None:
    events = [
        Happened(2**70, TextDelta("é\ud800")),
        Happened(3, TextDelta("x", (TokenInfo(TokenLogprob(1, b"x", 0)),))),
    ]
    assert wire.frame(events[:1])[4:] == '[[1180591620717411303424,"é\ud800"]]'.encode("utf-8", "surrogatepass")
    assert [there_and_back(event) for event in events] == events
    # what is written short has no other fields: a new one must be written too
    assert [field.name for field in (*dataclasses.fields(Happened), *dataclasses.fields(TextDelta))] == [
        *("id", "event"),
        *("text", "tokens"),
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_may_be_cut_anywhere(size: int) -> None:
    events = [Happened(i, TextDelta("é" * i, (TokenInfo(TokenLogprob(i, b"\xff\0", -0.5)),))) for i in range(9)]
    data = wire.frame(events[:4]) + wire.frame([]) + wire.frame(events[4:])
    reader = wire.FrameReader()
    assert [x for i in range(0, len(data), size) for x in reader.feed(data[i : i + size])] == events


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"text": "x"},
        SamplingParams(),  # only ever part of a request
        ValueError("x"),
        TextDelta(b"x"),
        Happened(True, TextDelta("x")),
        Submit(1, Request(token_ids=(1.5,))),
        Submit(1, Request(messages=(Message("nobody", "x"),))),
        Request(messages=(Message(Role.USER, None),)),
    ],
)
def test_what_is_of_another_type_is_not_written(value: object) -> None:
    with pytest.raises(WireError):
        wire.frame([value])


def test_a_refusal_names_the_place_and_no_content() -> None:
    with pytest.raises(WireError, match=r"Request\.params: SamplingParams\.stop: int where") as caught:
        wire.encode(Request(text="a secret", params=_params_with_stop((5,))))
    assert "secret" not in str(caught.value)


def _params_with_stop(stop: Any) -> SamplingParams:
    made = SamplingParams()
    object.__setattr__(made, "stop", stop)
    return made


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"null",
        b"[1]",
        b"[[]]",
        b"[[1]]",
        b"[[1,2]]",
        b'[["x",1]]',
        b'[[true,"x"]]',
        b'[[1.0,"x"]]',
        b'[[1,"x",[]]]',
        b"[{}]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[" + b"1" * 5000 + b"]",
        b'[{"@":"SamplingParams"}]',
        b'[{"@":"Path","text":"x"}]',
        b'[{"@":"Exception","message":"x","hint":null}]',
        b'[{"@":["TextDelta"],"text":"x"}]',
        b'[{"@":"TextDelta"}]',
        b'[{"@":"TextDelta","text":1}]',
        b'[{"@":"TextDelta","text":"x","more":1}]',
        b'[{"@":"TextDelta","text":"x","tokens":[{}]}]',
        b'[{"@":"TextDelta","text":"x","tokens":{"0":1}}]',
        b'[{"@":"PromptProgress","done":true,"total":2}]',
        b'[{"@":"PromptProgress","done":1.0,"total":2}]',
        b'[{"@":"Request"}]',
        b'[{"@":"Request","text":"x","token_ids":[1]}]',
        b'[{"@":"Request","text":"x","params":{"temperature":-1}}]',
        b'[{"@":"Request","text":"x","params":{"logit_bias":[[1,1.0],[1,2.0]]}}]',
        b'[{"@":"Request","text":"x","params":{"logit_bias":[[1]]}}]',
        b'[{"@":"Request","text":"x","response_format":{"kind":"perl","text":"x"}}]',
        b'[{"@":"Happened","id":1,"event":{"@":"Request","text":"x"}}]',
        b'[{"@":"Happened","id":1,"event":{"@":"QueueFullError","message":"x"}}]',
        b'[{"@":"Happened","id":1,"event":{"@":"GenerationError","message":"x","hint":null,"more":1}}]',
        b'[{"@":"Happened","id":1,"event":null}]',
        b'[{"@":"TextDelta","text":"x","tokens":[{"chosen":{"token_id":1,"data":"\xe6\x9d\xb1","logprob":0}}]}]',
    ],
)
def test_hostile_frames_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        wire.FrameReader().feed(framed(payload))


def test_a_frame_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="a frame of 4294967295 bytes"):
        wire.FrameReader().feed(b"\xff" * 4)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 40)
    assert there_and_back(TextDelta("é" * 4)) == TextDelta("é" * 4)
    with pytest.raises(WireError, match="more than the 40"):
        wire.frame([TextDelta("é" * 40)])


@settings(max_examples=300)
@given(data=st.data())
def test_changed_frames_give_values_or_are_refused(data: st.DataObject) -> None:
    """Bytes are overwritten, cut out and put in; numbers, keys and kinds change place."""
    start = wire.frame([Happened(3, TextDelta("hé", (TokenInfo(TokenLogprob(1, b"\xff", -0.5)),))), Loading("x", 1, 2)])
    changed = bytearray(start)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"1", b'"', b"[", b"null", b"@", b"\xc3"])
        )
    changed[:4] = (len(changed) - 4).to_bytes(4, "big")
    try:
        read = wire.FrameReader().feed(bytes(changed))
    except WireError:
        return
    assert all(type(value) in KINDS or isinstance(value, EdgeLLMError) for value in read)


def test_new_fields_come_along_by_themselves() -> None:
    class Colour(StrEnum):
        RED = "red"

    @dataclass(frozen=True)
    class Thing:
        colours: tuple[Colour, ...]
        pair: tuple[int, str]
        weights: Mapping[str, float]
        size: Literal["small", 7] = "small"
        child: TextDelta | None = None

    hints = {"Thing": Thing, "Colour": Colour}
    Thing.__annotations__ = {name: eval(hint, globals() | hints) for name, hint in Thing.__annotations__.items()}
    thing = Thing((Colour.RED,), (1, "x"), {"a": 0.5}, 7, TextDelta("x"))
    raw = json.loads(json.dumps(codec(Thing).encode(thing)))
    assert codec(Thing).decode(raw) == thing
    for name, wrong in (("pair", [1]), ("size", 8), ("size", True), ("colours", ["blue"]), ("weights", [["a", "b"]])):
        with pytest.raises(WireError):
            codec(Thing).decode({**raw, name: wrong})


def test_types_without_a_form_are_named() -> None:
    with pytest.raises(TypeError, match="set"):
        codec(set[int])
