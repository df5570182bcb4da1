"""The rules of docs/architecture.md that can be checked in the source text.

Each check fails if it finds nothing to check. Rust is read as text with comments and strings blanked, which is enough
for `use` lines, paths and keywords.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "crates" / "core" / "src"
BINDING = ROOT / "crates" / "py" / "src"
INTERFACE = ROOT / "crates" / "capi" / "src"
EMBED = ROOT / "crates" / "embed" / "src"
KEEPER = ROOT / "crates" / "keeper" / "src"
PYTHON = ROOT / "python" / "llm_datadist"
TESTING = ROOT / "crates" / "testing" / "src"
TABLE = ROOT / "docs" / "architecture.md"
WORDS = ("error", "status", "id", "desc", "keys", "config")
LONGEST = 600
LONGEST_FUNCTION = 50
LONGEST_METHOD = 15
TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|b?r(?P<hashes>#*)".*?"(?P=hashes)'
    r'|b?"(?:\\.|[^"\\])*"'
    r"|b?'(?:\\(?:u\{[0-9a-fA-F_]+\}|x[0-9a-fA-F]{2}|.)|[^'\\])'",
    re.DOTALL,
)


def blank(text: str) -> str:
    """`text` with strings and comments blanked; line breaks stay where they are."""
    return TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def production(text: str) -> str:
    """Everything before the file's test module."""
    match = re.search(
        r"^\s*#\[cfg\((?:all\()?test\b[^\n]*\n(?:\s*#\[[^\n]*\n)*\s*(?:pub(?:\([^)]*\))? )?mod \w+ *\{",
        text,
        re.MULTILINE,
    )
    return text if match is None else text[: match.start()]


def is_test(path: Path) -> bool:
    """Whether a whole file is a test module: `tests.rs`, `loom_tests.rs`, or a file below `tests/`."""
    return path.stem in ("tests", "loom_tests") or "tests" in path.relative_to(ROOT).parts


def code_of(path: Path) -> str:
    """The production part of a Rust file, with strings and comments blanked."""
    return production(blank(path.read_text(encoding="utf-8")))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def rust_files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*.rs") if not is_test(path))
    assert files, f"no Rust files in {folder}"
    return files


def rust_everywhere() -> list[Path]:
    return [path for crate in (CORE, BINDING, INTERFACE, EMBED, KEEPER) for path in rust_files(crate)]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_path(path: Path, crate: Path = CORE) -> tuple[str, ...]:
    """Module path of a file: `copy/mod.rs` → `("copy",)`."""
    parts = path.relative_to(crate).with_suffix("").parts
    return parts[:-1] if parts[-1] in ("mod", "lib") else parts


def module_of(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".rs")


def cells(line: str) -> list[str]:
    """The cells of one table row, without code marks."""
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]


def names_in(cell: str) -> list[str]:
    """Comma-separated names, without remarks in brackets and without `/*` at the end."""
    plain = re.sub(r"\([^)]*\)", "", cell)
    parts = (part.strip().rstrip(".").removesuffix("only").strip() for part in re.split(r",|\band\b|;", plain))
    return [part.split("/")[0].removeprefix("core::").strip() for part in parts if part]


def table_rows() -> list[tuple[list[str], list[str]]]:
    """Rows of the table: modules, and the modules that they may use. Rows about other crates are omitted."""
    assert TABLE.is_file(), f"{shown(TABLE)} is missing"
    rows, inside = [], False
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        row = cells(line) if line.lstrip().startswith("|") else []
        if [cell.lower() for cell in row[:2]] == ["module", "may use"]:
            inside = True
            continue
        inside = inside and bool(row)
        if inside and not set(row[0]) <= set("-: ") and "crates" not in row[0] and "python" not in row[0]:
            rows.append((names_in(row[0]), names_in(row[1])))
    assert rows, f"no table `| module | may use |` in {shown(TABLE)}"
    return rows


def arrows() -> dict[str, set[str]]:
    allowed: dict[str, set[str]] = {}
    for modules, may in table_rows():
        targets: set[str] = set()
        for name in may:
            if name.lower() in ("nothing", "-", "none"):
                continue
            if name.lower() == "words":
                targets.update(WORDS)
            elif name.lower() in ("everything above", "everything"):
                targets.update(allowed)
            else:
                targets.add(name)
        for module in modules:
            allowed.setdefault(module, set()).update(targets)
    return allowed


def leaves(tree: str) -> Iterator[str]:
    """All full paths of a `use` tree such as `a::{b, c::{d, self}}`."""
    tree = tree.strip()
    opening = tree.find("{")
    if opening < 0:
        yield re.sub(r"\s+as\s+\w+$", "", tree)
        return
    prefix, inner = tree[:opening], tree[opening + 1 : tree.rindex("}")]
    depth, part = 0, ""
    for sign in [*inner, ","]:
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            if part.strip():
                yield from (prefix + leaf for leaf in leaves(part))
            part = ""
        else:
            part += sign


def use_paths(code: str) -> list[str]:
    """Every path named by a `use` or by a qualified `crate::`/`super::` expression."""
    paths = []
    for match in re.finditer(r"(?:^|[;{}\n])\s*(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", code):
        paths += [re.sub(r"\s+", "", leaf) for leaf in leaves(match.group(1))]
    paths += [
        re.sub(r"\s+", "", found) for found in re.findall(r"\b(?:crate|super(?:\s*::\s*super)*)\s*::\s*\w+", code)
    ]
    return paths


def reexports() -> dict[str, str]:
    code = blank((CORE / "lib.rs").read_text(encoding="utf-8"))
    names: dict[str, str] = {}
    for match in re.finditer(r"pub\s+use\s+([^;]+);", code):
        for leaf in leaves(match.group(1)):
            parts = re.sub(r"\s+", "", leaf).removeprefix("crate::").removeprefix("self::").split("::")
            renamed = re.search(rf"\b{parts[-1]}\s+as\s+(\w+)", match.group(1))
            names[renamed.group(1) if renamed else parts[-1]] = parts[0]
    return names


def target_of(path: str, file: Path, roots: dict[str, str]) -> str | None:
    """The top-level module that a path leads to; None if it stays inside the module or leaves the crate."""
    full = absolute(path, module_path(file), {})
    first = full and roots.get(full[0], full[0])
    return first if first and first != module_of(file) else None


def test_arrows_run_one_way() -> None:
    allowed = arrows()
    roots = reexports()
    files = [path for path in rust_files(CORE) if path.name not in ("lib.rs", "main.rs") or path.parent != CORE]
    modules = {module_of(path) for path in files}
    assert modules, "no modules found"
    missing = modules - set(allowed)
    assert not missing, f"not in the table of {shown(TABLE)}: {sorted(missing)}"
    uses, wrong = 0, []
    for path in files:
        for used in use_paths(code_of(path)):
            target = target_of(used, path, roots)
            if target is None or target not in modules:
                continue
            uses += 1
            if target not in allowed[module_of(path)]:
                wrong.append(f"{shown(path)}: {used} ({module_of(path)} may not use {target})")
    assert uses, "no use lines found"
    assert not wrong, "\n".join(wrong)
    assert not circular({module: targets - {module} for module, targets in allowed.items()}), "the table has a circle"


def circular(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that reach themselves."""

    def reached(node: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(graph.get(node, ()))
        while waiting:
            if (other := waiting.pop()) not in seen:
                seen.add(other)
                waiting += graph.get(other, ())
        return seen

    return {node for node in graph if node in reached(node)}


def absolute(path: str, module: tuple[str, ...], modules: dict[tuple[str, ...], Path]) -> tuple[str, ...] | None:
    """A path of the crate from its root; None if it leads out of the crate."""
    parts = tuple(part for part in path.split("::") if part not in ("self", "*"))
    if not parts or parts[0] == "crate":
        return parts[1:] or None
    if parts[0] == "super":
        above = module
        while parts and parts[0] == "super":
            above, parts = above[:-1], parts[1:]
        return above + parts
    return module + parts if path.startswith("self::") or module + parts[:1] in modules else None


def owners_of_methods(code: dict[tuple[str, ...], str]) -> dict[str, set[tuple[str, ...]]]:
    """Method → the modules that define one of this name."""
    methods: dict[str, set[tuple[str, ...]]] = {}
    for module, text in code.items():
        for name in re.findall(r"\bfn (\w+)(?:<[^(]*>)?\(\s*(?:&(?:'\w+ )?)?(?:mut )?self\b", text):
            methods.setdefault(name, set()).add(module)
    return methods


def file_graph(crate: Path) -> dict[str, set[str]]:
    """File → files whose items it names or whose methods it calls on `self`. Re-exports do not count."""
    modules = {module_path(path, crate): path for path in rust_files(crate) if path.name != "lib.rs"}
    code = {module: code_of(path) for module, path in modules.items()}
    facade = r"(^|[;{}\n])\s*pub(?:\([^)]*\))?\s+use\s+([^;]+);"
    methods = owners_of_methods(code)
    exported: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for module, text in code.items():
        names = exported.setdefault(module, {})
        for match in re.finditer(facade, text):
            for leaf in leaves(match[2]):
                target = absolute(re.sub(r"\s+", "", leaf), module, modules)
                if target:
                    names[target[-1]] = target

    def defining(path: tuple[str, ...]) -> tuple[str, ...] | None:
        """The module that defines what a path names; re-exports are followed."""
        for length in range(len(path), 0, -1):
            module, rest = path[:length], path[length:]
            if module in modules:
                onward = exported[module].get(rest[0]) if rest else None
                return (defining(onward + rest[1:]) if onward and onward != path else None) or module
        return None

    graph: dict[str, set[str]] = {}
    for module, text in code.items():
        body = re.sub(facade, r"\1", text)
        named = use_paths(body) + [
            re.sub(r"\s+", "", found) for found in re.findall(r"\b[a-z_]\w*(?:\s*::\s*\w+)+", body)
        ]
        # `Tcp(` and `Address::Tcp` are variants with the name of a type.
        words = set(re.findall(r"(?<!:)\b[A-Z]\w*\b(?!\()|(?<!:)\b[a-z]\w*\b", body))
        named += ["::".join(("crate", *target)) for name, target in exported[module].items() if name in words]
        targets = {defining(full) for path in named if (full := absolute(path, module, modules))} - {None, module}
        called = [methods.get(name, set()) for name in re.findall(r"\bself\s*\.\s*(\w+)\(", text)]
        targets.update(*(owners for owners in called if len(owners) == 1 and module not in owners))
        graph[str(modules[module].relative_to(crate))] = {
            str(modules[target].relative_to(crate)) for target in targets if target is not None
        }
    return graph


CRATES = [(CORE, 400), (BINDING, 80), (INTERFACE, 10), (EMBED, 0), (KEEPER, 15), (TESTING, 0)]


@pytest.mark.parametrize(("crate", "least"), CRATES)
def test_files_import_one_another_in_no_circle(crate: Path, least: int) -> None:
    graph = file_graph(crate)
    assert sum(map(len, graph.values())) >= least, "hardly any import was found"
    assert not circular(graph), f"files that import one another: {sorted(circular(graph))}"


def test_unsafe_stays_in_its_rooms() -> None:
    """The compiler denies it elsewhere, and clippy where no SAFETY comment explains it (`Cargo.toml`)."""
    rooms = {CORE: "memory", INTERFACE: "abi", BINDING: "raw", EMBED: "list_allocator"}
    whole = [ROOT / "crates" / name / "src" for name in ("ucx", "fake-ucp")]
    files = rust_everywhere() + [path for crate in whole for path in rust_files(crate)]
    found = [path for path in files if "unsafe_code" in path.read_text(encoding="utf-8")]
    assert {path.parent: path.name for path in found} == dict.fromkeys([*rooms, *whole], "lib.rs")
    for crate, room in rooms.items():
        code = (crate / "lib.rs").read_text(encoding="utf-8")
        lifted = re.findall(r"^#\[expect\([^\]]*\bunsafe_code\b[^\]]*\]\n(?:pub )?mod (\w+);", code, re.MULTILINE)
        assert lifted == [room]


def test_ucx_gets_no_pointer_into_a_box() -> None:
    """A ``Box`` that moves asserts unique access to its content, and UCX keeps pointers to what it was given."""
    code = {
        path.name: blank(path.read_text(encoding="utf-8")) for path in (CORE.parents[1] / "ucx" / "src").glob("*.rs")
    }
    assert len(code) > 8
    assert not [name for name, text in code.items() if re.search(r"\bBox\b", text)]


@pytest.mark.parametrize("crate", [BINDING, INTERFACE], ids=["py", "capi"])
def test_a_binding_uses_only_what_the_core_re_exports(crate: Path) -> None:
    roots = set(reexports()) | {"bindings"}  # rules, and lists of any length: see docs/architecture.md
    other = {BINDING: "cpp", INTERFACE: ""}[crate]  # the rules of the C++ class; those of the native API are for both
    assert len(roots) > 1, "the core re-exports nothing"
    allowed = ["std", "core", "alloc", "crate", "super", "self", "llm_datadist_embed", "llm_datadist_hixl"]
    allowed += ["pyo3", "llm_datadist_keeper"] if crate == BINDING else ["libc"]
    uses, wrong = 0, []
    for path in rust_files(crate):
        code = code_of(path)
        for used in use_paths(code) + re.findall(r"\bllm_datadist_core\s*::\s*\w+", code):
            parts = [part.strip() for part in used.split("::")]
            uses += 1
            local = any((path.parent / name).exists() for name in (f"{parts[0]}.rs", parts[0]))
            if parts[0] in allowed or (local and path.name in ("lib.rs", "mod.rs")):
                continue
            core = parts[0] == "llm_datadist_core" and len(parts) > 1 and (parts[1] in roots or parts[1] == "self")
            if core and parts[1:3] != ["bindings", other]:
                continue
            wrong.append(f"{shown(path)}: {used}")
    assert uses, "no use lines found in the binding"
    assert not wrong, "\n".join(wrong)


def keeper_order() -> list[set[str]]:
    """The files of `crates/keeper`, by the rows of their table."""
    table = TABLE.read_text(encoding="utf-8").split("| file | what it has |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    return [set(re.findall(r"\w+", row)) for row in rows]


def test_files_of_the_keeper_use_those_of_rows_above() -> None:
    graph = file_graph(KEEPER)
    order = keeper_order()
    position = {f"{name}.rs": row for row, names in enumerate(order) for name in names}
    assert position.keys() == graph.keys()
    wrong = {(file, used) for file, all_used in graph.items() for used in all_used if position[used] >= position[file]}
    assert not wrong


def test_the_keeper_uses_what_the_core_lists_for_it() -> None:
    uses, wrong = 0, []
    for path in rust_files(KEEPER):
        for used in use_paths(code_of(path)):
            parts = used.split("::")
            if parts[0] == "llm_datadist_core" and parts[1] != "bindings":
                uses += 1
                assert parts[1] in reexports(), used
            elif parts[0] == "llm_datadist_core":
                uses += 1
                if parts[2] not in ("keeper", "fallible", "this_process", "remember_process"):
                    wrong.append(f"{shown(path)}: {used}")
    assert uses > 20
    assert not wrong


def closing(code: str, start: int, brackets: str) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for end in range(start, len(code)):
        depth += (code[end] == brackets[0]) - (code[end] == brackets[1])
        if depth == 0:
            return end
    return len(code)


def attributes(code: str, name: str) -> list[str]:
    """The text of every attribute `#[name ...]`, also inside `cfg_attr`."""
    found = re.finditer(rf"#\[[^\]]*?\b{name}\b", code)
    return [code[match.start() : closing(code, match.start() + 1, "[]") + 1] for match in found]


def test_every_class_of_the_binding_is_frozen() -> None:
    texts = [blank(path.read_text(encoding="utf-8")) for path in rust_files(BINDING)]
    found = [attribute for text in texts for attribute in attributes(text, "pyclass")]
    assert found, "no #[pyclass] found"
    assert all(re.search(r"\bfrozen\b", attribute) for attribute in found), found


def python_files() -> list[Path]:
    files = sorted(PYTHON.rglob("*.py"))
    assert files, f"no Python files in {PYTHON}"
    return files


def imports(tree: ast.AST) -> Iterator[tuple[str, bool, int]]:
    """(top-level name, whether at module level, line) of every import; relative ones count as the package."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            inner = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name.split(".")[0], not lazy, child.lineno
            elif isinstance(child, ast.ImportFrom):
                yield ("llm_datadist" if child.level else (child.module or "").split(".")[0], not lazy, child.lineno)
            yield from walk(child, inner)

    yield from walk(tree, lazy=False)


def python_imports(path: Path) -> set[str]:
    """Files of the package that a file imports when it is loaded; imports for annotations do not count."""
    found: set[Path] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llm_datadist"):
            folder = PYTHON.joinpath(*(node.module or "").split(".")[1:])
            files = {folder / f"{alias.name}.py" for alias in node.names if alias.name != "_core"}
            package = () if all(file.exists() for file in files) else (folder / "__init__.py",)
            found |= {folder.with_suffix(".py"), *files, *package}
    return {shown(file) for file in found if file.exists()}


def test_python_files_import_one_another_in_no_circle() -> None:
    graph = {shown(path): python_imports(path) for path in python_files()}
    assert sum(map(len, graph.values())) >= 60, "hardly any import was found"
    assert not circular(graph), f"files that import one another: {sorted(circular(graph))}"


STDLIB = getattr(sys, "stdlib_module_names", None)


SERVERS = {
    "vllm": ("vllm", "torch", "numpy", "msgspec"),
    "prometheus.py": ("prometheus_client",),
    "lmcache": ("lmcache",),
    "lmcache_l2.py": ("lmcache",),
    "sglang.py": ("sglang", "torch"),
    "store_settings.py": ("msgspec",),
    "opentelemetry.py": ("opentelemetry",),
}


def test_only_integrations_import_integrations() -> None:
    outside = [path for path in python_files() if "integrations" not in path.parts]
    inside = [path for path in python_files() if "integrations" in path.parts]
    assert outside
    assert inside
    wrong = {shown(path) for path in outside for name in python_imports(path) if "/integrations/" in name}
    assert not wrong


def test_commands_use_the_native_api_only() -> None:
    inside = [path for path in python_files() if "commands" in path.parts]
    used = {name for path in inside for name in python_imports(path) if "/commands/" not in name}
    front = shown(PYTHON)
    assert used == {f"{front}/{name}.py" for name in ("__init__", "native", "option_table")}


def package_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from the package, also of those for annotations. ``import m`` has no name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
        else:
            found = [(alias.name, "") for alias in node.names] if isinstance(node, ast.Import) else []
        yield from ((module, name) for module, name in found if module.startswith((".", "llm_datadist")))


def test_integrations_and_examples_use_the_native_api_only() -> None:
    """And commands. Each name is checked, because `llm_datadist` itself also has the names of the original."""
    front = tree_of(PYTHON / "__init__.py").body
    native = {alias.name for node in front if isinstance(node, ast.ImportFrom) for alias in node.names}
    modules = ("llm_datadist.native", "llm_datadist.option_table", "llm_datadist.stats")
    folders = ("llm_datadist.commands", "llm_datadist.integrations")
    examples = [path for path in (ROOT / "examples").rglob("*.py") if not path.name.startswith("lldd_")]
    inside = [path for path in python_files() if {"commands", "integrations"} & set(path.parts)]
    assert len(examples) > 10
    assert {"Engine", "__version__"} <= native
    found, wrong = 0, []
    for path in [*examples, *inside]:
        for module, name in package_names(tree_of(path)):
            found += 1
            allowed = name in native if module == "llm_datadist" else module in modules or module.startswith(folders)
            if not allowed:
                wrong.append(f"{shown(path)}: {module} {name}")
    assert found > 100, "hardly any import was found"
    assert not wrong, wrong


@pytest.mark.skipif(STDLIB is None, reason="this Python does not list its standard library (needs 3.10)")
def test_the_front_imports_only_the_standard_library_and_itself() -> None:
    """The integrations with a server also import that server, and nothing else imports them."""
    found, wrong = 0, []
    for path in python_files():
        server = path.relative_to(PYTHON).parts[:2]
        for name, eager, line in imports(tree_of(path)):
            found += 1
            if server[:1] == ("integrations",) and name in SERVERS.get(server[1], ()):
                continue
            if name in ("llm_datadist", "llm_datadist_v1", "__future__") or name in (STDLIB or ()):
                continue
            if name == "numpy" and (not eager or "replay" in path.relative_to(PYTHON).parts):
                continue
            wrong.append(f"{shown(path)}:{line}: {name}")
    assert found, "no imports found"
    assert not wrong, wrong


def test_no_file_grows_out_of_one_head() -> None:
    texts = {shown(path): path.read_text(encoding="utf-8") for path in [*rust_everywhere(), *python_files()]}
    lines = {
        name: len((production(text) if name.endswith(".rs") else text).splitlines()) for name, text in texts.items()
    }
    long = {name: count for name, count in lines.items() if count > LONGEST}
    assert not long, f"production part over {LONGEST} lines: {long}"


def test_a_type_has_a_name_of_its_own() -> None:
    """`State` and `Shared`: docs/architecture.md. `DataDist` and `Engine` of the binding wrap others."""
    found: dict[str, list[str]] = {}
    for path in rust_everywhere():
        for name in re.findall(r"^ *(?:pub(?:\(\w+\))? )?(?:struct|enum|trait) (\w+)", code_of(path), re.MULTILINE):
            found.setdefault(name, []).append(shown(path))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice.keys() == {"State", "Shared", "DataDist", "Engine"}, twice


def functions(code: str) -> Iterator[tuple[str, int, int]]:
    """(name, line, lines between its braces) of every Rust function with a body; `code` is blanked."""
    for match in re.finditer(r"\bfn (\w+)", code):
        depth, position = 0, match.end()
        while position < len(code) and not (depth == 0 and code[position] in "{;"):
            depth += (code[position] in "([") - (code[position] in ")]")
            position += 1
        if code[position : position + 1] != "{":
            continue
        end = closing(code, position, "{}")
        yield match[1], code.count("\n", 0, match.start()) + 1, max(code.count("\n", position, end) - 1, 0)


def pymethods(code: str) -> str:
    """The `#[pymethods]` blocks of a blanked file; all other text is blanked as well."""
    kept = ""
    for match in re.finditer(r"#\[pymethods\]\s*impl[^{]*\{", code):
        end = code.find("\n}\n", match.end())
        kept += re.sub(r"[^\n]", " ", code[len(kept) : match.start()]) + code[match.start() : end]
    return kept


def test_functions_fit_on_a_screen() -> None:
    """For Python functions, ruff checks this (PLR0915)."""
    found = [(lines, shown(path), name) for path in rust_everywhere() for name, _, lines in functions(code_of(path))]
    assert len(found) > 100, "this guard looked at next to nothing"
    long = [function for function in found if function[0] > LONGEST_FUNCTION]
    assert not long, f"over {LONGEST_FUNCTION} lines: {long}"


def test_methods_of_the_binding_convert_enter_and_call() -> None:
    blocks = {shown(path): pymethods(blank(path.read_text(encoding="utf-8"))) for path in rust_files(BINDING)}
    found = [(lines, file, name) for file, code in blocks.items() for name, _, lines in functions(code)]
    assert len(found) > 15, "this guard looked at next to nothing"
    long = [method for method in found if method[0] > LONGEST_METHOD]
    assert not long, f"over {LONGEST_METHOD} lines: {long}"


def test_the_readers_understand_what_they_read() -> None:
    code = blank('// unsafe { x }\nlet a = "unsafe"; let b = r#"unsafe "x" "#; let c = \'"\'; unsafe { y }\n')
    assert code.count("unsafe") == 1
    assert code.index("unsafe") > code.index("let c")
    assert blank("fn f<'a>(x: &'a str) -> &'a str { x }") == "fn f<'a>(x: &'a str) -> &'a str { x }"
    found = list(leaves("crate::{a::B, c::{self, D as E}, f}"))
    assert found == ["crate::a::B", "crate::c::self", "crate::c::D", "crate::f"]
    assert use_paths("use crate::{a::B,\n c};\nlet x = crate::d::new();") == ["crate::a::B", "crate::c", "crate::d"]
    deep = CORE / "engine" / "ring.rs"
    assert target_of("super::route::X", deep, {}) is None
    assert target_of("super::super::plan::X", deep, {}) == "plan"
    assert target_of("crate::Error", deep, {"Error": "error"}) == "error"
    assert target_of("super::error::X", CORE / "engine" / "mod.rs", {}) == "error"
    assert target_of("super::error::X", CORE / "pool.rs", {}) == "error"
    assert names_in("words, plan (spans), device/*") == ["words", "plan", "device"]
    found = attributes("#[pyclass(module = 1, frozen)]\nstruct A;\n#[pyclass]\nstruct B;", "pyclass")
    assert found == ["#[pyclass(module = 1, frozen)]", "#[pyclass]"]
    assert list(functions("fn a<T>(x: [u8; 2]) -> T\n{\n f();\n {}\n}\ntrait B { fn c(); }")) == [("a", 1, 2)]
    methods = pymethods("fn a() {}\n#[pymethods]\nimpl B {\n fn c() {}\n}\nfn d() {}\n")
    assert methods.split() == ["#[pymethods]", "impl", "B", "{", "fn", "c()", "{}"]
    assert production("fn a() {}\n#[cfg(test)]\nmod tests {\n}\n") == "fn a() {}\n"
    code = "import llm_datadist.v2\nfrom llm_datadist import A as B\nfrom . import c\nimport os"
    assert list(package_names(ast.parse(code))) == [("llm_datadist.v2", ""), ("llm_datadist", "A"), (".", "c")]
    assert list(imports(ast.parse("import os\ndef f():\n    import numpy\n"))) == [("os", True, 1), ("numpy", False, 3)]
