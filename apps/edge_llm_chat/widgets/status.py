"""StatusLine: the machine at a glance, on one line; what does not fit is left out, the least important first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from textual.content import Content
from textual.widgets import Static

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the line shows; None: not known (yet)."""

    model: str = ""
    state: str = "loading"
    """loading, ready, answering, failed"""
    doing: str = ""
    """what is going on, in place of figures"""
    fraction: float | None = None
    """how far that is"""
    context_used: int | None = None
    context: int | None = None
    kv_bytes: int | None = None
    cached: float | None = None
    """share of the last prompt that did not have to be read"""
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    speeds: tuple[float, ...] = ()
    """tokens a second, oldest first"""
    private: bool = False


class StatusLine(Static):
    """Shows a `Machine`."""

    def __init__(self) -> None:
        super().__init__(id="status", markup=False)
        self.machine = Machine()

    def tell(self, **changes: object) -> None:
        """Change some of the facts."""
        machine = replace(self.machine, **changes)  # type: ignore[arg-type]
        if machine != self.machine:
            self.machine = machine
            self.update(line(machine, self.size.width or 80), layout=False)  # one line it stays

    def on_resize(self) -> None:
        self.update(line(self.machine, self.size.width), layout=False)


def line(machine: Machine, width: int) -> Content:
    """The line for `width` cells."""
    dot = {"loading": ("◌", "$text-warning"), "failed": ("✕", "$text-error"), "answering": ("●", "$text-accent")}
    mark, colour = dot.get(machine.state, ("●", "$text-success"))
    parts = [Content.assemble((mark, colour), " ", (machine.model, "$foreground"))]
    if machine.private:
        parts.append(Content.styled("private", "$text-warning"))
    if machine.doing:
        doing = machine.doing if machine.fraction is None else f"{machine.doing} {machine.fraction:.0%}"
        parts.append(Content.styled(doing, "$foreground-muted"))
        if machine.fraction is not None:
            parts.append(Content.assemble(*_bar(machine.fraction, 12)))
    parts += [Content.styled(text, "$foreground-muted") for text in _figures(machine)]
    if machine.speeds:
        parts.append(Content.styled(sparkline(machine.speeds), "$text-accent"))
    between = Content.styled(" · ", "$foreground-disabled")
    room = max(width - 2, 1)
    while len(parts) > 1 and between.join(parts).cell_length > room:
        _make_room(parts)
    return between.join(parts).truncate(room, ellipsis=True)


def _make_room(parts: list[Content]) -> None:
    """Take away what is needed least: memory, cache, first token, the size of the context, the sparkline, at last the speed."""
    for word in ("kv ", "hit ", "ttft "):
        for index, part in enumerate(parts):
            if part.plain.startswith(word):
                del parts[index]
                return
    for index, part in enumerate(parts):
        fill, of, _ = part.plain.partition(" of ")
        if of and fill.startswith("ctx "):
            parts[index] = part[: len(fill)]
            return
    parts.pop()


def _figures(machine: Machine) -> list[str]:
    figures = []
    if machine.context_used is not None:
        if machine.context:
            filled = min(1.0, machine.context_used / machine.context)  # what has slid out does not fill it
            figures.append(f"ctx {filled:.0%} of {thousands(machine.context)}")
        else:
            figures.append(f"ctx {thousands(machine.context_used)}")
    if machine.kv_bytes:
        figures.append(f"kv {machine.kv_bytes / 1e6:.1f} MB")
    if machine.cached is not None:
        figures.append(f"hit {machine.cached:.0%}")
    if machine.ttft_s is not None:
        figures.append(f"ttft {duration(machine.ttft_s)}")
    if machine.tokens_per_s is not None:
        figures.append(f"{machine.tokens_per_s:.0f} tok/s")
    return figures


def _bar(fraction: float, width: int) -> list[tuple[str, str]]:
    done = round(max(0.0, min(1.0, fraction)) * width)
    return [("━" * done, "$text-accent"), ("━" * (width - done), "$foreground-disabled")]


def sparkline(values: tuple[float, ...]) -> str:
    """One bar a value, the tallest for the largest."""
    top = max(values, default=0.0)
    if top <= 0:
        return BARS[0] * len(values)
    return "".join(BARS[min(len(BARS) - 1, int(value / top * (len(BARS) - 1) + 0.5))] for value in values)


def thousands(count: int) -> str:
    """A count in at most four characters or so."""
    return str(count) if count < 1000 else f"{count / 1000:.1f}".removesuffix(".0") + "k"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
