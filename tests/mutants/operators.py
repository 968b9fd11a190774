"""Random changes of one place in a function: what :mod:`sample` draws from.

    comparison   a < b      ->  a <= b          constant    3        ->  4
    arithmetic   a + b      ->  a - b           returned    return x ->  return None
    boolean      a and b    ->  a or b          dropped     x.add_() ->  pass
    negated      if a       ->  if not a        swapped     f(a, b)  ->  f(b, a)

A change is a piece of text in the place of another, so that lines keep their numbers. Texts of errors, docstrings and
annotations are left alone: nothing that they say is a number. So are defaults, decorators and what modules and classes
run when they are imported: a change is put into functions that exist already.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.MatMult: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
# Calls whose arguments are words for people, or for types.
WORDS = {"cast", "warn", "add_note", "isinstance", "issubclass", "TypeVar", "overload"}


@dataclass(frozen=True, order=True)
class Change:
    """One change of one file.

    Attributes:
        file: relative to the package.
        line, column, end_line, end_column: what is replaced, as :mod:`ast` counts (columns in bytes).
        operator: one of the words above.
        new: the text that is put there.
        function: the qualified name of the innermost function.
        nth: which of the places of that function where the same text becomes the same.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    operator: str
    new: str
    function: str
    nth: int = 1

    def apply(self, text: str) -> str:
        """The changed text of the file."""
        lines = text.encode().split(b"\n")
        head = [*lines[: self.line - 1], lines[self.line - 1][: self.column]]
        tail = [lines[self.end_line - 1][self.end_column :], *lines[self.end_line :]]
        # Lines keep their numbers: what took several is one, followed by empty ones.
        blank = b"\n" * (self.end_line - self.line) if self.operator == "dropped" else b""
        return (b"\n".join(head) + self.new.encode() + blank + b"\n".join(tail)).decode()

    def old(self, text: str) -> str:
        """What stood there, on one line."""
        lines = text.encode().split(b"\n")[self.line - 1 : self.end_line]
        lines[-1] = lines[-1][: self.end_column]
        lines[0] = lines[0][self.column :]
        return " ".join(b" ".join(lines).decode().split())


def changes(file: str, text: str) -> list[Change]:
    """All changes of a file, in order."""
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for change in sorted(set(_Sites(file, text).all())):
        same = (change.function, change.operator, change.old(text), change.new)
        seen[same] += 1
        found.append(replace(change, nth=seen[same]))
    return found


class _Sites:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.tree = file, text, ast.parse(text)
        self.source = text.encode().split(b"\n")

    def all(self) -> Iterator[Change]:
        yield from self._walk(self.tree, "", inside=False)

    def _walk(self, node: ast.AST, function: str, inside: bool) -> Iterator[Change]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{node.name}".lstrip(".")
            body = node.body
            is_function = isinstance(node, ast.FunctionDef)
            # An abstract method, or an overload: there is nothing in it.
            if is_function and any(_word(decorator) in WORDS for decorator in node.decorator_list):
                return
            for child in body:
                yield from self._walk(child, name, inside or is_function)
            return
        if inside:
            if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
                return
            if isinstance(node, ast.Call) and _word(node.func) in WORDS:
                return
            if isinstance(node, ast.If) and _is_for_types(node):
                return
            # zip(strict=True) is an assertion.
            if isinstance(node, ast.keyword) and node.arg == "strict":
                return
            for new, operator, place in self._at(node):
                yield self._change(place, operator, new, function)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, function, inside)

    def _at(self, node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
        """New text, operator and what it replaces, for this node alone."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            new = f"({self._piece(node.left)}) {COMPARISONS[type(node.ops[0])]} ({self._piece(node.comparators[0])})"
            yield f"({new})", "comparison", node
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not self._is_text(node):
            new = f"({self._piece(node.left)}) {ARITHMETIC[type(node.op)]} ({self._piece(node.right)})"
            yield f"({new})", "arithmetic", node
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield f"({self._piece(node.operand)})", "negated", node
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield f"({word.join(f'({self._piece(value)})' for value in node.values)})", "boolean", node
        elif isinstance(node, ast.Constant):
            yield from ((new, "constant", node) for new in _other(node.value))
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield "return None", "returned", node
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield f"(not ({self._piece(node.test)}))", "negated", node.test
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield):
            yield "pass", "dropped", node
        elif isinstance(node, ast.AugAssign):
            yield "pass", "dropped", node
        elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
            yield "pass", "dropped", node
        elif (
            isinstance(node, ast.Call)
            and len(node.args) >= 2
            and not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        ):
            first, second = node.args[:2]
            if ast.dump(first) != ast.dump(second):
                between = self._between(first, second)
                yield f"{self._piece(second)}{between}{self._piece(first)}", "swapped", _Span(first, second)

    def _change(self, place: ast.AST, operator: str, new: str, function: str) -> Change:
        at = (place.lineno, place.col_offset, place.end_lineno, place.end_col_offset)
        return Change(self.file, *at, operator, new, function)

    def _piece(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    def _between(self, first: ast.AST, second: ast.AST) -> str:
        place = _Span(first, second)
        place.lineno, place.col_offset = first.end_lineno, first.end_col_offset
        place.end_lineno, place.end_col_offset = second.lineno, second.col_offset
        return self._piece(place)

    def _is_text(self, node: ast.BinOp) -> bool:
        """Texts that are added or filled in, and types that are joined."""
        sides = (node.left, node.right)
        words = any(isinstance(side, ast.JoinedStr) or _is_string(side) for side in sides)
        return words or any(isinstance(side, ast.Constant) and side.value is None for side in sides)


class _Span(ast.expr):
    """What stands from the first node to the end of the second."""

    def __init__(self, first: ast.AST, second: ast.AST) -> None:
        self.lineno, self.col_offset = first.lineno, first.col_offset
        self.end_lineno, self.end_col_offset = second.end_lineno, second.end_col_offset


def _other(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield str(value + 1)
    elif isinstance(value, float):
        yield repr(value * 2 if value else 1.0)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _word(node: ast.AST) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_for_types(node: ast.If) -> bool:
    return _word(node.test) == "TYPE_CHECKING"
