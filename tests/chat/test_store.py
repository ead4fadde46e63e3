from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path

import pytest
from edge_llm_chat.conversation import Attachment, Conversation, Facts, State
from edge_llm_chat.store import Store

from edge_llm.errors import StorageError
from edge_llm.messages import Role


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats" / "chats.sqlite3"


def conversation(*said: str, **more: object) -> Conversation:
    made = Conversation(**more)  # type: ignore[arg-type]
    for number, text in enumerate(said):
        made.add(made.end, Role.ASSISTANT if number % 2 else Role.USER, text)
    return made


def stored(store: Store, *said: str, **more: object) -> Conversation:
    made = conversation(*said, **more)
    for turn in list(made.turns.values()):
        store.save_turn(made, turn)
    return made


def test_a_conversation_comes_back_whole(path: Path) -> None:
    store = Store(path)
    made = conversation("q", "a", system="Be kind.", model="m", parameters={"seed": 3, "temperature": 0.5}, tags=("x",))
    facts = Facts(model="m", prompt_tokens=5, completion_tokens=2, ttft_s=0.1, seed=3, note="n")
    made.change(1, attachments=(Attachment("f.txt", "text"),))
    made.change(2, state=State.STOPPED, facts=facts, reasoning="hm", token_ids=(1, 2), tokenizer_digest="d")
    made.add(1, Role.ASSISTANT, "b")
    made.step(3, -1)
    for turn in list(made.turns.values()):
        store.save_turn(made, turn)
    store.close()
    store = Store(path)
    assert store.load(made.id) == made
    assert store.last() == made.id


def test_only_the_owner_can_read_it(path: Path) -> None:
    store = Store(path)
    stored(store, "q")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():  # the log and its index too
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(list(path.parent.iterdir())) == 3


def test_a_chat_without_a_word_is_not_kept(path: Path) -> None:
    store = Store(path)
    store.save(Conversation(title="empty"))
    assert store.find() == []
    assert store.last() is None


def test_search_finds_titles_texts_and_tags_in_any_script() -> None:
    store = Store(None)
    paris = stored(store, "Tell me of Paris", "Paris — 東京と大阪, déjà vu.", tags=("travel",))
    rust = stored(store, "Explain Rust", "Ownership means 100%_sure", tags=("code", "rust-lang"))
    shalom = stored(store, "שלום עולם", "ok")

    def found(words: str) -> list[int | None]:
        return [summary.id for summary in store.find(words)]

    assert found("") == [shalom.id, rust.id, paris.id], "the latest first"
    for words in ("paris", "aris", "京と大", "大阪", "vu", "#travel", "#TRA tell", "tell paris"):
        assert found(words) == [paris.id], words
    for words in ("owner", "100%_", "#rust", "#code owner"):
        assert found(words) == [rust.id], words
    assert found("שלום") == [shalom.id]
    for words in ('"', '" OR 1', "nothing", "%", "_x", "#", "* AND (", "paris rust", "\\"):
        assert [one for one in found(words) if one != rust.id] == [], words
    (summary,) = store.find("ownership")
    assert "Ownership means" in summary.excerpt


def test_pinned_chats_come_first_and_renaming_moves_nothing() -> None:
    store = Store(None)
    first, second, third = (stored(store, name) for name in ("one", "two", "three"))
    first.pinned = True
    store.save(first, touch=False)
    second.title = "second"
    store.save(second, touch=False)
    assert [summary.title for summary in store.find()] == ["one", "three", "second"]
    assert store.last() == third.id
    time.sleep(0.01)
    store.save(second)
    assert store.last() == second.id


def test_an_edited_turn_is_found_by_its_new_words() -> None:
    store = Store(None)
    made = stored(store, "question", "the old answer")
    store.save_turn(made, made.change(2, content="a fresh reply"))
    assert store.find("fresh")
    assert not store.find("old")


def test_what_is_deleted_is_gone_from_the_disk(path: Path) -> None:
    store = Store(path)
    kept, gone = stored(store, "keep this"), stored(store, "xyzzy-secret-1", "xyzzy-secret-2", "xyzzy-secret-3")
    store.remove_turns(gone, gone.remove(2))
    store.delete(gone.id)
    assert [summary.id for summary in store.find()] == [kept.id]
    assert not store.find("xyzzy")
    for file in path.parent.iterdir():
        assert b"xyzzy" not in file.read_bytes(), file.name
    assert b"keep this" in path.read_bytes()
    with pytest.raises(StorageError, match="no conversation"):
        store.load(gone.id)


def test_two_programs_share_a_file(path: Path) -> None:
    one, other = Store(path), Store(path)
    made = stored(one, "from one")
    assert [summary.id for summary in other.find("from")] == [made.id]
    second = stored(other, "from the other")
    assert {summary.id for summary in one.find("from")} == {made.id, second.id}


def test_a_file_of_a_newer_program_is_left_alone(path: Path) -> None:
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(StorageError, match="newer edge_llm"):
        Store(path)


@pytest.mark.parametrize("damage", [b"not a database" * 400, b"SQLite format 3\0" + b"\xff" * 5_000])
def test_a_damaged_file_is_said_and_kept(path: Path, damage: bytes) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(damage)
    with pytest.raises(StorageError, match="cannot be used"):
        Store(path)
    assert path.read_bytes() == damage


@pytest.mark.skipif(os.name != "posix", reason="links and rights are POSIX's")
def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        Store(path)
    assert not (tmp_path / "elsewhere").exists()


def test_library_and_settings() -> None:
    store = Store(None)
    store.save_prompt("kind", "Be kind.")
    store.save_prompt("kind", "Be very kind.")
    store.save_prompt("brief", "Be brief.")
    assert store.prompts() == {"brief": "Be brief.", "kind": "Be very kind."}
    store.delete_prompt("brief")
    assert list(store.prompts()) == ["kind"]
    assert store.setting("theme") is None
    store.set_setting("theme", "nord")
    assert store.setting("theme") == "nord"


def test_what_another_program_has_written_is_not_overwritten(path: Path) -> None:
    """The same chat is open twice, and goes on in both."""
    one, other = Store(path), Store(path)
    made = stored(one, "q")
    twin = other.load(made.id)
    one.save_turn(made, made.add(1, Role.ASSISTANT, "the first answer"))
    time.sleep(0.01)
    with pytest.raises(StorageError, match="another program"):
        other.save_turn(twin, twin.add(1, Role.ASSISTANT, "another answer"))
    assert [turn.content for turn in one.load(made.id).path()] == ["q", "the first answer"]
