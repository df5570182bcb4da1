"""The docstrings of the native API stand in its stub, and in Rust for `help()`: both have the same words."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llm_datadist
from llm_datadist import native

if TYPE_CHECKING:
    from collections.abc import Iterator


def docstrings(body: list[ast.stmt], of: Any, inside: str = "") -> Iterator[tuple[str, list[str], list[str]]]:
    """Each public class, method and property: its name, and the words of its docstring in the stub and in `of`."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            name, found = f"{inside}{node.name}", getattr(of, node.name)
            yield name, (ast.get_docstring(node) or "").split(), (inspect.getdoc(found) or "").split()
            if isinstance(node, ast.ClassDef):
                yield from docstrings(node.body, found, f"{name}.")


def test_docstrings_are_those_of_the_stub() -> None:
    stub = Path(llm_datadist.__file__).with_name("native.pyi").read_text(encoding="utf-8")
    found = list(docstrings(ast.parse(stub).body, native))
    assert len(found) > 100
    assert [name for name, words, _ in found if not words] == []
    assert [name for name, words, built in found if words != built] == []
