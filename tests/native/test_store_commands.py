"""What people see of a keeper: `KeeperObserver`, and the command `llm-datadist store`.

Not for: the counters themselves (`crates/keeper/tests`), and their types (`tests/test_stats.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket as sockets
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable

import pytest

from llm_datadist import Closed, Error, InvalidArgument, Keeper, PeerLost, Store
from llm_datadist.commands.main import main
from llm_datadist.commands.store import cli, top
from llm_datadist.native import KeeperObserver

from .stores import LIMIT, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VALUE = 4096
TOP = (sys.executable, "-m", "llm_datadist", "store", "top", "--socket")


@pytest.fixture
def keeper(socket: Path) -> Iterator[Keeper]:
    with Keeper(memory=64 * VALUE, socket=socket, value=VALUE) as opened:
        yield opened


@pytest.fixture
def filled(socket: Path, keeper: Keeper) -> Iterator[Store]:
    """A store of a keeper that has three values of `a model`, and one of another namespace."""
    assert keeper.slots == 64
    with (
        Store(socket, namespace="a model", value=VALUE) as store,
        Store(socket, namespace="b\x1b[2J", value=7) as other,
    ):
        assert store.put([key(n) for n in range(3)], [bytes(VALUE)] * 3) == [True] * 3
        assert other.put([key(1)], [bytes(7)]) == [True]
        yield store


def run(capsys: pytest.CaptureFixture[str], socket: Path, action: str, *more: str) -> tuple[int, str, str]:
    """Run `llm-datadist store`. Return its status and what it has printed."""
    try:
        status = main(["store", action, "--socket", str(socket), *more])
    except SystemExit as error:
        status = int(str(error.code))
    return (status, *capsys.readouterr())


def test_observer_lists_what_a_keeper_has(socket: Path, filled: Store) -> None:
    assert filled.get([key(2)], [bytearray(VALUE)]) == [True]
    assert filled.lease([key(0)], ttl=10) == [True]
    with KeeperObserver(socket) as observer:
        listed = observer.values(0)
        assert [row["key"] for row in listed] == [key(2), key(0), key(1)]
        assert [row["leased"] for row in listed] == [False, True, False]
        assert len({row["slot"] for row in listed}) == 3
        assert observer.values(0, limit=2) == listed[:2]
        assert {row["namespace"] for row in observer.values()} == {0, 1}
        first, second = observer.namespaces()
        assert first == {"number": 0, "text": "a model", "value": VALUE, "checksums": False, "values": 3}
        assert second == {"number": 1, "text": "b\x1b[2J", "value": 7, "checksums": False, "values": 1}
        assert observer.stats() == {**(filled.stats()["keeper"] or {}), "observers": 1}
        for wrong in ({"limit": 0}, {"limit": -1}):
            with pytest.raises(InvalidArgument, match="limit="):
                observer.values(0, **wrong)
        with pytest.raises(TypeError):
            observer.values("a model")  # type: ignore[arg-type]
    with pytest.raises(Closed):
        observer.stats()


def test_observer_needs_a_keeper(socket: Path) -> None:
    with pytest.raises(PeerLost):
        KeeperObserver(socket)
    with Keeper(memory=64 * VALUE, socket=socket, value=VALUE) as keeper:
        with contextlib.ExitStack() as observers:
            for _ in range(8):
                observer = observers.enter_context(KeeperObserver(socket))
            with pytest.raises(Error, match="8 observers are attached"):
                KeeperObserver(socket)
        with KeeperObserver(socket) as observer:
            keeper.close()
            with pytest.raises(PeerLost):
                observer.stats()


def shared_mappings() -> int:
    """Return how many parts of memory files this process has mapped."""
    with open("/proc/self/maps", encoding="ascii") as maps:  # noqa: PTH123  (lines, one by one)
        return sum("memfd:llm_datadist" in line for line in maps)


@pytest.mark.usefixtures("filled")
def test_observer_maps_no_memory_of_the_keeper(socket: Path) -> None:
    before = shared_mappings()
    assert before > 0
    with KeeperObserver(socket) as observer:
        assert len(observer.values()) == 4
        assert shared_mappings() == before


@pytest.mark.usefixtures("filled")
def test_forked_observer_refuses_calls_and_closes_nothing(socket: Path) -> None:
    observer = KeeperObserver(socket)
    forked = os.fork()
    if forked == 0:
        refused = 0
        with contextlib.suppress(BaseException):
            for name in ("stats", "namespaces", "values", "changes"):
                with contextlib.suppress(Closed):
                    getattr(observer, name)()
                    break
                refused += 1
            observer.close()
            del observer
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 4
    assert observer.stats()["values"] == 4, "the child has not ended the connection of its parent"
    observer.close()


def test_observer_follows_changes(socket: Path, filled: Store) -> None:
    with KeeperObserver(socket) as observer:
        assert observer.changes() == {"changes": [], "missed": 0}
        assert filled.put([key(5)], [bytes(VALUE)]) == [True]
        assert filled.drop([key(0)]) == 1
        stored = {"namespace": 0, "key": key(5), "stored": True}
        removed = {"namespace": 0, "key": key(0), "stored": False}
        assert observer.changes() == {"changes": [stored, removed], "missed": 0}


def test_clear_drops_one_namespace(socket: Path, filled: Store) -> None:
    assert filled.clear() == 3
    assert filled.clear() == 0
    assert filled.exists([key(0)]) == [False]
    with KeeperObserver(socket) as observer:
        assert [row["values"] for row in observer.namespaces()] == [0, 1]


@pytest.mark.usefixtures("filled")
def test_stats_prints_each_counter(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, socket, "stats")
    assert status == 0
    assert re.search(r"^values +4 \(6\.2% of the slots\), 0 leased$", text, re.MULTILINE)
    assert re.search(r"^values stored +4$", text, re.MULTILINE)
    assert re.search(r"^bytes stored +12\.0 KiB$", text, re.MULTILINE)
    status, data, _ = run(capsys, socket, "stats", "--json", "-")
    assert (status, json.loads(data)["stored"], json.loads(data)["clients"]) == (0, 4, 2)


@pytest.mark.usefixtures("filled")
def test_ls_lists_namespaces_and_values(socket: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text, _ = run(capsys, socket, "ls")
    assert status == 0
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["0", "3", "12.0", "KiB", "4.0", "KiB", "a", "model"],
        ["1", "1", "7", "B", "7", "B", "'b\\x1b[2J'"],
    ]
    assert "\x1b" not in text, "a namespace must not control the terminal"
    status, text, _ = run(capsys, socket, "ls", "--namespace", "a model", "--limit", "2")
    assert text.splitlines()[0] == "2 of 3 values, the most recently used first"
    assert [line.split()[0] for line in text.splitlines()[2:]] == [key(0).hex(), key(1).hex()]
    file = tmp_path / "values.json"
    status, text, _ = run(capsys, socket, "ls", "--namespace", "1", "--json", str(file))
    assert (status, text.splitlines()[0]) == (0, "1 of 1 values, the most recently used first")
    assert [row["key"] for row in json.loads(file.read_text())["values"]] == [key(1).hex()]


def test_drop_drops_keys_or_a_namespace(socket: Path, filled: Store, capsys: pytest.CaptureFixture[str]) -> None:
    drop = ("--namespace", "a model")
    keys = ("--key", key(0).hex(), "--key", key(9).hex())
    assert run(capsys, socket, "drop", *drop, *keys) == (0, "dropped 1 values\n", "")
    assert filled.exists([key(0), key(1)]) == [False, True]
    assert run(capsys, socket, "drop", *drop, "--all", "--json", "-")[1] == '{\n  "dropped": 2\n}\n'
    with KeeperObserver(socket) as observer:
        assert [row["values"] for row in observer.namespaces()] == [0, 1]


def test_drop_without_values_disconnects_no_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens, socket = tmp_path / "tokens", tmp_path / "keeper"
    tokens.touch(0o600)
    tokens.write_text("read a-token-of-readers\n")
    reader: dict[str, Any] = {"namespace": "n", "token": "a-token-of-readers"}
    with (
        Keeper(memory=64 * VALUE, socket=socket, value=VALUE, tokens=tokens),
        Store(socket, value=VALUE, **reader) as one,
        Store(socket, value=7, **reader) as other,
    ):
        with KeeperObserver(socket) as observer:
            assert [(row["text"], row["value"]) for row in observer.namespaces()] == [("n", VALUE), ("n", 7)]
        assert run(capsys, socket, "drop", "--namespace", "n", "--all") == (0, "dropped 0 values\n", "")
        for store in (one, other):
            stats = store.stats()
            assert stats["keeper"] is not None
            assert (stats["attached"], stats["keeper"]["clients"]) == (1, 2)


def test_errors_say_what_is_wrong(socket: Path, filled: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, socket, "ls", "--namespace", "c")
    assert (status, error) == (1, "llm-datadist store: --namespace: 'c' is none of the 2 namespaces of the keeper\n")
    for wrong in ("ab", key(0).hex() + "00", "x" * 56):
        status, _, error = run(capsys, socket, "drop", "--namespace", "a model", "--key", wrong)
        assert status == 2
        assert f"{wrong!r} is no key: 56 hexadecimal digits (28 bytes) are needed, and it has {len(wrong)}" in error
    assert run(capsys, socket, "drop", "--namespace", "a model")[0] == 2, "neither keys nor --all"
    assert run(capsys, socket, "ls", "--limit", "0")[0] == 2
    assert filled.exists([key(0)]) == [True]
    with KeeperObserver(socket) as observer:
        assert len(observer.namespaces()) == 2, "a question creates no namespace"
    nobody = socket.with_name("nobody")
    for action in ("stats", "ls", "top"):
        assert run(capsys, nobody, action) == (1, "", f"llm-datadist store: no keeper listens at {nobody}\n")


def test_commands_give_up_after_their_timeout(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as silent:
        silent.bind(str(socket))
        silent.listen()
        drop = ("drop", "--namespace", "a", "--all")
        for action in (("stats",), ("ls",), drop):
            status, _, error = run(capsys, socket, *action, "--timeout", "0.01")
            assert status == 1, error
            assert "timeout passed while waiting for the keeper (limit_ms=10)" in error
    assert run(capsys, socket, "ls", "--timeout", "0")[0] == 2


def test_failed_drop_tells_how_many_values_were_dropped(
    socket: Path, filled: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds no keeper."""
    calls = iter((filled.drop, None))

    def drop(keys: list[bytes]) -> int:
        call = next(calls)
        if call is None:
            raise PeerLost("the keeper has ended: dropped=0")
        return call(keys)

    monkeypatch.setattr(cli, "Store", lambda *_, **__: contextlib.nullcontext(SimpleNamespace(drop=drop)))
    keys = [word for number in range(4097) for word in ("--key", key(number).hex())]
    status, _, error = run(capsys, socket, "drop", "--namespace", "a model", *keys)
    text = "the keeper has ended: dropped=0; earlier calls have dropped 3 values"
    assert (status, error) == (1, f"llm-datadist store: {text}\n")


def test_top_divides_by_the_time_since_the_last_answer(
    socket: Path, keeper: Keeper, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeeperObserver(socket) as real:
        stats = real.stats()
    now = 0.0

    def observer(*_: Any, **__: Any) -> Any:
        """It answers after 0 and after 4 seconds, and has stored 40 values meanwhile."""
        if now == 2:
            raise PeerLost("away")
        counted = {**stats, "stored": 10 * now}
        return contextlib.nullcontext(SimpleNamespace(stats=lambda: counted, namespaces=list))

    def sleep(seconds: float) -> None:
        nonlocal now
        if now == 4:
            raise KeyboardInterrupt
        now += seconds

    monkeypatch.setattr(top, "KeeperObserver", observer)
    monkeypatch.setattr(top, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert not keeper.closed
    text = run(capsys, socket, "top", "--interval", "2")[1]
    assert text.count("no keeper answers") == 1
    assert re.findall(r"values stored +([0-9,]+) +([0-9,]+)\n", text) == [("0", "0"), ("10", "40")]


@pytest.mark.usefixtures("filled")
def test_top_reports_a_file_that_takes_no_more(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, socket, "top", "--json", "/dev/full")
    assert status == 1
    assert error.endswith("cannot write the results to /dev/full: No space left on device (errno=28)\n")


def read_until(descriptor: int, holds: Callable[[str], bool]) -> str:
    """Read from a descriptor until a condition holds for all that was read."""
    text, end = "", time.monotonic() + LIMIT
    while not holds(text):
        assert select.select([descriptor], [], [], max(end - time.monotonic(), 0))[0], text
        read = os.read(descriptor, 65536)
        assert read, text
        text += read.decode()
    return text


@contextlib.contextmanager
def started(*command: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, **more)  # noqa: S603
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("filled")
def test_top_prints_each_look_without_a_terminal(socket: Path, end: signal.Signals) -> None:
    with started(*TOP, str(socket), "--interval", "0.05", stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        text = read_until(top.stdout.fileno(), lambda text: text.count("keeper at") >= 3)
        top.send_signal(end)
        assert top.wait(LIMIT) == 0
    assert "\x1b" not in text
    assert re.search(r"values stored +[0-9,]+ +4\n", text)
    assert "a model" in text


def test_top_goes_on_while_the_keeper_is_away(socket: Path, keeper: Keeper, tmp_path: Path) -> None:
    file = tmp_path / "looks.json"
    with started(*TOP, str(socket), "--interval", "0.05", "--json", str(file), stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        read_until(top.stdout.fileno(), lambda text: "keeper at" in text)
        keeper.close()
        read_until(top.stdout.fileno(), lambda text: f"no keeper answers at {socket}" in text)
        with Keeper(memory=64 * VALUE, socket=socket, value=VALUE):
            read_until(top.stdout.fileno(), lambda text: "keeper at" in text)
            top.stdout.close()  # as `top | head` does
            assert top.wait(LIMIT) == 0
    looks = [json.loads(line) for line in file.read_text().splitlines()]
    assert looks[0]["slots"] == 64
    assert None in looks


@pytest.mark.usefixtures("filled")
def test_top_goes_on_while_the_keeper_refuses_it(socket: Path) -> None:
    with started(*TOP, str(socket), "--interval", "0.01", stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        read_until(top.stdout.fileno(), lambda text: "keeper at" in text)
        with contextlib.ExitStack() as observers:
            count, end = 0, time.monotonic() + LIMIT
            while count < 8:  # `top` is an observer at times
                assert time.monotonic() < end
                with contextlib.suppress(Error):
                    observers.enter_context(KeeperObserver(socket))
                    count += 1
            read_until(top.stdout.fileno(), lambda text: "8 observers are attached" in text)
        read_until(top.stdout.fileno(), lambda text: "keeper at" in text)


def test_top_replaces_characters_that_the_terminal_has_not(socket: Path, keeper: Keeper) -> None:
    ours, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with keeper, Store(socket, namespace="f\u00fcr alle", value=VALUE) as store:
        assert store.put([key(1)], [bytes(VALUE)]) == [True]
        with started(*TOP, str(socket), stdin=terminal, stdout=terminal, env=environment):
            read_until(ours, lambda text: "f?r alle" in text)
    os.close(terminal)
    os.close(ours)


@pytest.mark.parametrize("end", ["q", signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("filled")
def test_top_redraws_a_terminal_and_restores_it(socket: Path, end: str | signal.Signals) -> None:
    ours, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    with started(*TOP, str(socket), "--interval", "0.05", stdin=terminal, stdout=terminal) as top:
        text = read_until(ours, lambda text: text.count("\x1b[H") >= 3 and "a model" in text)
        assert text.startswith("\x1b[?1049h\x1b[?25l\x1b[Hkeeper at ")
        if isinstance(end, str):
            os.write(ours, end.encode())
        else:
            top.send_signal(end)
        assert top.wait(LIMIT) == 0
        rest = read_until(ours, lambda text: "\x1b[?1049l" in text)
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    os.close(ours)
    assert rest.endswith("\x1b[?25h\x1b[?1049l")
