"""One of the processes of F6: FOLDER FIRST SECONDS. Prints how many blocks it asked for."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from edge_llm.cache.block_folder import folder_stats
from edge_llm.cache.blocks import BLOCK
from tests.cache.blocks_rig import FORM, ROOT, block, open_store, same


def main(folder: Path, first: int, seconds: float) -> None:
    """Writes and reads blocks that the others have too, under a budget that holds few of them."""
    store = open_store(folder, budget=8 * FORM.size)
    until = time.monotonic() + seconds
    asked = 0
    print("ready", flush=True)
    while time.monotonic() < until:
        asked += 1
        one = block((first + asked) % 24, tokens=BLOCK if asked % 5 else 9)
        if store.has_room:
            store.write(one)
        found = store.read(ROOT, one.ids) if one.whole else store.read_rest(ROOT)
        assert found is None or not one.whole or same(found, one)
        assert folder_stats(folder).size <= 9 * FORM.size
        time.sleep(0.001)
    store.close()
    assert store.counts.damaged == 0
    assert store.counts.written > 0
    print(asked)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
