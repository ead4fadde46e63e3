"""Intake: from what a caller asks to a sequence that the engine can run; everything that can be wrong is said here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edge_llm import machine
from edge_llm.engine.beams import Beams
from edge_llm.engine.decoding import Decoding
from edge_llm.engine.draft_model import DraftModel
from edge_llm.engine.reader import MAX_CHOICE_TOKENS, ChoiceReader, EmbeddingReader, Reader
from edge_llm.engine.request import Request
from edge_llm.engine.sequence import Emit, Sequence
from edge_llm.engine.stream import TextStream
from edge_llm.engine.tooling import Tooling, forces_calls
from edge_llm.engine.window import ContextWindow
from edge_llm.errors import ContextLengthError, ModelFormatError, ParameterError, TemplateError, quoted
from edge_llm.model.manifest import TEMPLATE_NAME, TOKENIZER_NAME, ModelManifest
from edge_llm.sampling.params import SamplingParams
from edge_llm.sampling.sampler import Sampler
from edge_llm.text.prompt import RenderedPrompt
from edge_llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge_llm.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A rendered conversation; `places[i]` is the index of the message in it that shows the request's message i."""

    text: RenderedPrompt
    places: tuple[int, ...]


class Intake:
    """The text side of a model. May be used by several threads at once."""

    def __init__(
        self,
        manifest: ModelManifest,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        sampler: Sampler,
        window: ContextWindow,
        policy: str,
        speculates: bool = False,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`template` is None for a model that cannot chat; `policy` is that of requests without one of their own; with
        `speculates` drafts are tried, those of a `draft_model` too.

        Raises `ParameterError` for a policy that the window cannot follow, `ModelFormatError` for an unsound manifest.
        """
        window.limit(policy)
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.template = template
        self._window = window
        self._policy = policy
        self.draft_model = draft_model
        self.tooling = Tooling.of(manifest, tokenizer.added_tokens)
        self._decoding = Decoding(
            manifest, tokenizer, self.tooling, sampler, speculates=speculates, draft_model=draft_model
        )

    @classmethod
    def open(
        cls,
        folder: Path,
        manifest: ModelManifest,
        *,
        sampler: Sampler,
        window: ContextWindow,
        policy: str,
        speculates: bool = False,
        draft_model: DraftModel | None = None,
    ) -> Self:
        """Read tokenizer and template of a model folder; the rest as for `Intake` itself.

        Raises `ModelFormatError`, `TemplateError`, `ParameterError`.
        """
        try:
            SamplingParams().with_defaults(manifest.sampling)
        except ParameterError as error:
            raise ModelFormatError(f"manifest.json: sampling: {error}", hint="import the model again") from None
        tokenizer = Tokenizer.from_file(folder / TOKENIZER_NAME)
        machine.return_freed_memory()  # to read it took three times what it keeps
        template = _read_template(folder, manifest, tokenizer) if manifest.has_chat_template else None
        return cls(
            manifest,
            tokenizer,
            template,
            sampler=sampler,
            window=window,
            policy=policy,
            speculates=speculates,
            draft_model=draft_model,
        )

    def sequence(self, request: Request, emit: Emit, clock: Callable[[], float]) -> Sequence:
        """A sequence for `request`. Raises `ParameterError`, `TemplateError`, `ContextLengthError`."""
        submitted = clock()
        limit = self._window.limit(self._policy_of(request))
        if request.beams > 1 and self._policy_of(request) == "slide":
            raise ParameterError(
                "beams cannot be combined with context_policy slide, which this engine has",
                hint='ask for context_policy "error"',
            )
        prompt = self._rendered(request)
        self._refuse_far_beyond(limit, request.text if prompt is None else prompt.text.text)
        ids, places = self._prompt(request, prompt)
        if not ids:
            raise ParameterError("the prompt is empty", hint="give at least one token of text")
        reader = self._reader(request, ids)
        room = limit - len(ids)
        if room < (0 if request.embedding else 1):
            raise ContextLengthError(len(ids), limit)
        params = request.params.with_defaults(self.manifest.sampling)
        max_tokens = min(params.max_tokens or self._window.context, room)
        end_ids = frozenset() if params.ignore_eos else frozenset(self.manifest.tokens.eos)
        text = None if prompt is None else prompt.text

        def new_stream() -> TextStream:
            readers = None if text is None else self.tooling.readers(request, text)
            return TextStream(self.tokenizer, params, end_ids=end_ids, max_tokens=max_tokens, readers=readers)

        # rows that are not computed have no hidden states, and so far no others are worth a slot
        namespace = request.namespace if request.cache and request.embedding is None else None
        beams = None
        if request.beams > 1:
            beams = Beams(
                self._decoding.beam_decoder(request, params, end_ids, max_tokens, new_stream),
                new_stream,
                request.n_best,
            )
        return Sequence(
            ids,
            max_tokens=max_tokens,
            decoder=self._decoding.decoder(request, params, ids, text, namespace) if beams is None else beams.decoder,
            stream=new_stream(),
            emit=emit,
            submitted=submitted,
            window=self._window,
            places=places,
            namespace=namespace,
            owner=request.owner,
            structured=request.response_format is not None or forces_calls(request),
            priority=request.priority,
            timeout_s=request.timeout_s,
            reader=reader,
            beams=beams,
        )

    def _refuse_far_beyond(self, limit: int, text: str | None) -> None:
        """Raises `ContextLengthError` for a text of which a small part is too long: all of it would take long to encode."""
        tokens = None if text is None else self.tokenizer.estimate_beyond(text, limit)
        if tokens is not None:
            raise ContextLengthError(tokens, limit)

    def _reader(self, request: Request, ids: list[int]) -> Reader | None:
        """What reads a request that gets no answer."""
        if request.embedding is not None:
            return EmbeddingReader(request.embedding, len(ids))
        if not request.choices:
            return None
        begins = ids[-1] in self.tokenizer.added_tokens.values()  # no text before the label, only control
        labels = {label: tuple(self.tokenizer.encode_content(label, begins=begins)) for label in request.choices}
        for label, tokens in labels.items():
            if not 0 < len(tokens) <= MAX_CHOICE_TOKENS:
                raise ParameterError(
                    f"the choice {quoted(label)} has {len(tokens)} tokens, a label has 1 to {MAX_CHOICE_TOKENS}"
                )
        if len(set(labels.values())) < len(labels):
            raise ParameterError(
                "two of the choices are the same to this model: it has no tokens for what is different"
            )
        limit = self._window.limit(self._policy_of(request))
        longest = len(ids) + max(map(len, labels.values()))
        if longest > limit:
            raise ContextLengthError(longest, limit)
        return ChoiceReader(ids, list(labels.items()), self.manifest.tokens.eos)

    def close(self) -> None:
        """End what was started beside the engine, and free the draft model; idempotent."""
        self._decoding.close()
        if self.draft_model is not None:
            self.draft_model.close()

    def prompt(self, request: Request) -> tuple[list[int], tuple[range, ...]]:
        """The tokens that a request starts from; and where each message lies among them, if the request may slide.

        Raises `ParameterError`, `TemplateError`.
        """
        return self._prompt(request, self._rendered(request))

    def _rendered(self, request: Request) -> _Rendered | None:
        """What the template makes of a request's messages."""
        if request.messages is None:
            return None
        if self.template is None:
            raise TemplateError(
                f"{self.manifest.name} has no chat template, so it cannot answer messages",
                hint="let it continue a text instead (run --raw, or complete())",
            )
        shown = self.tooling.conversation(request, self.manifest, self.template)
        return _Rendered(
            self.template.render(shown.messages, tools=shown.tools, variables=shown.variables), shown.places
        )

    def _prompt(self, request: Request, rendered: _Rendered | None) -> tuple[list[int], tuple[range, ...]]:
        if rendered is not None:
            if self._policy_of(request) != "slide":
                return self.tokenizer.encode_prompt(rendered.text), ()
            ids, places = self.tokenizer.encode_conversation(rendered.text)
            return ids, tuple(places[place] for place in rendered.places)
        if request.text is not None:
            tokens = self.manifest.tokens
            return self.tokenizer.encode_raw(request.text, tokens.bos if tokens.add_bos else None), ()
        assert request.token_ids is not None
        return self._checked(request.token_ids), ()

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones included; bytes that are no UTF-8 become U+FFFD.

        Raises `ParameterError` for an id outside the vocabulary.
        """
        return self.tokenizer.decode(self._checked(token_ids), skip_special=False)

    def _checked(self, token_ids: Iterable[int]) -> list[int]:
        vocab = self.manifest.dimensions.vocab
        ids = list(token_ids)
        if any(type(i) is not int or not 0 <= i < vocab for i in ids):
            raise ParameterError(f"token ids must be whole numbers from 0 to {vocab - 1}")
        return ids

    def _policy_of(self, request: Request) -> str:
        return request.context_policy or self._policy


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
