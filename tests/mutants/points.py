"""Small changes to Python code that should break it: where they can be made, and how."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "len", "sorted": "list"}


@dataclass(frozen=True)
class Point:
    """A change: in a file, at a node of its syntax tree (counted in the order of a walk)."""

    file: str
    line: int
    column: int
    node: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.change}"


def points(path: Path, name: str) -> Iterator[Point]:
    """All changes to a file."""
    for index, node in enumerate(ast.walk(_parsed(path))):
        for change in _changes(node):
            yield Point(name, node.lineno, node.col_offset, index, change)  # type: ignore[attr-defined]


def changed(path: Path, point: Point) -> ast.Module:
    """The file with the change."""
    tree = _parsed(path)
    for index, node in enumerate(ast.walk(tree)):
        if index == point.node:
            _apply(node, point.change)
            return ast.fix_missing_locations(tree)
    raise ValueError(f"{point.name} is not there any more")


def _parsed(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):  # nobody computes with them
            if isinstance(getattr(node, field, None), ast.expr):
                setattr(node, field, ast.Constant("", lineno=1, col_offset=0))
    return tree


def _changes(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield "compare"
        case ast.BoolOp():
            yield "and/or"
            yield "leave out the last"
        case ast.UnaryOp(op=ast.Not()):
            yield "no not"
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _COMPUTED and not _text(node):
            yield "compute"
        case ast.Constant(value=bool()):
            yield "other bool"
        case ast.Constant(value=int()):
            yield "one more"
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED and len(node.args) == 1:
            yield "call"
        case ast.If() | ast.IfExp():
            yield "always"
            yield "never"
        case ast.Expr(value=ast.Call()):
            yield "leave out"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete():
            yield "leave out"
        case ast.Break() | ast.Continue():
            yield "leave out"
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp() if any(
            g.ifs for g in node.generators
        ):
            yield "no condition"
        case ast.Slice(lower=ast.expr()) | ast.Slice(upper=ast.expr()):
            yield "whole slice"


def _text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Is it about strings, as far as one sees?"""
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str))
        for s in sides
    )


def _apply(node: ast.AST, change: str) -> None:
    match node, change:
        case ast.Compare(ops=[op]), _:
            node.ops = [_COMPARED[type(op)]()]
        case ast.BoolOp(), "and/or":
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.BoolOp(), _:
            node.values = [*node.values[:-1], node.values[0]]
        case ast.UnaryOp(), _:
            _become(node, ast.Call(ast.Name("bool", ast.Load()), [node.operand], []))
        case ast.BinOp(op=op) | ast.AugAssign(op=op), _:
            node.op = _COMPUTED[type(op)]()
        case ast.Constant(value=bool(value)), _:
            node.value = not value
        case ast.Constant(value=int(value)), _:
            node.value = value + 1
        case ast.Call(func=ast.Name(id=name)), _:
            node.func = ast.Name(_CALLED[name], ast.Load())
        case ast.If() | ast.IfExp(), _:
            node.test = ast.Constant(change == "always")
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp(), _:
            for generator in node.generators:
                generator.ifs = []
        case ast.Slice(), _:
            node.lower = node.upper = None
        case ast.stmt(), "leave out":
            _become(node, ast.Pass())
        case _:
            raise ValueError(f"{change!r} of {type(node).__name__}")


def _become(node: ast.AST, other: ast.AST) -> None:
    """Change a node into one of another kind where it is."""
    place = {n: getattr(node, n) for n in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(other.__dict__ | place)
