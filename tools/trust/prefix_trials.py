"""The trials of F1, F3, F4, F5, F6 and F29: what the prefix cache on disk goes through, and what it must never do."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_llm.cache.block_file import BlockFormat
from edge_llm.cache.block_folder import verify_folder
from edge_llm.cache.blocks import BLOCK, Block, child_key
from edge_llm.engine.core import EngineCore
from edge_llm.engine.request import Request
from edge_llm.sampling.params import SamplingParams
from tests.cache.blocks_rig import FORM, ROOT, block, files, leftovers, open_store, same, stored
from tests.cache.faulty_os import SHORT, faulty
from tests.engine.fakes import make_core
from tests.engine.test_core import Asked, run

_LARGE_BYTES = 1 << 20
_LARGE = BlockFormat("large", {"global.keys": ((_LARGE_BYTES,), np.dtype(np.uint8))})
FAULTS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES, errno.EINTR, SHORT)
_ROOT = Path(__file__).parents[2]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as above:
        yield Path(above) / "prefixes"


# --- F1: writers that are killed -------------------------------------------------------------------------------------------


def kills(count: int, seed: int) -> int:
    """One or two writers at a time are killed; then every file is whole, and a new store works and has cleaned up."""
    generator = random.Random(seed)
    with _folder() as folder:
        done = in_mid_write = 0
        while done < count:
            writers = [_forked_writer(folder, generator.randrange(99)) for _ in range(1 + done % 2)]
            _wait_for_a_write(folder) if done % 4 == 0 else time.sleep(generator.uniform(0.002, 0.03))
            for writer in writers:
                os.kill(writer, signal.SIGKILL)
                os.waitpid(writer, 0)
            done += len(writers)
            assert verify_folder(folder).damaged == 0
            in_mid_write += folder.exists() and bool(leftovers(folder))
            one = _large(1000 + done)
            store = stored(folder, one, form=_LARGE, budget=6 * _LARGE.size)
            found = store.read(ROOT, one.ids)
            assert found is not None
            assert np.array_equal(found.arrays["global.keys"], one.arrays["global.keys"])
            assert not leftovers(folder)
    assert in_mid_write, "the trials were not what they should be"
    return done


def _forked_writer(folder: Path, first: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            _write_for_ever(folder, first)
        finally:
            os._exit(1)
    return child


def _write_for_ever(folder: Path, first: int) -> None:
    store = open_store(folder, form=_LARGE, budget=6 * _LARGE.size)
    while True:
        first += 1
        if store.has_room:
            store.write(_large(first % 30))
        time.sleep(0.0005)


def _wait_for_a_write(folder: Path) -> None:
    until = time.monotonic() + 1
    while not (folder.exists() and leftovers(folder)) and time.monotonic() < until:
        pass


def _large(seed: int) -> Block:
    """A block whose writing takes a while; one of four is the rest of a conversation."""
    ids = range(seed, seed + (BLOCK if seed % 4 else 9))
    return Block(ROOT, tuple(ids), {"global.keys": np.full(_LARGE_BYTES, seed % 251, np.uint8)})


# --- F3: bits that flip ----------------------------------------------------------------------------------------------------


def flips(count: int, seed: int) -> int:
    """Every bit of header, tokens, parent and digest, `count` of the rows, every length: each is a miss."""
    data = FORM.encode(block())
    rows, end = 8 + int.from_bytes(data[:8], "little") + 4 * BLOCK + 32, len(data) - 32
    generator = random.Random(seed)
    bits = [*range(8 * rows), *range(8 * end, 8 * len(data))]
    done = 0
    for bit in (*bits, *(generator.randrange(8 * rows, 8 * end) for _ in range(count))):
        data[bit // 8] ^= 1 << bit % 8
        assert FORM.decode(data, ROOT) is None, f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8
        done += 1
    for length in range(len(data)):
        assert FORM.decode(data[:length], ROOT) is None, f"length {length}"
    assert same(FORM.decode(data, ROOT), block())
    return done + len(data)


# --- F4: calls of the system that fail -------------------------------------------------------------------------------------


def faults(count: int, seed: int) -> int:
    """Each call that a life of a store makes fails in each way, `count` times: nothing is raised, leaked or wrong."""
    done = 0
    for turn in range(count):
        with _folder() as folder, faulty(None, SHORT) as counting:
            _use_a_store(folder, seed + turn)
        opened = len(os.listdir("/proc/self/fd"))
        for at in range(1, counting.calls + 1):
            for fault in FAULTS:
                with _folder() as folder:
                    folder.mkdir(mode=0o700)
                    with faulty(at, fault):
                        _use_a_store(folder, seed + turn)
                    assert verify_folder(folder).damaged == 0, (at, fault)
                    stored(folder, block(4))
                    assert not leftovers(folder), (at, fault)
                done += 1
        assert len(os.listdir("/proc/self/fd")) == opened
    return done


def _use_a_store(folder: Path, seed: int) -> None:
    blocks = [block(seed), block(seed + 1, tokens=10), block(seed + 2)]
    store = open_store(folder, budget=2 * FORM.size)
    for one in blocks:
        store.write(one)
        store.close()
    store.touch([child_key(ROOT, one.ids) for one in blocks])
    store.close()
    for one in blocks:
        found = store.read(ROOT, one.ids) if one.whole else store.read_rest(ROOT)
        assert found is None or same(found, one)


# --- F5: damage, and what is served then -----------------------------------------------------------------------------------


def _served(core: EngineCore, request: Request) -> Asked:
    events: list[object] = []
    asked = Asked(core.prepare(request, events.append), events)
    core.enqueue(asked.sequence)
    run(core)
    return asked


def _answer(folder: Path | None, request: Request) -> tuple[tuple[int, ...], int]:
    """(tokens, how many of the prompt's were found) of a new engine that knows the folder only."""
    core = make_core(folder=folder, context=512)
    finished = _served(core, request).finished
    core.close()
    return finished.token_ids, finished.usage.cached_tokens


def damages(count: int, seed: int) -> int:
    """Files are cut or changed at random: the next answer is that of an engine without a cache."""
    generator = random.Random(seed)
    request = Request(
        token_ids=tuple(3 + i * i % 200 for i in range(200)), params=SamplingParams(temperature=0, max_tokens=4)
    )
    expected, _ = _answer(None, request)
    hits = set()
    with _folder() as folder:
        _answer(folder, request)
        for _ in range(count):
            for path in files(folder):
                data = bytearray(path.read_bytes())
                if data and generator.random() < 0.4:
                    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
                    path.write_bytes(data[: generator.choice([len(data), generator.randrange(len(data))])])
            found, hit = _answer(folder, request)
            assert found == expected
            hits.add(hit)
    assert {0, 199} < hits, "the trials were not what they should be"
    return count


# --- F6: processes that share a folder -------------------------------------------------------------------------------------


def sharing(seconds: int, seed: int) -> int:
    """Four processes write, read and evict, one of them is killed and replaced; gives how many blocks were asked for."""
    with _folder() as folder:

        def start(number: int) -> subprocess.Popen[str]:
            arguments = [str(folder), str(seed + 6 * number), str(seconds)]
            command = [sys.executable, "-m", "tools.trust.prefix_sharer", *arguments]
            return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        children = [start(i) for i in range(4)]
        try:
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
            children[0].kill()
            children.append(start(4))
            results = [child.communicate() for child in children]
            assert [child.returncode for child in children[1:]] == [0] * 4, results
        finally:
            for child in children:
                child.kill()
                child.communicate()
        stored(folder, block(77))
        assert not leftovers(folder)
        assert verify_folder(folder).damaged == 0
        return sum(int(out.split()[-1]) for out, _ in results[1:])


# --- F29: keys that must not meet ------------------------------------------------------------------------------------------


def namespaces(count: int, seed: int) -> int:
    """The same prompt under another name is never found: not in memory while it runs or rests, not on disk."""
    generator = random.Random(seed)
    ids = tuple(3 + i * i % 200 for i in range(70))
    params = SamplingParams(temperature=0, max_tokens=2)
    with _folder() as folder:
        core = make_core(folder=folder, context=512, slots=4)
        for number in range(count):
            if number % 20 == 10:
                core.close()
                core = make_core(folder=folder, context=512, slots=4)
            name = f"{generator.choice(['', ' ', 'x', '0'])}{number:06d}"
            for cached in (0, 69):
                request = Request(token_ids=ids, params=params, namespace=name)
                assert _served(core, request).finished.usage.cached_tokens == cached
        core.close()
    return count
