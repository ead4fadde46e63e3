"""PrefixCache: the slot that a conversation gets, and how many rows of its prompt it finds there.

The row of a position follows from the tokens up to it and from nothing else, also in a conversation that has slid. So
any slot may lend its rows to whoever begins with the same tokens, as far as its rings still hold them (KVCache says so):

    idle     its conversation has ended. It stays until somebody goes on with it, or needs the slot or the memory.
    running  it lends copies of what it has.

The last token of a prompt is never taken from a slot, so that there is a row to compute logits from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from edge_llm.cache.kv_cache import KVCache
from edge_llm.kernels.layout import TILE


@dataclass(slots=True)
class _Tenant:
    """A conversation in a slot. `ids` is its owner's own list, which grows; None for `namespace` lends to nobody."""

    slot: int
    ids: list[int]
    namespace: str | None
    idle: bool = False
    used: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A slot, and how many rows of the conversation it holds already."""

    slot: int
    rows: int


class PrefixCache:
    """Gives out the slots of a KVCache. One thread at a time.

    Conversations meet only within a `namespace`; one without (None) neither takes nor leaves rows. Idle ones keep at most
    as many rows together as one conversation may have: the least recently used are given back first.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._tenants: dict[int, _Tenant] = {}
        self._clock = count()

    @property
    def idle_slots(self) -> int:
        """Slots that nobody runs in, but that hold rows."""
        return sum(tenant.idle for tenant in self._tenants.values())

    def acquire(self, ids: list[int], namespace: str | None) -> Placed | None:
        """A slot for a conversation that begins with `ids`, or None if all are running."""
        if not self._kv.free_slots and not self.idle_slots:
            return None
        tenant = _Tenant(-1, ids, namespace)
        tenant.slot = self._with_prefix(tenant)
        self._tenants[tenant.slot] = tenant
        self._touch(tenant)
        return Placed(tenant.slot, self._kv.length(tenant.slot))

    def catch_up(self, slot: int) -> int:
        """Take over what others have computed of the same prompt since; how many rows the slot has now."""
        tenant = self._tenants[slot]
        have = self._kv.length(slot)
        for rows, source in self._matches(tenant):
            if rows < have + TILE:
                break
            if self._kv.fork(source.slot, slot, rows):
                self._touch(source)
                return rows
        return have

    def release(self, slot: int, *, keep: bool) -> None:
        """A conversation has ended; its rows stay if it is sound (`keep`) and has a namespace."""
        tenant = self._tenants[slot]
        if not keep or tenant.namespace is None or not self._kv.length(slot):
            self._give_back(tenant)
            return
        tenant.idle = True
        self._touch(tenant)
        self._bound_idle_rows()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the slots that are taken are those that are known here."""
        if self._kv.slots - self._kv.free_slots != len(self._tenants):
            raise AssertionError(f"{len(self._tenants)} conversations, but {self._kv.free_slots} slots are free")
        for tenant in self._tenants.values():
            if self._kv.length(tenant.slot) > len(tenant.ids):
                raise AssertionError(f"slot {tenant.slot} has more rows than its conversation has tokens")

    def _with_prefix(self, tenant: _Tenant) -> int:
        """A slot with as much of the conversation as any has."""
        spare: int | None = None
        for rows, source in self._matches(tenant):
            if self._tenants.get(source.slot) is not source:  # it had to make room for this one
                continue
            # an idle conversation that would lose most of its rows is worth a copy, where there is room for one
            goes_on = source.idle and 2 * rows >= self._kv.length(source.slot)
            if not goes_on and spare is None:
                spare = self._vacant_slot(besides=source)
            if spare is not None:
                if self._kv.fork(source.slot, spare, rows):
                    self._touch(source)
                    return spare
            elif source.idle and self._kv.truncate(source.slot, rows):
                return source.slot
        if spare is None:
            spare = self._vacant_slot()
        assert spare is not None
        return spare

    def _matches(self, tenant: _Tenant) -> list[tuple[int, _Tenant]]:
        """(common rows, whose), the longest first; then idle ones, and of these the shortest."""
        if tenant.namespace is None:
            return []
        found = []
        for other in self._tenants.values():
            if other is not tenant and other.namespace == tenant.namespace:
                most = min(len(tenant.ids) - 1, self._kv.length(other.slot))
                found.append((common_prefix(tenant.ids, other.ids, most), other))
        found.sort(key=lambda match: (-match[0], not match[1].idle, self._kv.length(match[1].slot)))
        return [(rows, other) for rows, other in found if rows > 0]

    def _vacant_slot(self, besides: _Tenant | None = None) -> int | None:
        """An empty slot, if need be that of the idle conversation that was used least recently."""
        slot = self._kv.acquire()
        if slot is None:
            idle = [tenant for tenant in self._tenants.values() if tenant.idle and tenant is not besides]
            if idle:
                self._give_back(min(idle, key=lambda tenant: tenant.used))
                slot = self._kv.acquire()
        return slot

    def _bound_idle_rows(self) -> None:
        idle = sorted((tenant for tenant in self._tenants.values() if tenant.idle), key=lambda tenant: -tenant.used)
        rows = 0
        for tenant in idle:
            rows += min(self._kv.length(tenant.slot), self._kv.context)
            if rows > self._kv.context:
                self._give_back(tenant)

    def _give_back(self, tenant: _Tenant) -> None:
        del self._tenants[tenant.slot]
        self._kv.release(tenant.slot)

    def _touch(self, tenant: _Tenant) -> None:
        tenant.used = next(self._clock)


def common_prefix(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many of the first `most` items are equal."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
