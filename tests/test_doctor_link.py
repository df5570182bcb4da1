"""Measurements of `llm-datadist doctor --to`, with `--serve` in another process.

Not for: what the command says about a host (`test_doctor.py`). No test expects a time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable

import pytest

from conftest import options
from llm_datadist.commands import output
from llm_datadist.commands.doctor import link, report
from llm_datadist.commands.doctor.link import Row
from llm_datadist.native import Engine
from memory import run_command
from network_namespaces import ADDRESSES, Hosts, possible
from peers import Ends, refusing_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llm_datadist import LLMDataDist

DOCTOR = [sys.executable, "-m", "llm_datadist", "doctor"]
LIMIT_S = 60
# The rules for each path. The last one for rings applies if processes may not read each other's registered memory.
RULES = {
    "mapped": [["mapped_pool"]],
    "process": [["process_memory"]],
    "rings": [["short_transfer"], ["owner_sends"]],
    "sockets": [["owner_sends"]],
}


@contextmanager
def serving(*arguments: str, address: str = "127.0.0.1:0", before: tuple[str, ...] = ()) -> Iterator[Any]:
    """The other end, as a process with the attribute `port`."""
    command = [*before, *DOCTOR, "--serve", address, *arguments]
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        first = process.stdout.readline()
        found = re.search(r"serving at \S+:(\d+); ", first)
        assert found, first + process.stderr.read()
        process.port = int(found[1])
        assert process.stdout.readline() == f"doctor:   llm-datadist doctor --to HOST:{process.port}\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def to(address: str, *arguments: str, before: tuple[str, ...] = ()) -> Any:
    command = [*before, *DOCTOR, "--to", address, "--seconds", "0.4", "--json", "-", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)  # noqa: S603


def refused(address: str, reason: str, *arguments: str) -> str:
    """Check that a measurement fails with one line that has this reason. Return the line."""
    done = to(address, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    return str(done.stderr)


def ended_measurement(other: Any, end: Callable[[Any], object]) -> tuple[int, str, str]:
    """Begin a long measurement, call `end` with its process once it is linked, and return its status and output."""
    command = [*DOCTOR, "--to", f"127.0.0.1:{other.port}", "--seconds", "600"]
    measuring = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert other.stdout.readline().endswith(": linked\n")
        end(measuring)
        output, errors = measuring.communicate(timeout=LIMIT_S)
    finally:
        measuring.kill()
        measuring.communicate()
    return measuring.returncode, output, errors


def rows_of(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


def check_measured(row: dict[str, Any], moved_by: str, transport: str, also: str = "") -> None:
    """Check a row of a link over `transport`, whose calls were moved by one path, or some of them by another one."""
    assert [path for path in row["moved_by"] if path != also] == [moved_by]
    assert all(rules in RULES[path] for path, rules in row["moved_by"].items()), row["moved_by"]
    assert (row["transport"], row["unusable"]) == (transport, None)
    half, most = row["pull_us"]
    assert 0 < half <= most
    assert row["pull_gb_s"] > 0
    assert row["push_gb_s"] > 0
    assert all(count % link.BLOCK_BYTES == 0 and 0 < count <= link.CACHE_BYTES for count in row["call_bytes"])


@pytest.fixture
def token(tmp_path: Path) -> str:
    return secret(tmp_path / "token", "a token of this test, long enough")


def secret(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    return str(file)


def test_every_path_of_one_host_is_measured() -> None:
    with serving() as other:
        done = to(f"localhost:{other.port}")
        rows = rows_of(done)
        check_measured(rows[link.TCP], "sockets", "tcp")  # so there were two links
        output = "".join(other.stdout.readline() for _ in range(4))  # two links and their ends
        other.send_signal(signal.SIGINT)
        rest, errors = other.communicate(timeout=LIMIT_S)
    output += rest
    assert list(rows) == [link.DEFAULT, link.DEFAULT_REGISTERED, link.TCP, link.UCX]
    check_measured(rows[link.DEFAULT], "mapped", "shm")
    # Short calls use rings. The speed of the machine decides whether longer ones are measured.
    check_measured(rows[link.DEFAULT_REGISTERED], "rings", "shm", "process")
    assert rows[link.DEFAULT]["not_faster"] is None
    assert rows[link.DEFAULT_REGISTERED]["not_faster"]
    assert rows[link.UCX]["unusable"]  # there is no token
    assert f"link to 127.0.0.1:{other.port}" in done.stderr  # the table
    assert (other.returncode, errors) == (0, "")
    assert re.findall(r": (linked|ended)\n", output) == ["linked", "ended"] * 2 + ["ended"]
    assert output.endswith("doctor: ended\n")


def test_serve_ends_by_itself_after_its_seconds() -> None:
    with serving("--seconds", "0.2") as other:
        _, errors = other.communicate(timeout=LIMIT_S)
    assert (other.returncode, errors) == (0, "")


def test_token_admits_and_a_lack_of_it_does_not(token: str, tmp_path: Path) -> None:
    with serving("--token-file", token) as other:
        address = f"127.0.0.1:{other.port}"
        check_measured(rows_of(to(address, "--token-file", token))[link.DEFAULT], "mapped", "shm")
        wrong = secret(tmp_path / "wrong", "another token, also long enough")
        for given in ([], ["--token-file", wrong]):
            line = refused(address, "token", *given)
            assert line.startswith(f"doctor: cannot link to {address}: PeerLost: ")


def test_token_file_that_others_can_read_exits_2(token: str) -> None:
    os.chmod(token, 0o644)  # noqa: PTH101
    for way, address in (("--to", "127.0.0.1:1"), ("--serve", "127.0.0.1:0")):
        done = run_command("doctor", way, address, "--token-file", token)
        assert done.returncode == 2
        assert "token_file" in done.stderr
        assert "mode 0644" in done.stderr


def test_an_address_in_use_is_a_failure_of_the_engine() -> None:
    with serving() as other:
        done = run_command("doctor", "--serve", f"127.0.0.1:{other.port}")
    assert done.returncode == 1
    assert "doctor: the engine failed: Error: cannot listen at" in done.stderr


def test_a_wrong_address_has_no_advice_about_the_other_side() -> None:
    with pytest.raises(link.MeasureError, match="cannot link to nonsense: InvalidArgument: ") as raised:
        link.measure("nonsense", 0.1, {})
    assert "--serve" not in str(raised.value)


def test_nobody_listens() -> None:
    address = f"127.0.0.1:{refusing_port()}"
    line = refused(address, "Connection refused")
    assert line.startswith(f"doctor: cannot link to {address}: Timeout: ")


@pytest.mark.parametrize("metadata", [b"", b"of this test", link.METADATA + b"0"])
def test_another_program_with_an_engine_is_not_measured(metadata: bytes) -> None:
    with Engine(listen="127.0.0.1:0", metadata=metadata) as engine:
        refused(str(engine.address), "start `llm-datadist doctor --serve` there")


@pytest.mark.parametrize("accessible", [True, False])
def test_a_program_of_the_original_api_is_not_measured(start: Callable[..., LLMDataDist], accessible: bool) -> None:
    given = {"llm__listenIpInfo": "127.0.0.1:0", "llm__EnableRemoteCacheAccessible": str(int(accessible))}
    refused(str(start(options(**given)).listen_ip_info), "start `llm-datadist doctor --serve` there")


def test_the_end_of_the_other_side_ends_the_measurement() -> None:
    with serving() as other:
        status, output, errors = ended_measurement(other, lambda _: other.kill())
    assert (status, output) == (1, "")
    address = f"127.0.0.1:{other.port}"
    # The other side may know of the link a moment earlier than this one.
    begun = f"doctor: the measurement of {address} failed: PeerLost: " in errors
    assert begun or f"doctor: cannot link to {address}: " in errors


def test_interrupted_measurement_exits_130() -> None:
    with serving() as other:
        ended = ended_measurement(other, lambda measuring: measuring.send_signal(signal.SIGINT))
        assert other.stdout.readline().endswith(": ended\n")
    assert ended == (130, "", "doctor: interrupted\n")


def test_ucx_that_cannot_be_opened_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with serving() as other:
        row = rows_of(to(f"127.0.0.1:{other.port}"))[link.UCX]
    assert row["moved_by"] == {}
    assert "UCX needs a token" in row["unusable"]


@pytest.mark.root
@pytest.mark.skipif(not possible(), reason="this machine allows no network namespaces")
def test_another_host_is_measured_over_sockets(token: str, ends: Ends) -> None:
    here, there = (("nsenter", "-t", str(end.process.pid), "-n") for end in Hosts(ends).ends)
    given = ["--token-file", token]
    with serving(*given, address="0.0.0.0:26500", before=there):
        rows = rows_of(to(f"{ADDRESSES[1]}:26500", *given, before=here))
    assert list(rows) == [link.DEFAULT, link.DEFAULT_REGISTERED, link.UCX]  # TCP would be the default again
    for name in (link.DEFAULT, link.DEFAULT_REGISTERED):
        check_measured(rows[name], "sockets", "tcp")
        assert "no memory is shared" in rows[name]["not_faster"]


class Clock:
    """Time that passes only while bytes move."""

    def __init__(self, gb_s: float) -> None:
        self.now, self.gb_s, self.moves = 1000.0, gb_s, []

    def move(self, blocks: int) -> None:
        self.moves.append(blocks)
        self.now += blocks * link.BLOCK_BYTES / self.gb_s / 1e9

    def monotonic(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.mark.parametrize(
    ("gb_s", "limit_s", "blocks"), [(1.0, 10.0, 1024), (1e-4, 10.0, 16), (1e-4, 2.0, 4), (1e-7, 1.0, 4)]
)
def test_rate_grows_its_calls_only_as_far_as_time_allows(
    monkeypatch: pytest.MonkeyPatch, gb_s: float, limit_s: float, blocks: int
) -> None:
    clock = Clock(gb_s)
    monkeypatch.setattr(link, "time", clock)
    count, found = link.rate(clock.move, limit_s)
    assert count == blocks * link.BLOCK_BYTES
    assert found == pytest.approx(gb_s)
    assert clock.moves[0] == 4
    assert clock.moves[-1] == blocks
    last_s = blocks * link.BLOCK_BYTES / gb_s / 1e9
    assert clock.now <= 1000 + max(limit_s + last_s, last_s)


def test_percentiles_are_samples() -> None:
    assert output.percentiles([7.0]) == (7.0, 7.0)
    assert output.percentiles([float(number) for number in range(100, 0, -1)]) == (50.0, 99.0)
    assert output.percentiles([float(number) for number in range(1, 1001)]) == (500.0, 990.0)


def test_the_table_shows_rows_reasons_and_sizes() -> None:
    two_paths = {"process": ["a", "b"], "sockets": ["c"]}
    rows = [
        Row("default", "shm", {"mapped": ["mapped_pool"]}, (1.25, 1234.5), 12.3456, 0.001, (2**24, 2**16)),
        Row("registered", "shm", two_paths, (1.0, 2.0), 1.0, 1.0, None, not_faster="slow"),
        Row("UCX", unusable="a reason " * 20),
    ]
    text = report.measurements("10.0.0.2:26500", rows, 100)
    lines = text.splitlines()
    assert lines[0] == "link to 10.0.0.2:26500"
    assert max(map(len, lines[7:])) <= 100
    table = [re.split(r"\s{2,}", line.strip()) for line in lines[2:7]]
    assert table[2] == ["default", "mapped (shm)", "1.2", "1,234.5", "12.3", "0.001"]
    assert table[3][:2] == ["registered", "process, sockets (shm)"]
    assert table[4] == ["UCX", "not usable", "-", "-", "-", "-"]
    assert "registered: no faster path, because slow" in lines
    assert "UCX: not usable: a reason" in text
    assert "Rules that chose the paths: default: mapped_pool; registered: a, b, c." in lines
    assert lines[-1] == "Rates are those of calls of 64.0 KiB, 16.0 MiB."
