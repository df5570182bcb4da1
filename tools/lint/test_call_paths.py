"""The call paths that docs/architecture.md shows: each function exists in its file, and its caller's text calls it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import pytest
from test_architecture import ROOT, TABLE, blank

CALLS = ("swap_blocks", "pull_blocks")
MAX_FILES = 25


@dataclass(frozen=True)
class Step:
    """One line of a call path."""

    depth: int
    function: str
    file: str

    @property
    def name(self) -> str:
        """The name of the function without its type."""
        return self.function.rsplit("::")[-1]


def steps(call: str) -> list[Step]:
    """Read the call path below the heading of a call. Two spaces indent a function below its caller."""
    text = TABLE.read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^### `{call}`\n.*?^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found = []
    for line in shown.splitlines():
        match = re.fullmatch(r"( *)([\w:]+) +(\S+)", line)
        assert match, f"not a line of a call path: {line}"
        depth, odd = divmod(len(match[1]), 2)
        assert not odd, line
        found.append(Step(depth, match[2], match[3]))
    return found


def rust_bodies(text: str, name: str) -> list[str]:
    """The bodies of all functions of this name, without strings and comments."""
    text = blank(text)
    bodies = []
    for match in re.finditer(rf"\bfn {name}\b[^;{{]*\{{", text):
        depth, at = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        bodies.append(text[match.end() : at])
    return bodies


def python_bodies(text: str, name: str) -> list[str]:
    """The bodies of all functions of this name, without the doc string."""
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
    ]
    return ["\n".join(ast.unparse(line) for line in node.body[1:]) for node in functions]


def bodies(step: Step) -> list[str]:
    """The bodies of the functions that a step may mean."""
    path = ROOT / step.file
    text = path.read_text(encoding="utf-8")
    return python_bodies(text, step.name) if path.suffix == ".py" else rust_bodies(text, step.name)


@pytest.mark.parametrize("call", CALLS)
def test_functions_of_a_call_path_exist_and_call_each_other(call: str) -> None:
    path = steps(call)
    assert len(path) >= 8
    assert path[0].name == call
    callers: list[Step] = []
    for step in path:
        assert bodies(step), f"{step.file} has no function {step.name}"
        del callers[step.depth :]
        assert len(callers) == step.depth, f"{step.function} is indented too far"
        if callers:
            caller = callers[-1]
            calls = [re.search(rf"\b{step.name}\b", body) for body in bodies(caller)]
            assert any(calls), f"{caller.function} in {caller.file} does not call {step.function}"
        callers.append(step)


def test_a_pull_passes_few_files() -> None:
    files = {step.file for step in steps("pull_blocks")}
    assert 10 <= len(files) <= MAX_FILES, f"{len(files)} files: {sorted(files)}"


def test_a_missing_function_or_call_is_found() -> None:
    text = "fn outer() { inner::<u8>(1); } // other()\nfn other();\nimpl X { fn outer(&self) { self.last() } }"
    assert [bool(re.search(r"\binner\b", body)) for body in rust_bodies(text, "outer")] == [True, False]
    assert not any("other" in body for body in rust_bodies(text, "outer"))
    assert rust_bodies(text, "other") == []
    assert python_bodies('def f():\n    """g"""\n    return h()\n', "f") == ["return h()"]
