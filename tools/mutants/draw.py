"""Draws mutants of the Rust core with a fixed seed: draw.py > drawn.json.

Only this program needs `tree-sitter` and `tree-sitter-rust`. Candidates are comparisons, arithmetic, logic, numbers,
pairs of methods such as `min` and `max`, and statements that can be removed. Each is on one line, outside of tests,
constants and macros. The same number is drawn from every area. Not for: running mutants (`run.py`, which needs only the
list).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import tree_sitter
import tree_sitter_rust

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "crates" / "core" / "src"
SEED, OF_EACH = 15, 30
# Spare candidates of each area, which replace mutants that do not compile.
SPARE = 30
AREAS = {
    "planner": ["plan"],
    "pool": ["pool.rs", "arena.rs"],
    "cache table": ["table"],
    "protocol": ["wire"],
    "validation": ["check"],
}
OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
    "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "|": "&", "&": "|",
}  # fmt: skip
METHODS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "is_some": "is_none", "is_none": "is_some",
    "is_ok": "is_err", "is_err": "is_ok", "checked_add": "checked_sub", "checked_sub": "checked_add",
    "saturating_add": "saturating_sub", "saturating_sub": "saturating_add", "first": "last", "last": "first",
}  # fmt: skip
STATEMENTS = {"call_expression", "try_expression", "assignment_expression", "compound_assignment_expr"}
CLOSED = {
    "const_item", "static_item", "attribute_item", "inner_attribute_item", "macro_invocation", "macro_definition",
    "array_type",
    "type_arguments", "match_pattern", "range_pattern", "enum_variant", "use_declaration", "let_chain", "let_condition",
}  # fmt: skip

Mutant = dict[str, object]


def text(node: tree_sitter.Node) -> str:
    """The source of a node."""
    return (node.text or b"").decode()


def changes(node: tree_sitter.Node) -> Iterator[tuple[str, str]]:
    """Yields the mutations of a node as (text, replacement). An empty replacement removes the statement."""
    if node.type == "binary_expression":
        operator = node.child_by_field_name("operator")
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        if operator is not None and left is not None and right is not None and text(operator) in OPERATORS:
            yield text(node), f"{text(left)} {OPERATORS[text(operator)]} {text(right)}"
    elif node.type == "unary_expression" and text(node).startswith("!"):
        yield text(node), text(node)[1:]
    elif node.type == "integer_literal" and node.parent is not None and node.parent.type != "field_expression":
        digits = text(node).replace("_", "")
        if digits.isdigit():
            yield text(node), str(int(digits) + 1)
    elif node.type == "call_expression":
        function = node.child_by_field_name("function")
        field = function.child_by_field_name("field") if function is not None else None
        if field is not None and text(field) in METHODS:
            at, whole = field.start_byte - node.start_byte, text(node)
            raw = whole.encode()
            yield whole, (raw[:at] + METHODS[text(field)].encode() + raw[at + len(text(field)) :]).decode()
    elif node.type == "expression_statement" and node.children[0].type in STATEMENTS and text(node).endswith(";"):
        yield text(node), ""


def constant_function(node: tree_sitter.Node) -> bool:
    """Whether the compiler may evaluate a function (`const fn`). It cannot read the environment variable `MUTANT`."""
    return any(child.type == "function_modifiers" and "const" in text(child) for child in node.children)


def candidates(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    stripped = [line.strip() for line in lines]
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))

    def walk(node: tree_sitter.Node, function: str) -> Iterator[Mutant]:
        if node.type in CLOSED or (node.type == "function_item" and constant_function(node)):
            return
        if node.type == "mod_item" and (name := node.child_by_field_name("name")) is not None and text(name) == "tests":
            return
        if node.type == "function_item" and (name := node.child_by_field_name("name")) is not None:
            function = text(name)
        if function and node.start_point.row == node.end_point.row:
            line = stripped[node.start_point.row]
            for old, new in changes(node):
                # `run.py` replaces the first occurrence in the line, so only that one can be a mutant.
                first = lines[node.start_point.row].encode().find(old.encode()) == node.start_point.column
                if first and stripped.count(line) == 1:
                    where = str(path.relative_to(CORE))
                    yield {"file": where, "function": function, "line": line, "old": old, "new": new}
        for child in node.children:
            yield from walk(child, function)

    yield from walk(parser.parse(source.encode()).root_node, "")


def main() -> None:
    """Prints the list. In each area, the spare candidates come last."""
    drawn: list[Mutant] = []
    for area, paths in AREAS.items():
        files = [
            path
            for entry in paths
            for path in ([CORE / entry] if entry.endswith(".rs") else (CORE / entry).rglob("*.rs"))
        ]
        found = [mutant for path in sorted(files) for mutant in candidates(path)]
        random.Random(f"{SEED} {area}").shuffle(found)  # noqa: S311
        taken: list[Mutant] = []
        lines = set()
        for mutant in found:
            line = (mutant["file"], mutant["line"])
            if line not in lines and len(taken) < OF_EACH + SPARE:
                lines.add(line)
                taken.append({"area": area, "spare": len(taken) >= OF_EACH, **mutant})
        print(f"{area}: {len(found)} candidates in {len(files)} files", file=sys.stderr)
        drawn += taken
    json.dump(drawn, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
