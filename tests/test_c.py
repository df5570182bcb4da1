"""The native API in C: two C processes, a C and a Python process, and the program of the guide.

Not for: wrong arguments and handles (`crates/capi/src/tests`), or the rules that Python shares (`tests/native`).
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from contract import NO_COMPILER

from cpp_programs import INCLUDE, LIBRARY, ROOT, SANITIZE, run, snippet
from llm_datadist import Engine, Message, PeerUp
from native.helpers import messages
from peers import LIMIT

if TYPE_CHECKING:
    from pathlib import Path

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
STRICT = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
TRANSPORTS = ["auto", "tcp"]
BLOCKS, BLOCK, TENSORS = 16, 256, 6

pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)


def build(folder: Path, source: Path, compiler: str) -> Path:
    found = ["-I", INCLUDE, f"-L{LIBRARY}", "-lllm_datadist", f"-Wl,-rpath,{LIBRARY}"]
    run([compiler, *STRICT, *SANITIZE, source, "-o", folder / "program", *found])
    return folder / "program"


@pytest.fixture(scope="module", params=COMPILERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("c"), ROOT / "tests" / "c" / "native.c", request.param)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_processes(program: Path, transport: str) -> None:
    assert run([program, "both", transport]) == "done\n"


def owners_block(seed: int, block: int) -> bytes:
    """A block of the program's cache, over all tensors."""
    offsets = np.arange(block * BLOCK, (block + 1) * BLOCK)
    content = [seed * 131 + tensor * 29 + offsets * 7 + offsets // 256 for tensor in range(TENSORS)]
    return np.concatenate(content).astype(np.uint8).tobytes()


def test_a_python_engine_pulls_from_and_pushes_to_a_c_engine(program: Path) -> None:
    command, pipe = [program, "serve", "auto"], subprocess.PIPE
    with Engine(pool="1MiB", page="4KiB") as engine, subprocess.Popen(command, stdin=pipe, stdout=pipe) as owner:  # noqa: S603
        assert owner.stdout is not None
        kv = engine.allocate("kv", blocks=BLOCKS, tensors=TENSORS, shape=(BLOCK // 4,), dtype="float32")
        address = owner.stdout.readline().decode().strip()
        peer = engine.link(address, name="owner").result()
        engine.pull(kv[[2]], peer["kv"][[9]]).result()
        pulled = b"".join(tensor.numpy()[2].tobytes() for tensor in kv.tensors)
        assert pulled == owners_block(7, 9)
        engine.push(peer["kv"][[14]], kv[[2]], notify=b"check 14 7 9").result()
        assert messages(engine, 1) == [b"good"]
        peer.send(b"echo")
        assert messages(engine, 1) == [b"echo"]
        owner.communicate(timeout=LIMIT)
        assert owner.returncode == 0


def test_a_c_engine_pulls_from_a_python_engine(program: Path) -> None:
    with Engine(pool="1MiB", page="4KiB", listen="127.0.0.1:0") as engine:
        kv = engine.allocate("kv", blocks=BLOCKS, tensors=TENSORS, shape=(BLOCK // 4,), dtype="float32")
        for number, tensor in enumerate(kv.tensors):
            tensor.numpy()[:] = np.arange(BLOCKS * BLOCK // 4, dtype=np.float32).reshape(BLOCKS, -1) + 1000 * number
        assert engine.address is not None
        told = run([program, "pull", engine.address])
        assert bytes.fromhex(told.strip()) == b"".join(tensor.numpy()[3].tobytes() for tensor in kv.tensors)
        events = engine.events()
        assert [event.data for event in events if isinstance(event, Message)] == [b"pulled"]
        assert [event.peer.name for event in events if isinstance(event, PeerUp)] == ["reader"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_program_of_the_guide(tmp_path: Path, compiler: str) -> None:
    source = tmp_path / "program.c"
    source.write_text(snippet("docs/c.md", "c"), encoding="utf-8")
    assert run([build(tmp_path, source, compiler)]) == snippet("docs/c.md", "text")
