"""Each member of vLLM's objects that a module uses is in the tables of `interface` for it, which have no others.

mypy does not look into vLLM, so its objects are `Any` in the integration. What is read of such a value, or of what it
yields, is a use. Not for: whether vLLM has the member (`integration-tests/vllm/test_interface.py`).
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist.integrations.vllm import interface

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FOLDER = Path(interface.__file__).parent
# The first one is guarded by `register`, which logs what this vLLM lacks. The second one is what is tested.
NOT_CHECKED = {"__init__.py", "interface.py"}
# Each is checked when vLLM loads what it is named for.
TABLES = {
    "connector": interface.CONNECTOR,
    "offloading": interface.OFFLOADING,
    "peer-to-peer tier": interface.P2P,
    "store tier": interface.STORE_TIER,
}
# Members of tensors and types of torch, and of the context of ZMQ: vLLM only passes them on.
OTHERS = {"device", "itemsize", "shape", "stride", "tolist", "type", "linger"}
# Members of objects of ours that vLLM gives back.
OURS = {"by_worker", "step", "links", "reads", "expect", "advance", "finish"}
BUILTIN = {name for kind in (dict, list, set, str, tuple) for name in dir(kind)}
CONTAINERS = {"Iterable", "Mapping", "Optional", "Sequence", "Union", "dict", "list", "set", "tuple", "type"}
# Calls whose result has, or is, what they are given.
PASSES_ON = {"getattr", "iter", "list", "next", "reversed", "set", "sorted", "super", "tuple", "type"}


def of_self(node: ast.AST) -> str:
    """Return the attribute of `self` that an expression names, or an empty text."""
    named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if named else ""  # type: ignore[attr-defined]


class Scope:
    """The names in a function, a class or a module that stand for objects of vLLM."""

    def __init__(self, names: set[str], own: set[str] | None = None, *, extends: bool = False) -> None:
        self.names = set(names)
        self.members: set[str] = set()  # the attributes of `self` that are objects of vLLM
        self.own = own or set()  # all that our class sets or defines
        self.extends = extends  # whether it extends a class of vLLM: what is not its own is vLLM's

    def holds(self, node: ast.AST | None) -> bool:  # noqa: PLR0911 - a line for each kind of expression
        """Whether the value of an expression is, or contains, an object of vLLM."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        if of_self(node):  # type: ignore[arg-type]
            return of_self(node) in self.members or self.inherits(of_self(node))  # type: ignore[arg-type]
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            return self.holds(node.value)
        if isinstance(node, ast.Call):
            passes = isinstance(node.func, ast.Name) and node.func.id in PASSES_ON
            return any(map(self.holds, node.args)) if passes else self.holds(node.func)
        if isinstance(node, ast.IfExp):
            return self.holds(node.body) or self.holds(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self.holds, node.values))
        if isinstance(node, ast.BinOp):
            return self.holds(node.left) or self.holds(node.right)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(map(self.holds, node.elts))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self.holds(node.elt)
        return False

    def declares(self, annotation: ast.expr | None) -> bool:
        """Whether a value with an annotation is, or contains, an object of vLLM."""
        if isinstance(annotation, ast.Name):
            return annotation.id == "Any" or annotation.id in self.names
        if isinstance(annotation, ast.Tuple):
            return any(map(self.declares, annotation.elts))
        if isinstance(annotation, ast.BinOp):
            return self.declares(annotation.left) or self.declares(annotation.right)
        if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
            return annotation.value.id in CONTAINERS and self.declares(annotation.slice)
        return False

    def inherits(self, member: str) -> bool:
        return self.extends and member not in self.own

    def bind(self, target: ast.AST, value: ast.AST) -> None:
        """Note what an assignment, or a loop, gives a name to."""
        if isinstance(target, ast.Tuple):
            parts = [value] * len(target.elts)
            if isinstance(value, ast.Tuple):
                parts = value.elts  # type: ignore[assignment]
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "zip":
                parts = value.args  # type: ignore[assignment]
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "enumerate":
                parts = [ast.Constant(0), value.args[0]]
            for one, part in zip(target.elts, parts):
                self.bind(one, part)
        elif self.holds(value):
            self.name(target)

    def name(self, target: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self.names.add(target.id)
        elif of_self(target):
            self.members.add(of_self(target))

    def read(self, body: ast.AST) -> None:
        """Follow the assignments of a function until nothing changes."""
        for node in ast.walk(body):
            if isinstance(node, ast.arg) and self.declares(node.annotation):
                self.names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and self.declares(node.annotation):
                self.name(node.target)
        before = -1
        while before != len(self.names) + len(self.members):
            before = len(self.names) + len(self.members)
            for node in ast.walk(body):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self.bind(target, node.value)
                elif isinstance(node, ast.NamedExpr):
                    self.bind(node.target, node.value)
                elif isinstance(node, (ast.For, ast.comprehension)):
                    self.bind(node.target, node.iter)

    def uses(self, body: ast.AST) -> Iterator[tuple[str, int]]:
        """Yield the members of vLLM's objects that a function uses, and the lines."""
        for node in ast.walk(body):
            if not isinstance(node, ast.Attribute):
                continue
            up = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            of_vllm = self.inherits(node.attr) if up or of_self(node) else self.holds(node.value)
            if of_vllm and node.attr not in BUILTIN | OTHERS | OURS and not node.attr.startswith("__"):
                yield node.attr, node.lineno


def uses_of(source: str) -> dict[str, int]:
    """Return the members of vLLM's objects that a module uses, each with its first line."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {
        alias.asname or alias.name.partition(".")[0]
        for node in imports
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "vllm"
    }
    found: dict[str, int] = {}
    for node in tree.body:
        scope, functions = Scope(names), [node]
        if isinstance(node, ast.ClassDef):
            stored = [one for one in ast.walk(node) if isinstance(getattr(one, "ctx", None), ast.Store)]
            own = {of_self(one) or getattr(one, "id", "") for one in stored}
            own |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            scope = Scope(names, own, extends=any(map(scope.holds, node.bases)))
            functions = [*node.body, *node.bases]  # type: ignore[list-item]
            for _ in range(2):  # a method may use what a later one sets
                for function in functions:
                    inside = Scope(names, own, extends=scope.extends)
                    inside.members = scope.members
                    inside.read(function)
        for function in functions:
            inside = Scope(names, scope.own, extends=scope.extends)
            inside.members = scope.members
            inside.read(function)
            for name, line in inside.uses(function):
                found.setdefault(name, line)
    return found


def table_of(module: str) -> str:
    """Return the name of the table of a module. Modules that several of them load have objects of the connector."""
    if module.startswith("p2p_"):
        return "peer-to-peer tier"
    return {"offloading.py": "offloading", "store_tier.py": "store tier"}.get(module, "connector")


def read_of(table: Mapping[str, Sequence[str]]) -> set[str]:
    """Return what a table says is read of objects."""
    return {name for use, names in table.items() if use.endswith("[]") for name in names}


def all_uses(table: str) -> dict[str, str]:
    """Return what the modules of a table use, each with its first place."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.name not in NOT_CHECKED and table_of(path.name) == table:
            found |= {name: f"{path.name}:{line}" for name, line in uses_of(path.read_text()).items()}
    return found


@pytest.mark.parametrize(
    ("table", "least"), [("connector", 50), ("offloading", 8), ("peer-to-peer tier", 8), ("store tier", 8)]
)
def test_each_use_of_vllm_is_in_the_table_of_its_module(table: str, least: int) -> None:
    called = {word for use in TABLES[table] for word in use.rstrip("[]").partition(":")[2].split(".")}
    known = read_of(TABLES[table]) | called
    found = all_uses(table)
    assert len(found) > least
    assert {name: where for name, where in found.items() if name not in known} == {}


@pytest.mark.parametrize(
    ("table", "least"), [("connector", 40), ("offloading", 6), ("peer-to-peer tier", 8), ("store tier", 8)]
)
def test_the_tables_have_nothing_that_their_modules_do_not_use(table: str, least: int) -> None:
    given = read_of(TABLES[table])
    assert len(given) > least
    assert given - set(all_uses(table)) == set()


SOURCES = {
    "a parameter": "def f(config: Any): return config.model.wanted",
    "of a list": "def f(groups: list[Any]): return [group.wanted for group in groups]",
    "a member": "class A:\n def f(self): return self._a.wanted\n def __init__(self, a: Any): self._a = a.b()[0]",
    "of two": "def f(a: Any, b: list[int]):\n for x, y in zip(a, b): x.wanted; y.unwanted",
    "a type of vLLM": "from vllm.base import Base\ndef f():\n a: list[Base] = []\n a[0].wanted",
    "a module": "from vllm.platforms import wanted_platform as p\ndef f(): return p.wanted",
    "an inherited member": "from vllm.base import Base\nclass A(Base):\n def f(self): return self.wanted",
    "of the base": "from vllm.base import Base\nclass A(Base):\n def f(self): return super().wanted()",
    "a chosen one": "def f(a: Any, b: int): return (a if b else None).wanted",
}


@pytest.mark.parametrize("case", SOURCES)
def test_uses_are_found(case: str) -> None:
    """The negative control."""
    assert "wanted" in uses_of(SOURCES[case])
    assert "unwanted" not in uses_of(SOURCES[case])


def test_members_of_our_own_objects_are_no_uses() -> None:
    source = """
from vllm.base import Base
class A(Base):
    def __init__(self, a: Any, text: str) -> None:
        self._mine, self.text = a.used, text
    def f(self, other: A) -> None:
        self._mine.read = self.text.strip(other.name, self.f())
"""
    assert set(uses_of(source)) == {"used", "read"}
