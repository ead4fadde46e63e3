"""PrefixCache: the slot that a conversation gets, and how many rows of its prompt it finds there.

The row of a position follows from the tokens up to it and from nothing else, also in a conversation that has slid. So
any slot may lend its rows to whoever begins with the same tokens, as far as its rings still hold them (KVCache says so):

    idle     its conversation has ended. It stays until somebody goes on with it, or needs the slot or the memory.
    running  it lends copies of what it has.

A BlockStore, where there is one, keeps rows longer: of each block of 64 tokens once it is whole, before a ring can overwrite
it, and of what is left at the end. Rows past the context are not stored: they also depend on how long it is.
The last token of a prompt is never taken from a slot, so that there is a row to compute logits from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from edge_llm.cache.blocks import BLOCK, Block, BlockStore, child_key, root_key
from edge_llm.cache.kv_cache import KVCache
from edge_llm.cache.snapshot import Snapshot

WORTH_A_COPY = 16
"""rows that are sooner copied than computed"""
IDLE_CONTEXTS = 2
"""full contexts of rows that idle conversations may keep together"""


@dataclass(slots=True)
class _Tenant:
    """A conversation in a slot. `ids` is its owner's own list, which grows; None for `namespace` lends to nobody.

    The first `stored` blocks are in the store; `keys` are those that are known so far, the root's first.
    """

    slot: int
    ids: list[int]
    namespace: str | None
    idle: bool = False
    used: int = 0
    stored: int = 0
    keys: list[bytes] = field(default_factory=list)

    def block_ids(self, index: int) -> list[int]:
        return self.ids[index * BLOCK : (index + 1) * BLOCK]

    def key(self, blocks: int) -> bytes:
        """Key of the first `blocks` blocks."""
        while len(self.keys) <= blocks:
            self.keys.append(child_key(self.keys[-1], self.block_ids(len(self.keys) - 1)))
        return self.keys[blocks]


@dataclass(frozen=True, slots=True)
class Placed:
    """A slot, and how many rows of the conversation it holds already; `stored` of them came from the store."""

    slot: int
    rows: int
    stored: int = 0


class PrefixCache:
    """Gives out the slots of a KVCache. One thread at a time.

    Conversations meet only within a `namespace`; one without (None) neither takes nor leaves rows. Idle ones keep at most
    as many rows together as IDLE_CONTEXTS allows: the least recently used are given back first.
    """

    def __init__(self, kv: KVCache, store: BlockStore | None = None) -> None:
        self._kv = kv
        self._store = store
        self._tenants: dict[int, _Tenant] = {}
        self._clock = count()

    @property
    def idle_slots(self) -> int:
        """Slots that nobody runs in, but that hold rows."""
        return sum(tenant.idle for tenant in self._tenants.values())

    @property
    def idle_bytes(self) -> int:
        """Bytes of these rows."""
        return sum(self._kv.slot_bytes(tenant.slot) for tenant in self._tenants.values() if tenant.idle)

    def acquire(self, ids: list[int], namespace: str | None) -> Placed | None:
        """A slot for a conversation that begins with `ids`, or None if all are running."""
        if not self._kv.free_slots and not self.idle_slots:
            return None
        tenant = _Tenant(-1, ids, namespace)
        tenant.slot = self._with_prefix(tenant)
        self._tenants[tenant.slot] = tenant
        rows = self._kv.length(tenant.slot)
        if self._store is not None and namespace is not None:
            tenant.keys.append(root_key(self._store.fingerprint, namespace))
            self._read_blocks(tenant, self._store)
        self._touch(tenant)
        now = self._kv.length(tenant.slot)
        return Placed(tenant.slot, now, max(0, now - rows))

    def awaits(self, slot: int, others: Iterable[int]) -> bool:
        """Whether one of `others`, whose prompts are being read, will soon have rows of this one's that are worth a copy."""
        tenant = self._tenants[slot]
        worth = self._kv.length(slot) + WORTH_A_COPY
        for other in (self._tenants[number] for number in others):
            if tenant.namespace is not None and other.namespace == tenant.namespace:
                common = common_prefix(tenant.ids, other.ids, len(tenant.ids) - 1)
                if common >= worth and common > self._kv.length(other.slot):
                    return True
        return False

    def catch_up(self, slot: int) -> int:
        """Take over what others have computed of the same prompt since; how many rows the slot has now."""
        tenant = self._tenants[slot]
        have = self._kv.length(slot)
        for rows, source in self._matches(tenant):
            if rows < have + WORTH_A_COPY:
                break
            if self._kv.fork(source.slot, slot, rows):
                self._lent(source, tenant, rows)
                return rows
        return have

    def committed(self, slot: int) -> None:
        """A step has added rows to a slot: the blocks that are whole now are stored."""
        tenant = self._tenants[slot]
        if self._store is None or tenant.namespace is None:
            return
        stop = min(self._kv.length(slot), self._kv.context)
        while (tenant.stored + 1) * BLOCK <= stop and self._store.has_room:
            if not self._write_block(tenant, self._store, (tenant.stored + 1) * BLOCK):
                return
            tenant.stored += 1

    def rewind(self, slot: int, rows: int) -> int:
        """Take back all but the first `rows` rows of a slot, whose owner goes on differently; how many are left. There are
        none if that cannot be, for a ring has lost what they attend to."""
        tenant = self._tenants[slot]
        if not self._kv.truncate(slot, rows):
            self._kv.truncate(slot, rows := 0)
        self._forget_blocks(tenant, rows)
        return rows

    def branch(self, slot: int, ids: list[int]) -> int:
        """Another slot that holds all rows of this one, of whose tokens `ids` is a copy. It lends to nobody.

        Whoever asks for it knows that not all slots are running.
        """
        target = self._vacant_slot()
        assert target is not None
        self._tenants[target] = _Tenant(target, ids, None)
        forked = self._kv.fork(slot, target, self._kv.length(slot))
        assert forked, "a slot can be copied as it is"
        return target

    def replace(self, slot: int, source: int, same: int) -> None:
        """Let a slot hold the rows of another one, as long as it. The first `same` are equal; who owns the slot's tokens
        changes the others."""
        forked = self._kv.fork(source, slot, self._kv.length(source), same=same)
        assert forked, "a slot can be copied as it is"
        self._forget_blocks(self._tenants[slot], same)

    def release(self, slot: int, *, keep: bool) -> None:
        """A conversation has ended; its rows stay if it is sound (`keep`) and has a namespace."""
        tenant = self._tenants[slot]
        if not keep or tenant.namespace is None or not self._kv.length(slot):
            self._give_back(tenant)
            return
        if self._store is not None:
            self.committed(slot)  # what the store had no room for before
            self._write_end(tenant, self._store)
        tenant.idle = True
        self._touch(tenant)
        self._bound_idle_rows()

    def shrink(self, nbytes: int) -> None:
        """Let idle conversations keep at most so many bytes."""
        for tenant in self._idle_latest_first():
            nbytes -= self._kv.slot_bytes(tenant.slot)
            if nbytes < 0:
                self._give_back(tenant)

    def close(self) -> None:
        """Finish what was to be stored."""
        if self._store is not None:
            self._store.close()

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
                    self._lent(source, tenant, rows)
                    return spare
            elif source.idle and self._kv.truncate(source.slot, rows):
                self._lent(source, tenant, rows)
                return source.slot
        if spare is None:
            spare = self._vacant_slot()
        assert spare is not None
        return spare

    def _read_blocks(self, tenant: _Tenant, store: BlockStore) -> None:
        """Go on from the rows of a slot with those that are stored, whole blocks first."""
        most = min(len(tenant.ids) - 1, self._kv.context)
        index = self._kv.length(tenant.slot) // BLOCK
        while (index + 1) * BLOCK <= most:
            block = store.read(tenant.key(index), tenant.block_ids(index))
            if block is None or not self._restore(tenant, index, block, BLOCK):
                break
            index += 1
            tenant.stored = max(tenant.stored, index)
        rest = store.read_rest(tenant.key(index))
        if rest is not None:
            rows = common_prefix(list(rest.ids), tenant.block_ids(index), most - index * BLOCK)
            if index * BLOCK + rows > self._kv.length(tenant.slot):
                self._restore(tenant, index, rest, rows)
        if index:
            store.touch(tenant.keys[1 : index + 1])

    def _restore(self, tenant: _Tenant, index: int, block: Block, rows: int) -> bool:
        """Put the first rows of a block where they belong; False if that cannot be."""
        start, have = index * BLOCK, self._kv.length(tenant.slot)
        if have > start and not self._kv.truncate(tenant.slot, start):
            return False
        try:
            self._kv.restore(tenant.slot, Snapshot(start, start + rows, block.arrays))
        except ValueError:
            return False
        return True

    def _write_block(self, tenant: _Tenant, store: BlockStore, stop: int) -> bool:
        """Store the block that ends at `stop`; False if its rows are gone."""
        index = (stop - 1) // BLOCK
        snapshot = self._kv.snapshot(tenant.slot, index * BLOCK, stop)
        if snapshot is None:
            return False
        store.write(Block(tenant.key(index), tuple(tenant.ids[index * BLOCK : stop]), snapshot.arrays))
        return True

    def _write_end(self, tenant: _Tenant, store: BlockStore) -> None:
        """Store what is left of a conversation that has ended, and mark all of it as used."""
        length = self._kv.length(tenant.slot)
        if tenant.stored == length // BLOCK and length % BLOCK and length <= self._kv.context and store.has_room:
            self._write_block(tenant, store, length)
        if tenant.stored:
            store.touch(tenant.keys[1 : tenant.stored + 1])

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
        rows = 0
        for tenant in self._idle_latest_first():
            rows += min(self._kv.length(tenant.slot), self._kv.context)
            if rows > IDLE_CONTEXTS * self._kv.context:
                self._give_back(tenant)

    def _idle_latest_first(self) -> list[_Tenant]:
        return sorted((tenant for tenant in self._tenants.values() if tenant.idle), key=lambda tenant: -tenant.used)

    def _give_back(self, tenant: _Tenant) -> None:
        del self._tenants[tenant.slot]
        self._kv.release(tenant.slot)

    def _lent(self, source: _Tenant, tenant: _Tenant, rows: int) -> None:
        self._touch(source)
        tenant.stored = min(source.stored, rows // BLOCK)

    def _forget_blocks(self, tenant: _Tenant, rows: int) -> None:
        """What was known of its blocks past the first `rows` rows no longer holds."""
        tenant.stored = min(tenant.stored, rows // BLOCK)
        del tenant.keys[rows // BLOCK + 1 :]

    def _touch(self, tenant: _Tenant) -> None:
        tenant.used = next(self._clock)


def common_prefix(one: list[int], other: list[int], most: int) -> int:
    """How many of the first `most` items are equal."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
