"""The commands of the chat, in one list: what is typed after a slash, what the palette offers, and what the help tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """`/name argument`; the screen does it in its method `do_NAME(argument)`."""

    name: str
    help: str
    argument: str = ""
    """what stands after the name; in [] if it may be left out"""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".strip()

    @property
    def needs_argument(self) -> bool:
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = (
    Command("new", "Begin a new chat"),
    Command("history", "Search and open stored chats"),
    Command("retry", "Answer the last question again, beside the answer"),
    Command("edit", "Edit the last question and ask again"),
    Command("copy", "Copy the last answer"),
    Command("code", "Copy the last block of code"),
    Command("inspect", "Look at the tokens of the last answer, and fork it"),
    Command("attach", "Attach a text file to the next question", "PATH"),
    Command("system", "Set or edit the system message of this chat", "[TEXT]"),
    Command("prompts", "Choose a system message from your library"),
    Command("keep", "Keep this chat's system message in your library", "NAME"),
    Command("set", "See or change the sampling of this chat", "[NAME VALUE]"),
    Command("model", "Choose another model", "[NAME]"),
    Command("tools", "Let the model call tools; each call is asked for", "[NAMES|off]"),
    Command("title", "Rename this chat", "[TEXT]"),
    Command("tag", "Set the tags of this chat", "[WORDS]"),
    Command("pin", "Pin this chat to the top of the list, or unpin it"),
    Command("export", "Write this chat to a file: Markdown, or NAME.json", "[PATH]"),
    Command("delete", "Delete this chat"),
    Command("theme", "Choose the colours", "[NAME]"),
    Command("help", "Show all keys and commands"),
    Command("quit", "Leave"),
)
BY_NAME = {command.name: command for command in COMMANDS}


def parse(text: str) -> tuple[str, str] | None:
    """(name, argument) of a line that is a command, known or not; None for a question, such as one about /usr/bin."""
    first, _, rest = text.strip().partition(" ")
    if not first.startswith("/") or not first[1:].isalpha() or "\n" in text.strip():
        return None
    return first[1:].lower(), rest.strip()


def matching(text: str) -> list[Command]:
    """Commands that the beginning of a line may become."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:].lower())]
