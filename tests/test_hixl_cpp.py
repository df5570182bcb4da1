"""The C++ classes `hixl::Hixl` and `adxl::AdxlEngine`: each call in one process, and two processes.

Not for: headers and install (`test_cpp_install.py`), null pointers and handles (`crates/capi/src/tests/hixl.rs`), or
rules that the Python module shares, such as peers that stop or die (`test_hixl_*.py`).
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any, Callable

import pytest
from contract import NO_COMPILER

from cpp_programs import COMPILERS, run
from hixl import ALREADY_CONNECTED, FAILED, NOT_CONNECTED, PARAM_INVALID, SUCCESS
from hixl_ends import listener, pattern
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)

READ, WRITE = 0, 1
WAITING, COMPLETED, ENDED = 0, 1, 3
SIZE = 1 << 16
LIMIT_MS = 20_000  # of calls that succeed
COMMANDS = "state options registration links ranges requests notifications connections threads adxl"


@pytest.mark.parametrize("command", COMMANDS.split())
@pytest.mark.parametrize("compiler", COMPILERS)
def test_calls_in_one_process(built: Callable[..., Path], compiler: str, command: str) -> None:
    assert run([built("hixl_calls", compiler, "hixl_types"), command]) == "done\n"


# -- two processes ---------------------------------------------------------------------------------------------------


def word(text: str | bytes) -> str:
    """A text as a word of a command."""
    return "." + (text.encode() if isinstance(text, str) else text).hex()


class HixlEnd:
    """A process of `hixl_end.cpp` with a registered range."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen(  # noqa: S603
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address, self.at, self.handle = "", 0, 0

    def send(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> list[Any]:
        """The numbers and texts of an answer, the status first."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it died: {self.process.wait(LIMIT)}"
        return [bytes.fromhex(one[1:]) if one.startswith(".") else int(one) for one in line.split()]

    def ask(self, *words: Any) -> list[Any]:
        self.send(*words)
        return self.answer()

    def open(self, address: str, seed: int, **options: str) -> HixlEnd:
        pairs = [word(text) for pair in options.items() for text in pair]
        assert self.ask("initialize", word(address), len(options), *pairs) == [SUCCESS]
        self.address = address
        _, self.at = self.ask("add", "m", word(pattern(seed, SIZE)))
        status, self.handle = self.ask("register", self.at, SIZE, 0, 0)
        assert status == SUCCESS
        return self

    def content(self) -> bytes:
        return self.ask("bytes", "m")[1]

    def connect(self, other: HixlEnd) -> int:
        return self.ask("connect", word(other.address), LIMIT_MS)[0]

    def disconnect(self, other: HixlEnd) -> int:
        return self.ask("disconnect", word(other.address), LIMIT_MS)[0]

    def move(self, other: HixlEnd, op: int, *ops: tuple[int, int, int]) -> int:
        """Move (own offset, offset of the other, bytes)."""
        return self.ask("move", word(other.address), op, LIMIT_MS, *self.ops(other, ops))[0]

    def submit(self, other: HixlEnd, op: int, *ops: tuple[int, int, int]) -> list[int]:
        return self.ask("submit", word(other.address), op, *self.ops(other, ops))

    def ops(self, other: HixlEnd, ops: tuple[tuple[int, int, int], ...]) -> list[int]:
        return [len(ops), *(number for own, remote, size in ops for number in (self.at + own, other.at + remote, size))]

    def notify(self, other: HixlEnd, name: str, text: str) -> int:
        return self.ask("notify", word(other.address), word(name), word(text), LIMIT_MS)[0]

    def ended(self, request: int) -> list[int]:
        """The status and the state of a request that does not wait any more."""
        found: list[int] = []
        assert eventually(lambda: found.clear() or found.extend(self.ask("state", request)) or found[1:] != [WAITING])
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def start(built: Callable[..., Path]) -> Iterator[Callable[[], HixlEnd]]:
    """A function that starts a process. Each must end with status 0."""
    started: list[HixlEnd] = []

    def begin() -> HixlEnd:
        started.append(HixlEnd(built("hixl_end")))
        return started[-1]

    yield begin
    try:
        for end in started:
            end.process.communicate(timeout=LIMIT)
            assert end.process.returncode == 0
    finally:
        for end in started:
            end.kill()


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_client_reads_and_writes_a_target_that_calls_nothing(
    start: Callable[[], HixlEnd], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    if transport:
        monkeypatch.setenv("LLM_DATADIST_TRANSPORT", transport)
    a, b = start().open("127.0.0.1:0", 1), start().open(listener(), 2)
    assert a.move(b, READ, (0, 0, 1)) == NOT_CONNECTED
    assert a.connect(b) == SUCCESS
    assert a.connect(b) == ALREADY_CONNECTED
    own, remote = bytearray(pattern(1, SIZE)), bytearray(pattern(2, SIZE))
    assert a.move(b, READ, (7, 100, 4096), (5000, 5001, 3)) == SUCCESS
    own[7:4103], own[5000:5003] = remote[100:4196], remote[5001:5004]
    assert a.move(b, WRITE, (0, SIZE // 2, 10_000)) == SUCCESS
    remote[SIZE // 2 : SIZE // 2 + 10_000] = own[:10_000]
    assert (a.content(), b.content()) == (own, remote)
    requests = []
    for i in range(16):
        offset = 20_000 + i * 100
        status, request = a.submit(b, i % 2, (offset, offset, 99))
        assert (status, request != 0) == (SUCCESS, True)
        requests.append(request)
        here, there = (own, remote) if i % 2 == READ else (remote, own)
        here[offset : offset + 99] = there[offset : offset + 99]
    for request in requests:
        assert a.ended(request) == [SUCCESS, COMPLETED]
        assert a.ask("state", request) == [PARAM_INVALID, ENDED]
    assert (a.content(), b.content()) == (own, remote)
    assert a.disconnect(b) == SUCCESS
    assert a.disconnect(b) == NOT_CONNECTED
    for end in (a, b):
        assert end.ask("deregister", end.handle) == [SUCCESS]
        assert end.ask("finalize") == [SUCCESS]
    assert a.connect(b) == FAILED


def test_notifications_of_two_senders_arrive_in_order(start: Callable[[], HixlEnd]) -> None:
    a, b, target = start().open("127.0.0.1:0", 1), start().open("127.0.0.1:0", 2), start().open(listener(), 3)
    assert a.connect(target) == b.connect(target) == SUCCESS
    for i in range(50):
        assert a.notify(target, "a", str(i)) == SUCCESS
        assert b.notify(target, "b", f"{i}\0é") == SUCCESS
    status, *texts = target.ask("notifies")
    pairs = list(zip(texts[::2], texts[1::2]))
    assert status == SUCCESS
    assert [text for name, text in pairs if name == b"a"] == [str(i).encode() for i in range(50)]
    assert [text for name, text in pairs if name == b"b"] == [f"{i}\0é".encode() for i in range(50)]
    assert target.ask("notifies") == [SUCCESS]
    assert a.notify(target, "x" * 1025, "") == PARAM_INVALID
    assert target.notify(a, "", "") == NOT_CONNECTED
