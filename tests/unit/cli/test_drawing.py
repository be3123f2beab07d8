"""Layered drawings: nothing overlaps, links run between boxes, heights are the nearest possible."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli import app
from anabranch.cli.describe import draw
from anabranch.cli.drawing import (
    MAX_LED_LINKS,
    Box,
    Link,
    _crossings,
    _Point,
    curve,
    lay_out,
    spread,
)

SPACE = "{http://www.w3.org/2000/svg}"
GAP, APART = 30.0, 10.0


def brute_force(wanted: list[float], steps: list[float]) -> float:
    """The least sum of squares: try every way to cut the row into blocks that move together."""
    offsets = [sum(steps[:i]) for i in range(len(steps))]
    aims = [w - o for w, o in zip(wanted, offsets, strict=True)]
    best = float("inf")
    for cuts in itertools.product([False, True], repeat=len(aims) - 1):
        blocks: list[list[float]] = [[aims[0]]]
        for aim, cut in zip(aims[1:], cuts, strict=True):
            if cut:
                blocks.append([aim])
            else:
                blocks[-1].append(aim)
        means = [sum(b) / len(b) for b in blocks]
        if all(a <= b for a, b in itertools.pairwise(means)):
            spots = [m for m, b in zip(means, blocks, strict=True) for _ in b]
            best = min(best, sum((s - a) ** 2 for s, a in zip(spots, aims, strict=True)))
    return best


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 20)), min_size=1, max_size=7))
def test_spread_is_the_nearest_that_keeps_order_and_distance(
    given_rows: list[tuple[int, int]],
) -> None:
    wanted, steps = [float(w) for w, _ in given_rows], [float(s) for _, s in given_rows]
    found = spread(wanted, steps)
    for (a, b), step in zip(itertools.pairwise(found), steps, strict=False):
        assert b - a >= step - 1e-9
    cost = sum((f - w) ** 2 for f, w in zip(found, wanted, strict=True))
    assert cost == pytest.approx(brute_force(wanted, steps), abs=1e-6)


@st.composite
def graphs(draw_: st.DrawFn) -> tuple[list[Box], list[Link]]:
    boxes = []
    for layer in range(draw_(st.integers(1, 5))):
        for i in range(draw_(st.integers(1, 5))):
            width, height = draw_(st.integers(10, 90)), draw_(st.integers(10, 60))
            boxes.append(Box(f"{layer}.{i}", layer, width, height, inset=draw_(st.integers(0, 5))))
    pairs = [(a, b) for a in boxes for b in boxes if a.layer < b.layer]
    chosen = draw_(st.lists(st.sampled_from(pairs), max_size=15, unique=True)) if pairs else []
    return boxes, [Link(a.name, b.name, a.height / 2, b.height / 3) for a, b in chosen]


@given(graphs())
def test_boxes_and_links_keep_clear_of_each_other(graph: tuple[list[Box], list[Link]]) -> None:
    boxes, links = graph
    layout = lay_out(boxes, links, left=20, top=50, gap=GAP, apart=APART)
    spans = {b.name: (layout.at[b.name][1], layout.at[b.name][1] + b.height) for b in boxes}
    assert min(low for low, _ in spans.values()) >= 50 - 1e-6
    assert max(high for _, high in spans.values()) <= layout.height + 1e-6
    for a, b in itertools.combinations(boxes, 2):
        if a.layer == b.layer:
            (_, high), (low, _) = sorted([spans[a.name], spans[b.name]])
            assert low - high >= APART - 1e-6
    for (_, right), (left, _) in itertools.pairwise(layout.columns):
        assert left - right == pytest.approx(GAP)
    by_name = {b.name: b for b in boxes}
    for link, route in layout.routes:
        source, target = by_name[link.source], by_name[link.target]
        assert len(route) == 2 * (target.layer - source.layer + 1)
        assert route[0][1] == pytest.approx(spans[source.name][0] + link.leaves)
        assert route[-1][1] == pytest.approx(spans[target.name][0] + link.arrives)
        assert route[0][0] == layout.at[source.name][0] + source.width - source.inset
        for step, layer in enumerate(range(source.layer + 1, target.layer), start=1):
            (x1, y1), (x2, y2) = route[2 * step], route[2 * step + 1]
            assert ((x1, x2), y1) == (layout.columns[layer], y2)
            for box in boxes:
                low, high = spans[box.name]
                assert box.layer != layer or not low < y1 < high
        path = curve(route)
        assert path.count("H") == path.count("C") + 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12, unique=True))
def test_crossings_are_pairs_of_links_in_the_other_order(pairs: list[tuple[int, int]]) -> None:
    layers = [[_Point(layer, 1.0, None) for _ in range(5)] for layer in (0, 1)]
    for a, b in pairs:
        layers[0][a].after.append((layers[1][b], 0.0, 0.0))
    slow = sum((a - c) * (b - d) < 0 for (a, b), (c, d) in itertools.combinations(pairs, 2))
    assert _crossings(layers) == slow


def test_a_crossing_that_need_not_be_is_taken_out() -> None:
    boxes = [Box("a", 0, 20, 20), Box("b", 0, 20, 20), Box("c", 1, 20, 20), Box("d", 1, 20, 20)]
    layout = lay_out(boxes, [Link("a", "d", 5, 5), Link("b", "c", 5, 5)], 0, 0, GAP, APART)
    assert (layout.at["a"][1] < layout.at["b"][1]) == (layout.at["d"][1] < layout.at["c"][1])


def test_many_links_are_drawn_straight() -> None:
    many = MAX_LED_LINKS + 1
    boxes = [Box("a", 0, 10, 10), Box("m", 1, 10, 10)]
    boxes += [Box(f"z{i}", 2, 10, 10) for i in range(many)]
    layout = lay_out(boxes, [Link("a", f"z{i}", 5, 5) for i in range(many)], 0, 0, GAP, APART)
    assert {len(route) for _, route in layout.routes} == {4}


def topology() -> ab.Topology:
    made = ab.Topology("shop")
    orders, clicks = made.source("orders", None), made.source("clicks", None)
    totals = orders.filter("clean", "ok").key_by("k").aggregate("totals", v=ab.sum("v"))
    totals.changes().key_by("k").aggregate("best", v=ab.max("v")).to("best_out", ab.Memory())
    both = (
        totals.changes()
        .union(clicks)
        .key_by("k", "v")
        .aggregate("pairs", parallelism=4, n=ab.count())
    )
    both.to("out", ab.Memory())
    return made


def test_a_topology_is_drawn_whole() -> None:
    plan = topology().plan()
    root = ElementTree.fromstring(draw(plan))
    words = [t.text for t in root.iter(f"{SPACE}text")]
    for name in ("orders", "clicks", "clean", "best_out", "out"):
        assert name in words
    for words_wanted in ("totals by k", "best by k", "pairs by k, v", "4 partitions", "wave 2"):
        assert words_wanted in words
    boxes = [r for r in root.iter(f"{SPACE}rect") if r.get("rx") == "6"]
    assert len(boxes) == len(plan.chains) == 4  # totals and best are fused
    shuffles = [p for p in root.iter(f"{SPACE}path") if p.get("stroke-width") == "1.3"]
    assert len(shuffles) == sum(len(c.inputs) for c in plan.chains) == 3
    width, height = map(float, str(root.get("viewBox")).split()[2:])
    for t in root.iter(f"{SPACE}text"):
        assert 0 < float(str(t.get("x"))) < width
        assert 0 < float(str(t.get("y"))) < height


def test_describe_writes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    out = tmp_path / "traffic.svg"
    arguments = ["describe", "examples.traffic:topology", "--svg", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "topology traffic" in result.stdout
    assert f"drawn in {out}" in result.stdout
    assert ElementTree.parse(out).getroot().tag == f"{SPACE}svg"
    refused = CliRunner().invoke(app, [*arguments[:3], str(tmp_path / "no" / "file.svg")])
    assert refused.exit_code == 1
    assert "cannot write" in refused.stderr
