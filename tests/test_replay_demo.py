"""The verdict of the replay command, what it shows while it runs, refused late pulls, and how it is interrupted.

Not for: replays (`test_replay.py`) and their parts (`test_replay_parts.py`).
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llm_datadist.commands.replay import cli, node, prefill, report
from llm_datadist.commands.replay.cli import main
from llm_datadist.commands.replay.node import Calls, Node
from llm_datadist.commands.replay.serve import Outcome
from llm_datadist.commands.replay.trace import make_trace
from test_replay_parts import corrupt

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300
REQUESTS = 60
# 16 KiB a block
SMALL = ["--layers", "1", "--head-dim", "8", "--device-pool", "8MiB", "--host-pool", "20MiB", "--quiet"]
BLOCK_BYTES, BLOCK_TOKENS = 16384, 512
LARGE_POOL = "64MiB"  # holds every block of the requests, so that none is dropped


def comparisons(requests):
    """How often a block is compared in a replay that evicts nothing, counted from the trace alone.

    Once for each block of a prompt; twice when a partial block is copied, and once for each block with generated tokens
    at the end of its request; each distinct block at the end; and the block of the grant.
    """
    count = 1 + len({block for request in requests for block in request.blocks})
    for request in requests:
        generated = -(-(request.input_tokens + request.output_tokens) // BLOCK_TOKENS)
        full = request.input_tokens // BLOCK_TOKENS
        copied = request.input_tokens % BLOCK_TOKENS != 0 and request.output_tokens > 0
        count += len(request.blocks) + 2 * copied + (generated - full if request.output_tokens else 0)
    return count


@pytest.mark.parametrize(("variables", "kill"), [([], True), (["KILL=7"], True), (["KILL=0"], False)])
def test_make_demo_ends_with_the_verdict(tmp_path, variables, kill):
    path = tmp_path / "results.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    options = f"{' '.join(SMALL)} --requests {REQUESTS} --device-pool {LARGE_POOL} --json {path}"
    command = ["make", "-C", str(ROOT), "--no-print-directory", "--old-file=build", "demo", *variables]
    command += [f"REPLAY={options}", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    compared = comparisons(make_trace(REQUESTS, seed=1)) * BLOCK_BYTES
    offer, verdict = done.stdout.splitlines()[-2:]
    assert "make example" in offer
    expected = f"PASS {REQUESTS} requests, {compared / 2**20:.1f} MiB compared, 0 wrong"
    survived = r", 1 kill survived in [0-9]+\.[0-9] s" if kill else ""
    assert re.fullmatch(re.escape(expected) + survived, verdict)
    assert done.stderr.count("kill -9 ") == kill
    found = json.loads(path.read_text())
    assert (found["compared_bytes"], found["verdict"]) == (compared, verdict)
    assert (found["late_pull"]["ended"], found["late_pull"]["code"]) == ("expired", "grant_ended")


def test_wrong_byte_is_the_verdict(capsys, monkeypatch):
    corrupt(monkeypatch, pulled=9)
    assert main([*SMALL, "--requests", str(REQUESTS), "--offer", "OFFER"]) == 1
    said = capsys.readouterr()
    assert re.fullmatch(r"replay: WRONG BYTE: request .*\n", said.err)
    assert re.fullmatch(r"FAIL [0-9]+ requests?, [0-9.]+ KiB compared, 1 wrong\n", said.out)


@pytest.fixture
def replay(tmp_path, monkeypatch):
    """A function that runs a short replay, and returns its exit status and its results."""
    monkeypatch.setattr(node, "_ROUNDS", 1)

    def run(*options):
        path = tmp_path / "results.json"
        status = main([*SMALL, "--requests", "10", "--json", str(path), *options])
        return status, json.loads(path.read_text() or "{}")

    return run


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_engine_refuses_the_late_pull_and_nothing_else(replay, capsys, transport):
    status, found = replay("--transport", transport)
    assert status == 0
    assert found["engine"]["ops"]["pull"]["failures"] == 1, "counted by the engine"
    assert found["calls"]["pull granted"]["calls"] == 1, "the pull in time"
    assert found["late_pull"]["error"].startswith("the grant has ended")
    assert "PASS 10 requests" in capsys.readouterr().out


def test_late_pull_that_is_not_refused_fails_the_replay(replay, capsys, monkeypatch):
    pull = Node.pull
    monkeypatch.setattr(Node, "pull", lambda self, peer, sources, targets, *_, **__: pull(self, peer, sources, targets))
    status, _ = replay()
    said = capsys.readouterr()
    assert status == 1
    assert said.err == "replay: LATE PULL: a pull under a grant that had expired was not refused\n"
    assert re.fullmatch(r"FAIL 10 requests, .* compared, 0 wrong\n", said.out)


def worker(lines):
    return [
        sys.executable,
        "-c",
        f"import sys\nfrom llm_datadist.commands.replay import worker\n{lines}\nsys.exit(worker.main())",
    ]


WRONG_GRANTED_BYTE = """
def damage(row):
    row[5] ^= 0x40
lend = worker.Worker._lend
def wrong(self, slots, message):
    damage(self._rows[0][slots[0]].view("uint8"))
    return lend(self, slots, message)
worker.Worker._lend = wrong
"""
LASTING_GRANT = """
lend = worker.Worker._lend
worker.Worker._lend = lambda self, slots, message: lend(self, slots, {**message, "ttl": 60.0})
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (LASTING_GRANT, "LATE PULL: the grant of 100 ms did not end"),
        (
            WRONG_GRANTED_BYTE,
            "WRONG BYTE: request 10: block 0 (granted, slot 0): tensor 0, first wrong byte at offset 5",
        ),
        (
            f"{WRONG_GRANTED_BYTE}damage = lambda _: sys.exit(9)",
            "the prefill process failed: it granted no block: PeerLost: the peer was finalized; it ended with exit ",
        ),
    ],
)
def test_fault_of_prefill_in_the_late_pull_fails_the_replay(replay, capsys, monkeypatch, lines, reason):
    monkeypatch.setattr(prefill, "COMMAND", worker(lines))
    monkeypatch.setattr(prefill, "LATE_LIMIT_S", 1.0)
    assert replay()[0] == 1
    said = capsys.readouterr()
    assert f"replay: {reason}" in said.err
    assert said.out.startswith("FAIL 10 requests")


def test_an_interrupt_while_prefill_is_closed_still_closes_the_engine(replay, capsys, monkeypatch):
    close = prefill.Prefill.close

    def interrupted(self):
        close(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(prefill.Prefill, "close", interrupted)
    free, closed = Node.close, []

    def watched(self):
        leaked = free(self)
        closed.append(self.engine.closed)
        return leaked

    monkeypatch.setattr(Node, "close", watched)
    assert replay() == (130, {})
    said = capsys.readouterr()
    assert said.err == "replay: interrupted\n"
    assert said.out.startswith("FAIL 10 requests")
    assert closed == [True]


def test_help_and_the_module_list_every_exit_status(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert re.findall(r"\b(\d+) (?:if|for)\b", said[said.index("Exit status") :]) == ["0", "1", "2", "3", "130"]
    assert re.findall(r"^\| (\d+) ", cli.__doc__, re.MULTILINE) == ["0", "1", "2", "3", "130"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """A function that shows three updates of a replay with these variables, and returns the text."""

    def show(stream, **variables):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("TERM", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(report, "_IN_PLACE_S", 0)
        monkeypatch.setattr(report, "_LINES_S", 0)
        pulls = Calls()
        display = report.Progress(8000, pulls, 2**20, stream, quiet=False)
        display.plain_copy = node.PlainCopy(4, 2**20, 2.5 * 2**30)
        display.start()
        for moved in (2**30, 2**20, 0):
            if moved:
                pulls.add(500_000_000, 1, moved)
            display(Outcome(requests=4000, blocks={"verified": 1536}))
        display.tell("word " * 30)
        return stream.getvalue()

    return show


def test_rates_are_updated_in_place_without_escapes(shown):
    lines = shown(Terminal(), TERM="xterm", NO_COLOR="1").split("\r")
    rates = ["pulls 2.0 GiB/s", "pulls 0.002 GiB/s", "no pulls"]
    for line, rate in zip(lines[1:4], rates):
        assert line.startswith(f"4,000/8,000 done, {rate} (plain copy 2.5), 1.5 GiB right, ")
        assert len(line) == 79
        assert line.rstrip().endswith(" s left")
    assert not lines[4].strip(), "the line is cleared before another one"
    assert all(len(line) < 80 for line in lines[5].splitlines())
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("stream", "variables"), [(io.StringIO, {"TERM": "xterm"}), (Terminal, {"TERM": "dumb"}), (Terminal, {})]
)
def test_rates_are_lines_without_a_capable_terminal(shown, stream, variables):
    text = shown(stream(), **variables)
    assert text.startswith("4,000/8,000 done, pulls 2.0 GiB/s (plain copy 2.5), 1.5 GiB right, ")
    assert "\r" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", ["1", "21"])
def test_narrow_terminal_is_no_error(shown, columns):
    assert "word" in shown(Terminal(), TERM="xterm", COLUMNS=columns)


@pytest.mark.parametrize(
    ("moved", "text"), [(2**30, "1.0"), (3 * 2**20, "0.0029"), (1, "9.3e-10"), (12.34 * 2**30, "12.3")]
)
def test_rate_is_never_shown_as_zero(moved, text):
    assert report.rate(moved) == text


@pytest.mark.parametrize(("threads", "amount"), [(1, 64), (4, 4096), (64, 8), (3, 2**20)])
def test_plain_copy_copies_and_measures(monkeypatch, threads, amount):
    monkeypatch.setattr(node, "_ROUNDS", 3)
    monkeypatch.setattr(node, "_ROUND_S", 0.001)
    sources = [np.full((6, 16), tensor + 1, np.uint64) for tensor in range(2)]
    targets = [np.zeros((4, 16), np.uint64) for _ in range(2)]
    measured = node.copy_plainly(sources, targets, threads, amount)
    assert measured.threads == threads
    assert measured.bytes_per_s > 0
    for source, target in zip(sources, targets):
        assert set(target.flat) <= {0, source[0, 0]}
    assert any(target.any() for target in targets)


def running(pid):
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def eventually(condition):
    until = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def shared_memory():
    folder = Path("/dev/shm")  # noqa: S108
    return {path.name for path in folder.iterdir() if "llm" in path.name} if folder.exists() else set()


@pytest.mark.parametrize(
    ("number", "early"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_interrupted_replay_leaves_no_process_and_no_shared_memory(number, early):
    before = shared_memory()
    command = [sys.executable, "-m", "llm_datadist", "replay", *SMALL, "--requests", "20000", "--kill-prefill-at", "1"]
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as decode:
        try:
            while not early and "was recomputed and pulled" not in decode.stderr.readline():
                assert decode.poll() is None
            (other,) = eventually(lambda: children(decode.pid))
            os.killpg(decode.pid, number)  # as a terminal does
            said, errors = decode.communicate(timeout=LIMIT_S)
        finally:
            decode.kill()
    eventually(lambda: not running(other))
    assert shared_memory() == before
    assert decode.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert errors == "replay: interrupted\n"
        kills = ", 1 kill survived in [0-9.]+ s" if not early else ""
        assert re.fullmatch(f"FAIL [0-9,]+ requests?, .* compared, 0 wrong{kills}\n", said)
