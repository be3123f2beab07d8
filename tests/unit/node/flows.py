"""Random dataflows and random input for them, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from oracle import Dataflow, Row, Step

FOLDS = ("count", "sum", "min", "max")


@st.composite
def flows(draw: st.DrawFn) -> Dataflow:
    """One or two sources, then steps that read one or two earlier ones, then a sink per leaf."""
    steps = [Step(f"s{i}", "source") for i in range(draw(st.integers(1, 2)))]
    for i in range(draw(st.integers(1, 6))):
        what = draw(st.sampled_from(("filter", "map", "keep", *FOLDS, *FOLDS)))
        reads = draw(
            st.lists(st.sampled_from([s.name for s in steps]), min_size=1, max_size=2, unique=True)
        )
        steps.append(Step(f"o{i}", what, tuple(reads), draw(st.integers(2, 5))))
    read = {n for s in steps for n in s.reads}
    leaves = [s.name for s in steps if s.name not in read]
    extra = draw(st.sampled_from([s.name for s in steps]))
    for i, name in enumerate(dict.fromkeys([*leaves, extra])):
        steps.append(Step(f"out{i}", "sink", (name,)))
    return Dataflow(tuple(steps))


rows: st.SearchStrategy[list[Row]] = st.lists(
    st.tuples(st.none() | st.integers(-3, 12), st.integers(-20, 20)), max_size=12
)


def batches(flow: Dataflow) -> st.SearchStrategy[list[list[dict[str, list[Row]]]]]:
    """Several batches of zero to three source tasks."""
    names = [s.name for s in flow.steps if s.what == "source"]
    task = st.fixed_dictionaries(dict.fromkeys(names, rows))
    return st.lists(st.lists(task, max_size=3), min_size=1, max_size=4)
