"""The call paths that docs/architecture.md shows: each function exists in its file, and its caller's text calls it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import pytest
from test_architecture import ROOT, TABLE, blank

# Heading → the first function below it.
CALLS = {
    "`swap_blocks`": "swap_blocks",
    "`pull_blocks` of a pool": "pull_blocks",
    "`Engine.pull` of the native API": "pull",
    "The description of a remote cache": "known",
    "`pull_blocks` through rings": "pull_bytes",
    "The owner's side": "run",
}
MAX_FILES = 25
# What the signature of a function that gets a closure has.
TAKES_CLOSURE = re.compile(r"\bFn(?:Once|Mut)?\(|\bWork\b")


@dataclass(frozen=True)
class Step:
    """One line of a call path."""

    depth: int
    function: str
    file: str
    # The function that contains the closure in which this one is called, if so.
    closure_of: str | None = None

    @property
    def name(self) -> str:
        """The name of the function without its type."""
        return self.function.rsplit("::")[-1]


def steps(call: str) -> list[Step]:
    """Read the call path below the heading of a call. Two spaces indent a function below its caller."""
    text = TABLE.read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^### {re.escape(call)}\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found = []
    for line in shown.splitlines():
        match = re.fullmatch(r"( *)([\w:]+) +(\S+)(?: +closure of ([\w:]+))?", line)
        assert match, f"not a line of a call path: {line}"
        depth, odd = divmod(len(match[1]), 2)
        assert not odd, line
        found.append(Step(depth, match[2], match[3], match[4]))
    return found


def rust_functions(text: str, name: str) -> list[tuple[str, str]]:
    """The signature and the body of each function of this name, without strings and comments."""
    text = blank(text)
    found = []
    for match in re.finditer(rf"\bfn {name}\b", text):
        # The first brace outside parentheses: an argument may be a pattern with braces.
        depth, at = 0, match.end()
        while depth or text[at] not in "{;":
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text[at], 0)
            at += 1
        if text[at] == ";":
            continue
        signature, depth, body = text[match.start() : at], 1, at + 1
        while depth:
            at += 1
            depth += {"{": 1, "}": -1}.get(text[at], 0)
        found.append((signature, text[body : at + 1]))
    return found


def rust_bodies(text: str, name: str) -> list[str]:
    """The bodies of all functions of this name, without strings and comments."""
    return [body for _, body in rust_functions(text, name)]


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


def has_type(step: Step) -> bool:
    """Whether the file of a step has methods of its type."""
    owner, method, _ = step.function.rpartition("::")
    text = blank((ROOT / step.file).read_text(encoding="utf-8"))
    return not method or re.search(rf"^impl\b[^{{;]*\b{owner}\b", text, re.MULTILINE) is not None


def takes_closure(step: Step) -> bool:
    """Whether the function of a step gets a closure as an argument."""
    text = (ROOT / step.file).read_text(encoding="utf-8")
    return any(TAKES_CLOSURE.search(signature) for signature, _ in rust_functions(text, step.name))


def names(caller: Step, step: Step) -> bool:
    """Whether the text of a function, or of a closure in it, names the function of `step`."""
    return any(re.search(rf"\b{step.name}\b", body) for body in bodies(caller))


@pytest.mark.parametrize("call", CALLS)
def test_functions_of_a_call_path_exist_and_call_each_other(call: str) -> None:
    path = steps(call)
    assert len(path) >= 8
    assert path[0].name == CALLS[call]
    callers: list[Step] = []
    for at, step in enumerate(path):
        assert bodies(step), f"{step.file} has no function {step.name}"
        assert has_type(step), f"{step.file} has no methods of {step.function}"
        del callers[step.depth :]
        assert len(callers) == step.depth, f"{step.function} is indented too far"
        if step.closure_of:
            assert takes_closure(callers[-1]), f"{callers[-1].function} takes no closure"
            above = [other for other in path[:at] if other.function == step.closure_of]
            assert above, f"{step.closure_of} is not above {step.function}"
            assert any(names(other, step) for other in above), f"{step.closure_of} does not name {step.function}"
        elif callers:
            caller = callers[-1]
            assert names(caller, step), f"{caller.function} in {caller.file} does not call {step.function}"
        callers.append(step)


def test_all_call_paths_are_checked() -> None:
    (part,) = re.findall(r"^## Call paths\n(.*?)^## ", TABLE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^### (.+)$", part, re.MULTILINE) == list(CALLS)


def test_closure_calls_are_checked() -> None:
    assert sum(step.closure_of is not None for call in CALLS for step in steps(call)) >= 8


def test_listed_path_of_a_pull_has_few_files() -> None:
    files = {step.file for step in steps("`pull_blocks` of a pool")}
    assert 10 <= len(files) <= MAX_FILES, f"{len(files)} files: {sorted(files)}"


def test_a_missing_function_or_call_is_found() -> None:
    text = "fn outer() { inner::<u8>(1); } // other()\nfn other();\nimpl X { fn outer(&self) { self.last() } }"
    assert [bool(re.search(r"\binner\b", body)) for body in rust_bodies(text, "outer")] == [True, False]
    assert not any("other" in body for body in rust_bodies(text, "outer"))
    assert rust_bodies(text, "other") == []
    assert rust_bodies("fn f(S { a, b }: &S, c: [u8; 2]) -> [u8; 2] { g(a) }", "f") == [" g(a) }"]
    signatures = [signature for signature, _ in rust_functions("fn f(g: impl FnMut(u8)) {} fn f(g: u8) {}", "f")]
    assert [bool(TAKES_CLOSURE.search(signature)) for signature in signatures] == [True, False]
    assert python_bodies('def f():\n    """g"""\n    return h()\n', "f") == ["return h()"]
