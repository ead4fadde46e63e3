"""PrefixCache: who gets which slot, and that what is found there is what would have been computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_llm.cache.block_file import BlockFormat
from edge_llm.cache.kv_cache import CacheGeometry, KVCache
from edge_llm.cache.prefix_cache import PrefixCache, common_prefix
from edge_llm.cache.prefix_store import PrefixStore
from edge_llm.cache.tiled_rows import LayerGeometry
from edge_llm.kernels.layout import TILE, KvType
from tests.cache.rig import CONTEXT, append, make, serves

SHARED = list(range(100, 100 + TILE))


def talk(prefixes: PrefixCache, kv: KVCache, ids: list[int], *, end: bool = True, namespace: str | None = "") -> int:
    """A conversation of `ids`, all but the last of them computed; gives its slot."""
    placed = prefixes.acquire(ids, namespace)
    assert placed is not None
    assert placed.rows == kv.length(placed.slot) < len(ids)
    assert serves(kv, placed.slot, ids[: placed.rows])
    append(kv, placed.slot, ids[placed.rows : -1])
    if end:
        prefixes.release(placed.slot, keep=True)
    return placed.slot


def found(prefixes: PrefixCache, ids: list[int], namespace: str | None = "") -> tuple[int, int]:
    """(slot, rows) that a conversation begins with; it is given up at once."""
    placed = prefixes.acquire(ids, namespace)
    assert placed is not None
    prefixes.release(placed.slot, keep=False)
    return placed.slot, placed.rows


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 150])
def test_a_conversation_goes_on_where_it_ended(length: int) -> None:
    kv = make()
    prefixes = PrefixCache(kv)
    ids = list(range(length))
    slot = talk(prefixes, kv, ids)
    placed = prefixes.acquire([*ids, 7, 8, 9], "")
    assert placed is not None
    assert placed.rows == length - 1
    assert placed.rows == 0 or placed.slot == slot
    assert kv.slots - kv.free_slots == 1
    prefixes.check_integrity()


def test_the_last_token_is_always_computed() -> None:
    kv = make()
    prefixes = PrefixCache(kv)
    talk(prefixes, kv, list(range(80)))
    for length in (80, 79, 40, 2):
        talk(prefixes, kv, list(range(80)))
        assert found(prefixes, list(range(length)))[1] == length - 1


def test_one_that_begins_alike_gets_a_copy_and_the_first_one_stays() -> None:
    kv = make()
    prefixes = PrefixCache(kv)
    first = [*SHARED, *range(90)]
    slot = talk(prefixes, kv, first)
    other = prefixes.acquire([*SHARED, 7, 8], "")
    assert other is not None
    assert (other.rows, other.slot == slot) == (TILE, False)
    assert serves(kv, other.slot, SHARED)
    assert found(prefixes, [*first, 1])[1] == len(first) - 1


def test_a_running_conversation_lends_what_it_has() -> None:
    kv = make()
    prefixes = PrefixCache(kv)
    first = talk(prefixes, kv, [*SHARED, 1, 2], end=False)
    second = talk(prefixes, kv, [*SHARED, 1, 3, 4], end=False)
    assert first != second
    assert serves(kv, first, [*SHARED, 1])
    assert serves(kv, second, [*SHARED, 1, 3])


def test_the_same_prompt_twice_at_once_is_read_once() -> None:
    kv = make()
    prefixes = PrefixCache(kv)
    ids = list(range(150))
    one, two = prefixes.acquire(list(ids), ""), prefixes.acquire(list(ids), "")
    assert one is not None
    assert two is not None
    append(kv, one.slot, ids[:25])
    append(kv, two.slot, ids[:10])
    assert prefixes.catch_up(two.slot) == 10  # too little to be worth a copy
    assert prefixes.awaits(two.slot, [one.slot])
    append(kv, one.slot, ids[25:])
    assert not prefixes.awaits(two.slot, [one.slot])
    assert prefixes.catch_up(two.slot) == kv.length(two.slot) == 149
    assert serves(kv, two.slot, ids[:149])
    assert prefixes.catch_up(one.slot) == 150


def test_slots_are_given_back_least_recently_used_first() -> None:
    kv = make(slots=3)
    prefixes = PrefixCache(kv)
    for i in range(3):
        talk(prefixes, kv, [i] * 40)
    talk(prefixes, kv, [0] * 41)  # used again
    talk(prefixes, kv, [7] * 40)
    assert [found(prefixes, [i] * 42)[1] for i in (2, 1)] == [39, 0]
    assert all(prefixes.acquire([20 + i], "") is not None for i in range(3))
    assert prefixes.acquire([9], "") is None
    assert prefixes.idle_slots == 0


@pytest.mark.parametrize(
    ("other", "namespace", "awaited"),
    [
        ([*range(80), 7], "", True),
        ([*range(16), 7], "", True),
        ([*range(15), 7], "", False),
        (list(range(80)), "b", False),
        (list(range(80)), None, False),
    ],
)
def test_who_waits_for_whose_rows(other: list[int], namespace: str | None, awaited: bool) -> None:
    """For those of the same namespace that will have enough of the same rows, until they have them."""
    kv = make(slots=3)
    prefixes = PrefixCache(kv)
    one, two = prefixes.acquire(list(range(100)), ""), prefixes.acquire(other, namespace)
    assert one is not None
    assert two is not None
    assert prefixes.awaits(one.slot, [two.slot]) == awaited
    assert not prefixes.awaits(one.slot, [])
    append(kv, two.slot, other[:-1])
    assert not prefixes.awaits(one.slot, [two.slot])
    append(kv, one.slot, list(range(98)))
    assert not prefixes.awaits(one.slot, [two.slot])


def test_idle_conversations_shrink_to_what_is_left() -> None:
    kv = make(slots=4)
    prefixes = PrefixCache(kv)
    for i in range(3):
        talk(prefixes, kv, [i] * 70)
    running = talk(prefixes, kv, [9] * 70, end=False)
    each = kv.slot_bytes(running)
    prefixes.shrink(4 * each)
    assert prefixes.idle_slots == 3
    prefixes.shrink(3 * each - 1)
    assert prefixes.idle_slots == 2
    assert found(prefixes, [0] * 80)[1] == 0
    prefixes.shrink(0)
    assert prefixes.idle_slots == 0
    assert kv.used_bytes == each
    prefixes.check_integrity()


def test_where_there_is_no_other_slot_the_longer_conversation_is_cut() -> None:
    kv = make(slots=1)
    prefixes = PrefixCache(kv)
    talk(prefixes, kv, list(range(150)))
    assert found(prefixes, [*range(10), 99]) == (0, 10)


def test_idle_conversations_keep_no_more_than_two_contexts() -> None:
    kv = make(slots=6)
    prefixes = PrefixCache(kv)
    for i in range(5):
        talk(prefixes, kv, [i] * (CONTEXT // 2 + 1))
    assert prefixes.idle_slots == 4
    for i, idle in ((7, 3), (8, 2), (9, 2)):
        talk(prefixes, kv, [i] * (3 * CONTEXT))  # one that has slid has one context
        assert prefixes.idle_slots == idle
    assert [found(prefixes, [i] * (3 * CONTEXT))[1] for i in (9, 8)] == [3 * CONTEXT - 1] * 2


@pytest.mark.parametrize("namespace", [None, "other"])
def test_namespaces_never_meet(namespace: str | None) -> None:
    """F29: neither what is idle nor what runs is found from another namespace, or from none."""
    kv = make(slots=4)
    prefixes = PrefixCache(kv)
    for i in range(4):
        ids = [i, *SHARED[:20]]
        talk(prefixes, kv, ids)
        running = talk(prefixes, kv, ids, end=False)
        other = prefixes.acquire(ids, namespace)
        assert other is not None
        assert other.rows == 0
        assert not serves(kv, other.slot, ids[:10])  # the memory is not even there
        append(kv, other.slot, [1, 2])
        assert prefixes.catch_up(other.slot) == 2
        prefixes.release(other.slot, keep=True)
        prefixes.release(running, keep=False)


def test_what_failed_is_not_kept() -> None:
    kv = make()
    prefixes = PrefixCache(kv)
    slot = talk(prefixes, kv, SHARED, end=False)
    prefixes.release(slot, keep=False)
    assert found(prefixes, SHARED)[1] == 0


def test_rows_that_a_window_has_lost_are_not_found() -> None:
    """The local layer has rows for its window and a step: the end of a long conversation can go on, its middle cannot."""
    geometry = CacheGeometry((LayerGeometry(1, 8), LayerGeometry(1, 8, window=10)))
    kv = make(geometry=geometry)
    prefixes = PrefixCache(kv)
    ids = list(range(190))
    talk(prefixes, kv, ids)
    assert found(prefixes, [*ids[:60], 5, 6])[1] == 0
    assert found(prefixes, [*ids, 5, 6])[1] == 189


def test_a_conversation_that_has_slid_goes_on() -> None:
    kv = make(geometry=CacheGeometry((LayerGeometry(1, 8),)))
    prefixes = PrefixCache(kv)
    ids = [i % 90 for i in range(3 * CONTEXT)]
    talk(prefixes, kv, ids)
    assert found(prefixes, [*ids[:150], 91])[1] == 0  # what comes next would attend to rows that are gone
    placed = prefixes.acquire([*ids[:-5], 91, 92], "")
    assert placed is not None
    assert placed.rows == len(ids) - 5
    assert serves(kv, placed.slot, ids[:-5])


def test_common_prefix() -> None:
    for equal in range(9):
        one, other = [1] * equal + [2, 5], [1] * equal + [3, 5]
        for most in range(12):
            assert common_prefix(one, other, most) == min(equal, most)
    assert common_prefix([1, 2], [1, 2], 9) == 2


class Conversations(RuleBasedStateMachine):
    """Any order of beginnings, steps, ends and failures; every row that is found is the one that belongs there."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = make()
        self.prefixes = PrefixCache(self.kv)
        self.running: dict[int, tuple[list[int], str | None]] = {}

    @rule(
        shared=st.integers(0, 3),
        length=st.sampled_from([0, 5, 63, 64, 65, 140]),
        end=st.integers(0, 3),
        namespace=st.sampled_from(["", "a", None]),
    )
    def begin(self, shared: int, length: int, end: int, namespace: str | None) -> None:
        ids = [*([shared] * length), end, end]
        placed = self.prefixes.acquire(ids, namespace)
        assert (placed is None) == (len(self.running) == self.kv.slots)
        if placed is not None:
            assert placed.slot not in self.running
            assert serves(self.kv, placed.slot, ids[: placed.rows])
            assert namespace is not None or placed.rows == 0
            self.running[placed.slot] = (ids, namespace)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rows=st.integers(1, 60))
    def step(self, data: st.DataObject, rows: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        ids, _ = self.running[slot]
        have = self.kv.length(slot)
        if self.prefixes.catch_up(slot) > have:
            have = self.kv.length(slot)
            assert serves(self.kv, slot, ids[:have])
        if len(ids) == have and have + rows <= CONTEXT:
            ids += [rows] * rows
        append(self.kv, slot, ids[have : have + rows])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        ids, _ = self.running.pop(slot)
        assert serves(self.kv, slot, ids[: self.kv.length(slot)])
        self.prefixes.release(slot, keep=keep)

    @invariant()
    def everything_is_right(self) -> None:
        self.prefixes.check_integrity()
        self.kv.check_integrity()
        assert self.kv.free_slots + self.prefixes.idle_slots == self.kv.slots - len(self.running)


Conversations.TestCase.settings = settings(max_examples=10, stateful_step_count=20)
TestConversations = Conversations.TestCase


# --- with a store ------------------------------------------------------------------------------------------------------


def with_store(folder: Path, **options: object) -> tuple[PrefixCache, KVCache]:
    kv = make(**options)
    form = BlockFormat("rig", kv.snapshot_shapes(1))
    return PrefixCache(kv, PrefixStore(folder, form, budget=1 << 24)), kv


def speak(prefixes: PrefixCache, kv: KVCache, ids: list[int]) -> int:
    """As `talk`, in steps that are told; gives how many rows were found."""
    placed = prefixes.acquire(ids, "")
    assert placed is not None
    assert serves(kv, placed.slot, ids[: placed.rows])
    for first in range(placed.rows, len(ids) - 1, 37):
        append(kv, placed.slot, ids[first : min(first + 37, len(ids) - 1)])
        prefixes.committed(placed.slot)
    prefixes.release(placed.slot, keep=True)
    prefixes.close()
    kv.check_integrity()
    return placed.rows


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize("length", [2, 64, 65, 66, 128, 129, 150, 193])
def test_rows_come_back_in_another_cache(tmp_path: Path, kv_type: KvType, length: int) -> None:
    """Local layers included, which by the end no longer hold the first rows."""
    ids = list(range(length))
    assert speak(*with_store(tmp_path / "p", kv_type=kv_type), ids) == 0
    assert speak(*with_store(tmp_path / "p", kv_type=kv_type), [*ids, 7, 8]) == length - 1
    assert speak(*with_store(tmp_path / "p", kv_type=kv_type), [*ids[:-1], 7, 8]) == length - 1


def test_blocks_go_on_from_where_a_slot_ends(tmp_path: Path) -> None:
    ids = list(range(190))
    assert speak(*with_store(tmp_path / "p"), ids) == 0
    prefixes, kv = with_store(tmp_path / "p")
    assert speak(prefixes, kv, ids[:71]) == 64  # a slot now has 70 rows
    assert speak(prefixes, kv, [*ids, 5]) == 189
    assert speak(prefixes, kv, [*ids[:150], 5]) == 150


def test_a_short_end_does_not_hide_a_longer_conversation(tmp_path: Path) -> None:
    """B24."""
    ids = list(range(100))
    speak(*with_store(tmp_path / "p"), ids)
    speak(*with_store(tmp_path / "p"), ids[:20])
    speak(*with_store(tmp_path / "p"), ids[:80])
    assert speak(*with_store(tmp_path / "p"), [*ids, 5]) == 99


def test_a_store_of_another_fingerprint_finds_nothing(tmp_path: Path) -> None:
    ids = list(range(100))
    speak(*with_store(tmp_path / "p"), ids)
    kv = make()
    other = PrefixStore(tmp_path / "p", BlockFormat("other", kv.snapshot_shapes(1)), budget=1 << 24)
    assert speak(PrefixCache(kv, other), kv, ids) == 0
    assert other.counts.damaged == 0


def test_what_the_store_had_no_room_for_is_stored_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, kv = with_store(tmp_path / "p")
    ids = list(range(150))
    placed = prefixes.acquire(ids, "")
    assert placed is not None
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "has_room", False)
        append(kv, placed.slot, ids[:-1])
        prefixes.committed(placed.slot)
    prefixes.release(placed.slot, keep=True)
    prefixes.close()
    assert speak(*with_store(tmp_path / "p"), [*ids, 5]) == 149
