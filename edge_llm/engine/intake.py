"""Intake: from what a caller asks to a sequence that the engine can run; everything that can be wrong is said here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Emit, Sequence
from edge_llm.engine.stream import TextStream
from edge_llm.errors import ContextLengthError, ModelFormatError, ParameterError, TemplateError
from edge_llm.messages import Message, Role
from edge_llm.model.manifest import TEMPLATE_NAME, TOKENIZER_NAME, ModelManifest
from edge_llm.sampling.decoders import SampledDecoder
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from edge_llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge_llm.text.chat_template import ChatTemplate


class Intake:
    """The text side of a model. May be used by several threads at once."""

    def __init__(
        self,
        manifest: ModelManifest,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        sampler: Sampler,
        context: int,
    ) -> None:
        """`context` bounds prompt and answer together, in tokens; `template` is None for a model that cannot chat."""
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.template = template
        self.context = context
        self._sampler = sampler

    @classmethod
    def open(cls, folder: Path, manifest: ModelManifest, *, sampler: Sampler, context: int) -> Self:
        """Read tokenizer and template of a model folder. Raises `ModelFormatError`, `TemplateError`."""
        try:
            SamplingParams().with_defaults(manifest.sampling)
        except ParameterError as error:
            raise ModelFormatError(f"manifest.json: sampling: {error}", hint="import the model again") from None
        tokenizer = Tokenizer.from_file(folder / TOKENIZER_NAME)
        template = _read_template(folder, manifest, tokenizer) if manifest.has_chat_template else None
        return cls(manifest, tokenizer, template, sampler=sampler, context=context)

    def sequence(self, request: Request, emit: Emit, clock: Callable[[], float]) -> Sequence:
        """A sequence for `request`. Raises `ParameterError`, `TemplateError`, `ContextLengthError`."""
        submitted = clock()
        ids = self.prompt_ids(request)
        if not ids:
            raise ParameterError("the prompt is empty", hint="give at least one token of text")
        room = self.context - len(ids)
        if room < 1:
            raise ContextLengthError(len(ids), self.context)
        params = request.params.with_defaults(self.manifest.sampling)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        end_ids = frozenset() if params.ignore_eos else frozenset(self.manifest.tokens.eos)
        return Sequence(
            ids,
            max_tokens=max_tokens,
            decoder=SampledDecoder(self._sampler.sequence(params, ids, self.tokenizer.token_bytes)),
            stream=TextStream(self.tokenizer, params, end_ids=end_ids, max_tokens=max_tokens),
            emit=emit,
            submitted=submitted,
        )

    def prompt_ids(self, request: Request) -> list[int]:
        """The tokens that a request starts from. Raises `ParameterError`, `TemplateError`."""
        if request.messages is not None:
            if self.template is None:
                raise TemplateError(
                    f"{self.manifest.name} has no chat template, so it cannot answer messages",
                    hint="let it continue a text instead (run --raw, or complete())",
                )
            messages = self._with_system(request.messages)
            rendered = self.template.render(messages, variables=self.manifest.template_kwargs)
            return self.tokenizer.encode_prompt(rendered)
        if request.text is not None:
            tokens = self.manifest.tokens
            return self.tokenizer.encode_raw(request.text, tokens.bos if tokens.add_bos else None)
        assert request.token_ids is not None
        vocab = self.manifest.dimensions.vocab
        ids = list(request.token_ids)
        if any(type(i) is not int or not 0 <= i < vocab for i in ids):
            raise ParameterError(f"token ids must be whole numbers from 0 to {vocab - 1}")
        return ids

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation, opened by the model's own system prompt if it has none."""
        prompt = self.manifest.system_prompt
        if prompt is None or any(message.role is Role.SYSTEM for message in messages):
            return messages
        return (Message.system(prompt), *messages)


def _read_template(folder: Path, manifest: ModelManifest, tokenizer: Tokenizer) -> ChatTemplate:
    from edge_llm.text.chat_template import ChatTemplate  # jinja2 is only loaded for a model that can chat

    try:
        source = (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{TEMPLATE_NAME} cannot be read: {error}", hint="import the model again") from None

    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    eos = manifest.tokens.eos
    return ChatTemplate(source, bos_token=text(manifest.tokens.bos), eos_token=text(eos[0] if eos else None))
