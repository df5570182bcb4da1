"""The C++ class: the seeds' two examples as programs, its calls among C++ and Python processes, its header and install.

Programs under `tests/cpp` are compiled with every compiler that is there, warnings as errors, against the library that
`make capi` builds. With `LLM_DATADIST_SANITIZE=1` (`make sanitize`) they are compiled with the address and the
undefined-behaviour sanitizer. Not for: null pointers and handles (`crates/capi/src/tests`), or rules of the core's
`validate` that the Python calls share.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from contract import NO_COMPILER
from peers import LIMIT, OK, End, Ends, by_blocks, by_slot, equal, eventually, options, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ROOT.parent / "shared" / "seeds"
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
NATIVE = ["-lpthread", "-ldl", "-lm"]  # what a static Rust library needs
SUCCESS, FAILED, GONE, INVALID, UNLINKED = "0", "ffffffff", "5010b002", "5010b005", "5010b007"
FULL, DISABLED, LINKED, LATE = "5010b00e", "5010b019", "5010b018", "5010b01a"
UINT8 = 4
HOST, DEVICE = 0, 1
present = pytest.mark.skipif(not SEEDS.is_dir(), reason="the founding documents are not beside the repository")

pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)
packaged = pytest.mark.skipif(not shutil.which("pkg-config"), reason="no pkg-config")
readable = pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")


def run(command: Sequence[Any], **given: Any) -> str:
    """Run a program; its output, or a failure that shows what it said."""
    done = subprocess.run(  # noqa: S603  (compilers, and what they made of our own files)
        list(map(str, command)), capture_output=True, text=True, timeout=600, check=False, **given
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build(compiler: str, out: Path, sources: Sequence[Path], *flags: Any) -> Path:
    """Compile and link a program against the shared library of this tree."""
    assert (LIBRARY / SONAME).is_file(), "the library is not built: make capi"
    found = ["-I", INCLUDE, f"-L{LIBRARY}", "-lllm_datadist", f"-Wl,-rpath,{LIBRARY}"]
    run([compiler, *STRICT, *sources, "-o", out, *(flags or found)])
    return out


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that compiles a program once."""
    made: dict[tuple[str, ...], Path] = {}
    folder = tmp_path_factory.mktemp("cpp")

    def program(name: str, compiler: str = COMPILERS[0], *more: str) -> Path:
        key = (name, compiler, *more)
        if key not in made:
            sources = [SOURCES / f"{part}.cpp" for part in (name, *more)]
            made[key] = build(compiler, folder / f"{len(made)}-{name}", sources)
        return made[key]

    return program


# -- the examples of the seeds ---------------------------------------------------------------------------------------


@pytest.mark.contract("19.cpp-copy-kv-cache", "19.cpp-push-kv-cache")
@present
@pytest.mark.parametrize("page", ["CopyKvCache", "PushKvCache"])
def test_the_programs_contain_the_examples_of_the_seeds(page: str) -> None:
    text = (SEEDS / f"{page}.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^## 调用示例\n+```\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    if page == "CopyKvCache":
        assert example.endswith(")\n"), "the page has its semicolon now"
        example = example[:-1] + ";\n"  # the only change
    part = "seed_copy" if page == "CopyKvCache" else "seed_push"
    assert (SOURCES / f"{part}.inc").read_text(encoding="utf-8") == example
    assert f'#include "{part}.inc"' in (SOURCES / f"{part}.cpp").read_text(encoding="utf-8")


@pytest.mark.contract("19.cpp-copy-kv-cache", "19.cpp-types")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_example_of_copy_kv_cache(built: Callable[..., Path], compiler: str) -> None:
    assert run([built("seed_copy", compiler, "second")]) == "copied\n"


@pytest.mark.contract("19.cpp-push-kv-cache", "19.cpp-types")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_example_of_push_kv_cache_in_two_processes(built: Callable[..., Path], compiler: str) -> None:
    program = built("seed_push", compiler)
    with subprocess.Popen(  # noqa: S603
        [program, "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as receiver:
        try:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            assert run([program, "push", port]) == "pushed\n"
            out, err = receiver.communicate("now\n", timeout=LIMIT)
        finally:
            receiver.kill()
    assert (receiver.returncode, out) == (0, "received\n"), err


@pytest.mark.contract("19.cpp-push-kv-cache")
def test_the_example_of_push_kv_cache_in_one_process(built: Callable[..., Path]) -> None:
    assert run([built("seed_push"), "both"]) == "pushed\nreceived\n"


# -- the class, command by command -----------------------------------------------------------------------------------


class Cpp:
    """A process of `end.cpp`: one object of the class. Statuses are hexadecimal texts; what a call gives follows."""

    def __init__(self, program: Path, cluster: int, role: int) -> None:
        self.process = subprocess.Popen(  # noqa: S603
            [program, str(cluster), str(role)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.cluster, self.port, self.reason, self.dead = cluster, 0, "", False
        self.shapes: dict[str, tuple[int, int, int]] = {}

    def ask(self, *words: Any) -> list[str]:
        """One command; the words of its answer, the status first."""
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
        made.update({key.replace("__", "."): value for key, value in given.items()})
        status, port = self.ask("init", *(f"{key}={value}" for key, value in made.items()))
        assert status == SUCCESS, self.reason
        self.port = int(port)
        return self

    @property
    def at(self) -> tuple[int, str]:
        """Where Python ends link to."""
        return self.cluster, f"127.0.0.1:{self.port}"

    def make(
        self, name: str, tensors: int, rows: int, size: int, seed: int, how: str = "allocate", where: int = DEVICE
    ) -> int:
        """A cache of bytes, filled with `pattern`; its id."""
        told = self.ask(how, name, where, tensors, UINT8, rows, size)
        assert told[0] == SUCCESS, self.reason
        self.shapes[name] = (tensors, rows, size)
        self.write(name, pattern(seed, tensors, rows, size))
        return int(told[1]) if len(told) > 1 else -1

    def write(self, name: str, content: Sequence[np.ndarray]) -> None:
        """Fill every tensor."""
        assert self.ask("write", name, *(tensor.tobytes().hex() for tensor in content)) == [SUCCESS]

    def read(self, name: str) -> list[np.ndarray]:
        """The bytes of every tensor."""
        _, rows, size = self.shapes[name]
        status, *content = self.ask("read", name)
        assert status == SUCCESS
        return [np.frombuffer(bytes.fromhex(text), np.uint8).reshape(rows, size) for text in content]

    def close(self) -> None:
        """End the process; it must end well, unless the test killed it."""
        self.process.communicate(timeout=LIMIT)
        assert self.dead or self.process.returncode == 0


def listed(blocks: Sequence[int]) -> str:
    """A list as a command has it."""
    return " ".join(map(str, (len(blocks), *blocks)))


PROMPT, DECODER, MIX = 1, 2, 3


@pytest.fixture
def cpp(built: Callable[..., Path]) -> Iterator[Callable[..., Cpp]]:
    """A function that starts a process of the class; all end well when the test does."""
    started: list[Cpp] = []

    def start(cluster: int, role: int = PROMPT) -> Cpp:
        started.append(Cpp(built("end"), cluster, role))
        return started[-1]

    yield start
    try:
        for end in started:
            end.close()
    finally:
        for end in started:
            end.process.kill()


def pair(cpp: Callable[..., Cpp], **given: Any) -> tuple[Cpp, Cpp]:
    """Two linked processes: 1 linked to 2."""
    near, far = cpp(1).open(**given), cpp(2, DECODER).open(**given)
    assert near.ask("link", 2, far.port) == [SUCCESS, SUCCESS], near.reason
    return near, far


@pytest.mark.contract("19.cpp-push-kv-cache")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("how", ["allocate", "register"])
def test_pulls_and_pushes_between_two_processes_of_the_class(cpp: Callable[..., Cpp], how: str, transport: str) -> None:
    near, far = pair(cpp, llm__LinkTransport=transport)
    source, target = near.make("n", 4, 5, 40, 1, how), far.make("f", 4, 5, 40, 2, how)
    ours, theirs = pattern(1, 4, 5, 40), pattern(2, 4, 5, 40)

    assert near.ask("push", "n", 2, target, 3, 1, -1) == [SUCCESS], near.reason
    for tensor in range(4):
        theirs[tensor][3] = ours[tensor][1]
    assert near.ask("push", "n", 2, target, 0, 4, -1, 1, 1, 0, 0, 2) == [SUCCESS], near.reason
    for tensor in (0, 1):
        theirs[tensor][0] = ours[tensor + 2][4]
    assert near.ask("push_blocks", "n", 2, target, 0, listed([0, 2]), listed([4, 1])) == [SUCCESS], near.reason
    for tensor in range(4):
        theirs[tensor][[4, 1]] = ours[tensor][[0, 2]]
    assert equal(far.read("f"), theirs)

    assert near.ask("pull", 2, target, 2, "n", 0, -1) == [SUCCESS], near.reason
    assert near.ask("pull", 2, target, 4, "n", 1, 7) == [SUCCESS], near.reason
    assert near.ask("pull_blocks", 2, target, 0, "n", listed([1, 3, 1]), listed([2, 3, 4])) == [SUCCESS], near.reason
    assert near.ask("pull", 2, target, 0, "n", 2, -1, 0, 0, 3, 3, 1) == [SUCCESS], near.reason
    for tensor in range(4):
        ours[tensor][0] = theirs[tensor][2]
        ours[tensor][1, :7] = theirs[tensor][4, :7]
        ours[tensor][[2, 3, 4]] = theirs[tensor][[1, 3, 1]]
    ours[3][2] = theirs[0][0]
    assert equal(near.read("n"), ours)
    assert equal(far.read("f"), theirs), "a pull changed its source"
    assert source == target == 1


@pytest.mark.contract("19.cpp-push-kv-cache", "19.cpp-codes")
def test_what_a_transfer_refuses(cpp: Callable[..., Cpp]) -> None:
    near, far = pair(cpp)
    target = far.make("f", 4, 5, 40, 2)
    far.make("narrow", 4, 5, 39, 2)
    near.make("n", 4, 5, 40, 1)
    near.make("host", 4, 5, 40, 1, "register", HOST)
    near.make("lent", 4, 5, 40, 1, "loose", HOST)
    rows = [
        (INVALID, "size=40", "push n 2 1 0 0 40"),
        (INVALID, "src_batch_index=5", "push n 2 1 0 5 -1"),
        (INVALID, "slot 5", "push n 2 1 5 0 -1"),
        (INVALID, "host memory", "push host 2 1 0 0 -1"),
        (INVALID, "39", "push n 2 2 0 0 -1"),
        (INVALID, "src_layer_range=(-1, 0)", "push n 2 1 0 0 -1 -1 0 0 0 1"),
        (INVALID, "dst_layer_range=(-1, -1)", "push n 2 1 0 0 -1 0 0 -1 -1 1"),
        (INVALID, "src_layer_range=(2, 1)", "push n 2 1 0 0 -1 2 1 0 1 1"),
        (INVALID, "(0, 4)", "push n 2 1 0 0 -1 0 4 0 4 1"),
        (INVALID, "2 layers", "push n 2 1 0 0 -1 0 1 0 0 1"),
        (INVALID, "tensor_num_per_layer=0", "push n 2 1 0 0 -1 -1 -1 -1 -1 0"),
        (INVALID, "tensor_num_per_layer=5", "push n 2 1 0 0 -1 -1 -1 -1 -1 5"),
        (INVALID, "tensor_num_per_layer=3", "push n 2 1 0 0 -1 0 0 0 0 3"),
        (INVALID, "cluster_id=1", "push n 1 1 0 0 -1"),
        (UNLINKED, "7", "push n 7 1 0 0 -1"),
        (GONE, "99", "push n 2 99 0 0 -1"),
        (INVALID, "dst_cache_index.batch_index=1", "push_blocks n 2 1 1 1 0 1 0"),
        (INVALID, "src_blocks=[]", "push_blocks n 2 1 0 0 1 0"),
        (INVALID, "src_blocks has 2", "push_blocks n 2 1 0 2 0 1 1 0"),
        (INVALID, "src_blocks[0]=5", "push_blocks n 2 1 0 1 5 1 0"),
        (INVALID, "dst_blocks[0]", "push_blocks n 2 1 0 1 0 1 18446744073709551615"),
        (INVALID, "host memory", "push_blocks host 2 1 0 1 0 1 0"),
        (INVALID, "a block has 40 bytes", "push_blocks n 2 2 0 1 0 1 0"),
        (INVALID, "size=0", "pull 2 1 0 n 0 0"),
        (INVALID, "size=-2", "pull 2 1 0 n 0 -2"),
        (INVALID, "size=41", "pull 2 1 0 n 0 41"),
        (INVALID, "batch_index=5", "pull 2 1 0 n 5 -1"),
        (GONE, "slot 5", "pull 2 1 5 n 0 -1"),
        (INVALID, "cluster_id=1", "pull 1 1 0 n 0 -1"),
        (INVALID, "dst_layer_range=(0, 4)", "pull 2 1 0 n 0 -1 0 4 0 4 1"),
        (INVALID, "dst_layer_range=(-1, -1)", "pull 2 1 0 n 0 -1 0 0 -1 -1 1"),
        (INVALID, "src_layer_range=(-1, -1)", "pull 2 1 0 n 0 -1 -1 -1 0 0 1"),
        (INVALID, "tensor_num_per_layer", "pull 2 1 0 n 0 -1 -1 -1 -1 -1 0"),
        (GONE, "-1", "pull 2 1 0 nobody 0 -1"),
        (UNLINKED, "9", "pull 9 1 0 n 0 -1"),
        # Two faults: what no cache makes right is said before a cache is looked for.
        (INVALID, "size=40", "push nobody 2 1 0 0 40"),
        (INVALID, "src_layer_range=(2, 1)", "push nobody 2 1 0 0 -1 2 1 0 1 1"),
        (INVALID, "2 layers", "push nobody 2 99 0 0 -1 0 1 0 0 1"),
        (INVALID, "tensor_num_per_layer=0", "push nobody 2 1 0 0 -1 -1 -1 -1 -1 0"),
        (INVALID, "cluster_id=1", "push nobody 1 1 0 0 -1"),
        (INVALID, "host memory", "push lent 2 1 0 0 -1"),
        (INVALID, "host memory", "push_blocks lent 2 1 0 1 0 1 0"),
        (GONE, "-1", "push nobody 2 1 0 0 -1"),
        (INVALID, "src_blocks has 2", "push_blocks nobody 2 1 0 2 0 1 1 0"),
        (INVALID, "dst_layer_range=(1, 0)", "push_blocks nobody 2 1 0 1 0 1 0 0 1 1 0 1"),
        (GONE, "-1", "push_blocks nobody 2 1 0 1 0 1 0"),
        (INVALID, "size=0", "pull 2 1 0 nobody 0 0"),
        (INVALID, "dst_layer_range=(1, 0)", "pull 2 1 0 nobody 0 -1 0 1 1 0 1"),
        (INVALID, "tensor_num_per_layer=0", "pull 2 1 0 nobody 0 -1 -1 -1 -1 -1 0"),
        (INVALID, "cluster_id=1", "pull 1 1 0 nobody 0 -1"),
        (INVALID, "src_blocks has 1", "pull_blocks 2 1 0 nobody 1 0 2 0 1"),
        (INVALID, "src_layer_range=(-1, 2)", "pull_blocks 2 1 0 nobody 1 0 1 0 -1 2 0 0 1"),
        (GONE, "-1", "pull_blocks 2 1 0 nobody 1 0 1 0"),
        (INVALID, "src_cache_index.batch_index=2", "pull_blocks 2 1 2 n 1 0 1 0"),
        (INVALID, "dst_blocks=[]", "pull_blocks 2 1 0 n 1 0 0"),
        (INVALID, "src_blocks has 1", "pull_blocks 2 1 0 n 1 0 2 0 1"),
        (INVALID, "a block has 40 bytes", "pull_blocks 2 2 0 n 1 0 1 0"),
    ]
    for expected, fact, command in rows:
        assert near.ask(command) == [expected], (command, near.reason)
        assert fact in near.reason, (command, near.reason)
    assert equal(far.read("f"), pattern(2, 4, 5, 40))
    assert equal(near.read("n"), pattern(1, 4, 5, 40))
    assert far.ask("deallocate", target) == [SUCCESS]
    assert near.ask("push n 2 1 0 0 -1") == [GONE]
    assert near.ask("pull 2 1 0 n 0 -1") == [GONE]


@pytest.mark.contract("19.cpp-push-kv-cache")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("tensors", [1, 5])
def test_what_the_default_of_tensors_per_layer_moves(cpp: Callable[..., Cpp], tensors: int, transport: str) -> None:
    """The default 2 is no fault of a program that gives no range, and may stay with ranges (page of PushKvCache)."""
    near, far = pair(cpp, llm__LinkTransport=transport)
    target = far.make("f", tensors, 5, 40, 2)
    near.make("n", tensors, 5, 40, 1)
    ours, theirs = pattern(1, tensors, 5, 40), pattern(2, tensors, 5, 40)
    assert near.ask("push", "n", 2, target, 3, 1, -1) == [SUCCESS], near.reason
    assert near.ask("push_blocks", "n", 2, target, 0, listed([0]), listed([4])) == [SUCCESS], near.reason
    assert near.ask("pull", 2, target, 0, "n", 2, -1) == [SUCCESS], near.reason
    for tensor in range(tensors):
        theirs[tensor][3], theirs[tensor][4] = ours[tensor][1], ours[tensor][0]
        ours[tensor][2] = theirs[tensor][0]
    layers = SUCCESS if tensors == 5 else INVALID
    assert near.ask("push", "n", 2, target, 1, 0, -1, 1, 1, 0, 0, 2) == [layers], near.reason
    assert near.ask("pull", 2, target, 0, "n", 4, -1, 0, 1, 0, 1, 2) == [layers], near.reason
    if tensors == 5:
        for tensor in (0, 1):
            theirs[tensor][1] = ours[tensor + 2][0]
        for tensor in range(4):
            ours[tensor][4] = theirs[tensor][0]
    assert near.ask("push", "n", 2, target, 1, 0, -1, 2, 2, 2, 2, 2) == [INVALID], near.reason
    assert equal(far.read("f"), theirs)
    assert equal(near.read("n"), ours)


@pytest.mark.contract("19.cpp-codes")
def test_a_peer_that_hangs_is_a_timeout(cpp: Callable[..., Cpp]) -> None:
    near, far = pair(cpp, llm__SyncKvCacheWaitTime=300, llm__LinkTransport="tcp")
    near.make("n", 2, 2, 8, 1)
    far.make("f", 2, 2, 8, 2)
    far.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        for command in ("push n 2 1 0 0 -1", "pull 2 1 0 n 0 -1"):
            assert near.ask(command) == [LATE], near.reason
            assert "limit_ms=300" in near.reason
        assert time.monotonic() - began < LIMIT
    finally:
        far.process.send_signal(signal.SIGCONT)
    assert equal(near.read("n"), pattern(1, 2, 2, 8))


def test_a_peer_that_dies_is_not_linked(cpp: Callable[..., Cpp]) -> None:
    near, far = pair(cpp)
    near.make("n", 2, 2, 8, 1)
    far.make("f", 2, 2, 8, 2)
    assert near.ask("push n 2 1 0 0 -1") == [SUCCESS]
    far.process.kill()
    far.dead = True
    far.process.wait(LIMIT)
    assert near.ask("push n 2 1 0 0 -1") == [UNLINKED], near.reason
    # Its memory is still mapped here, and whole: a pull may succeed until the link is known to be broken.
    eventually(lambda: near.ask("pull 2 1 0 n 0 -1") == [UNLINKED])


@pytest.mark.contract("19.cpp-push-kv-cache")
def test_the_role_decoder_does_not_push_and_mix_does(cpp: Callable[..., Cpp]) -> None:
    mix, decoder = cpp(1, MIX).open(), cpp(2, DECODER).open()
    assert mix.ask("link", 2, decoder.port) == [SUCCESS, SUCCESS]
    mix.make("c", 2, 2, 8, 1)
    decoder.make("c", 2, 2, 8, 2)
    for command in ("push c 1 1 0 0 -1", "push_blocks c 1 1 0 1 0 1 0", "push nobody 1 1 0 0 -1"):
        assert decoder.ask(command) == [INVALID]
        assert "Decoder" in decoder.reason
    assert mix.ask("push c 2 1 0 0 -1") == [SUCCESS], mix.reason
    assert mix.ask("unlink", 2, decoder.port) == [SUCCESS, SUCCESS]
    assert decoder.ask("set_role", PROMPT) == [INVALID, str(decoder.port)], "decoders must find it somewhere"
    assert "llm.ListenIpInfo" in decoder.reason
    assert decoder.ask("set_role", MIX) == [SUCCESS, "0"], "without an address it listens nowhere"
    assert decoder.ask("set_role", PROMPT, "llm.ListenIpInfo=127.0.0.1:0")[0] == SUCCESS
    assert decoder.ask("link", 1, mix.port) == [SUCCESS, SUCCESS], decoder.reason
    assert decoder.ask("push c 1 1 0 0 -1") == [SUCCESS], decoder.reason


def test_with_links_that_go_both_ways_a_role_is_a_label(cpp: Callable[..., Cpp]) -> None:
    far, near = cpp(2).open(llm__TransferBackend="hixl"), cpp(1, DECODER).open(llm__TransferBackend="hixl")
    far.make("c", 2, 2, 8, 1)
    near.make("c", 2, 2, 8, 2)
    assert near.ask("link", 2, far.port) == [SUCCESS, SUCCESS]
    assert near.ask("push c 2 1 0 1 -1") == [SUCCESS], near.reason
    expected = pattern(1, 2, 2, 8)
    for tensor, other in zip(expected, pattern(2, 2, 2, 8)):
        tensor[0] = other[1]
    assert equal(far.read("c"), expected)


def test_set_role(cpp: Callable[..., Cpp]) -> None:
    near, far = pair(cpp)
    assert near.ask("set_role", DECODER)[0] == LINKED
    assert near.ask("unlink", 2, far.port) == [SUCCESS, SUCCESS]
    status, port = near.ask("set_role", DECODER, "llm.ListenIpInfo=127.0.0.1:0")
    assert (status, port != "0") == (SUCCESS, True)
    assert near.ask("set_role", PROMPT, "llm.ListenIpInfo=nowhere")[0] == INVALID
    assert near.ask("set_role", 4)[0] == INVALID
    assert "role=4" in near.reason
    fixed = cpp(3).open(llm__TransferBackend="hixl")
    assert fixed.ask("set_role", MIX) == [SUCCESS, str(fixed.port)]
    assert fixed.ask("set_role", MIX, "llm.ListenIpInfo=127.0.0.1:1")[0] == DISABLED
    never = cpp(4).open(llm__EnableSwitchRole=0)
    assert never.ask("set_role", MIX)[0] == DISABLED
    assert "llm.EnableSwitchRole" in never.reason


def test_links(cpp: Callable[..., Cpp]) -> None:
    near, far = pair(cpp)
    already = "5010b008"
    assert near.ask("link", 2, far.port) == [already, already]
    assert near.ask("unlink", 5, far.port) == [SUCCESS, SUCCESS], "a cluster that is not linked"
    assert near.ask("force", 2, far.port) == [SUCCESS, SUCCESS]
    assert far.ask("force", 1, near.port) == [SUCCESS, SUCCESS]
    assert near.ask("link", 2, far.port) == [SUCCESS, SUCCESS], "good again"
    assert near.ask("link", 3, 1)[0] == "5010b009"
    assert "cluster=3" in near.reason


@pytest.mark.contract("19.cpp-copy-kv-cache")
def test_copies_by_id_and_by_address(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1).open()
    end.make("a", 2, 4, 16, 1)
    end.make("b", 2, 5, 16, 2)
    end.make("own", 2, 4, 16, 3, "register", HOST)
    end.make("loose", 2, 4, 16, 4, "loose", HOST)
    end.make("lent", 2, 4, 16, 5, "loose", DEVICE)
    bytes_of = {name: pattern(seed, 2, rows, 16) for name, seed, rows in (
        ("a", 1, 4), ("b", 2, 5), ("own", 3, 4), ("loose", 4, 4), ("lent", 5, 4)
    )}  # fmt: skip
    for src, dst in (("a", "b"), ("a", "a"), ("b", "own"), ("a", "loose"), ("lent", "a"), ("lent", "loose")):
        assert end.ask("copy", src, dst, 2, 1, 4, 9) == [SUCCESS], (src, dst, end.reason)
        assert end.ask("copy", src, dst, 0, 3, 0, -1) == [SUCCESS], (src, dst, end.reason)
        for to, out in zip(bytes_of[dst], bytes_of[src]):
            to[1, 4:13] = out[2, 4:13]
            to[3] = out[0]
    for src, dst in (("a", "b"), ("b", "a"), ("a", "loose"), ("loose", "b"), ("own", "a"), ("a", "own")):
        lists = f"2 {listed([0, 1])} {listed([2, 3])}"
        assert end.ask("copy_blocks", src, dst, listed([3, 0]), lists) == [SUCCESS], (src, dst, end.reason)
        for to, out in zip(bytes_of[dst], bytes_of[src]):
            to[[0, 1]] = to[[2, 3]] = out[[3, 0]].copy()
    for name, content in bytes_of.items():
        assert equal(end.read(name), content), name


@pytest.mark.contract("19.cpp-copy-kv-cache", "19.cpp-codes")
def test_what_a_copy_refuses(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1).open()
    names = (("a", 2, 4, 16), ("narrow", 2, 4, 15), ("few", 1, 4, 16))
    for name, tensors, rows, size in names:
        end.make(name, tensors, rows, size, 1)
    end.make("host", 2, 4, 16, 1, "register", HOST)
    end.make("loose", 2, 4, 16, 1, "loose", HOST)
    end.make("gone", 2, 4, 16, 1, "loose")
    assert end.ask("claim gone 99 4 2") == [SUCCESS]
    rows = [
        (INVALID, "host memory", "copy host a 0 0 0 -1"),
        (INVALID, "host memory", "copy loose a 0 0 0 -1"),
        (INVALID, "src_batch_index=4", "copy a a 4 0 0 -1"),
        (INVALID, "dst_batch_index=4", "copy a a 0 4 0 -1"),
        (INVALID, "offset=16", "copy a a 0 1 16 -1"),
        (INVALID, "size=0", "copy a a 0 1 0 0"),
        (INVALID, "size=-2", "copy a a 0 1 0 -2"),
        (INVALID, "size=9", "copy a a 0 1 8 9"),
        (INVALID, "size=-1", "copy a narrow 0 1 0 -1"),
        (INVALID, "2 tensors", "copy a few 0 1 0 -1"),
        (INVALID, "src_blocks=[]", "copy_blocks a a 0 1 0"),
        (INVALID, "dst_blocks_list=[]", "copy_blocks a a 1 0 0"),
        (INVALID, "dst_blocks_list[1] has 2", "copy_blocks a a 1 0 2 1 1 2 1 2"),
        (INVALID, "block sizes 16 and 15", "copy_blocks a narrow 1 0 1 1 1"),
        (INVALID, "destination block=4", "copy_blocks a a 1 0 1 1 4"),
        (INVALID, "one must be device", "copy_blocks host loose 1 0 1 1 0"),
        (GONE, "99", "copy gone a 0 0 0 -1"),
        (INVALID, "size=0", "copy gone a 0 0 0 0"),
        (INVALID, "size=-2", "copy a gone 0 0 0 -2"),
        (GONE, "99", "copy_blocks gone a 1 0 1 1 0"),
        (INVALID, "src_blocks=[]", "copy_blocks gone a 0 1 0"),
        (INVALID, "dst_blocks_list[0] has 2", "copy_blocks a gone 1 0 1 2 1 2"),
    ]
    for expected, fact, command in rows:
        assert end.ask(command) == [expected], (command, end.reason)
        assert fact in end.reason, (command, end.reason)
    for name, tensors, rows_, size in names:
        assert equal(end.read(name), pattern(1, tensors, rows_, size)), "a refused copy moved something"
    # A structure must not contradict the cache its id names.
    assert end.ask("claim a 1 5 2") == [SUCCESS]
    assert end.ask("copy a narrow 0 0 0 8") == [INVALID]
    assert "cache_desc" in end.reason
    assert end.ask("claim a 1 4 1") == [SUCCESS]
    assert end.ask("copy a narrow 0 0 0 8") == [INVALID]
    assert "tensor_addrs" in end.reason
    assert end.ask("claim a 77 4 0") == [SUCCESS]
    assert end.ask("copy a narrow 0 0 0 8") == [GONE]
    assert end.ask("claim a 1 4 0") == [SUCCESS]
    assert end.ask("copy a narrow 0 0 0 8") == [SUCCESS], "the id is enough"
    for number in (0, -2):
        assert end.ask("claim a", number, 4, 2) == [SUCCESS]
        assert end.ask("copy a narrow 0 0 0 8") == [GONE], "only -1 means the addresses"
    assert end.ask("claim a 1 4 0") == [SUCCESS]
    assert end.ask("place a", HOST) == [SUCCESS]
    assert end.ask("copy a narrow 0 0 0 8") == [INVALID]
    assert "host memory" in end.reason
    assert end.ask("copy_blocks a narrow 1 0 1 1 0") == [INVALID]
    assert "placement" in end.reason
    assert end.ask("place host", DEVICE) == [SUCCESS]
    assert end.ask("copy narrow host 0 0 0 8") == [INVALID]
    assert "placement" in end.reason


@pytest.mark.contract("19.cpp-types")
def test_caches_come_and_go(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1).open()
    assert end.ask("allocate", "x", HOST, 1, UINT8, 4, 16)[0] == INVALID
    assert end.ask("allocate", "x", DEVICE, 2, UINT8, 4, 1 << 20)[0] == FULL
    assert "longest" in end.reason or "free" in end.reason
    for _ in range(5):
        first = end.make("x", 1, 2, 1 << 19, 1)
        assert end.ask("deallocate", first) == [SUCCESS]
        assert end.ask("deallocate", first) == [SUCCESS], "one that is not there"
    own = end.make("own", 1, 4, 16, 1, "register")
    assert end.ask("deallocate", own) == [SUCCESS]
    assert end.ask("copy own own 0 1 0 -1") == [SUCCESS], "a registered cache is not deallocated"
    assert end.ask("unregister", own) == [SUCCESS]
    assert end.ask("unregister", own) == [SUCCESS], "one that is not there"
    assert end.ask("copy own own 0 1 0 -1") == [GONE]
    assert end.ask("finalize") == [SUCCESS]
    assert end.ask("finalize") == [SUCCESS]
    assert end.ask("copy own own 0 1 0 -1") == [FAILED]
    assert end.open().make("again", 1, 4, 16, 1) == 1, "may be initialised again"


def test_the_reason_of_a_refused_initialize_outlives_other_questions(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1)
    assert end.ask("init", "llm.DeviceId=x") == [INVALID, "0"], "the port is asked for before the reason"
    assert 'llm.DeviceId="x"' in end.reason


def test_huge_pages_are_an_option_of_initialize(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1)
    for word in ("on", "Eager", ""):
        assert end.ask("init", "llm.DeviceId=0", f"llm.HugePages={word}") == [INVALID, "0"]
        assert f'huge_pages="{word}" must be auto or off or merge or merge_registered or eager' in end.reason
    for cluster, word in enumerate(("auto", "off", "merge", "merge_registered", "eager"), 2):
        chosen = cpp(cluster).open(llm__HugePages=word)
        chosen.make("x", 2, 3, 100, 1)
        assert equal(chosen.read("x"), pattern(1, 2, 3, 100))


def test_without_a_size_the_pool_is_the_machines(cpp: Callable[..., Cpp]) -> None:
    end = cpp(1)
    assert end.ask("init", "llm.DeviceId=0") == [SUCCESS, "0"], end.reason
    end.make("x", 2, 3, 100, 1)
    assert end.ask("allocate", "big", DEVICE, 4, UINT8, 1, 64 << 20)[0] == SUCCESS
    assert equal(end.read("x"), pattern(1, 2, 3, 100))
    sized = cpp(2)
    assert sized.ask("init", "llm.DeviceId=0", 'llm.BufPoolCfg={"buf_pool_size":1048576}') == [SUCCESS, "0"]
    assert sized.ask("allocate", "big", DEVICE, 1, UINT8, 1, (1 << 20) + 1)[0] == FULL
    assert sized.ask("allocate", "fits", DEVICE, 1, UINT8, 1, 1 << 20)[0] == SUCCESS


# -- C++ and Python --------------------------------------------------------------------------------------------------


def python_end(ends: Ends, **given: Any) -> End:
    """The Python end here, cluster 9, which listens."""
    return ends.near(options(accessible=True, listen="127.0.0.1:0", **given), cluster=9)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("registered", [False, True])
def test_a_python_process_links_pulls_from_and_pushes_to_the_class(
    ends: Ends, cpp: Callable[..., Cpp], registered: bool, transport: str
) -> None:
    near, far = python_end(ends, llm__LinkTransport=transport), cpp(2).open(llm__LinkTransport=transport)
    target = far.make("f", 4, 5, 40, 2, "register" if registered else "allocate")
    near.make("n", 5, 40, 4, registered=registered, seed=1)
    ours, theirs = pattern(1, 4, 5, 40), pattern(2, 4, 5, 40)
    assert near.link_clusters([far.at])[0] == OK
    near.push_cache(by_slot(2, target, 3), "n", 1)
    near.pull_cache(by_slot(2, target, 0), "n", 4)
    near.push_cache(by_slot(2, target, 2), "n", 0, src_layers=(1, 2), dst_layers=(0, 1))
    for tensor in range(4):
        theirs[tensor][3] = ours[tensor][1]
        ours[tensor][4] = theirs[tensor][0]
    for tensor in (0, 1):
        theirs[tensor][2] = ours[tensor + 2][0]
    assert equal(far.read("f"), theirs)
    assert equal(near.read("n"), ours)
    assert near.unlink_clusters([far.at])[0] == OK


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_class_links_pulls_from_and_pushes_to_a_python_process(
    ends: Ends, cpp: Callable[..., Cpp], blocks: bool, transport: str
) -> None:
    far, near = python_end(ends, llm__LinkTransport=transport), cpp(2).open(llm__LinkTransport=transport)
    keys = [by_blocks(9)] if blocks else []
    target = far.make("f", 5, 40, 4, blocks=blocks, keys=keys, seed=1)
    near.make("n", 4, 5, 40, 2)
    ours, theirs = pattern(2, 4, 5, 40), pattern(1, 4, 5, 40)
    port = far.listening().rpartition(":")[2]
    assert near.ask("link", 9, port) == [SUCCESS, SUCCESS], near.reason
    # Blocks are rows to the class, whatever Python calls them.
    assert near.ask("push_blocks", "n", 9, target, 0, listed([0, 1]), listed([4, 2])) == [SUCCESS], near.reason
    assert near.ask("pull_blocks", 9, target, 0, "n", listed([3, 0]), listed([3, 4])) == [SUCCESS], near.reason
    for tensor in range(4):
        theirs[tensor][[4, 2]] = ours[tensor][[0, 1]]
        ours[tensor][[3, 4]] = theirs[tensor][[3, 0]]
    slots = INVALID if blocks else SUCCESS
    assert near.ask("push", "n", 9, target, 0, 2, -1) == [slots], near.reason
    assert near.ask("pull", 9, target, 0, "n", 1, -1) == [slots], near.reason
    if not blocks:
        for tensor in range(4):
            theirs[tensor][0] = ours[tensor][2]
            ours[tensor][1] = theirs[tensor][0]
    assert equal(far.read("f"), theirs)
    assert equal(near.read("n"), ours)


def test_a_python_process_in_the_other_mode_is_told_why(ends: Ends, cpp: Callable[..., Cpp]) -> None:
    near, far = ends.near(options(), cluster=9), cpp(2).open()
    code, codes = near.link_clusters([far.at])
    assert code != OK
    assert codes == [code]


def test_many_threads_use_one_object(built: Callable[..., Path]) -> None:
    assert run([built("threads")]) == "done\n"


# -- the header --------------------------------------------------------------------------------------------------------


@pytest.mark.contract("19.cpp-types")
@pytest.mark.parametrize("more", ["", "-fno-exceptions -fno-rtti", "-D_GLIBCXX_USE_CXX11_ABI=0"])
@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("dialect", ["c++14", "c++17", "c++20"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_header_compiles_in_every_dialect(
    compiler: str, dialect: str, level: str, more: str, tmp_path: Path
) -> None:
    for name in ("every_method", "second"):
        flags = [f"-std={dialect}", level, *WARNINGS, *more.split(), "-I", INCLUDE]
        run([compiler, *flags, "-c", SOURCES / f"{name}.cpp", "-o", tmp_path / f"{name}.o"])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_log_callback_gets_lines_until_it_is_removed(built: Callable[..., Path], compiler: str) -> None:
    assert run([built("log", compiler)]) == "logged\n"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_program_without_optimisation_and_exceptions_links_and_runs(compiler: str, tmp_path: Path) -> None:
    flags = ["-std=c++14", "-O0", *WARNINGS, "-fno-exceptions", "-I", INCLUDE, *SANITIZE]
    found = [f"-L{LIBRARY}", "-lllm_datadist", f"-Wl,-rpath,{LIBRARY}"]
    run([compiler, *flags, SOURCES / "every_method.cpp", "-o", tmp_path / "program", *found])
    run([tmp_path / "program"])


def test_a_program_of_a_newer_header_is_told_so(tmp_path: Path) -> None:
    newer = tmp_path / "include"
    shutil.copytree(INCLUDE, newer)
    header = newer / "llm_datadist" / "llm_datadist_c.h"
    text, count = re.subn(
        r"#define LLM_DATADIST_ABI_VERSION 2\n", "#define LLM_DATADIST_ABI_VERSION 3\n", header.read_text()
    )
    assert count == 1
    header.write_text(text)
    source = tmp_path / "newer.cpp"
    source.write_text(
        '#include "llm_datadist/llm_datadist.h"\n#include <iostream>\nint main() {\n'
        "  llm_datadist::LlmDataDist engine(1, llm_datadist::LlmRole::kPrompt);\n"
        '  std::cout << std::hex << engine.Initialize({{llm_datadist::OPTION_DEVICE_ID, "0"}}) << " "\n'
        "            << llm_datadist::LastErrorMessage();\n  return 0;\n}\n"
    )
    found = [f"-L{LIBRARY}", "-lllm_datadist", f"-Wl,-rpath,{LIBRARY}"]
    program = build(COMPILERS[0], tmp_path / "newer", [source], "-I", newer, *found)
    status, _, reason = run([program]).partition(" ")
    assert status == FAILED
    assert "version 3" in reason
    assert "version 2" in reason


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
    """A prefix that `make install` filled, and that was moved since."""
    prefix = tmp_path_factory.mktemp("installed") / "pre fix"
    run(["make", "--no-print-directory", "-C", ROOT, "install-files", f"PREFIX={prefix}"])
    moved = prefix.with_name("mo ved")
    prefix.rename(moved)
    return moved


GUIDE = (ROOT / "docs" / "how-to" / "cpp.md").read_text(encoding="utf-8")


def guide_program(folder: Path) -> Path:
    """The C++ program of the guide, as a file."""
    (text,) = re.findall(r"```cpp\n(.*?)```", GUIDE, re.DOTALL)
    source = folder / "prefill_and_decode.cpp"
    source.write_text(text, encoding="utf-8")
    return source


def check_guide_output(output: str) -> None:
    """The program pulls a value, and shows the reason of a call that fails."""
    pulled, reason = output.splitlines()
    assert pulled == "pulled 1.5"
    assert reason.startswith("src_blocks[0]")
    assert "0 to 127" in reason


@packaged
@readable
def test_the_program_of_the_guide_builds_with_pkg_config_and_runs(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PKG_CONFIG_PATH": str(installed / "lib" / "pkgconfig")}
    flags = run(["pkg-config", "--cflags", "--libs", "llm_datadist"], env=environment)
    assert run(["pkg-config", "--modversion", "llm_datadist"], env=environment).strip() == "0.1.0"
    source, program = guide_program(tmp_path), tmp_path / "program"
    # Through a shell, as a user has it: pkg-config quotes for one.
    command = f"{COMPILERS[0]} {' '.join(STRICT)} '{source}' -o '{program}' {flags}"
    run(["sh", "-c", command])
    check_guide_output(run([program], env={**os.environ, "LD_LIBRARY_PATH": str(installed / "lib")}))
    # By its path too, a program asks for the library by the name it has everywhere.
    library, include = installed / "lib" / "libllm_datadist.so", installed / "include"
    run([COMPILERS[0], *STRICT, "-I", include, source, "-o", tmp_path / "by path", library])
    for made in (program, tmp_path / "by path"):
        needed = re.findall(r"\(NEEDED\).*\[(.*llm_datadist.*)\]", run(["readelf", "-d", made]))
        assert needed == [SONAME]


@packaged
@readable
@pytest.mark.skipif(SANITIZED, reason="a static program, without the sanitizers' own library")
def test_the_program_of_the_guide_links_statically(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PKG_CONFIG_PATH": str(installed / "lib" / "pkgconfig")}
    flags = run(["pkg-config", "--static", "--cflags", "--libs", "llm_datadist"], env=environment)
    flags = flags.replace("-lllm_datadist", "-l:libllm_datadist.a")
    source, program = guide_program(tmp_path), tmp_path / "program"
    run(["sh", "-c", f"{COMPILERS[0]} {' '.join(STRICT)} '{source}' -o '{program}' {flags}"])
    assert "llm_datadist" not in run(["readelf", "-d", program])
    check_guide_output(run([program]))


def test_the_program_of_the_guide_builds_with_cmake(installed: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
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


def test_cmake_accepts_only_compatible_versions(installed: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    package = installed / "lib/cmake/llm_datadist/llm_datadistConfigVersion.cmake"
    script = tmp_path / "version.cmake"

    def accepted(installed_version: str, wanted: str) -> bool:
        text = package.read_text(encoding="utf-8").replace(VERSION, installed_version)
        major, minor, *_ = [*wanted.split("."), "0"]
        script.write_text(
            f'set(PACKAGE_FIND_VERSION "{wanted}")\nset(PACKAGE_FIND_VERSION_MAJOR {major})\n'
            f'set(PACKAGE_FIND_VERSION_MINOR {minor})\n{text}\nmessage("${{PACKAGE_VERSION_COMPATIBLE}}")\n'
        )
        done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=True)  # noqa: S603, S607
        return {"TRUE": True, "FALSE": False}[done.stderr.strip()]

    for version, wanted, expected in [
        ("0.1.0", "0.1", True),
        ("0.1.3", "0.1.2", True),
        ("0.1.0", "0.1.1", False),
        ("0.2.0", "0.1", False),
        ("1.4.0", "1.2", True),
        ("1.4.0", "1.5", False),
        ("2.0.0", "1.4", False),
        ("1.0.0", "0.9", False),
    ]:
        assert accepted(version, wanted) == expected, (version, wanted)


def files_below(folder: Path) -> set[str]:
    """The paths of all files and links below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def installation(library: str = "lib", include: str = "include", documents: str = "share/doc/llm_datadist") -> set[str]:
    """The files that an install puts into a prefix."""
    names = ["libllm_datadist.so", SONAME, f"libllm_datadist.so.{VERSION}", "libllm_datadist.a"]
    names += ["pkgconfig/llm_datadist.pc"]
    names += [f"cmake/llm_datadist/llm_datadist{part}.cmake" for part in ("Config", "ConfigVersion")]
    headers = [f"{include}/llm_datadist/{name}.h" for name in ("llm_datadist", "llm_datadist_c")]
    licenses = [f"{documents}/{name}" for name in ("LICENSE", "THIRD-PARTY-LICENSES")]
    return {*(f"{library}/{name}" for name in names), *headers, *licenses}


def test_the_installed_files(installed: Path) -> None:
    assert sys.platform == "linux"
    assert files_below(installed) == installation()
    licenses = (installed / "share/doc/llm_datadist/THIRD-PARTY-LICENSES").read_text(encoding="utf-8")
    assert "MIT License" in licenses or "Permission is hereby granted" in licenses
    links = {name: str((installed / "lib" / name).readlink()) for name in ("libllm_datadist.so", SONAME)}
    assert links == {"libllm_datadist.so": SONAME, SONAME: f"libllm_datadist.so.{VERSION}"}
    assert VERSION in (installed / "lib/pkgconfig/llm_datadist.pc").read_text()


@readable
def test_installed_libraries_have_no_debug_information(installed: Path) -> None:
    assert ".debug_line" in run(["readelf", "-S", "-W", LIBRARY / "libllm_datadist.so"]), "nothing to strip"
    for name in ("libllm_datadist.so", "libllm_datadist.a"):
        assert ".debug_line" not in run(["readelf", "-S", "-W", installed / "lib" / name])
    symbols = run(["nm", "-D", "--defined-only", installed / "lib/libllm_datadist.so"]).splitlines()
    assert len(symbols) > 15


@packaged
def test_install_honours_its_folders_and_uninstall_leaves_other_files(tmp_path: Path) -> None:
    prefix = tmp_path / "pre fix"
    folders = [
        f"PREFIX={prefix}",
        f"LIBDIR={prefix}/lib/triple",
        f"INCLUDEDIR={prefix}/headers",
        f"DOCDIR={prefix}/doc",
    ]
    make = ["make", "--no-print-directory", "-C", ROOT]
    run([*make, "install-files", *folders])
    assert files_below(prefix) == installation("lib/triple", "headers", "doc")
    environment = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/triple/pkgconfig")}
    paths = {
        name: Path(run(["pkg-config", f"--variable={name}", "llm_datadist"], env=environment).strip().replace("\\", ""))
        for name in ("prefix", "libdir", "includedir")
    }
    assert {name: path.resolve() for name, path in paths.items()} == {
        "prefix": prefix,
        "libdir": prefix / "lib/triple",
        "includedir": prefix / "headers",
    }
    foreign = {"lib/triple/libother.so", "doc/notes"}
    for name in foreign:
        (prefix / name).touch()
    run([*make, "uninstall", *folders])
    assert files_below(prefix) == foreign
    assert not (prefix / "headers/llm_datadist").exists()


def test_install_honours_destdir(tmp_path: Path) -> None:
    make = ["make", "--no-print-directory", "-C", ROOT]
    run([*make, "install-files", f"DESTDIR={tmp_path}/root", "PREFIX=/opt/x"])
    assert files_below(tmp_path) == {f"root/opt/x/{name}" for name in installation()}
    run([*make, "uninstall", f"DESTDIR={tmp_path}/root", "PREFIX=/opt/x"])
    assert files_below(tmp_path) == set()


def test_install_refuses_a_relative_prefix() -> None:
    done = subprocess.run(  # noqa: S603
        ["make", "--no-print-directory", "-C", ROOT, "install-files", "PREFIX=here"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "PREFIX must be an absolute path: PREFIX=here" in done.stderr
