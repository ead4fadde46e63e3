"""Beams: the branches of one sequence, each in a slot of its own, that run in the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_llm.cache.prefix_cache import PrefixCache, common_prefix
from edge_llm.engine.stream import TextStream
from edge_llm.messages import Beam, TextDelta
from edge_llm.sampling.beams import BeamDecoder, Hypothesis
from edge_llm.sampling.decoders import Selection


@dataclass(slots=True, eq=False)
class Branch:
    """Prompt and tokens of one beam. All branches of a sequence are of one length."""

    slot: int
    ids: list[int]


class Beams:
    """What a decoder looks along. After its first step there are branches, mostly `width` of them: one in the slot of the
    sequence, the others in slots of their own."""

    def __init__(self, decoder: BeamDecoder, new_stream: Callable[[], TextStream], n_best: int) -> None:
        """`new_stream` gives what reads an answer, `n_best` of which are wanted."""
        self.decoder = decoder
        self.branches: list[Branch] = []
        """in the order of the decoder's rows"""
        self._new_stream, self._n_best = new_stream, n_best

    @property
    def width(self) -> int:
        return self.decoder.width

    def follow(self, picks: Sequence[tuple[int, int]], root: Branch, prefixes: PrefixCache) -> None:
        """Go on with each (branch, token), where `root` is the sequence's own branch if there are no others yet.

        Who is followed by one stays in its slot. Further followers get copies of its rows in the slots of those whom nobody
        follows, or at first in new ones: of the rows that both have in common, none is copied.
        """
        branches = self.branches or [root]
        followed = {parent for parent, _ in picks}
        vacant = [branch for i, branch in enumerate(branches) if i not in followed]
        chosen: list[Branch] = []
        for parent, _ in picks:
            source = branches[parent]
            if source not in chosen:
                chosen.append(source)
            elif vacant:
                chosen.append(_moved(source, vacant, prefixes))
            else:
                ids = list(source.ids)
                chosen.append(Branch(prefixes.branch(source.slot, ids), ids))
        for branch, (_, token_id) in zip(chosen, picks, strict=True):
            branch.ids.append(token_id)
        self.branches = chosen or self.branches

    @property
    def best(self) -> Selection:
        """The best answer so far; nothing before the first step."""
        ranked = self.decoder.ranked()
        return Selection((), forced=ranked[0].token_ids if ranked else ())

    def results(self) -> tuple[Beam, ...]:
        """The best answers, the best first."""
        return tuple(map(self._beam, self.decoder.ranked()[: self._n_best]))

    def _beam(self, hypothesis: Hypothesis) -> Beam:
        stream = self._new_stream()
        deltas = [*stream.feed(Selection((), forced=hypothesis.token_ids)), *stream.flush()]
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        return Beam(text, tuple(stream.token_ids), hypothesis.logprob, self.decoder.score(hypothesis))


def _moved(source: Branch, vacant: list[Branch], prefixes: PrefixCache) -> Branch:
    """The one of `vacant` that has most in common with `source`, once it holds the same."""

    def common(branch: Branch) -> int:
        return common_prefix(branch.ids, source.ids, len(source.ids))

    target = max(vacant, key=common)
    vacant.remove(target)
    same = common(target)
    prefixes.replace(target.slot, source.slot, same)
    target.ids[same:] = source.ids[same:]
    return target
