from __future__ import annotations

import math
import random
from operator import itemgetter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row, plain_value, rows_of

import anabranch as ab
from anabranch.errors import ConfigError, TopologyError
from anabranch.model.graph import Kind
from anabranch.node.arrow.schemas import build_programs, infer_schemas
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels.topk import TopK
from anabranch.operators.rows.hashing import key_groups
from effort import examples

SCHEMA = pa.schema([("k", pa.string()), ("x", pa.float64()), ("n", pa.int32())])
nan = float("nan")
first = itemgetter(0)


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def group_of(key: str | None) -> int:
    return int(key_groups(table_of([(key, None, None)]), ("k",), GROUPS)[0])


Numbered = list[tuple[int, Row]]  # rows with the number of their arrival


def best(history: Numbered, kernel: TopK) -> Numbered:
    column = SCHEMA.get_field_index(kernel.by)

    def badness(numbered: tuple[int, Row]) -> tuple[bool, float]:
        value = numbered[1][column]
        if math.isnan(value):
            return True, 0.0
        return False, -value if kernel.descending else value

    present = [(number, row) for number, row in history if row[column] is not None]
    return sorted(present, key=badness)[: kernel.k]


records = st.tuples(
    st.sampled_from([None, "a", "b", "c"]),
    st.one_of(st.none(), st.sampled_from([nan, 0.0, -0.0, -1.5, 2.0, 3.0])),
    st.one_of(st.none(), st.integers(-(2**31), -(2**31) + 3), st.integers(0, 5)),
)
slices = st.tuples(
    st.lists(records, max_size=12),
    st.lists(st.integers(0, 12), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)
KERNELS = [TopK(("k",), 1, "x"), TopK(("k",), 3, "n"), TopK(("k",), 4, "x", descending=False)]


@settings(max_examples=examples(35), deadline=None)
@given(st.sampled_from(KERNELS), st.lists(slices, max_size=6))
def test_against_sorted_histories(
    kernel: TopK, script: list[tuple[list[Row], list[int], str]]
) -> None:
    run = KernelRun(kernel, SCHEMA)
    column = SCHEMA.get_field_index(kernel.by)
    histories: dict[str | None, Numbered] = {}
    arrived = 0
    for rows, cuts, action in script:
        for number, row in enumerate(rows, arrived):
            histories.setdefault(row[0], []).append((number, row))
        expected: dict[int, list[Row]] = {}
        for key in dict.fromkeys(row[0] for row in rows if row[column] is not None):
            ranking = best(histories[key], kernel)
            if any(number >= arrived for number, _ in ranking):
                expected.setdefault(group_of(key), []).extend(
                    (*(plain_value(value) for value in row), rank)
                    for rank, (_, row) in enumerate(ranking, 1)
                )
        arrived += len(rows)
        assert run.run((table_of(rows),), None, cuts) == expected
        run.act(action)
    held = sum(partition.state.rows for partition in run.partitions)
    assert held == sum(len(best(history, kernel)) for history in histories.values())


def test_an_unchanged_ranking_is_not_repeated() -> None:
    kernel = TopK(("k",), 2, "n")
    state = kernel.new_state(GROUPS, SCHEMA)
    outputs = []
    for number, rows in enumerate([[("a", 1.0, 5), ("a", 2.0, 7)], [("a", 3.0, 5)]]):
        time = SliceTime(number, None, 0)
        result = kernel.compute(state, (kernel.combine(0, table_of(rows)),), time)
        state.install(result.change)
        outputs.append(result.output.to_pylist())
    assert outputs[0] == [
        {"k": "a", "x": 2.0, "n": 7, "rank": 1},
        {"k": "a", "x": 1.0, "n": 5, "rank": 2},
    ]
    assert outputs[1] == []  # equal to the second, but later
    assert kernel.compute(state, (table_of([]),), SliceTime(2, None, 0)).output.num_rows == 0


def test_times_are_ranked_and_keep_their_type() -> None:
    schema = pa.schema([("k", pa.string()), ("t", pa.timestamp("ms", "UTC")), ("u", pa.uint64())])
    table = pa.table({"k": ["a"] * 3, "t": [1, 3, 2], "u": [0, 2**64 - 1, 5]}, schema)
    for by, expected in (("t", [3_000, 2_000]), ("u", [2**64 - 1, 5])):
        kernel = TopK(("k",), 2, by)
        state = kernel.new_state(4, schema)
        result = kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0))
        assert result.output.schema == kernel.output_schema(schema)
        column = result.output.column(by)
        assert (column.cast(pa.int64()) if by == "t" else column).to_pylist() == expected


def test_combine_sends_at_most_k_rows_of_a_key() -> None:
    kernel = TopK(("k",), 2, "n")
    rows = [("b", 0.0, 1), ("a", 0.0, 1), ("a", 1.0, 9), ("a", 2.0, 9), ("b", 3.0, None)]
    sent = kernel.combine(0, table_of(rows))
    assert sent.column("x").to_pylist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("by", ["x", "n"])
def test_combine_of_many_rows_keeps_the_best(by: str, descending: bool) -> None:
    """Many enough that most are dropped without being sorted; few values, so many ties."""
    rng = random.Random(5)
    numbers = [nan, nan, None, *range(-20, 20)]
    rows = [
        (f"k{int(rng.paretovariate(0.7)) % 50}", rng.choice(numbers), rng.choice(numbers[2:]))
        for _ in range(3_000)
    ]
    kernel = TopK(("k",), 5, by, descending)
    histories: dict[str | None, Numbered] = {}
    for number, row in enumerate(rows):
        histories.setdefault(row[0], []).append((number, row))
    present = dict.fromkeys(k for k, *row in rows if row["xn".index(by)] is not None)
    expected = [row for k in present for _, row in sorted(best(histories[k], kernel), key=first)]
    assert rows_of(kernel.combine(0, table_of(rows))) == [
        tuple(plain_value(v) for v in row) for row in expected
    ]


def test_topologies_with_rankings() -> None:
    topology = ab.Topology("t")
    rows = topology.source("rows", None)
    rows.key_by("k").top_k("per_key", 3, by="n").to("a", ab.Memory())
    rows.top_k("best", 2, by="x", descending=False).to("b", ab.Memory())
    plan = topology.plan()
    schemas, inputs = infer_schemas(plan.graph, {"rows": SCHEMA}, topology._sinks)
    assert schemas["per_key"].names == ["k", "x", "n", "rank"]
    assert schemas["best.ranking"].names == ["k", "x", "n", "rank"]
    assert plan.by_name["best"].parallelism == 1
    programs = build_programs(plan, schemas, inputs)
    (source,) = plan.source_chains
    many = table_of([("a", float(i % 7), i) for i in range(50)])
    result = programs[source.name].run({"rows": many}, {}, {}, SliceTime(0, None, 0))
    to_best = next(e for e in source.outputs if e.target_op == "best")
    assert result.edges[to_best.id].num_rows == 2  # local top-k before the shuffle
    program = programs["best"]
    for sent, expected in (([result.edges[to_best.id]], [0, 7]), ([], [])):
        shuffled = {to_best.id: sent}
        done = program.run({}, shuffled, program.new_states(), SliceTime(0, None, 0))
        assert done.sinks["b"].column("n").to_pylist() == expected
    assert plan.graph.by_name["best"].kind is Kind.KEYED


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="k of top_k is 0; give at least 1"):
        TopK(("k",), 0, "n")
    with pytest.raises(TopologyError, match="ranks by 'k', which is a key"):
        TopK(("k",), 1, "k")
    with pytest.raises(TopologyError, match=r"top_k\('s'\).*takes numbers, dates and times"):
        TopK(("k",), 1, "s").output_schema(SCHEMA.append(pa.field("s", pa.string())))
    with pytest.raises(TopologyError, match="top_k needs column 'absent'"):
        TopK(("k",), 1, "absent").output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="'rank' has a name this operator needs"):
        TopK(("k",), 1, "n").output_schema(SCHEMA.append(pa.field("rank", pa.int64())))
