"""`anabranch describe MODULE:ATTRIBUTE`: the topology as text, and as a picture.

In the picture a column is a wave, a box is a chain with its operators from top to bottom, and an
arrow between boxes is a shuffle to the keyed operator it points at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.cli.drawing import (
    ACCENT,
    FAINT,
    INK,
    PALE,
    Box,
    Link,
    curve,
    lay_out,
    picture,
    text,
    text_width,
)
from anabranch.model.graph import Kind, Operator
from anabranch.model.plan import Chain, Plan, inputs_in_chain

HEAD, ROW, PAD, INDENT = 38, 24, 8, 16  # of a chain's box: title, operator, margin, step
FILLS = {Kind.SOURCE: "#d9f2e3", Kind.STATELESS: "white", Kind.KEYED: "#fde3cf", Kind.SINK: PALE}
LEGEND = "green: source · white: stateless · orange: state by key · blue: sink · arrow: shuffle"


@dataclass(frozen=True, slots=True)
class Row:
    """An operator in its chain's box: how deep it is indented, and the middle of its row."""

    op: Operator
    depth: int
    y: float
    reads: tuple[str, ...]  # in the same box


def draw(plan: Plan) -> str:
    """The plan as SVG."""
    rows = {c.name: _rows(plan, c) for c in plan.chains}
    widths: dict[int, float] = {}
    for c in plan.chains:
        widths[c.depth] = max(widths.get(c.depth, 0.0), _width(c, rows[c.name]))
    boxes = [Box(c.name, c.depth, widths[c.depth], _height(c)) for c in plan.chains]
    links = [
        Link(e.source, e.target, rows[e.source][e.producer].y, rows[e.target][e.target_op].y)
        for c in plan.chains
        for e in c.inputs
    ]
    layout = lay_out(boxes, links, left=24, top=76, gap=64, apart=20)
    parts = [
        text((low + high) / 2, 60, _wave(depth), style=f' fill="{INK}" font-weight="bold"')
        for depth, (low, high) in enumerate(layout.columns)
    ]
    for c in plan.chains:
        parts += _chain(c, rows[c.name], *layout.at[c.name], widths[c.depth])
    parts += [
        f'<path d="{curve(route)}" fill="none" stroke="{INK}" stroke-width="1.3" '
        'marker-end="url(#arrow)"/>'
        for _, route in layout.routes
    ]
    foot = layout.height + 34
    parts.append(text(16, foot, LEGEND, "start", f' fill="{INK}"'))
    ops, chains = len(plan.graph.operators), len(plan.chains)
    title = f"{plan.graph.name}: {ops} operators in {chains} chain{'s' if chains > 1 else ''}"
    return picture(title, max(layout.width, 32 + text_width(LEGEND)), foot + 16, parts)


def _rows(plan: Plan, chain: Chain) -> dict[str, Row]:
    """Operators as a tree: each below, and indented from, the last one it reads from."""
    ops = plan.graph.by_name
    reads: dict[str, tuple[str, ...]] = {}
    below: dict[str | None, list[str]] = {}
    for name in chain.operators:
        ports = range(len(ops[name].inputs))
        found = {p for port in ports for p in inputs_in_chain(chain, ops[name], port)}
        reads[name] = tuple(n for n in chain.operators if n in found)
        below.setdefault(reads[name][-1] if reads[name] else None, []).append(name)
    rows: dict[str, Row] = {}
    waiting = [(name, 0) for name in reversed(below[None])]
    while waiting:
        name, depth = waiting.pop()
        rows[name] = Row(ops[name], depth, HEAD + ROW * len(rows) + 9, reads[name])
        waiting += [(n, depth + 1) for n in reversed(below.get(name, []))]
    return rows


def _wave(depth: int) -> str:
    return "source tasks" if depth == 0 else f"wave {depth}"


def _label(op: Operator) -> str:
    if op.kind is Kind.SINK and op.priority > 1:
        return f"{op.name}, priority {op.priority}"
    return f"{op.name} by {', '.join(op.keys)}" if op.keys else op.name


def _where(chain: Chain) -> str:
    if chain.is_source:
        return "in Spark's own tasks"
    return f"{chain.parallelism} partition{'s' if chain.parallelism > 1 else ''}"


def _width(chain: Chain, rows: Mapping[str, Row]) -> float:
    labels = [INDENT * r.depth + text_width(_label(r.op)) + 12 for r in rows.values()]
    return max(*labels, 1.1 * text_width(chain.name), text_width(_where(chain))) + 2 * PAD


def _height(chain: Chain) -> float:
    return HEAD + ROW * len(chain.operators) + PAD - 4


def _chain(chain: Chain, rows: Mapping[str, Row], x: float, y: float, width: float) -> list[str]:
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_height(chain):.1f}" rx="6" '
        f'fill="#f8fafc" stroke="{FAINT}"/>',
        text(x + PAD, y + 16, chain.name, "start", ' font-weight="bold"'),
        text(x + PAD, y + 30, _where(chain), "start", f' fill="{INK}"'),
    ]
    for row in rows.values():
        left, middle = x + PAD + INDENT * row.depth, y + row.y
        edge = ACCENT if row.op.kind is Kind.KEYED else INK
        parts += [
            f'<rect x="{left:.1f}" y="{middle - 9:.1f}" width="{x + width - PAD - left:.1f}" '
            f'height="18" rx="3" fill="{FILLS[row.op.kind]}" stroke="{edge}" stroke-width="0.8">'
            f"<title>{row.op.kind.value}</title></rect>",
            text(left + 6, middle + 4, _label(row.op), "start"),
        ]
        for name in row.reads:
            stem, start = x + PAD + INDENT * rows[name].depth + 6, y + rows[name].y
            start += 9 if start < middle else -9
            parts.append(
                f'<path d="M{stem:.1f} {start:.1f}V{middle:.1f}H{left:.1f}" fill="none" '
                f'stroke="{INK}" stroke-width="0.9" marker-end="url(#arrow)"/>'
            )
    return parts
