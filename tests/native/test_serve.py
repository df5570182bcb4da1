"""The processes of `llm-datadist serve`: one that holds the memory, and one that serves, which is killed or replaced.

Not for: kills at random moments (`test_keeper_kills.py`), an index that is left half-written
(`crates/keeper/src/table.rs`), and what a store does without a keeper (`test_store.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket as sockets
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from emulation import emulated
from keeper_process import stopped
from llm_datadist import InvalidArgument, Store
from peers import eventually

from .stores import LIMIT, VALUE, child_of, got, key, opened, put, value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


class Serve:
    """`llm-datadist serve`, which is killed at the end."""

    def __init__(self, socket: Path, *options: str, output: int | IO[str] = subprocess.PIPE) -> None:
        command = [sys.executable, "-m", "llm_datadist", "serve", "--memory", "4MiB", "--socket", str(socket), *options]
        self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True)  # noqa: S603

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def serving(self) -> int:
        """The process that serves."""
        return child_of(self.process)

    def printed(self) -> str:
        """Return the next line of the standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def complained(self) -> str:
        """Return the next line of the standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def kill(self) -> int:
        """Kill the process that serves, and return its id."""
        killed = self.serving
        os.kill(killed, signal.SIGKILL)
        return killed


@pytest.fixture
def served(socket: Path) -> Iterator[Serve]:
    with ready(socket) as serve:
        yield serve


@contextlib.contextmanager
def ready(socket: Path, *options: str) -> Iterator[Serve]:
    with Serve(socket, *options) as serve:
        assert serve.printed() == f"ready: 64 values of 64KiB at {socket}\n"
        yield serve


def attached(store: Store) -> bool:
    return store.stats()["keeper"] is not None


def ended(pid: int) -> bool:
    """Return whether a process has ended; nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_values_of_a_killed_process_are_found_again(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert all(put(store, *range(64)))
        assert got(store, 63) == value(63)
        assert store.lease([key(1)], ttl=10) == [True]
        killed = served.kill()
        eventually(lambda: got(store, 1) == value(1) and store.stats()["attached"] == 2)
        assert [got(store, number) for number in range(64)] == [value(number) for number in range(64)]
        stats = store.stats()["keeper"]
        assert (stats["values"], stats["leased"], stats["namespaces"]) == (64, 0, 1)
        assert served.complained().startswith(
            f"llm-datadist serve: the process that serves (pid {killed}) was killed by SIGKILL after "
        )
        assert served.complained() == f"llm-datadist serve: pid {served.serving} serves, with 64 values from before\n"
        # The order of use is that from before: value 0 was used last above, as the last one of the loop of `got` was.
        assert put(store, 100) == [True]
        assert [n for n in range(64) if store.exists([key(n)]) == [False]] == [0]


def test_a_child_is_started_once_the_system_has_descriptors_again(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert put(store, 1) == [True]
        before = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        served.kill()
        assert served.complained().endswith("; starting another one\n")
        assert "cannot start a process that serves; trying again: " in served.complained()
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, before)
        eventually(lambda: got(store, 1) == value(1))
        # It complains once, however often it has tried.
        assert served.complained().endswith(" serves, with 1 values from before\n")


def test_a_child_that_cannot_wait_for_clients_fails(socket: Path) -> None:
    code = """
import os, socket, sys, threading
from pathlib import Path
from llm_datadist import Error, Store
from llm_datadist.native import _Holder
holder = _Holder(memory="1MiB", socket=sys.argv[1], value="64KiB", take_over=False)
stop, other = socket.socketpair()
def serve():
    try:
        print(holder.serve(other, empty=False))
    except Error as error:
        print(error)
thread = threading.Thread(target=serve)
thread.start()
stop.recv(4)
descriptors = []
while not descriptors:
    links = [(link, os.readlink(link)) for link in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(link)]
    descriptors = [int(link.rpartition("/")[2]) for link, name in links if "eventpoll" in name]
store = Store(sys.argv[1], namespace="n", timeout=60.0)
os.close(descriptors[0])
store.stats()  # it waits again after this message
thread.join()
"""
    command = [sys.executable, "-c", code, str(socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)  # noqa: S603
    assert "epoll_wait failed" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("read a-token-of-readers\n")
    return path


def be_refused(socket: Path, count: int) -> None:
    wrong: dict[str, Any] = {"token": "a-wrong-token-0123"}
    for _ in range(count):
        with pytest.raises(InvalidArgument):
            opened(socket, **wrong)


def test_refusals_are_reported_once_a_minute(socket: Path, tokens: Path) -> None:
    with ready(socket, "--tokens", str(tokens)) as served:
        line = "llm-datadist serve: a client was refused: "
        line += f"pid={os.getpid()} uid={os.geteuid()}: the token is none of those of the keeper\n"
        be_refused(socket, 3)
        assert served.complained() == line
        with opened(socket) as store:
            assert store.stats()["keeper"]["refused"] == 3
            served.kill()
            eventually(lambda: attached(store))
            crashed = served.complained()
            if "2 clients were refused in a minute" in crashed:  # the machine has paused the test for so long
                crashed = served.complained()
            assert crashed.endswith("; starting another one\n"), "one line at most for the other two"
            assert served.complained().endswith(" serves, with 0 values from before\n")
            be_refused(socket, 1)
            assert served.complained() == line, "the next process reports, too"
        served.process.terminate()
        assert served.process.communicate()[1] == ""


def fill(serve: Serve) -> int:
    """Fill the standard error of a process, a pipe, with zeros. Return how many."""
    # Opened again, because O_NONBLOCK would count for the process, too.
    descriptor, count = os.open(f"/proc/{serve.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK), 0
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                count += os.write(descriptor, bytes(select.PIPE_BUF))
    finally:
        os.close(descriptor)
    return count


def test_stderr_that_nobody_reads_does_not_block(socket: Path, tokens: Path) -> None:
    with ready(socket, "--tokens", str(tokens)) as served, opened(socket) as store:
        assert put(store, 1) == [True]
        count = fill(served)
        assert count > 0
        be_refused(socket, 1)  # the holder has a report to print
        served.kill()
        eventually(lambda: got(store, 1) == value(1))
        be_refused(socket, 1)
        served.process.terminate()
        assert served.process.wait(LIMIT) == 0
        assert served.process.communicate()[1] == "\0" * count


def test_memory_is_emptied_after_two_crashes(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert put(store, 1) == [True]
        for attachments in (2, 3):
            served.kill()
            eventually(lambda count=attachments: attached(store) and store.stats()["attached"] == count)
        assert got(store, 1) is None
        assert put(store, 1) == [True]
        lines = [served.complained() for _ in range(4)]
        assert lines[0].endswith("; starting another one\n")
        assert lines[1].endswith(" serves, with 1 values from before\n")
        assert lines[2].endswith("; starting with empty memory, after two crashes within 60 s\n")
        assert lines[3].endswith(" serves, with 0 values from before\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("which", ["holder", "child"])
def test_a_signal_to_one_process_ends_both(socket: Path, served: Serve, number: signal.Signals, which: str) -> None:
    serving = served.serving
    os.kill(served.process.pid if which == "holder" else serving, number)
    assert served.process.wait(LIMIT) == 0
    assert not socket.exists()
    assert ended(serving)
    assert served.process.communicate()[1] == ""


def test_the_child_ends_with_its_holder_and_another_keeper_takes_the_path(socket: Path, served: Serve) -> None:
    serving = served.serving
    served.process.kill()
    served.process.wait(LIMIT)
    with ready(socket), opened(socket) as store:  # it waits for the end of the child
        assert put(store, 1) == [True]
    assert ended(serving)


def test_the_holder_has_one_thread_and_no_client(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert put(store, 1) == [True]
        # An emulator may have a thread of its own.
        assert len(list(Path(f"/proc/{served.process.pid}/task").iterdir())) <= 1 + emulated()
        # The socket that listens, a pair for signals, the end of the child, and nothing of a client.
        kinds = [str(link.readlink()) for link in Path(f"/proc/{served.process.pid}/fd").iterdir()]
        assert len([kind for kind in kinds if kind.startswith("socket:")]) == 4
        assert not [kind for kind in kinds if "eventpoll" in kind or "pidfd" in kind]


def test_a_stopped_process_that_is_killed_is_replaced(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert put(store, 1) == [True]
        os.kill(served.serving, signal.SIGSTOP)
        # This client waits in the queue of the socket.
        waiting = threading.Thread(target=lambda: waited.append(opened(socket)))
        waited: list[Store] = []
        waiting.start()
        served.kill()
        waiting.join()
        with waited[0] as other:
            eventually(lambda: got(other, 1) == value(1))


def test_another_keeper_takes_over_the_values(socket: Path, served: Serve) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(opened(socket))
        assert all(put(store, *range(40)))
        assert store.lease([key(39)], ttl=10) == [True]
        # The second process has half of the memory.
        other = stack.enter_context(Serve(socket, "--take-over", "--memory", "2MiB", "--json"))
        facts = json.loads(other.printed())
        assert facts == {
            "ready": True,
            "slots": 32,
            "slot_bytes": VALUE,
            "socket": str(socket),
            "pid": other.process.pid,
            "serving_pid": other.serving,
        }
        assert served.process.wait(LIMIT) == 0
        assert served.complained() == "llm-datadist serve: another keeper has taken over\n"
        eventually(lambda: attached(store))
        taken = [number for number in range(40) if got(store, number) == value(number)]
        assert len(taken) == 32
        assert other.complained().startswith(f"llm-datadist serve: {len(taken)} values were taken over")
        assert socket.exists()
        assert sorted(path.name for path in socket.parent.iterdir()) == ["keeper", "keeper.lock"]
        # It is a keeper as any other.
        other.kill()
        eventually(lambda: attached(store) and store.stats()["attached"] == 3)
        assert [number for number in range(40) if got(store, number) == value(number)] == taken


def test_of_two_keepers_that_take_over_at_once_one_has_the_values(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert all(put(store, *range(64)))
        with Serve(socket, "--take-over") as one, Serve(socket, "--take-over") as other:
            assert served.process.wait(LIMIT) == 0
            eventually(lambda: [one.process.poll(), other.process.poll()] != [None, None])
            # If the second one was late, it has taken over from the first one.
            assert [one.process.poll(), other.process.poll()].count(None) == 1
            eventually(lambda: attached(store))
            assert [got(store, number) for number in range(64)] == [value(number) for number in range(64)]


@pytest.mark.parametrize("which", ["holder", "child"])
def test_a_keeper_that_is_killed_while_it_takes_over_leaves_the_other_one_alone(
    socket: Path, served: Serve, which: str
) -> None:
    with opened(socket) as store, contextlib.ExitStack() as stack:
        assert all(put(store, *range(64)))
        with stopped(served.process):
            other = stack.enter_context(Serve(socket, "--take-over"))
            eventually(lambda: _has_child(other))
            child = other.serving
            killed = other.process.pid if which == "holder" else child
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: ended(killed))  # on a busy machine, later than the other one could take over
        assert other.process.wait(LIMIT) == (-signal.SIGKILL if which == "holder" else 1)
        eventually(lambda: ended(child))
        assert served.process.poll() is None
        assert [got(store, number) for number in range(64)] == [value(number) for number in range(64)]
        assert store.stats()["keeper"]["values"] == 64


def _has_child(serve: Serve) -> bool:
    pid = serve.process.pid
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def test_a_keeper_that_has_taken_over_goes_on_without_standard_output(socket: Path, served: Serve) -> None:
    with opened(socket) as store, Path("/dev/full").open("w") as full:
        assert put(store, 1) == [True]
        with Serve(socket, "--take-over", output=full) as other:
            assert served.process.wait(LIMIT) == 0
            assert other.complained() == "llm-datadist serve: 1 values were taken over\n"
            assert "cannot write the results" in other.complained()
            eventually(lambda: got(store, 1) == value(1))
            assert other.process.poll() is None


def test_a_size_without_a_unit_is_a_number_of_bytes(socket: Path) -> None:
    for memory, reason in [
        ("100", "memory=100 must be at least 65536 bytes, the slot of one value"),
        ("0", "memory=0 must be a number of bytes above 0, or a text with a unit"),
        ("lots", "memory=lots must be a number of bytes above 0, or a text with a unit"),
        ("64K", "memory=64K must be a number of bytes above 0, or a text with a unit"),
        ("+100000", "memory=+100000 must be a number of bytes above 0, or a text with a unit"),
    ]:
        with Serve(socket, "--memory", memory) as refused:
            assert refused.complained().startswith(f"llm-datadist serve: {reason}")
            assert refused.process.wait(LIMIT) == 2
    with Serve(socket, "--memory", "131072") as serve:
        assert serve.printed() == f"ready: 2 values of 64KiB at {socket}\n"


def test_nothing_is_taken_over_without_a_keeper(socket: Path) -> None:
    with ready(socket, "--take-over"), opened(socket) as store:
        assert put(store, 1) == [True]


def test_a_failed_take_over_leaves_the_path_alone(socket: Path) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as listening:
        listening.bind(str(socket))
        listening.listen()

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        thread = threading.Thread(target=refuse)
        thread.start()
        with Serve(socket, "--take-over") as serve:
            assert serve.process.wait(LIMIT) == 1
            assert "the keeper has ended the connection" in serve.complained()
            assert "the process that should serve" in serve.complained()
        listening.shutdown(sockets.SHUT_RDWR)
        thread.join()
        assert sorted(path.name for path in socket.parent.iterdir()) == ["keeper", "keeper.lock"]


def test_no_process_is_left_if_the_line_cannot_be_printed(socket: Path) -> None:
    command = [sys.executable, "-m", "llm_datadist", "serve", "--memory", "4MiB", "--socket", str(socket)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False)  # noqa: S603
    assert done.returncode == 1
    assert "cannot write the results" in done.stderr
    with Store(socket, namespace="n") as store:
        assert store.stats()["keeper"] is None


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(
    socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    path = f"\0{tmp_path}/notify" if abstract else f"{tmp_path}/notify"
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(LIMIT)
        monkeypatch.setenv("NOTIFY_SOCKET", path.replace("\0", "@"))
        with ready(socket, "--prepare") as serve:
            assert serve.complained() == "llm-datadist serve: memory: 4.0 MiB of 4.0 MiB prepared\n"
            serve.kill()
            again = [serve.complained(), serve.complained()]
            serve.process.terminate()
            assert serve.process.wait(LIMIT) == 0
        prepared, started, crashed, serves, stopping = (manager.recv(1000).decode() for _ in range(5))
        assert prepared.splitlines() == [
            "STATUS=memory: 4.0 MiB of 4.0 MiB prepared",
            "EXTEND_TIMEOUT_USEC=60000000",
        ]
        assert started.splitlines() == ["READY=1", f"STATUS=64 values of 64KiB at {socket}"]
        assert [f"llm-datadist serve: {text.removeprefix('STATUS=')}\n" for text in (crashed, serves)] == again
        assert stopping == "STOPPING=1"


def test_the_service_manager_waits_while_values_are_taken_over(
    socket: Path, served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.settimeout(LIMIT)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
        with stopped(served.process), Serve(socket, "--take-over"):
            assert manager.recv(1000).decode().splitlines() == [
                "STATUS=taking over the values of another keeper",
                "EXTEND_TIMEOUT_USEC=60000000",
            ]


def test_prepared_memory_is_used_at_once(socket: Path) -> None:
    def kib(serve: Serve) -> tuple[int, int]:
        """Return how much memory for values is used, and how much counts for the process that holds it."""
        process = Path(f"/proc/{serve.process.pid}")
        (values,) = (link for link in (process / "fd").iterdir() if "llm_datadist values" in str(link.readlink()))
        fields = dict(line.split(":") for line in (process / "status").read_text().splitlines())
        return values.stat().st_blocks // 2, int(fields["RssShmem"].split()[0])

    with ready(socket, "--prepare") as serve:
        used, counted = kib(serve)
        assert used == 4096
        assert counted < 1024, "the kernel would end the process that holds the values first"
    with ready(socket) as serve:
        assert kib(serve)[0] < 1024
