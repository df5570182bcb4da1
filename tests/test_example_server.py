"""The command `examples/asyncio_server`: its summary and exit status, its faults, and what its guide quotes.

Not for: the calls in detail (`tests/native`), or speed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "asyncio_server"
GUIDE = ROOT / "docs" / "how-to" / "asyncio-server.md"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108

Change = tuple[str, str, str]
"""A file of the example, a text that it contains once, and what replaces it."""

SHORT_RUN: Change = ("__main__.py", "LIMIT_S = 60.0", "LIMIT_S = 5.0")


class Ended(NamedTuple):
    """What a run has printed, and its exit status."""

    status: int
    output: str
    errors: str

    def number(self, pattern: str) -> int:
        """The number in the only place of the output that matches."""
        (found,) = re.findall(pattern, self.output)
        return int(found)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command as the leader of a new process group, with warnings as errors in all of its processes."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, str(folder), *arguments],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*arguments: str, folder: Path = EXAMPLE) -> Ended:
    process = start(folder, *arguments)
    try:
        output, errors = process.communicate(timeout=5 * LIMIT)
        assert not members(process.pid), "a process is left"
    finally:
        kill_group(process.pid)
    return Ended(process.returncode, output, errors)


def members(group: int) -> list[int]:
    """The processes of a group that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found


def kill_group(group: int) -> None:
    for process in members(group):
        os.kill(process, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    before = set(SHARED_MEMORY.iterdir())
    yield
    # Other programs may have files there for a moment.
    eventually(lambda: not set(SHARED_MEMORY.iterdir()) - before, what="that /dev/shm has no new file")


def changed(folder: Path, *changes: Change) -> Path:
    """Copy the example, with changes."""
    copy = folder / "asyncio_server"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in changes:
        text = (copy / name).read_text()
        assert text.count(before) == 1, (name, before)
        (copy / name).write_text(text.replace(before, after))
    return copy


def assert_all_is_right(ended: Ended, requests: int) -> None:
    assert (ended.status, ended.errors) == (0, ""), ended.output
    assert f"{requests} right, 0 wrong, 0 lost" in ended.output
    assert re.findall(r"(\w+): (\d+) of \2 blocks are free", ended.output) == [("decode", "1024"), ("prefill", "384")]


def test_all_requests_are_served(tmp_path: Path) -> None:
    patient = changed(tmp_path, ("decode_server.py", "ATTEMPT_LIMIT_S = 5.0", "ATTEMPT_LIMIT_S = 50.0"))
    ended = run("--requests", "256", "--in-flight", "64", folder=patient)
    assert_all_is_right(ended, 256)
    assert ended.number(r"links: (\d+)") == 1
    assert ended.number(r"computed again: (\d+)") == 0


@pytest.mark.parametrize("fault", ["--kill", "--cut"])
def test_requests_outlive_a_killed_prefill_and_a_dropped_link(fault: str) -> None:
    """If only the link drops, prefill lives on: it frees the blocks of the lost requests because of the event."""
    ended = run("--requests", "256", "--in-flight", "64", fault)
    assert_all_is_right(ended, 256)
    assert ended.number(r"links: (\d+)") == 2
    assert ended.number(r"computed again: (\d+)") >= 1, "requests were in flight"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_calls_that_the_engine_refuses_are_repeated(tmp_path: Path, transport: str) -> None:
    one_at_a_time = ("decode_server.py", "MAX_TRANSFERS = 8", "MAX_TRANSFERS = 1")
    by_transport = (
        "blocks.py",
        "**options)\n        self.cache",
        f"transport={transport!r}, **options)\n        self.cache",
    )
    ended = run("--kill", folder=changed(tmp_path, one_at_a_time, by_transport))
    assert_all_is_right(ended, 256)
    assert ended.number(r"Busy and repeated: (\d+)") >= 1


PREFILL, DECODE = "prefill_server.py", "decode_server.py"
WRITE, LEND, RELEASE = (
    "self._blocks.write(job.request, blocks)",
    "await self._lend(job, blocks)",
    "self._blocks.give_back(",
)
SPOIL = "self._blocks._tensors[7][blocks[-1], -1:] += job.request == 7"
ANSWER = "send(request=request"
# Changes that put a fault into the example, and a pattern that the output must match.
FAULTS: dict[str, tuple[list[Change], str]] = {
    "one wrong word": ([(PREFILL, WRITE, f"{WRITE}; {SPOIL}")], "255 right, 1 wrong, 0 lost"),
    "one block that is not freed": (
        [(PREFILL, f"{RELEASE}blocks)", f"{RELEASE}blocks[_.request == 7:])")],
        r"(?s)256 right, 0 wrong, 0 lost.*prefill: 383 of 384 blocks are free",
    ),
    "blocks that are freed too early": (
        [(PREFILL, f"{RELEASE}blocks)", "pass"), (PREFILL, LEND, f"{LEND}; {RELEASE}blocks)")],
        "[1-9][0-9]* wrong",
    ),
    "a request without an answer": ([(DECODE, ANSWER, f"request == 7 or {ANSWER}"), SHORT_RUN], "[1-9][0-9]* lost"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(tmp_path: Path, fault: str) -> None:
    changes, output = FAULTS[fault]
    ended = run(folder=changed(tmp_path, *changes))
    assert ended.status == 1
    assert "TimeoutError" in ended.errors if SHORT_RUN in changes else ended.errors == ""
    assert re.search(output, ended.output), ended.output


def test_servers_end_when_the_front_end_is_killed() -> None:
    """Decode is in the middle of its requests, and cancels them."""
    process = start(EXAMPLE, "--requests", "1000000")
    try:
        eventually(lambda: len(members(process.pid)) == 3, what="the start of both servers")
        time.sleep(1)
        process.kill()
        output, errors = process.communicate(timeout=LIMIT)  # until the servers have closed their standard error
        assert (output, errors) == ("", "")
        eventually(lambda: not members(process.pid))
    finally:
        kill_group(process.pid)


def test_the_guide_quotes_the_example() -> None:
    quoted = re.findall(
        r"^<!-- not run: an excerpt of examples/asyncio_server/(\w+\.py) -->\n```python\n(.*?)^```$",
        GUIDE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert len(quoted) == GUIDE.read_text(encoding="utf-8").count("```python")
    for name, excerpt in quoted:
        source = (EXAMPLE / name).read_text(encoding="utf-8")
        indented = [textwrap.indent(excerpt, " " * depth) for depth in range(0, 20, 4)]
        assert any(f"\n{text}" in f"\n{source}" for text in indented), f"{name} does not contain:\n{excerpt}"
