"""The processes of `llm-datadist serve`: one that holds the memory, and one that serves, which is killed or replaced.

Not for: an index that is left half-written (`crates/keeper/src/table.rs`), and what a store does without a keeper
(`test_store.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket as sockets
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist import Store

from .stores import CHILD, LIMIT, VALUE, child_of, got, key, opened, value, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

ROUNDS = int(os.environ.get("LLM_DATADIST_SOAK", "5"))


class Serve:
    """`llm-datadist serve`, which is killed at the end."""

    def __init__(self, socket: Path, *options: str) -> None:
        command = [sys.executable, "-m", "llm_datadist", "serve", "--memory", "4MiB", "--socket", str(socket), *options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)  # noqa: S603

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
def socket(tmp_path: Path) -> Path:
    return tmp_path / "keeper"


@pytest.fixture
def served(socket: Path) -> Iterator[Serve]:
    with ready(socket) as serve:
        yield serve


@contextlib.contextmanager
def ready(socket: Path, *options: str) -> Iterator[Serve]:
    with Serve(socket, *options) as serve:
        assert serve.printed() == f"ready: 64 values of 64KiB at {socket}\n"
        yield serve


def put(store: Store, *numbers: int) -> list[bool]:
    return store.put([key(number) for number in numbers], [value(number) for number in numbers])


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
        wait_for(lambda: got(store, 1) == value(1) and store.stats()["attached"] == 2)
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


def test_memory_is_emptied_after_two_crashes(socket: Path, served: Serve) -> None:
    with opened(socket) as store:
        assert put(store, 1) == [True]
        for attachments in (2, 3):
            served.kill()
            wait_for(lambda count=attachments: attached(store) and store.stats()["attached"] == count)
        assert got(store, 1) is None
        assert put(store, 1) == [True]
        lines = [served.complained() for _ in range(4)]
        assert lines[0].endswith("; starting another one\n")
        assert lines[1].endswith(" serves, with 1 values from before\n")
        assert lines[2].endswith("; starting with empty memory, after two crashes within 60 s\n")
        assert lines[3].endswith(" serves, with 0 values from before\n")


CLIENT = """
import random
confirmed, buffer = set(), bytearray(65536)
numbers = range(60) if sys.argv[2] == "fit" else range(200)
print("begun", flush=True)
for turn in range(int(sys.argv[3])):
    chosen = random.sample(numbers, 4)
    for number, stored in zip(chosen, store.put([key(n) for n in chosen], [value(n) for n in chosen])):
        confirmed |= {number} if stored else set()
    if turn % 7 == 0 and sys.argv[2] != "fit":
        try:
            store.drop([key(chosen[0])])
        except Exception:
            pass  # the keeper is away
    for number in random.sample(numbers, 4):
        if store.get([key(number)], [buffer]) == [True]:
            assert buffer == value(number), f"wrong bytes of {number}"
print(*sorted(confirmed), flush=True)
"""


@pytest.mark.parametrize("values", ["fit", "replaced"])
def test_killed_at_any_moment_no_wrong_byte_is_read_and_no_confirmed_value_is_lost(socket: Path, values: str) -> None:
    """Two crashes within a minute empty the memory, so each round has processes of its own."""
    for _ in range(ROUNDS):
        with ready(socket) as serve:
            code = [sys.executable, "-c", CHILD + CLIENT, str(socket), values, "300"]
            with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as client:  # noqa: S603
                assert client.stdout is not None
                assert client.stdout.readline() == "begun\n"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    client.wait(random.uniform(0, 0.3))  # noqa: S311
                serve.kill()
                confirmed = [int(number) for number in client.stdout.readline().split()]
                assert client.wait(LIMIT) == 0
            with opened(socket) as store:
                wait_for(lambda: attached(store))
                found = {number: got(store, number) for number in range(200)}
            assert all(found[number] in (None, value(number)) for number in found)
            if values == "fit":
                assert [number for number in confirmed if found[number] is None] == []


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
        assert len(list(Path(f"/proc/{served.process.pid}/task").iterdir())) == 1
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
            wait_for(lambda: got(other, 1) == value(1))


def test_another_keeper_takes_over_the_values(socket: Path, served: Serve) -> None:
    with opened(socket) as store, Serve(socket, "--take-over", "--memory", "2MiB", "--json") as other:
        # The second process has half of the memory.
        assert all(put(store, *range(40)))
        assert store.lease([key(39)], ttl=10) == [True]
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
        wait_for(lambda: attached(store))
        taken = [number for number in range(40) if got(store, number) == value(number)]
        assert len(taken) <= 32
        assert other.complained().startswith(f"llm-datadist serve: {len(taken)} values were taken over")
        assert socket.exists()
        assert sorted(path.name for path in socket.parent.iterdir()) == ["keeper", "keeper.lock"]
        # It is a keeper as any other.
        other.kill()
        wait_for(lambda: attached(store) and store.stats()["attached"] == 3)
        assert [number for number in range(40) if got(store, number) == value(number)] == taken


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
            serve.process.terminate()
            assert serve.process.wait(LIMIT) == 0
        prepared, started, stopping = (manager.recv(1000).decode() for _ in range(3))
        assert prepared.splitlines() == [
            "STATUS=memory: 4.0 MiB of 4.0 MiB prepared",
            "EXTEND_TIMEOUT_USEC=60000000",
        ]
        assert started.splitlines() == ["READY=1", f"STATUS=64 values of 64KiB at {socket}"]
        assert stopping == "STOPPING=1"


def test_prepared_memory_is_used_at_once(socket: Path) -> None:
    def memory(serve: Serve) -> int:
        fields = dict(line.split(":") for line in Path(f"/proc/{serve.process.pid}/status").read_text().splitlines())
        return int(fields["RssShmem"].split()[0])

    with ready(socket, "--prepare") as serve:
        assert memory(serve) >= 4096
    with ready(socket) as serve:
        assert memory(serve) < 1024
