"""Two calm themes of our own; Textual's are there too."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="edge-dark",
    primary="#7aa2f7",
    secondary="#9aa5ce",
    accent="#7dcfff",
    warning="#e0af68",
    error="#f7768e",
    success="#9ece6a",
    foreground="#d5d9e8",
    background="#15171e",
    surface="#1b1e27",
    panel="#232733",
    dark=True,
    variables={"footer-key-foreground": "#7aa2f7", "border": "#2d3342", "border-blurred": "#232733"},
)
LIGHT = Theme(
    name="edge-light",
    primary="#2f5fd0",
    secondary="#57607a",
    accent="#0b7285",
    warning="#9a6700",
    error="#c0263b",
    success="#2b7a3d",
    foreground="#1f2430",
    background="#fbfbfd",
    surface="#f1f3f8",
    panel="#e6e9f1",
    dark=False,
    variables={"footer-key-foreground": "#2f5fd0", "border": "#cdd3e1", "border-blurred": "#e0e4ee"},
)
