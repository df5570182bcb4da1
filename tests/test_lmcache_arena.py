"""The arena and the readers of the channel for LMCache, between two processes, without LMCache.

`integration-tests/lmcache` runs the channel inside the real package.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import socket
import sys
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Cancelled, Error
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

SIZE = 1 << 18
_PROCESSES = multiprocessing.get_context("forkserver")


def load() -> Any:
    """Import `arena.py` alone, because its package needs LMCache."""
    path = Path(__file__).parents[1] / "python/llm_datadist/integrations/lmcache/arena.py"
    spec: Any = importlib.util.spec_from_file_location("lmcache_arena", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


arena = load()


def _run(pipe: Connection, listen: str) -> None:
    memory = np.arange(SIZE // 2, dtype=np.uint16)
    served = arena.Arena(listen, memory.ctypes.data, SIZE, {})
    pipe.send(served.address)
    pipe.recv()
    served.close()


class Remote:
    """An arena in another process."""

    def __init__(self, listen: str = "tcp://127.0.0.1:0") -> None:
        self._pipe, there = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_run, args=(there, listen), daemon=True)
        self.process.start()
        there.close()
        assert self._pipe.poll(LIMIT)
        self.address = self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT)

    def close(self) -> None:
        if self.process.is_alive():
            self._pipe.send("close")
            self.process.join(LIMIT)


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(SIZE, np.uint8)


@pytest.fixture
def local(memory: np.ndarray) -> Iterator[Any]:
    made = arena.Arena("127.0.0.1:0", memory.ctypes.data, SIZE, {})
    yield made
    made.close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    made = Remote()
    yield made
    made.close()


@pytest.fixture
def reader(local: Any, remote: Remote) -> Iterator[Any]:
    made = arena.ArenaReader(local, remote.address, LIMIT)
    yield made
    made.close()


def ended(reader: Any, number: int) -> list[bool]:
    outcomes: list[list[bool]] = []
    eventually(lambda: outcomes.extend(filter(None, [reader.outcome(number)])) or outcomes)
    return outcomes[0]


def test_ranges_are_read(local: Any, remote: Remote, memory: np.ndarray) -> None:
    reader = arena.ArenaReader(local, f"tcp://{remote.address}", LIMIT)
    local_ranges, remote_ranges = [(100, 50), (4096, 8192)], [(2000, 50), (SIZE - 8192, 8192)]
    assert ended(reader, reader.submit(local_ranges, remote_ranges)) == [True, True]
    source = np.arange(SIZE // 2, dtype=np.uint16).view(np.uint8)
    expected = np.zeros(SIZE, np.uint8)
    expected[100:150], expected[4096:12288] = source[2000:2050], source[-8192:]
    assert np.array_equal(memory, expected)
    with pytest.raises(KeyError):
        reader.outcome(1)
    reader.close()


def test_ranges_that_do_not_fit_are_refused(reader: Any, memory: np.ndarray) -> None:
    for local_ranges, remote_ranges in [
        ([], []),
        ([(0, 8)], []),
        ([(0, 8)], [(0, 9)]),
        ([(0, 0)], [(0, 0)]),
        ([(-1, 8)], [(0, 8)]),
        ([(SIZE - 4, 8)], [(0, 8)]),
        ([(0, 8)], [(-1, 8)]),
    ]:
        with pytest.raises(ValueError, match="ranges"):
            reader.submit(local_ranges, remote_ranges)
    # The peer refuses what leaves its arena.
    assert ended(reader, reader.submit([(0, 8), (8, 8)], [(0, 8), (SIZE - 4, 8)])) == [False, False]
    assert not memory[8:16].any()


def test_a_peer_may_be_restarted(reader: Any, remote: Remote) -> None:
    assert ended(reader, reader.submit([(0, 8)], [(8, 8)])) == [True]
    remote.kill()
    eventually(lambda: not reader._peer.alive)
    assert ended(reader, reader.submit([(0, 8)], [(8, 8)])) == [False]
    again = Remote(remote.address)
    try:
        # Each attempt has a second to link again.
        eventually(lambda: ended(reader, reader.submit([(0, 8)], [(8, 8)])) == [True], what="a read of the new peer")
    finally:
        again.close()


def test_bad_arguments() -> None:
    for url in ("tcp://host:", ":7600", "host:port", "[::1", "127.0.0.1", "tcp://[::1]", "::1"):
        with pytest.raises(ValueError, match=r"url=.* is not an address: give host:port or \[ipv6\]:port"):
            arena.Arena(url, 4096, 8, {})
    for options, text in [
        ({"token_fil": "/token"}, 'did you mean "token_file"'),
        ({"listen": "127.0.0.1:0"}, "'listen'"),
    ]:
        with pytest.raises(TypeError, match=text):
            arena.Arena("127.0.0.1:0", 4096, 8, options)
    with pytest.raises(ValueError, match="copy_workers"):
        arena.Arena("127.0.0.1:0", 4096, 8, {"copy_workers": 0})


def test_nobody_listens(local: Any) -> None:
    with pytest.raises(Error, match=r"127\.0\.0\.1:1"):
        arena.ArenaReader(local, "127.0.0.1:1", 0.2)


def skip_without(host: str) -> None:
    """Skip the test if it needs IPv6 and this machine has none."""
    if ":" in host.replace(":0", ""):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 on this machine")


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_peers_are_reached_by_names_and_by_ipv6(local: Any, memory: np.ndarray, host: str) -> None:
    skip_without(host)
    remote = Remote(f"tcp://{host}:0")
    try:
        port = remote.address.rpartition(":")[2]
        reader = arena.ArenaReader(local, f"tcp://{host}:{port}", LIMIT)
        assert ended(reader, reader.submit([(0, 8)], [(8, 8)])) == [True]
        assert memory[:8].any()
    finally:
        remote.close()


@pytest.mark.parametrize("pointer", [0, -1])
def test_a_failed_opening_frees_the_port(memory: np.ndarray, pointer: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises((Error, ValueError)):
        arena.Arena(listen, pointer, SIZE, {})
    with closing(arena.Arena(listen, memory.ctypes.data, SIZE, {})) as opened:
        assert opened.address == listen


def test_a_process_may_have_several_arenas(local: Any, memory: np.ndarray) -> None:
    other = np.full(SIZE, 7, np.uint8)
    with closing(arena.Arena("127.0.0.1:0", other.ctypes.data, SIZE, {})) as second:
        reader = arena.ArenaReader(local, second.address, LIMIT)
        assert ended(reader, reader.submit([(8, 8)], [(0, 8)])) == [True]
    assert memory[:24].tolist() == [0] * 8 + [7] * 8 + [0] * 8


def test_the_engine_allows_the_reads_that_a_reader_promises(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    engine = arena.Engine
    monkeypatch.setattr(arena, "Engine", lambda **given: opened.append(given) or engine(**given))
    for options in ({}, {"max_transfers": 7}):
        arena.Arena("127.0.0.1:0", memory.ctypes.data, SIZE, options).close()
    assert opened[0]["max_transfers"] > arena._MAX_TASKS == 65_536
    assert opened[1]["max_transfers"] == 7


def test_the_log_says_why_a_read_failed(reader: Any, remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    # The peer refuses what leaves its arena.
    assert ended(reader, reader.submit([(0, 8), (8, 8)], [(4, 8), (SIZE - 4, 8)])) == [False, False]
    record = next(record for record in caplog.records if record.name == "llm_datadist.lmcache")
    assert record.levelno >= logging.WARNING  # visible if the program has not configured `logging`
    text = record.getMessage()
    assert f"a read of the peer at {remote.address} failed: 2 ranges, 16 bytes, the first at offset 4: " in text
    assert text.partition("offset 4: ")[2]


def test_the_log_says_why_a_read_was_not_started(reader: Any, remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    remote.kill()
    eventually(lambda: not reader._peer.alive)
    assert reader.outcome(reader.submit([(0, 8)], [(8, 8)])) == [False]
    assert f"a read of the peer at {remote.address} failed: 1 ranges, 8 bytes, the first at offset 8: " in caplog.text
    assert "cannot connect" in caplog.text
    assert reader.outcome(reader.submit([], [])) == []  # before its lists are checked, the reader links


def test_a_dead_peer_does_not_flood_the_log(
    reader: Any, remote: Remote, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the reader stands still until the test moves it."""
    now = 100.0
    monkeypatch.setattr(arena, "time", SimpleNamespace(monotonic=lambda: now))

    def fails() -> None:
        assert ended(reader, reader.submit([(0, 8)], [(SIZE - 4, 8)])) == [False]

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "llm_datadist.lmcache"]

    for _ in range(5):
        fails()
    assert len(lines()) == 1
    assert "more reads" not in lines()[0]
    now += 1.5
    fails()
    assert lines()[1].endswith("(4 more reads failed since the last such line)")
    for _ in range(3):
        fails()
    assert len(lines()) == 2
    reader.close()
    assert lines()[2:] == [f"3 more reads of the peer at {remote.address} failed"]


class Read:
    """A read that raises `failures` when it is waited for, one each time, and then ends unless it is `stuck`."""

    def __init__(self, *failures: type[BaseException], stuck: bool = False) -> None:
        self.failures, self.stuck = list(failures), stuck
        self.ended = self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def done(self) -> bool:
        return self.ended

    def result(self, timeout: float) -> None:
        assert 0 <= timeout <= 30
        if self.failures:
            raise self.failures.pop(0)
        if self.stuck:
            raise TimeoutError
        self.ended = True
        raise Cancelled


def closing_reader(*reads: Read) -> Any:
    reader = arena.ArenaReader.__new__(arena.ArenaReader)
    reader._lock, reader._left_out, reader._url = threading.Lock(), 0, "peer"
    reader._tasks = {number: (read, [(0, 8)]) for number, read in enumerate(reads)}
    return reader


def test_ctrl_c_while_a_reader_closes_waits_for_its_reads() -> None:
    """The first wait is interrupted. The reader still waits for both reads, and raises `KeyboardInterrupt`."""
    reads = Read(KeyboardInterrupt), Read()
    with pytest.raises(KeyboardInterrupt):
        closing_reader(*reads).close()
    assert [(read.cancelled, read.ended) for read in reads] == [(True, True)] * 2


@pytest.mark.parametrize("failures", [(), (KeyboardInterrupt,), (KeyboardInterrupt, KeyboardInterrupt)])
def test_memory_that_a_closed_reader_still_uses_is_logged(
    failures: tuple[type[BaseException], ...], caplog: pytest.LogCaptureFixture
) -> None:
    reads = Read(*failures, stuck=True), Read(stuck=True)
    with pytest.raises(KeyboardInterrupt) if failures else nullcontext():
        closing_reader(*reads).close()
    assert [read.cancelled for read in reads] == [True, True]
    assert "2 cancelled reads still use their memory" in caplog.text
