"""Programs of `tests/cpp`: compiled with warnings as errors, and run as processes that take commands.

They link the library that `make capi` builds. `LLM_DATADIST_SANITIZE=1` (`make sanitize`) adds the sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from peers import LIMIT, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "cpp"
INCLUDE = ROOT / "crates" / "capi" / "include"
LIBRARY = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
(VERSION,) = re.findall(r'^version = "(\d+\.\d+\.\d+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
# The rule of the changelog, as test_soname_follows_the_changelog checks it: before 1.0 a minor version may break.
COMPATIBLE = re.match(r"0\.\d+" if VERSION.startswith("0.") else r"\d+", VERSION)[0]  # type: ignore[index]
SONAME = f"libllm_datadist.so.{COMPATIBLE}"
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]
SANITIZED = os.environ.get("LLM_DATADIST_SANITIZE", "") not in ("", "0")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if SANITIZED else []
STRICT = ["-std=c++14", "-g", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread", *SANITIZE]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
NATIVE = ["-lpthread", "-ldl", "-lm"]  # system libraries that a static Rust library needs
SUCCESS, FAILED, GONE, INVALID, UNLINKED = "0", "ffffffff", "5010b002", "5010b005", "5010b007"
FULL, DISABLED, LINKED, LATE = "5010b00e", "5010b019", "5010b018", "5010b01a"
UINT8 = 4
HOST, DEVICE = 0, 1

packaged = pytest.mark.skipif(not shutil.which("pkg-config"), reason="no pkg-config")
readable = pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")


def run(command: Sequence[Any], **given: Any) -> str:
    done = subprocess.run(  # noqa: S603  (compilers, and programs built from our own files)
        list(map(str, command)), capture_output=True, text=True, timeout=600, check=False, **given
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def snippet(page: str, language: str) -> str:
    """The only code block of a page in this language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


def build(compiler: str, out: Path, sources: Sequence[Path], *flags: Any) -> Path:
    """Compile and link a program against the shared library of this tree."""
    assert (LIBRARY / SONAME).is_file(), "the library is not built: make capi"
    found = ["-I", INCLUDE, f"-L{LIBRARY}", "-lllm_datadist", f"-Wl,-rpath,{LIBRARY}"]
    run([compiler, *STRICT, *sources, "-o", out, *(flags or found)])
    return out


class Cpp:
    """A process of `end.cpp`: one object of the class. Answers are a hexadecimal status and the results of the call."""

    def __init__(self, program: Path, cluster: int, role: int) -> None:
        self.process = subprocess.Popen(  # noqa: S603
            [program, str(cluster), str(role)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.cluster, self.port, self.reason = cluster, 0, ""
        self.shapes: dict[str, tuple[int, int, int]] = {}

    def ask(self, *words: Any) -> list[str]:
        """Send one command and return the words of its answer, the status first."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"it died at {words}: {self.process.wait(LIMIT)}"
        told, _, self.reason = answer.strip().partition(" | ")
        return told.split()

    def open(self, **given: Any) -> Cpp:
        """Initialize with a small pool and a listener at any port."""
        pool = '{"memory_size":2097152,"page_shift":12}'
        made = {"llm.DeviceId": 0, "llm.MemPoolConfig": pool, "llm.ListenIpInfo": "127.0.0.1:0"}
        made["llm.SyncKvCacheWaitTime"] = 5000  # the default of 1 s is short beside other programs
        made.update({key.replace("__", "."): value for key, value in given.items()})
        status, port = self.ask("init", *(f"{key}={value}" for key, value in made.items()))
        assert status == SUCCESS, self.reason
        self.port = int(port)
        return self

    @property
    def at(self) -> tuple[int, str]:
        return self.cluster, f"127.0.0.1:{self.port}"

    def make(
        self, name: str, tensors: int, rows: int, size: int, seed: int, how: str = "allocate", where: int = DEVICE
    ) -> int:
        """Allocate a cache of bytes, fill it with `pattern`, and return its id."""
        told = self.ask(how, name, where, tensors, UINT8, rows, size)
        assert told[0] == SUCCESS, self.reason
        self.shapes[name] = (tensors, rows, size)
        self.write(name, pattern(seed, tensors, rows, size))
        return int(told[1]) if len(told) > 1 else -1

    def write(self, name: str, content: Sequence[np.ndarray]) -> None:
        assert self.ask("write", name, *(tensor.tobytes().hex() for tensor in content)) == [SUCCESS]

    def read(self, name: str) -> list[np.ndarray]:
        _, rows, size = self.shapes[name]
        status, *content = self.ask("read", name)
        assert status == SUCCESS
        return [np.frombuffer(bytes.fromhex(text), np.uint8).reshape(rows, size) for text in content]

    def close(self) -> None:
        self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0


def listed(blocks: Sequence[int]) -> str:
    return " ".join(map(str, (len(blocks), *blocks)))


PROMPT, DECODER, MIX = 1, 2, 3
