"""The class with the calls of Mooncake's transfer engine when something fails: opening, unregistering, Ctrl-C, limits.

Not for: the bytes that it moves (`test_transfer_engine.py`) and the texts of addresses (`test_integrations.py`).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheManager, LLMDataDist, LLMException, LLMStatusCode
from llm_datadist.integrations.transfer_engine import TransferEngine
from llm_datadist.integrations.transfer_engine import engine as engine_module
from llm_datadist.integrations.transfer_engine import peers as peers_module
from peers import LIMIT, stop_process
from test_transfer_engine import SIZE, Far, Near

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.events import Transfer


@pytest.fixture
def ends() -> Iterator[tuple[Near, Far]]:
    """Yield two linked engines whose whole memory is registered. They use TCP, so a stopped peer moves nothing."""
    # No transfer ends by a limit.
    near, far = Near("tcp", sync_kv_timeout=600_000, link_silence=600_000), Far("tcp")
    assert near.engine.register_memory(near.address, SIZE) == 0
    assert far("register_memory", far.address, SIZE) == 0
    assert near.engine.transfer_sync_read(far.session, near.address, far.address, 8) == 0
    yield near, far
    near.engine.close()
    far("close")
    far.process.join(LIMIT)


@contextmanager
def stopped(far: Far) -> Iterator[None]:
    """Stop the other process while the block runs."""
    assert far.process.pid is not None
    try:
        stop_process(far.process.pid)
        yield
    finally:
        os.kill(far.process.pid, signal.SIGCONT)


class Interrupted:
    """A transfer. SIGINT is sent once, after the first wait for any of them has begun."""

    def __init__(self, transfer: Transfer, timer: threading.Timer) -> None:
        self.transfer = transfer
        self._timer = timer

    def result(self) -> Any:
        self._begin()
        return self.transfer.result()

    def exception(self, *limit: int) -> Any:
        self._begin()
        return self.transfer.exception(*limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transfer, name)

    def _begin(self) -> None:
        if self._timer.ident is None:
            self._timer.start()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[Interrupted]:
    """Interrupt the first wait for a transfer. The list has the transfers."""
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    made: list[Interrupted] = []
    start = TransferEngine._start

    def started(engine: TransferEngine, *args: Any) -> Any:
        made.append(Interrupted(start(engine, *args), timer))
        return made[-1]

    monkeypatch.setattr(TransferEngine, "_start", started)
    return made


@pytest.mark.parametrize("opcode", ["read", "write"])
def test_ctrl_c_ends_a_synchronous_transfer(
    ends: tuple[Near, Far], interrupted: list[Interrupted], opcode: str
) -> None:
    near, far = ends
    near.memory[:] = 9
    with stopped(far):
        with pytest.raises(KeyboardInterrupt):
            getattr(near.engine, f"transfer_sync_{opcode}")(far.session, near.address, far.address, SIZE)
        assert [transfer.done() for transfer in interrupted] == [True]
    # The peer goes on, and nothing is written here any more.
    far("bytes")
    assert (near.memory == 9).all()


def test_ctrl_c_ends_all_batches_that_a_call_waits_for(ends: tuple[Near, Far], interrupted: list[Interrupted]) -> None:
    near, far = ends
    near.memory[:] = 9
    ranges = ([near.address], [far.address], [SIZE // 2])
    with stopped(far):
        batches = [near.engine.batch_transfer_async_read(far.session, *ranges) for _ in range(3)]
        with pytest.raises(KeyboardInterrupt):
            near.engine.get_batch_transfer_status(batches)
        assert [transfer.done() for transfer in interrupted] == [True] * 3
    far("bytes")
    assert (near.memory == 9).all()
    assert near.engine.get_batch_transfer_status(batches) == -1


def test_as_many_batches_run_as_the_limit_allows(
    ends: tuple[Near, Far], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real limit is 65,536. 5,000 are enough to exceed the default of the engine, 4,096."""
    near, far = ends
    monkeypatch.setattr(engine_module, "_MAX_BATCHES", 5000)
    engine, ranges = near.engine, (far.session, [near.address], [far.address], [8])
    with stopped(far):
        batches = [engine.batch_transfer_async_read(*ranges) for _ in range(5000)]
        assert min(batches) > 0
        assert engine.batch_transfer_async_read(*ranges) == -1
        assert "5000 batches run" in caplog.text
        assert "get_batch_transfer_status" in caplog.text
    assert engine.get_batch_transfer_status(batches) == 0
    assert engine.transfer_sync_read(*(value if isinstance(value, str) else value[0] for value in ranges)) == 0


def test_the_engine_allows_the_batches_that_the_class_promises() -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "", "", "") == 0
    assert engine._engine is not None
    assert int(engine._engine._engine_options["llm.MaxTransfers"]) > engine_module._MAX_BATCHES == 65_536
    engine.close()


class Refusing:
    """Makes `unregister_cache` fail with `LLM_TIMEOUT` for the first calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        unregister = CacheManager.unregister_cache

        def refused(manager: CacheManager, cache_id: int) -> None:
            if self.left:
                self.left -= 1
                raise LLMException("still used", status_code=LLMStatusCode.LLM_TIMEOUT)
            unregister(manager, cache_id)

        monkeypatch.setattr(CacheManager, "unregister_cache", refused)


def caches(engine: TransferEngine) -> int:
    assert engine._engine is not None
    return int(engine._engine.stats()["table"]["caches"])


def test_memory_that_is_still_used_can_be_unregistered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Near("")
    engine = near.engine
    try:
        assert engine.register_memory(near.address, SIZE) == 0
        Refusing(monkeypatch, 2)
        for _ in range(2):
            assert engine.unregister_memory(near.address) == -1
            assert engine.register_memory(near.address, SIZE) == -1
        assert engine.unregister_memory(near.address) == 0
        assert caches(engine) == 0
        assert engine.unregister_memory(near.address) == -1
        assert engine.register_memory(near.address, SIZE) == 0
    finally:
        engine.close()


def test_a_refused_list_leaves_no_memory_that_cannot_be_unregistered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near = Near("")
    engine, address = near.engine, near.address
    try:
        refusing = Refusing(monkeypatch, 1)
        # The third range meets the second one.
        assert engine.batch_register_memory([address, address + 64, address + 64], [64, 64, 64]) == -1
        assert refusing.left == 0
        assert f"64 bytes at {address:#x} stay registered: " in caplog.text
        assert caches(engine) == 1
        assert engine.unregister_memory(address) == 0
        assert engine.unregister_memory(address + 64) == -1
        assert caches(engine) == 0
    finally:
        engine.close()


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EMFILE, "no more descriptors")


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("step", ["descriptor", "events", "thread"])
def test_a_failed_opening_does_not_keep_later_ones_from_working(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    engine = TransferEngine()
    before = descriptors()
    with monkeypatch.context() as patch:
        if step == "descriptor":
            patch.setattr(peers_module.os, "eventfd", refuse)
        elif step == "events":
            patch.setattr(LLMDataDist, "poll", refuse)
        else:
            start = threading.Thread.start
            own = "llm_datadist-transfer-engine"
            patch.setattr(
                threading.Thread, "start", lambda thread: no_thread() if thread.name == own else start(thread)
            )
        assert engine.initialize("127.0.0.1", "", "", "") == -1
    assert LLMDataDist.llm_engine_instance is None
    assert descriptors() == before
    assert engine.initialize("127.0.0.1", "", "", "") == 0
    engine.close()


def test_a_failed_close_still_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "", "", "") == 0
    close = peers_module.Peers.close

    def interrupted(peers: peers_module.Peers) -> None:
        close(peers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(peers_module.Peers, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert LLMDataDist.llm_engine_instance is None


def test_an_engine_that_was_closed_can_be_opened_again() -> None:
    near = Near("")
    for _ in range(2):
        assert near.engine.register_memory(near.address, SIZE) == 0
        near.engine.close()
        assert near.engine.initialize("127.0.0.1", "", "", "") == 0
    near.engine.close()


def test_an_answer_that_cannot_be_sent_is_logged_as_that(caplog: pytest.LogCaptureFixture) -> None:
    near = Near("")
    assert near.engine._peers is not None
    near.engine._peers._heard(77, b'{"list": 0}')
    assert "cannot answer cluster 77: " in caplog.text
    near.engine.close()


def skip_without(host: str) -> None:
    """Skip the test if it needs IPv6 and this machine has none."""
    if ":" in host.replace(":0", ""):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 on this machine")


@pytest.mark.parametrize("host", ["::1", "[::1]", "[::1]:0", "localhost", "localhost:0", "127.0.0.1"])
def test_peers_reach_an_engine_by_its_session_id(host: str, far_of_any_host: Far) -> None:
    skip_without(host)
    engine, memory = TransferEngine(), np.zeros(64, np.uint8)
    assert engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
    try:
        session = engine.get_session_id()
        bare = host.strip("[]").removesuffix(":0").removesuffix("]")
        assert session == f"[{bare}]:{engine.get_rpc_port()}" if ":" in bare else f"{bare}:{engine.get_rpc_port()}"
        assert engine.register_memory(memory.ctypes.data, 64) == 0
        far_of_any_host("fill", 5)
        assert far_of_any_host("transfer_sync_write", session, far_of_any_host.address, memory.ctypes.data, 64) == 0
        assert (memory == 5).all()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def far_of_any_host() -> Iterator[Far]:
    made = Far("tcp")
    assert made("register_memory", made.address, SIZE) == 0
    yield made
    made("close")
    made.process.join(LIMIT)


def test_addresses_that_are_refused_name_the_argument(caplog: pytest.LogCaptureFixture) -> None:
    engine = TransferEngine()
    for host in ("", "[::1", "[localhost]", "host:port", "[::1]:65536", "fe80::1%lo", "[::1]7600", "a:b:c"):
        assert engine.initialize(host, "", "", "") == -1
        assert f"local_hostname={host!r} is not an address: give host, host:port, ipv6 or [ipv6]:port" in caplog.text
    assert engine.initialize(7, "", "", "") == -1  # type: ignore[arg-type]
    assert "local_hostname must be a str, not int" in caplog.text
    assert engine.initialize("127.0.0.1", "", "", "") == 0
    assert engine.initialize("127.0.0.1", "", "", "") == -1
    assert "initialize was called before" in caplog.text
    try:
        for session in ("::1", "[::1]", "localhost", "::1:7600"):
            assert engine.transfer_sync_read(session, 1, 2, 3) == -1
            assert f"target_hostname={session!r} has no port: give host:port or [ipv6]:port" in caplog.text
            assert engine.send_probe(session) == -1
            assert f"peer_server_name={session!r} has no port" in caplog.text
    finally:
        engine.close()


def test_a_request_for_regions_that_was_interrupted_is_repeated(
    ends: tuple[Near, Far], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    engine = near.engine._engine
    assert engine is not None
    assert far("unregister_memory", far.address) == 0
    assert far("register_memory", far.address, 64) == 0
    near.engine._opened().forget(near.engine._clusters[far.session])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine, "notify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            near.engine.transfer_sync_read(far.session, near.address, far.address, 8)
    assert near.engine._opened()._answers == {}
    assert near.engine.transfer_sync_read(far.session, near.address, far.address, 8) == 0
