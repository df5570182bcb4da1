"""The C++ header, the C interface below the class, and the files that `make install` installs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Callable

import pytest
from contract import NO_COMPILER

from cpp_programs import (
    COMPILERS,
    FAILED,
    INCLUDE,
    LIBRARY,
    NATIVE,
    ROOT,
    SANITIZED,
    SONAME,
    SOURCES,
    STRICT,
    VERSION,
    WARNINGS,
    build,
    packaged,
    readable,
    run,
    snippet,
)

pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)
# With these variables, CMake colours its messages, also in a pipe. GNU make sets the first two in a terminal.
COLOURS = ("MAKE_TERMOUT", "MAKE_TERMERR", "CLICOLOR_FORCE")


# -- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.contract("19.cpp-types")
@pytest.mark.parametrize(
    ("dialect", "level", "more"),
    [  # each level with each dialect, and with each of the other flags
        ("c++14", "-O0", ""),
        ("c++14", "-O2", "-fno-exceptions -fno-rtti"),
        ("c++17", "-O0", "-D_GLIBCXX_USE_CXX11_ABI=0"),
        ("c++17", "-O2", ""),
        ("c++20", "-O0", "-fno-exceptions -fno-rtti"),
        ("c++20", "-O2", "-D_GLIBCXX_USE_CXX11_ABI=0"),
    ],
)
@pytest.mark.parametrize("source", ["every_method", "hixl_calls", "hixl_types"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_header_compiles_in_every_dialect(
    compiler: str, source: str, dialect: str, level: str, more: str, tmp_path: Path
) -> None:
    flags = [f"-std={dialect}", level, *WARNINGS, *more.split(), "-I", INCLUDE]
    run([compiler, *flags, "-c", SOURCES / f"{source}.cpp", "-o", tmp_path / "object.o"])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_method_links_and_runs(built: Callable[..., Path], compiler: str) -> None:
    run([built("every_method", compiler)])
    assert run([built("log", compiler)]) == "logged\n", "the log callback gets lines until it is removed"


def test_a_program_of_a_newer_header_is_refused(tmp_path: Path) -> None:
    header = shutil.copytree(INCLUDE, tmp_path / "include") / "llm_datadist" / "llm_datadist_c.h"
    text, count = re.subn("LLM_DATADIST_ABI_VERSION 5\n", "LLM_DATADIST_ABI_VERSION 6\n", header.read_text())
    assert count == 1
    header.write_text(text)
    source = tmp_path / "newer.cpp"
    source.write_text(
        '#include "llm_datadist/llm_datadist.h"\n#include <iostream>\nint main() {\n'
        "  llm_datadist::LlmDataDist engine(1, llm_datadist::LlmRole::kPrompt);\n"
        '  std::cout << std::hex << engine.Initialize({{llm_datadist::OPTION_DEVICE_ID, "0"}}) << " "\n'
        "            << llm_datadist::LastErrorMessage();\n  return 0;\n}\n"
    )
    found = ["-I", tmp_path / "include", f"-L{LIBRARY}", "-lllm_datadist", f"-Wl,-rpath,{LIBRARY}"]
    status, _, reason = run([build(COMPILERS[0], tmp_path / "newer", [source], *found)]).partition(" ")
    assert status == FAILED
    assert "version 6" in reason
    assert "version 5" in reason


# -- the interface beneath, and the install --------------------------------------------------------------------------


def test_the_c_header_is_plain_c(tmp_path: Path) -> None:
    source = tmp_path / "plain.c"
    source.write_text(
        '#include "llm_datadist/llm_datadist_c.h"\n#include <stdio.h>\n'
        'int main(void) {\n  LlmDatadistOption option = {"llm.DeviceId", "x"};\n'
        "  uint64_t handle = llm_datadist_new(1, 1);\n"
        "  if (llm_datadist_initialize(handle, &option, 1) == 0) return 1;\n"
        "  puts(llm_datadist_last_error());\n  return (int)llm_datadist_free(handle);\n}\n"
    )  # fmt: skip
    compiler = shutil.which("gcc") or shutil.which("clang") or "cc"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", INCLUDE]
    library = LIBRARY / "libllm_datadist.a"
    run([compiler, *flags, source, "-o", tmp_path / "plain", library, *NATIVE])
    assert "llm.DeviceId" in run([tmp_path / "plain"]), "the static library works"
    linked = run(["ldd", tmp_path / "plain"])
    assert "llm_datadist" not in linked


def test_the_library_exports_only_its_interface() -> None:
    declared = set(re.findall(r"\b(llm_datadist_\w+)\(", (INCLUDE / "llm_datadist/llm_datadist_c.h").read_text()))
    symbols = run(["nm", "-D", "--defined-only", LIBRARY / "libllm_datadist.so"]).splitlines()
    exported = {line.split()[-1].split("@")[0] for line in symbols}
    assert len(declared) > 15
    assert exported == declared


@readable
def test_soname_follows_the_changelog() -> None:
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert "Until then, a minor version may contain incompatible changes." in changelog
    dynamic = run(["readelf", "-d", LIBRARY / "libllm_datadist.so"])
    assert re.findall(r"\(SONAME\).*\[(.*)\]", dynamic) == [SONAME]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix that `make install` filled and that was moved afterwards."""
    prefix = tmp_path_factory.mktemp("installed") / "pre fix"
    run(["make", "--no-print-directory", "-C", ROOT, "install-files", f"PREFIX={prefix}"])
    moved = prefix.with_name("mo ved")
    prefix.rename(moved)
    return moved


def pkg_config(libraries: Path, *asked: str) -> str:
    """Return the output of pkg-config for the library in this folder."""
    environment = {**os.environ, "PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    return run(["pkg-config", *asked, "llm_datadist"], env=environment).strip()


def guide_program(folder: Path) -> Path:
    """The C++ program of the guide, as a file."""
    source = folder / "program.cpp"
    source.write_text(snippet("docs/llm-datadist/cpp-programs.md", "cpp"), encoding="utf-8")
    return source


@packaged
def test_the_program_of_the_page_about_hixl_builds_with_pkg_config_and_runs(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.cpp").write_text(snippet("docs/hixl.md", "cpp"), encoding="utf-8")
    (command,) = re.findall(r"^g\+\+ .*$", (ROOT / "docs/hixl.md").read_text(encoding="utf-8"), re.MULTILINE)
    asked = "$(pkg-config --cflags --libs llm_datadist)"
    assert asked in command
    # The prefix has a space, which pkg-config quotes for a shell.
    command = command.replace(asked, pkg_config(installed / "lib", "--cflags", "--libs"))
    run(["sh", "-c", command.replace("g++", " ".join([COMPILERS[0], *STRICT]))], cwd=tmp_path)
    output = run([tmp_path / "program"], env={**os.environ, "LD_LIBRARY_PATH": str(installed / "lib")})
    assert output == "there\n"


def compile_in_shell(source: Path, program: Path, flags: str) -> None:
    """Compile as users do, because pkg-config quotes its output for a shell."""
    run(["sh", "-c", f"{COMPILERS[0]} {' '.join(STRICT)} '{source}' -o '{program}' {flags}"])


def check_guide_output(output: str) -> None:
    """Check that the program pulls a value and shows the reason of a failed call."""
    pulled, reason = output.splitlines()
    assert pulled == "pulled 1.5"
    assert reason.startswith("src_blocks[0]")
    assert "0 to 127" in reason


@packaged
@readable
def test_the_program_of_the_guide_builds_with_pkg_config_and_runs(installed: Path, tmp_path: Path) -> None:
    flags = pkg_config(installed / "lib", "--cflags", "--libs")
    assert pkg_config(installed / "lib", "--modversion") == "0.1.0"
    source, program = guide_program(tmp_path), tmp_path / "program"
    compile_in_shell(source, program, flags)
    check_guide_output(run([program], env={**os.environ, "LD_LIBRARY_PATH": str(installed / "lib")}))
    # A program that is linked with the path of the library still depends on its SONAME.
    library, include = installed / "lib" / "libllm_datadist.so", installed / "include"
    run([COMPILERS[0], *STRICT, "-I", include, source, "-o", tmp_path / "by path", library])
    for made in (program, tmp_path / "by path"):
        needed = re.findall(r"\(NEEDED\).*\[(.*llm_datadist.*)\]", run(["readelf", "-d", made]))
        assert needed == [SONAME]


@packaged
@readable
@pytest.mark.skipif(SANITIZED, reason="a static program, without the sanitizers' own library")
def test_the_program_of_the_guide_links_statically(installed: Path, tmp_path: Path) -> None:
    flags = pkg_config(installed / "lib", "--static", "--cflags", "--libs")
    program = tmp_path / "program"
    compile_in_shell(guide_program(tmp_path), program, flags.replace("-lllm_datadist", "-l:libllm_datadist.a"))
    assert "llm_datadist" not in run(["readelf", "-d", program])
    check_guide_output(run([program]))


@pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake")
def test_the_program_of_the_guide_builds_with_cmake(installed: Path, tmp_path: Path) -> None:
    source = guide_program(tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.14)\nproject(user CXX)\nset(CMAKE_CXX_STANDARD 14)\n"
        "find_package(llm_datadist 0.1 REQUIRED)\n"
        f"add_executable(program {source.name})\n"
        "target_link_libraries(program llm_datadist::llm_datadist)\n"
    )
    run(["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={installed}"])
    run(["cmake", "--build", tmp_path / "build"])
    check_guide_output(run([tmp_path / "build" / "program"]))


@pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake")
@pytest.mark.parametrize(
    ("version", "wanted", "accepted"),
    [
        *[("0.1.0", "0.1", "TRUE"), ("0.1.3", "0.1.2", "TRUE"), ("0.1.0", "0.1.1", "FALSE"), ("0.2.0", "0.1", "FALSE")],
        *[("1.4.0", "1.2", "TRUE"), ("1.4.0", "1.5", "FALSE"), ("2.0.0", "1.4", "FALSE"), ("1.0.0", "0.9", "FALSE")],
    ],
)
def test_cmake_accepts_only_compatible_versions(
    installed: Path, tmp_path: Path, version: str, wanted: str, accepted: str
) -> None:
    package = installed / "lib/cmake/llm_datadist/llm_datadistConfigVersion.cmake"
    major, minor, *_ = wanted.split(".")
    (tmp_path / "version.cmake").write_text(
        f'set(PACKAGE_FIND_VERSION "{wanted}")\nset(PACKAGE_FIND_VERSION_MAJOR {major})\n'
        f"set(PACKAGE_FIND_VERSION_MINOR {minor})\n{package.read_text().replace(VERSION, version)}\n"
        'message(STATUS "${PACKAGE_VERSION_COMPATIBLE}")\n'
    )
    environment = {name: value for name, value in os.environ.items() if name not in COLOURS}
    assert run(["cmake", "-P", tmp_path / "version.cmake"], env=environment) == f"-- {accepted}\n"


def files_below(folder: Path) -> set[str]:
    """The paths of all files and links below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def installation(library: str = "lib", include: str = "include", documents: str = "share/doc/llm_datadist") -> set[str]:
    """The files that an install puts into a prefix."""
    names = ["libllm_datadist.so", SONAME, f"libllm_datadist.so.{VERSION}", "libllm_datadist.a"]
    names += ["pkgconfig/llm_datadist.pc"]
    names += [f"cmake/llm_datadist/llm_datadist{part}.cmake" for part in ("Config", "ConfigVersion")]
    names_of_headers = [f"llm_datadist/llm_datadist{part}" for part in ("", "_c", "_types")]
    names_of_headers += ["hixl/hixl", "hixl/hixl_types", "hixl/ascend_string", "adxl/adxl_engine", "adxl/adxl_types"]
    headers = [f"{include}/{name}.h" for name in names_of_headers]
    licenses = [f"{documents}/{name}" for name in ("LICENSE", "THIRD-PARTY-LICENSES")]
    return {*(f"{library}/{name}" for name in names), *headers, *licenses}


@readable
def test_the_installed_files(installed: Path) -> None:
    assert files_below(installed) == installation()
    links = {name: str((installed / "lib" / name).readlink()) for name in ("libllm_datadist.so", SONAME)}
    assert links == {"libllm_datadist.so": SONAME, SONAME: f"libllm_datadist.so.{VERSION}"}
    assert VERSION in (installed / "lib/pkgconfig/llm_datadist.pc").read_text()
    assert ".debug_line" in run(["readelf", "-S", "-W", LIBRARY / "libllm_datadist.so"]), "nothing to strip"
    for name in ("libllm_datadist.so", "libllm_datadist.a"):
        assert ".debug_line" not in run(["readelf", "-S", "-W", installed / "lib" / name])


MAKE = ["make", "--no-print-directory", "-C", ROOT]


@packaged
def test_install_honours_its_folders_and_uninstall_leaves_other_files(tmp_path: Path) -> None:
    prefix = tmp_path / "pre fix"
    folder_of = {"prefix": prefix, "libdir": prefix / "lib/triple", "includedir": prefix / "headers"}
    folders = [*(f"{name.upper()}={path}" for name, path in folder_of.items()), f"DOCDIR={prefix}/doc"]
    run([*MAKE, "install-files", *folders])
    assert files_below(prefix) == installation("lib/triple", "headers", "doc")
    for name, path in folder_of.items():
        found = pkg_config(prefix / "lib/triple", f"--variable={name}")
        assert Path(found.replace("\\", "")).resolve() == path
    foreign = {"lib/triple/libother.so", "doc/notes"}
    for name in foreign:
        (prefix / name).touch()
    run([*MAKE, "uninstall", *folders])
    assert files_below(prefix) == foreign
    assert not any((prefix / "headers" / folder).exists() for folder in ("llm_datadist", "hixl", "adxl"))


def test_install_honours_destdir(tmp_path: Path) -> None:
    given = [f"DESTDIR={tmp_path}/root", "PREFIX=/opt/x"]
    run([*MAKE, "install-files", *given])
    assert files_below(tmp_path) == {f"root/opt/x/{name}" for name in installation()}
    run([*MAKE, "uninstall", *given])
    assert files_below(tmp_path) == set()


def test_install_refuses_a_relative_prefix() -> None:
    with pytest.raises(AssertionError, match="PREFIX must be an absolute path: PREFIX=here"):
        run([*MAKE, "install-files", "PREFIX=here"])
