"""F23 and the sandbox: no template runs long, grows large, or reaches anything of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edge_llm
from edge_llm.errors import TemplateError
from edge_llm.messages import Message
from edge_llm.text import template_budget
from edge_llm.text.chat_template import ChatTemplate
from edge_llm.text.template_budget import Budget
from tests.text.bombs import BOMBS
from tests.text.escapes import CANARY, ESCAPES

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / "tests" / "golden" / "templates").glob("*.jinja"))
MAX_GROWTH_MIB = 64


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What came of each bomb, in processes with hard limits."""
    command = [sys.executable, "-m", "tests.text.bombs"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_f23_there_are_enough_bombs() -> None:
    assert len(BOMBS) >= 80


@pytest.mark.parametrize("name", BOMBS)
def test_f23_a_bomb_is_refused_in_time_and_space(name: str, outcomes: dict[str, Any]) -> None:
    """F23: an error within the budget of processor time (or the kernel kills it), and the process hardly grows."""
    assert outcomes[name]["outcome"].startswith("refused: ")
    assert "\n" not in outcomes[name]["outcome"]
    assert outcomes[name]["mib"] <= MAX_GROWTH_MIB


@pytest.fixture(scope="module")
def touched() -> list[str]:
    """Files, programs, modules and connections that this process reaches for; the caller empties it."""
    found: list[str] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "import", "os.system", "subprocess.Popen", "socket.connect"):
            found.append(f"{event} {args[0]}")

    sys.addaudithook(audit)
    return found


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused_or_inert(
    source: str, touched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing of Python's or of ours shows, nothing is run or read, and the messages stay as they are."""
    secret = tmp_path / "secret"
    secret.write_text(CANARY)
    monkeypatch.setenv("EDGE_LLM_CANARY", CANARY)
    messages = [Message.user("hello")]
    touched.clear()
    try:
        text = ChatTemplate(source.replace("CANARY", str(secret))).render(messages).text
    except TemplateError as error:
        text = str(error)
    reached = [what for what in touched if what != "import jinja2.runtime"]
    assert reached == []
    for leaked in (CANARY, "<class", "<function", "<bound", "<built-in", "<module", " object at 0x", "root:", "uid="):
        assert leaked not in text
    assert messages == [Message.user("hello")]


def test_there_are_enough_escapes() -> None:
    assert len(set(ESCAPES)) >= 200


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_long_conversation_is_no_bomb(path: Path) -> None:
    """1,024 messages of 60 words each."""
    chat = ChatTemplate(path.read_text(encoding="utf-8"), bos_token="<s>", eos_token="</s>")
    words = "a few plain words to say " * 10
    messages = [Message.user(words) if i % 2 == 0 else Message.assistant(words) for i in range(1024)]
    assert chat.render(messages).text.count("plain words") >= 1024


def test_a_long_text_is_no_bomb() -> None:
    chat = ChatTemplate(
        "{% for m in messages %}{{ '<|x|>' + m.content | trim | replace('a', 'b') + '<|y|>\n' }}{% endfor %}"
    )
    assert len(chat.render([Message.user("a b " * 500_000)]).text) > 1_900_000


def test_time_is_that_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no template: only the thread's own processor time counts."""
    now = 0.0
    monkeypatch.setattr(template_budget.time, "thread_time", lambda: now)
    budget = Budget(0)
    budget.step(5000)
    now = template_budget.MAX_SECONDS + 0.1
    with pytest.raises(TemplateError, match="budget of time"):
        budget.step(5000)


def test_jinja_is_imported_in_one_place() -> None:
    """A second call site is how a peer forgot its sandbox."""
    package = Path(edge_llm.__file__).parent
    found = {
        path.name
        for path in package.rglob("*.py")
        if "import jinja2" in (t := path.read_text("utf-8")) or "from jinja2" in t
    }
    assert found == {"template_sandbox.py"}


def test_refusals_name_what_they_refuse() -> None:
    for source, named in {
        "{{ 'a'|center(9) }}": "center",
        "{% include 'x' %}": "include",
        "{{ f(*[1]) }}": r"\* or \*\*",
        "{{ '%d' % 1 }}": "formatting by %",
        "{{ range(10**6) }}": "range of more than",
        "{% for x in [1] %}{{ loop.changed(x) }}{% endfor %}": r"loop\.changed",
    }.items():
        with pytest.raises(TemplateError, match=named):
            ChatTemplate(source).render([Message.user("hi")])
