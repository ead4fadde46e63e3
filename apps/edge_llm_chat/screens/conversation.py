"""ConversationScreen: the conversation that is open: its model, its questions, and their answers while they come."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.widgets import Static

from edge_llm.errors import EdgeLLMError, RuntimeFailure
from edge_llm.messages import FinishReason, Role, TokenInfo, ToolCall
from edge_llm.sampling.params import MAX_SEED, USUAL_MAX_TOKENS, SamplingParams
from edge_llm.text.terminal import clean_line
from edge_llm_chat.answering import Answer, text_of
from edge_llm_chat.backend import Ask, ModelInfo
from edge_llm_chat.conversation import Conversation, Facts, State, Turn, state_of
from edge_llm_chat.markdown.leaves import parser
from edge_llm_chat.screens.shown import WELCOME, ShownScreen, words
from edge_llm_chat.toolbelt import MAX_ROUNDS, Toolbelt
from edge_llm_chat.widgets.message import MessageView

if TYPE_CHECKING:
    from edge_llm.toolbox.approval import Approval, Decision

ALTERNATIVES = 10
"""tokens that are told for each place of an answer"""
_SHORTEST_S, _LONGEST_S = 0.06, 1.0
_SHARE = 16
"""what is done here may take one part in so many of a core's time: the model wants it too"""


class ConversationScreen(ShownScreen):
    """Takes questions, and shows answers while they come."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Stop the answer; back to typing", id="chat.stop"),
    ]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self.model: ModelInfo | None = None
        self.answer: Answer | None = None
        """the one that is coming"""
        self.busy = False
        """an answer is coming, or its tools run"""
        self.belt = Toolbelt(self._approve)
        self._failure: EdgeLLMError | None = None  # why there is no model
        self._noticed = ""  # what was said of the model
        self._stopped = False
        self._ended = asyncio.Event()  # no answer is coming
        self._ended.set()
        self._answering: MessageView | None = None
        self._waiting: list[tuple[int | None, tuple[TokenInfo, ...]]] = []
        self._flush_set = False
        self._cost_s = self._spent_s = 0.0

    async def on_mount(self) -> None:
        self.status.tell(model=clean_line(self.app.backend.wanted), private=self.app.start.private)
        self.composer.focus()
        await self.show_path()
        self.load_model()

    # --- the model ---

    @work(exclusive=True, group="model", exit_on_error=False)
    async def load_model(self) -> None:
        """Load behind the screen; a question that was asked meanwhile is answered then."""
        self._failure = None
        self.status.tell(state="loading", doing="loading", fraction=None)
        try:
            self.model = await self.app.backend.load(self._progress)
        except Exception as error:
            failure = (
                error if isinstance(error, EdgeLLMError) else RuntimeFailure(f"the model cannot be loaded: {error!r}")
            )
            self.status.tell(state="failed", doing=clean_line(str(failure)), fraction=None)
            self._failure = failure
            self.query_one("#welcome", Static).update(words(failure))
            if self.conversation.turns:
                await self.transcript.tell(words(failure))
            return
        self.query_one("#welcome", Static).update(WELCOME)
        self.status.tell(
            state="ready", doing="", fraction=None, model=clean_line(self.model.name), context=self.model.context
        )
        self.conversation.model = self.model.name
        self._show_notice()
        await asyncio.to_thread(parser)  # its library, before the first answer waits for it
        if self._waiting:
            self._start(*self._waiting.pop())

    def _show_notice(self) -> None:
        """Say what is to be known of the model that answers, when it changes."""
        notice = self.app.backend.notice()
        if notice and notice != self._noticed:
            self.tell(notice)
        self._noticed = notice

    def _progress(self, stage: str, done: int, total: int) -> None:
        self.app.call_later(self._show_progress, clean_line(stage), done / total if total else None)

    def _show_progress(self, stage: str, fraction: float | None) -> None:
        if self.status.machine.state == "loading":  # the last report may arrive after the end
            self.status.tell(doing=stage, fraction=fraction)

    # --- asking ---

    async def ask(self, text: str) -> None:
        """Send a question: after the last turn, or beside the one that is edited."""
        editing, self._editing = self._editing, None
        parent = self.conversation.end if editing is None else self.conversation.turns[editing].parent
        turn = self.conversation.add(parent, Role.USER, text, attachments=tuple(self._attached))
        self._attached = []
        self._show_attached()
        self._show_hint()
        self._store(turn)
        await self.show_path()
        self._start(turn.id)

    def _start(self, question: int | None, prefix: tuple[TokenInfo, ...] = ()) -> None:
        """Answer a question; later, if the model is not there yet."""
        self._waiting.clear()
        if self.model is None:
            self._waiting.append((question, prefix))
            if self._failure is None:
                self.tell("The answer comes as soon as the model is loaded")
            else:
                self.run_worker(self.transcript.tell(words(self._failure)))
            return
        self.busy, self._stopped = True, False
        self._ended.clear()
        self._run(question, prefix)

    @work(group="answer")
    async def _run(self, question: int | None, prefix: tuple[TokenInfo, ...]) -> None:
        """Answer, run the tools that the answer asks for, and answer again, until there is an answer in words."""
        try:
            for left in reversed(range(MAX_ROUNDS + 1)):
                turn, calls = await self._answer(question, prefix, "auto" if left else "none")
                if not calls or self._stopped:
                    break
                question, prefix = await self._use_tools(turn, calls), ()
                if self._stopped:
                    break
        finally:
            self.busy = False
            self._ended.set()

    async def _answer(
        self, question: int | None, prefix: tuple[TokenInfo, ...], tool_choice: str
    ) -> tuple[int, tuple[ToolCall, ...]]:
        """One answer from beginning to end: the id of its turn, and the calls that it asks for."""
        assert self.model is not None
        begun = tuple(info.chosen for info in prefix)
        answer = self.answer = Answer(self._changed, tokens=list(prefix), text=text_of(begun))
        turn = self.conversation.add(question, Role.ASSISTANT, "")
        path = self.conversation.path()[:-1]  # of an answer that is asked for again, what followed the old one goes
        await self.transcript.show(path, [self._place(other) for other in path])
        view = self._answering = await self.transcript.add(turn, self._place(turn), streaming=True)
        view.wait("…")
        self.transcript.follow()
        self.status.tell(state="answering", speeds=())
        self._cost_s, self._spent_s = 0.0, time.thread_time()
        try:
            messages = tuple(self.conversation.messages(question))
            ask = Ask(messages, self._params(turn), begun, self.belt.tools, tool_choice)
            await answer.run(self.app.backend, ask)
        except EdgeLLMError as error:
            answer.error = error
        except asyncio.CancelledError:  # the program ends
            if answer.text:
                self._store(self.conversation.change(turn.id, content=answer.text, state=State.STOPPED))
            raise
        self._flush()
        self.answer = self._answering = None
        self.status.tell(state="ready", speeds=(), doing="", fraction=None)
        await self._end(turn, view, answer, tuple(token.token_id for token in begun))
        finished = answer.finished
        return turn.id, finished.tool_calls if finished and finished.reason is FinishReason.TOOL_CALLS else ()

    async def _use_tools(self, after: int, calls: tuple[ToolCall, ...]) -> int:
        """Run what an answer asks for, one after another; gives the last turn."""
        for call in calls:
            result = await self.belt.run(call)
            turn = self.conversation.add(
                after, Role.TOOL, result.content, tool_call_id=result.tool_call_id, tool_name=result.name
            )
            self._store(turn)
            await self.transcript.add(turn)
            after = turn.id
        return after

    def _approve(self, approval: Approval) -> Decision:
        """Ask the user; called on the thread of a tool, which waits."""
        from edge_llm.toolbox.approval import Decision
        from edge_llm_chat.screens.approval import ApprovalScreen

        question = ApprovalScreen(approval)
        self.app.call_from_thread(self.app.push_screen, question)
        decision = question.decision.result()
        self._stopped = self._stopped or decision is None
        return decision or Decision.NO

    def _params(self, turn: Turn) -> SamplingParams:
        """How the answer `turn` is sampled; a seed counts its siblings, or asking again would give the same once more."""
        asked = self.model is not None and self.model.inspects
        more = {"logprobs": True, "top_logprobs": ALTERNATIVES} if asked else {}
        values = {"max_tokens": USUAL_MAX_TOKENS, **more, **self.conversation.parameters}
        if "seed" in values:
            values["seed"] = (int(values["seed"]) + self._place(turn).index - 1) % (MAX_SEED + 1)
        return SamplingParams(**values)  # type: ignore[arg-type]

    async def _end(self, turn: Turn, view: MessageView, answer: Answer, begun: tuple[int, ...]) -> None:
        """Keep the answer as far as it came; nothing is kept of one that failed before its first word."""
        if answer.error is not None:
            if not answer.text:
                self.conversation.remove(turn.id)
                await self.show_path()
                await self.transcript.tell(words(answer.error))
                return
            self.report(answer.error)
            changes: dict[str, object] = {"state": State.FAILED, "facts": Facts(note=clean_line(str(answer.error)))}
        else:
            assert answer.finished is not None
            assert self.model is not None
            finished = answer.finished
            note = self.conversation.forgotten_note(finished, self.model.context)
            facts = replace(Facts.of(finished, self.model.name), note=note)
            changes = {"state": state_of(finished), "facts": facts, "tokens": tuple(answer.tokens)}
            changes["tool_calls"] = finished.tool_calls if finished.reason is FinishReason.TOOL_CALLS else ()
            if self.model.tokenizer_digest:
                changes |= {"token_ids": begun + finished.token_ids, "tokenizer_digest": self.model.tokenizer_digest}
        turn = self.conversation.change(turn.id, content=answer.text, reasoning=answer.reasoning, **changes)
        await view.end(turn)
        self._store(turn)
        self._show_facts(turn.facts)
        self._show_notice()
        view.show_place(self._place(turn))

    def _store(self, turn: Turn) -> None:
        with self.reported():
            self.app.store.save_turn(self.conversation, turn)

    # --- while an answer comes ---

    def _changed(self) -> None:
        if not self._flush_set:
            self._flush_set = True
            self.set_timer(min(max(_SHORTEST_S, _SHARE * self._cost_s), _LONGEST_S), self._flush)

    def _flush(self) -> None:
        """Show what has come since the last time. The more time this thread took since then, the longer it is until the next."""
        self._flush_set = False
        answer, view = self.answer, self._answering
        if answer is None or view is None:
            return
        spent = time.thread_time()
        self._cost_s, self._spent_s = spent - self._spent_s, spent
        text, reasoning = answer.pending()
        if text or reasoning:
            view.append(text, reasoning)
            self.transcript.grow(view.refresh_text())
        elif answer.calling:
            view.wait(f"calling {clean_line(answer.calling)} …")
        elif answer.progress is not None and not answer.text:
            view.wait(f"reading {answer.progress.done:,} of {answer.progress.total:,} tokens")
        rates = answer.speed.rates()
        self.status.tell(speeds=rates, **({"tokens_per_s": rates[-1]} if rates else {}))

    # --- keys ---

    async def action_back(self) -> None:
        self._stopped = True
        if self.answer is not None:
            self.answer.stop()
            if self._answering is not None:
                self._answering.wait("stopping …")
        elif self._waiting:
            self._waiting.clear()
            self.tell("The question waits no more; ask again when the model is loaded")
        elif self._editing is not None or self._attached:
            self._editing, self._attached = None, []
            self.composer.clear()
            self._show_hint()
            self._show_attached()
        self.composer.focus()
