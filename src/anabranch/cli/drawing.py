"""Pictures as SVG: the frame of every picture, and graphs in layers from left to right.

A layered drawing is made in three steps. A link that passes a layer gets a point in it, so that it
is led between the boxes there. Within a layer, boxes are ordered by the mean position of their
neighbours, sweep by sweep, and the order with the fewest crossings is kept. Then every box is moved
as near to the height of its neighbours as the order allows: least squares with a minimal distance,
which pooling adjacent violators solves.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import pairwise

FONT = 11
CHARACTER = 0.62 * FONT  # the widest common sans-serif, on average
SWEEPS = 12
MAX_LED_LINKS = 400  # more are drawn as straight lines: no eye can follow them anyway
INK, FAINT, ACCENT, PALE = "#334155", "#94a3b8", "#c2410c", "#dbe4f0"


def text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def text_width(words: str) -> float:
    return CHARACTER * len(words)


def picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A whole SVG file; at least as wide as its title."""
    width = max(width, 32 + text_width(title) * 14 / FONT)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'font-family="sans-serif" font-size="{FONT}">',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
            "</defs>",
            '<rect width="100%" height="100%" fill="white"/>',
            text(16, 24, title, "start", ' font-size="14"'),
            *parts,
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True, slots=True)
class Box:
    """Something to place. Links meet it `inset` from its sides."""

    name: str
    layer: int
    width: float
    height: float
    inset: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """From a height below the top of one box to a height below the top of another."""

    source: str
    target: str
    leaves: float
    arrives: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is: top left corners, and the points each link is led through."""

    at: Mapping[str, tuple[float, float]]
    routes: Sequence[tuple[Link, Sequence[tuple[float, float]]]]
    columns: Sequence[tuple[float, float]]  # left and right edge of every layer
    width: float
    height: float


@dataclass(slots=True, eq=False)
class _Point:
    """A box, or the place of a link in a layer that it passes."""

    layer: int
    height: float
    box: Box | None
    y: float = 0.0
    before: list[tuple[_Point, float, float]] = field(default_factory=list)
    after: list[tuple[_Point, float, float]] = field(default_factory=list)


def lay_out(
    boxes: Sequence[Box], links: Sequence[Link], left: float, top: float, gap: float, apart: float
) -> Layout:
    """Place boxes in their layers, `gap` between layers and `apart` within one."""
    points = {b.name: _Point(b.layer, b.height, b) for b in boxes}
    led = len(links) <= MAX_LED_LINKS
    paths = [_led(points, link, led) for link in links]
    everything = [*points.values(), *(p for path in paths for p in path)]
    layers: list[list[_Point]] = [[] for _ in range(max(p.layer for p in everything) + 1)]
    for point in everything:
        layers[point.layer].append(point)
    layers = _ordered(layers)
    _settle(layers, apart, top)
    columns, x = [], left
    for layer in layers:
        wide = max((p.box.width for p in layer if p.box), default=0.0)
        columns.append((x, x + wide))
        x += wide + gap
    at = {}
    for name, point in points.items():
        assert point.box is not None
        low, high = columns[point.layer]
        at[name] = ((low + high - point.box.width) / 2, point.y)
    routes = [
        (link, _route(points, at, columns, link, path))
        for link, path in zip(links, paths, strict=True)
    ]
    height = max(p.y + p.height for p in everything)
    return Layout(at, routes, columns, x - gap + left, height)


def _led(points: Mapping[str, _Point], link: Link, led: bool) -> list[_Point]:
    """Join two boxes, through a point in every layer between them."""
    source, target = points[link.source], points[link.target]
    between = range(source.layer + 1, target.layer) if led else range(0)
    path = [source, *(_Point(layer, 0.0, None) for layer in between), target]
    for i, (one, other) in enumerate(pairwise(path)):
        out = link.leaves if i == 0 else 0.0
        into = link.arrives if i == len(path) - 2 else 0.0
        one.after.append((other, out, into))
        other.before.append((one, into, out))
    return path[1:-1]


def _ordered(layers: list[list[_Point]]) -> list[list[_Point]]:
    """The order of every layer that gave the fewest crossings over all sweeps."""
    best, fewest = layers, _crossings(layers)
    place = {p: i / len(layer) for layer in layers for i, p in enumerate(layer)}
    for sweep in range(SWEEPS):
        if not fewest:
            break
        layers = [list(layer) for layer in layers]
        forward = sweep % 2 == 0
        for layer in layers if forward else reversed(layers):
            layer.sort(key=partial(_wanted, place, forward))
            place.update((p, i / len(layer)) for i, p in enumerate(layer))
        crossings = _crossings(layers)
        if crossings < fewest:
            best, fewest = layers, crossings
    return best


def _wanted(place: Mapping[_Point, float], forward: bool, point: _Point) -> float:
    """The mean place of the neighbours on one side; who has none stays where it is."""
    sides = point.before if forward else point.after
    if not sides:
        return place[point]
    # Heights break ties: what leaves a box further up comes first.
    return sum(place[p] + 1e-6 * there for p, _, there in sides) / len(sides)


def _crossings(layers: list[list[_Point]]) -> int:
    """Links from one layer to the next that cross: pairs whose ends are in the other order."""
    rank = {p: i for layer in layers for i, p in enumerate(layer)}
    count = 0
    for layer in layers:
        met: list[tuple[int, float]] = []
        for point in layer:
            for other, _, into in sorted(point.after, key=lambda a: (a[1], rank[a[0]], a[2])):
                if other.layer == point.layer + 1:
                    end = (rank[other], into)
                    count += len(met) - bisect_right(met, end)
                    insort(met, end)
    return count


def _settle(layers: list[list[_Point]], apart: float, top: float) -> None:
    """Heights: near the neighbours, in order, `apart` from each other."""
    for layer in layers:
        y = 0.0
        for point in layer:
            point.y, y = y, y + point.height + apart
    sides: list[Callable[[_Point], list[tuple[_Point, float, float]]]] = [
        lambda p: p.before,
        lambda p: p.after,
        lambda p: [*p.before, *p.after],
    ]
    for sweep in range(SWEEPS):
        chosen = sides[2 if sweep >= SWEEPS - 2 else sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = []
            for point in layer:
                near = [other.y + there - here for other, here, there in chosen(point)]
                wanted.append(sum(near) / len(near) if near else point.y)
            steps = [p.height + apart for p in layer]
            for point, y in zip(layer, spread(wanted, steps), strict=True):
                point.y = y
    highest = min(p.y for layer in layers for p in layer)
    for layer in layers:
        for point in layer:
            point.y += top - highest


def spread(wanted: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Nearest to `wanted` in least squares, each at least its predecessor's step after it."""
    offsets, total = [], 0.0
    for step in steps:
        offsets.append(total)
        total += step
    blocks: list[list[float]] = []  # [sum, count], means ascending
    for value, offset in zip(wanted, offsets, strict=True):
        blocks.append([value - offset, 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            more, count = blocks.pop()
            blocks[-1][0] += more
            blocks[-1][1] += count
    means = [total / count for total, count in blocks for _ in range(int(count))]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _route(
    points: Mapping[str, _Point],
    at: Mapping[str, tuple[float, float]],
    columns: Sequence[tuple[float, float]],
    link: Link,
    path: Sequence[_Point],
) -> list[tuple[float, float]]:
    """Level through the columns, so that a link never runs over a box of its own layer."""
    source, target = points[link.source].box, points[link.target].box
    assert source is not None
    assert target is not None
    y1, y2 = at[link.source][1] + link.leaves, at[link.target][1] + link.arrives
    route = [(at[link.source][0] + source.width - source.inset, y1), (columns[source.layer][1], y1)]
    for point in path:
        route += [(columns[point.layer][0], point.y), (columns[point.layer][1], point.y)]
    return [*route, (columns[target.layer][0], y2), (at[link.target][0] + target.inset, y2)]


def curve(route: Sequence[tuple[float, float]]) -> str:
    """A path through the points of a route: level in columns, a smooth step between them."""
    (x, y), *rest = route
    path = f"M{x:.1f} {y:.1f}"
    for i, (to_x, to_y) in enumerate(rest):
        if i % 2 == 0:
            path += f"H{to_x:.1f}"
        else:
            middle = (x + to_x) / 2
            path += f"C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    return path
