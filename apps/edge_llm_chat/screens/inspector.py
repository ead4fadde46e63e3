"""InspectorScreen: the tokens of an answer, what else could have stood in the place of each, and a fork from there."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edge_llm.messages import TokenInfo
from edge_llm_chat.screens.shown import WIDE
from edge_llm_chat.surprise import JUMP_BITS, Alternative, alternatives, bits, label, perplexity
from edge_llm_chat.widgets.token_text import TokenText

_BAR = 24
_LABEL = 16
_BEFORE_BAR = 2 + _LABEL + 9


class InspectorScreen(ModalScreen[tuple[TokenInfo, ...] | None]):
    """Gives the beginning of the answer to go on from: the tokens up to the place, and the one that was picked there."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "step(-1)", "The token before", id="inspector.previous", priority=True),
        Binding("right,l", "step(1)", "The next token", id="inspector.next", priority=True),
        Binding("n,tab", "surprise(1)", "The next surprise", id="inspector.next_surprise", priority=True),
        Binding("p,shift+tab", "surprise(-1)", "The surprise before", id="inspector.previous_surprise", priority=True),
        Binding("pagedown,ctrl+down", "line(1)", "The line below", id="inspector.down", priority=True),
        Binding("pageup,ctrl+up", "line(-1)", "The line above", id="inspector.up", priority=True),
        Binding("home", "go(0)", "The first token", id="inspector.first", priority=True),
        Binding("end", "go(-1)", "The last token", id="inspector.last", priority=True),
        Binding("escape,q,f2", "dismiss(None)", "Back", id="inspector.back", priority=True),
    ]

    def __init__(self, tokens: tuple[TokenInfo, ...], *, forks: bool, end_ids: Collection[int] = ()) -> None:
        """`end_ids` are tokens that end an answer: nothing can go on from them."""
        super().__init__()
        self._tokens, self._forks, self._end_ids = tokens, forks, end_ids
        self._rows: list[Alternative] = []
        self._bar = _BAR

    def compose(self) -> ComposeResult:
        with Vertical(id="inspector") as box:
            box.border_title = f"{len(self._tokens)} tokens · perplexity {perplexity(self._tokens):.1f}"
            yield TokenText(self._tokens)
            yield Static(id="place", markup=False)
            yield OptionList(id="alternatives", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        keys = ["←→ token", "n p surprise", "↑↓ other token", *(["Enter forks"] if self._forks else [])]
        if event.size.width < WIDE:  # what can be guessed least
            keys = ["n p surprise", *(["Enter forks"] if self._forks else [])]
        self.query_one("#inspector").border_subtitle = " · ".join(keys)
        self._bar = max(1, min(_BAR, event.size.width - _BEFORE_BAR - 3))  # beside borders and a scrollbar
        self.action_go(self._at)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        first = next((i for i, token in enumerate(self._tokens) if bits(token.chosen) >= JUMP_BITS), 0)
        self.action_go(first)

    @property
    def _at(self) -> int:
        return self.query_one(TokenText).selected

    def action_go(self, token: int) -> None:
        token = len(self._tokens) - 1 if token < 0 else min(token, len(self._tokens) - 1)
        self.query_one(TokenText).selected = token
        info = self._tokens[token]
        self.query_one("#place", Static).update(_place(token, len(self._tokens), info))
        self._rows = alternatives(info)
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(_row(row, row.token.token_id in self._end_ids, self._bar)) for row in self._rows])
        listed.highlighted = next(i for i, row in enumerate(self._rows) if row.chosen)

    def action_step(self, by: int) -> None:
        self.action_go(max(0, self._at + by))

    def action_line(self, by: int) -> None:
        self.action_go(self.query_one(TokenText).line_step(by))

    def action_surprise(self, by: int) -> None:
        after = range(self._at + 1, len(self._tokens)) if by > 0 else range(self._at - 1, -1, -1)
        found = next((i for i in after if bits(self._tokens[i].chosen) >= JUMP_BITS), None)
        if found is not None:
            self.action_go(found)

    def on_token_text_clicked(self, event: TokenText.Clicked) -> None:
        self.action_go(event.token)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        row = self._rows[event.option_index]
        if not self._forks:
            self.notify(
                "This server cannot go on from a chosen token: edge-llm chat -m MODEL loads the model here",
                markup=False,
            )
        elif row.token.token_id in self._end_ids:
            self.notify("The answer would end there: pick another token", markup=False)
        else:
            at = self._at
            self.dismiss((*self._tokens[:at], TokenInfo(row.token, self._tokens[at].alternatives)))


def _place(token: int, count: int, info: TokenInfo) -> Content:
    surprise = bits(info.chosen)
    return Content.assemble(
        (f"{token + 1} of {count}", "$foreground-muted"),
        "  ",
        (label(info.chosen), "bold"),
        (f"  {surprise:.1f} bits of surprise", "$text-warning" if surprise >= JUMP_BITS else "$foreground-muted"),
    )


def _row(row: Alternative, ends: bool, most: int) -> Content:
    """A token, its probability, and that as a bar of `most` cells for 1."""
    name = Content(label(row.token) if not ends else f"{label(row.token)} ends").truncate(_LABEL, ellipsis=True)
    share = row.probability
    figure = f"{share:7.2%}" if share >= 0.0001 else "<0.01 %"
    bar = "█" * round(share * most) or ("▏" if share > 0.005 else "")
    colour = "$text-accent" if row.chosen else "$foreground-muted"
    mark = "▸ " if row.chosen else "  "
    return Content.assemble(
        (mark, "$text-accent"), name.pad_right(_LABEL - name.cell_length), f" {figure} ", (bar, colour)
    )
