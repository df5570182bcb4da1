"""The native API stays small enough to learn in an hour, and every option of a call is named."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "python" / "llm_datadist" / "native.pyi"

# The objects that a program calls. Events, errors and views of memory only have values.
NOUNS = {"Engine", "Cache", "RemoteCache", "Rows", "Peer", "Transfer", "Grant"}
VERBS = {
    "allocate",
    "close",
    "copy",
    "events",
    "free",
    "lend",
    "link",
    "pull",
    "push",
    "ready",
    "register",
    "send",
}
# Arguments that a call may have without their names: what it is about.
SUBJECTS = {"name", "layout", "tensors", "dst", "src", "address", "rows", "message", "layer"}
# A single argument that needs no name.
SINGLE = {("events", "limit"), ("close", "timeout"), ("result", "timeout"), ("renew", "ttl")}

Method = tuple[str, ast.FunctionDef]


def methods() -> list[Method]:
    """Returns the public methods of the nouns, each with its class."""
    classes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)]
    nouns = [node for node in classes if node.name in NOUNS]
    assert {node.name for node in nouns} == NOUNS
    functions = [(node.name, item) for node in nouns for item in node.body if isinstance(item, ast.FunctionDef)]
    return [
        (of, function) for of, function in functions if not function.name.startswith("_") and not is_property(function)
    ]


def is_property(function: ast.FunctionDef) -> bool:
    """Return whether a function is the getter of an attribute."""
    return any(ast.unparse(decorator) == "property" for decorator in function.decorator_list)


def test_a_program_needs_few_methods() -> None:
    names = {function.name for _, function in methods()}
    assert names >= VERBS
    assert len(VERBS) <= 12
    assert len(names) <= 20, sorted(names)


def test_options_are_named() -> None:
    for of, function in methods():
        given = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)][1:]
        for name in given:
            assert name in SUBJECTS or (len(given) == 1 and (function.name, name) in SINGLE), (of, function.name, name)
        assert function.args.vararg is None, (of, function.name)


def test_results_have_types() -> None:
    for of, function in methods():
        assert function.returns is not None, (of, function.name)
        assert ast.unparse(function.returns) != "Any", (of, function.name)
