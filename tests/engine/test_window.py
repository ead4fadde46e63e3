"""ContextWindow against the rule itself: row p attends to k < sinks and to p - window < k <= p."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_llm.engine.window import ContextWindow


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 120), st.data())
def test_forgotten_is_what_the_last_row_does_not_attend_to(
    window: int, sinks: int, rows: int, data: st.DataObject
) -> None:
    made = ContextWindow(sinks + window, sinks)
    last = rows - 1
    attended = {k for k in range(rows) if k < sinks or k > last - window}
    assert set(made.forgotten(rows)) == set(range(rows)) - attended
    edges = st.tuples(st.integers(0, rows), st.integers(0, rows)).map(sorted)
    places = [range(*edge) for edge in data.draw(st.lists(edges, max_size=5)) if edge[0] < edge[1]]
    expected = tuple(i for i, place in enumerate(places) if attended.isdisjoint(place))
    assert made.forgotten_places(places, rows) == expected


@given(st.integers(1, 200), st.integers(0, 200))
def test_a_conversation_within_the_context_forgets_nothing(context: int, rows: int) -> None:
    made = ContextWindow(context)
    if rows <= context:
        assert not made.forgotten(rows)
        assert made.forgotten_places([range(1), range(64, 64)], rows) == ()
