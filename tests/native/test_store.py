"""`Store` and `Keeper`: values that processes share, and what is left of one that is killed.

Not for: random calls against a model, and hostile clients (`crates/keeper/tests`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import pytest

from llm_datadist import Closed, Error, InvalidArgument, Keeper, PeerLost, Timeout
from peers import another_thread_runs, eventually, lingering_socket

from .stores import LIMIT, VALUE, child, got, key, line, opened, process, serving, stop, value

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def served(socket: Path) -> Iterator[subprocess.Popen[str]]:
    with serving(socket) as started:
        yield started


@pytest.mark.usefixtures("served")
def test_one_process_puts_what_another_one_gets(socket: Path) -> None:
    with child(
        socket, "print(store.put([key(n) for n in range(3)], [value(n) for n in range(3)]), flush=True)"
    ) as other:
        assert line(other) == "[True, True, True]\n"
        assert other.wait(LIMIT) == 0
    with opened(socket) as store:
        assert store.exists([key(0), key(1), key(9)]) == [True, True, False]
        assert [got(store, number) for number in (0, 1, 2, 9)] == [value(0), value(1), value(2), None]
        assert store.drop([key(0), key(9)]) == 1
        assert got(store, 0) is None
        stats = store.stats()
        assert (stats["hits"], stats["misses_absent"], stats["keeper"]["values"]) == (3, 2, 2)
        with opened(socket, namespace="another model") as other_store:
            assert other_store.exists([key(1)]) == [False]


def test_killed_keeper_means_misses_and_a_new_one_is_found(socket: Path, served: subprocess.Popen[str]) -> None:
    with opened(socket) as store:
        assert store.put([key(1)], [value(1)]) == [True]
        served.kill()
        served.wait(LIMIT)
        eventually(lambda: got(store, 1) is None)  # the process that served has seen the end of the other one
        assert store.exists([key(1)]) == [False]
        assert store.put([key(1)], [value(1)]) == [False]
        assert store.stats()["keeper"] is None
        with store.view([key(1)], ttl=1) as seen:
            assert (seen.values, seen.leased, seen.valid()) == ((None,), [False], [False])
        with pytest.raises(PeerLost):
            store.drop([key(1)])
        assert socket.exists(), "a killed process leaves its socket"
        with serving(socket):
            eventually(lambda: store.put([key(1)], [value(1)]) == [True])
            assert got(store, 1) == value(1)
            assert store.stats()["attached"] == 2


def test_call_that_waits_ends_with_the_keeper(socket: Path, served: subprocess.Popen[str]) -> None:
    """The keeper is stopped, so only its end can end the call before its time limit of an hour."""
    with child(
        socket, "print(1, flush=True); print(store.put([key(1)], [value(1)], timeout=3600), flush=True)"
    ) as other:
        assert line(other) == "1\n"
        stopped = stop(served)
        with opened(socket, timeout=0.2) as store:  # its attempt to attach is not answered
            assert store.put([key(1)], [value(1)]) == [False]
        os.kill(stopped, signal.SIGKILL)
        assert line(other) in ("[False]\n", "[True]\n")  # the keeper may have taken the value before it was stopped
        assert other.wait(LIMIT) == 0


def test_calls_of_all_clients_of_a_stopped_keeper_end_in_time_and_go_on_with_it(
    socket: Path, served: subprocess.Popen[str]
) -> None:
    """Each call has a store of its own, because one that times out ends the connection of its store."""

    def refused(call: Callable[[], int]) -> None:
        with pytest.raises(Timeout):
            call()

    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(opened(socket)) for _ in range(7)]
        reads, puts, started, drops, clears, leases, counts = stores
        assert reads.put([key(1)], [value(1)]) == [True]
        stopped = stop(served)
        assert puts.put([key(2)], [value(2)], timeout=0.1) == [False]
        late_put, next_put = (started.start_put([key(n)], [value(n)], timeout=t) for n, t in ((3, 0.1), (6, LIMIT)))
        assert (late_put.result(), next_put.result()) == ([False], [False])
        refused(lambda: drops.drop([key(1)], timeout=0.1))
        refused(lambda: clears.clear(timeout=0.1))
        assert leases.lease([key(1)], ttl=5, timeout=0.1) == [False]
        assert counts.stats(timeout=0.1)["keeper"] is None
        own = reads.stats(keeper=False)  # without a question to the keeper, so `reads` stays attached
        assert (own["puts_stored"], own["keeper"]) == (1, None)
        late = stack.enter_context(opened(socket, timeout=0.1))
        # Until the keeper answers, whoever must attach again finds nothing.
        for store in (*stores[1:], late):
            assert (store.exists([key(1)]), got(store, 1)) == ([False], None)
            assert store.put([key(4)], [value(4)]) == [False]
            assert store.start_get([key(1)], [bytearray(VALUE)]).result() == [False]
        assert (got(reads, 1), reads.exists([key(1), key(9)])) == (value(1), [True, False])
        os.kill(stopped, signal.SIGCONT)
        # `drop` and `clear` may have reached the keeper.
        eventually(lambda: all(store.put([key(5)], [value(5)]) == [True] for store in (*stores, late)))
        assert [got(store, 5) for store in (*stores, late)] == [value(5)] * 8
        # The keeper may have stored values of calls that timed out, but never with bytes of a later call.
        assert [got(late, n) or value(n) for n in (2, 3, 4, 6)] == [value(n) for n in (2, 3, 4, 6)]


def test_descriptors_that_close_slowly_hold_nobody_up(socket: Path, served: subprocess.Popen[str]) -> None:
    attach = b"\x00\x03\x01n\x40\x00"
    with contextlib.ExitStack() as kept, opened(socket) as store:
        assert store.put([key(1)], [value(1)]) == [True]
        stopped = stop(served)  # so that it has the last descriptors
        for messages in ([attach], [b"\xff"], [b"\x06"], [b""], [b"\xff", b"\xff"]):
            client = kept.enter_context(sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET))
            client.connect(str(socket))
            for message in messages:
                end, other = lingering_socket(3600)
                kept.enter_context(other)
                with end:
                    sockets.send_fds(client, [message], [end.fileno()] * 4)
        os.kill(stopped, signal.SIGCONT)
        assert store.put([key(2)], [value(2)]) == [True]
        eventually(lambda: store.stats()["keeper"]["refused"] >= 4)
        with opened(socket) as other_store:
            assert got(other_store, 2) == value(2)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_program_of_another_user_gets_nothing() -> None:
    code = """
import os, socket, sys
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(sys.argv[1])
listening.listen()
os.chmod(sys.argv[1], 0o777)
print("ready", flush=True)
while True:
    print(len(listening.accept()[0].recv(65536)), flush=True)
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # noqa: PTH101, S103
        path = Path(folder) / "keeper"
        with opened(path) as early, process(sys.executable, "-c", code, str(path)) as other:
            assert line(other) == "ready\n"
            with pytest.raises(Error, match="a process of another user listens at the socket") as caught:
                opened(path)
            assert caught.value.facts["uid"] == "12345"
            assert "keeper_user names the user whose keeper is trusted" in str(caught.value)
            assert line(other) == "0\n"
            time.sleep(1.1)  # until the store attaches again
            assert early.put([key(1)], [value(1)]) == [False]
            assert "a process of another user" in early.stats()["refused"]
            assert line(other) == "0\n"


@pytest.mark.usefixtures("served")
def test_leases_of_a_killed_process_end_although_another_one_has_its_socket(socket: Path) -> None:
    code = """
import os, subprocess
store.put([key(1)], [value(1)])
print(sum(store.lease([key(1)], ttl=10)), flush=True)
sockets = [number for number in map(int, os.listdir("/proc/self/fd")) if is_socket(number)]
print(subprocess.Popen(["sleep", "60"], pass_fds=sockets, stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""
    helper = """
import stat, os
def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
"""
    with opened(socket) as store, child(socket, helper + code) as other:
        assert line(other) == "1\n"
        sleeping = int(line(other))
        try:
            assert store.stats()["keeper"]["leased"] == 1
            other.kill()
            eventually(lambda: store.stats()["keeper"]["leased"] == 0, limit=5)  # its time would end later
            assert store.stats()["keeper"]["clients"] == 1
            os.kill(sleeping, 0)
        finally:
            os.kill(sleeping, signal.SIGKILL)


def test_buffers_and_arrays_are_values(socket: Path, keeper: Keeper) -> None:
    np = pytest.importorskip("numpy")
    array = np.arange(VALUE // 4, dtype=np.int32).reshape(4, -1)
    with opened(socket) as store:
        assert store.put([key(1), key(2), key(3)], [array, bytearray(value(2)), value(3)]) == [True] * 3
        into = [np.zeros_like(array), bytearray(VALUE), memoryview(bytearray(VALUE))]
        assert store.get([key(1), key(2), key(3)], into) == [True] * 3
        assert (into[0] == array).all()
        assert [bytes(into[1]), bytes(into[2])] == [value(2), value(3)]
    assert keeper.slots == 64


def test_read_only_buffer_of_another_size_is_not_copied(socket: Path, tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    file.touch()
    os.truncate(file, 64 << 20)
    with file.open("rb") as reading, opened(socket) as store:
        given = memoryview(mmap.mmap(reading.fileno(), 0, prot=mmap.PROT_READ))
        tracemalloc.start()
        try:
            with pytest.raises(InvalidArgument, match=r"values\[0\]=67108864 bytes"):
                store.put([key(1)], [given])
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.usefixtures("keeper")
def test_put_reads_constant_buffers_and_get_refuses_them(socket: Path) -> None:
    np = pytest.importorskip("numpy")
    constant = np.frombuffer(value(1), dtype=np.uint8)
    assert not constant.flags.writeable
    whole = np.frombuffer(b"ab" + value(4), dtype=np.uint8)
    values = [constant, memoryview(value(2)), memoryview(value(3)).cast("I"), whole[2:]]
    keys = [key(number) for number in range(1, 5)]
    with opened(socket) as store:
        assert store.put(keys, values) == [True] * 4
        assert [got(store, number) for number in range(1, 5)] == [value(number) for number in range(1, 5)]
        with pytest.raises(InvalidArgument, match=r"values\[0\]=65535 bytes"):
            store.put([key(5)], [memoryview(value(1))[1:]])
        with pytest.raises(InvalidArgument, match="a buffer with gaps"):
            store.put([key(5)], [memoryview(value(1) * 2)[::2]])
        for constant_buffer in (constant, memoryview(value(1))):
            with pytest.raises(InvalidArgument, match=r"into\[0\]=a read-only"):
                store.get([key(1)], [constant_buffer])


@pytest.mark.usefixtures("keeper")
def test_wrong_arguments_are_named(socket: Path) -> None:
    def refused(call: Callable[[], object], error: type[Exception] = InvalidArgument) -> str:
        with pytest.raises(error) as caught:
            call()
        return str(caught.value)

    with opened(socket) as store:
        assert refused(lambda: store.exists([b"short"])) == "keys[0]=5 bytes must be 28 bytes"
        assert "len(keys)=4097 must be at most 4096" in refused(lambda: store.exists([key(1)] * 4097))
        assert len(store.exists([key(1)] * 4096)) == 4096
        assert refused(lambda: store.put([key(1)], [b"short"])) == (
            "values[0]=5 bytes must be 65536 bytes, a value of the store"
        )
        assert refused(lambda: store.get([key(1)], [])) == "len(into)=0 must be 1, one for each key"
        assert "writable" in refused(lambda: store.get([key(1)], [memoryview(bytes(VALUE))]))
        assert "keys must be a list or tuple" in refused(lambda: store.exists(key(1)), TypeError)  # type: ignore[arg-type]
        assert "keys[0] must be bytes" in refused(lambda: store.exists(["a"]), TypeError)  # type: ignore[list-item]
        objects = "an object with __dlpack__ or __array_interface__, not"
        assert f"values[0] must be a buffer, or {objects} 'str'" in refused(
            lambda: store.put([key(1)], ["a"]),  # type: ignore[list-item]
            TypeError,
        )
        assert f"values[0] must be a buffer, or {objects} 'int'" in refused(
            lambda: store.put([key(1)], [4096]),  # type: ignore[list-item]
            TypeError,
        )
        assert f"into[0] must be a writable buffer, or {objects} 'int'" in refused(
            lambda: store.get([key(1)], [4096]),  # type: ignore[list-item]
            TypeError,
        )
        assert "values must be a list or tuple, or one buffer with rows" in refused(
            lambda: store.put([key(1)], value(1)),  # type: ignore[arg-type]
            TypeError,
        )
        assert "timeout" in refused(lambda: store.put([], [], timeout=0))
        for ttl in (0, -1, float("nan"), 10.001, 11):
            text = f"ttl={ttl} must be above 0 and at most 10 seconds"
            assert text in refused(lambda ttl=ttl: store.lease([key(0)], ttl=ttl))  # type: ignore[misc]
        assert "keeper" in refused(lambda: store.stats(keeper=1), TypeError)  # type: ignore[arg-type]
        assert "tmeout" in refused(lambda: store.put([], [], tmeout=1), TypeError)  # type: ignore[call-arg]
        assert "value=1024 must be 65536, as in the namespace" in refused(lambda: opened(socket, value="1KiB"))
    assert "namespace=0 bytes must be" in refused(lambda: opened(socket, namespace=""))
    assert "value=131072 must be at most 65536" in refused(lambda: opened(socket, value="128KiB", namespace="b"))
    assert "value=big must be a number of bytes" in refused(lambda: opened(socket, value="big"))
    assert "memory=1024 must be at least" in refused(lambda: Keeper(memory=1024, socket=f"{socket}2"))
    assert "memory" in refused(lambda: Keeper(memory="1000TiB", socket=f"{socket}2"))
    assert "its folder must exist" in refused(lambda: Keeper(memory="4MiB", socket=f"{socket}2/keeper"), Error)
    assert refused(lambda: Keeper(memory="60TiB", socket=f"{socket}2", value="64MiB"), MemoryError)


def test_serve_names_the_process_that_uses_its_path(socket: Path, served: subprocess.Popen[str]) -> None:
    command = [sys.executable, "-m", "llm_datadist", "serve", "--memory", "4MiB", "--socket", str(socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)  # noqa: S603
    assert done.returncode == 1
    assert f"pid={served.pid}" in done.stderr


def test_closed_and_forked_objects_refuse_calls(socket: Path, keeper: Keeper) -> None:
    store = opened(socket)
    assert store.put([key(1)], [value(1)]) == [True]
    forked = os.fork()
    if forked == 0:
        status = 1
        try:
            store.exists([key(1)])
        except Closed:
            status = 0 if keeper.closed else 2
        del store
        keeper.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    # The child has closed nothing of its parent.
    assert got(store, 1) == value(1)
    store.close()
    store.close()
    views = lambda: store.view([], ttl=1)  # noqa: E731
    for call in (lambda: store.exists([]), store.stats, lambda: store.put([], []), views):
        with pytest.raises(Closed):
            call()
    assert not keeper.closed
    keeper.close()
    keeper.close()
    assert keeper.closed


def descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def test_keeper_whose_thread_has_ended_is_closed(socket: Path) -> None:
    """What other code writes to the descriptors of the process may end the thread."""
    before = descriptors()
    with Keeper(memory="4MiB", socket=socket) as keeper, opened(socket) as store:
        assert store.put([key(1)], [value(1)]) == [True]
        assert not keeper.closed
        for number in descriptors() - before:
            with contextlib.suppress(OSError):  # not a socket that is connected
                other = sockets.socket(fileno=os.dup(number))
                with other:
                    if other.type == sockets.SOCK_STREAM:
                        other.send(b"x")
        eventually(lambda: keeper.closed)
        assert not socket.exists()
        assert store.exists([key(1)]) == [False]


def test_store_unmaps_the_memory_of_its_keeper_without_the_gil(socket: Path) -> None:
    def last_reference() -> Callable[[], None]:
        stores = [opened(socket)]
        assert all(stores[0].get([key(n) for n in range(512)], buffers))
        return stores.clear

    with Keeper(memory="64MiB", socket=socket), opened(socket) as filling:
        buffers = [bytearray(VALUE) for _ in range(512)]
        assert all(filling.put([key(n) for n in range(512)], buffers))
        assert another_thread_runs(last_reference), "the GIL is never released"
