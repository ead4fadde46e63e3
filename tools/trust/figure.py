"""One figure of docs/trust.md: its sizes, its seed, and the row that it prints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`trials(count, seed)` runs at least `count` trials and gives how many; it raises on the first that fails."""

    number: str
    what: str
    command: str
    sizes: Mapping[str, int]
    trials: Callable[[int, int], int]

    def main(self, arguments: Sequence[str]) -> int:
        """Run, print the row of docs/trust.md, and give the exit code."""
        parser = argparse.ArgumentParser(prog=self.command, description=f"{self.number}: {self.what}")
        parser.add_argument("--size", choices=list(self.sizes), default="commit")
        parser.add_argument("--seed", type=int, default=1)
        options = parser.parse_args(arguments)
        started = time.process_time()
        count = self.trials(self.sizes[options.size], options.seed)
        day = time.strftime("%Y-%m-%d", time.gmtime())
        command = f"`{self.command} --size {options.size} --seed {options.seed}`"
        print(
            f"| {self.number} | {self.what} | {options.size} | {count:,} | 0 failures | {command} | {day} |", flush=True
        )
        print(f"{time.process_time() - started:.0f} s of CPU time", file=sys.stderr)
        return 0
