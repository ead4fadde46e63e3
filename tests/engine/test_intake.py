"""Intake: what can be wrong with a request is said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_llm.engine.intake import Intake
from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Sequence
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import ContextLengthError, ModelFormatError, ParameterError, TemplateError
from edge_llm.messages import Message, Role
from edge_llm.model.manifest import TOKENIZER_NAME, TokenSpec
from edge_llm.sampling.params import SamplingParams
from edge_llm.text.chat_template import ChatTemplate
from tests.engine.fakes import END, MERGES, START, TEMPLATE, VOCAB, FakeSampler, byte_ids, manifest, tokenizer


def intake(*, template: bool = True, context: int = 100, policy: str = "error", **changes: object) -> Intake:
    return Intake(
        manifest(**changes),
        tokenizer(),
        ChatTemplate(TEMPLATE) if template else None,
        sampler=FakeSampler(),
        window=ContextWindow(context),
        policy=policy,
    )


def sequence(made: Intake, request: Request) -> Sequence:
    return made.sequence(request, lambda event: None, lambda: 0.0)


def test_a_chat_goes_through_the_template_and_content_is_never_control() -> None:
    """B39: the text of a control token in a message stays text."""
    ids, _ = intake().prompt(Request.chat([Message.user("<|im_end|>")]))
    assert ids == [
        START,
        *byte_ids("user\n<|im_end|>"),
        END,
        *byte_ids("\n"),
        START,
        *byte_ids("assistant\n"),
    ]


def test_a_text_is_continued_as_it_is() -> None:
    hello = 3 + 256 + MERGES.index("hell o")
    assert intake().prompt(Request.completion("hello<|im_end|>"))[0] == [hello, *byte_ids("<|im_end|>")]
    with_bos = intake(tokens=TokenSpec(bos=0, eos=(END,), add_bos=True))
    assert with_bos.prompt(Request.completion("a"))[0] == [0, *byte_ids("a")]
    assert len(sequence(with_bos, Request.completion("")).ids) == 1


def test_ids_are_taken_as_they_are() -> None:
    assert intake().prompt(Request(token_ids=(5, 0, 6))) == ([5, 0, 6], ())


@pytest.mark.parametrize("ids", [(VOCAB,), (-1,), (True,), ("5",), (1.0,)])
def test_ids_outside_the_vocabulary_are_refused(ids: tuple[object, ...]) -> None:
    with pytest.raises(ParameterError, match="token ids"):
        intake().prompt(Request(token_ids=ids))


def test_an_empty_prompt_is_refused() -> None:
    for request in (Request.completion(""), Request(token_ids=())):
        with pytest.raises(ParameterError, match="empty"):
            sequence(intake(), request)


def test_a_request_is_one_thing() -> None:
    for wrong in ({}, {"text": "a", "token_ids": (1,)}, {"messages": ()}, {"messages": ("hello",)}, {"text": b"a"}):
        with pytest.raises(ParameterError):
            Request(**wrong)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(TemplateError, match="no chat template") as caught:
        sequence(intake(template=False), Request.chat([Message.user("hi")]))
    assert caught.value.hint


def test_the_context_must_hold_the_prompt_and_one_token() -> None:
    made = intake(context=10)
    assert sequence(made, Request(token_ids=(5,) * 9)).max_tokens == 1
    with pytest.raises(ContextLengthError):
        sequence(made, Request(token_ids=(5,) * 10))


@pytest.mark.parametrize("policy", ["error", "slide"])
def test_a_request_chooses_what_happens_past_the_context(policy: str) -> None:
    """B16: `slide` takes any prompt, and an answer is as long as the context unless the caller says otherwise."""
    made = intake(policy="slide" if policy == "error" else "error")
    sizes = {None: 100, 5: 5, 10**6: 10**6}
    for length in (99, 100, 101, 1000):
        for asked, most in sizes.items():
            params = SamplingParams(max_tokens=asked)
            request = Request(token_ids=(5,) * length, params=params, context_policy=policy)
            if policy == "slide":
                assert sequence(made, request).max_tokens == most
            elif length < 100:
                assert sequence(made, request).max_tokens == 1
            else:
                with pytest.raises(ContextLengthError, match=f"{length} tokens.* 100 tokens"):
                    sequence(made, request)


def test_without_a_choice_the_engine_s_policy_holds() -> None:
    request = Request(token_ids=(5,) * 200)
    assert sequence(intake(policy="slide"), request).max_tokens == 100
    with pytest.raises(ContextLengthError):
        sequence(intake(), request)


def test_policies_have_names() -> None:
    with pytest.raises(ParameterError, match="error or slide, not 'half'"):
        Request.chat([Message.user("hi")], context_policy="half")
    assert Request.completion("hi", context_policy="slide").context_policy == "slide"


@pytest.mark.parametrize("context", [1, 63, 64])
def test_a_context_that_sinks_fill_cannot_slide(context: int) -> None:
    request = Request(token_ids=(5,), context_policy="slide")
    with pytest.raises(ParameterError, match=f"{context} tokens is too small to slide.* 64 ") as caught:
        sequence(intake(context=context), request)
    assert "more than 64" in caught.value.hint
    with pytest.raises(ParameterError, match="too small to slide"):
        intake(context=context, policy="slide")
    assert sequence(intake(context=65), request).max_tokens == 65


def test_places_are_those_of_the_caller_s_messages() -> None:
    """What the model's own system prompt adds in front counts for nobody."""
    messages = [Message.user("ab"), Message(Role.ASSISTANT, "c"), Message.user("d")]
    for prompt in (None, "Be brief."):
        ids, places = intake(system_prompt=prompt).prompt(Request.chat(messages, context_policy="slide"))
        assert [tokenizer().decode(ids[place.start : place.stop]) for place in places] == ["ab", "c", "d"]


def test_the_model_recommends_what_the_caller_leaves_open() -> None:
    made = intake(sampling={"temperature": 0.25, "top_k": 40})
    request = Request(token_ids=(5,), params=SamplingParams(top_k=3))
    params = sequence(made, request).decoder._sampler.params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 3, 1.0)


def test_variables_of_the_manifest_reach_the_template() -> None:
    made = intake(template_kwargs={"enable_thinking": True})
    made.template = ChatTemplate("{% if enable_thinking %}think{% endif %}{{ messages[0].content }}")
    assert made.prompt(Request.chat([Message(Role.USER, "x")]))[0] == byte_ids("thinkx")


def test_a_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=TOKENIZER_NAME):
        Intake.open(tmp_path, manifest(), sampler=FakeSampler(), window=ContextWindow(10), policy="error")
