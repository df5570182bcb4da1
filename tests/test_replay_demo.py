"""The verdict of the replay command, what it shows while it runs, and how it is interrupted.

Not for: replays (`test_replay.py`) and their parts (`test_replay_parts.py`).
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm_datadist.commands.replay import prefill, report
from llm_datadist.commands.replay.cli import main
from llm_datadist.commands.replay.node import Node
from llm_datadist.commands.replay.trace import make_trace
from peers import eventually
from test_replay import SMALL

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300
REQUESTS = 60
BLOCK_BYTES = 16384
LARGE_POOL = "64MiB"  # holds every block of the requests, so that none is dropped


def comparisons(requests):
    """How often a block is compared in a replay that evicts nothing: for each block of a prompt, and at the end."""
    blocks = [block for request in requests for block in request.blocks]
    return len(blocks) + len(set(blocks))


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
    verdict = done.stdout.splitlines()[-1]
    expected = f"PASS {REQUESTS} requests, {compared / 2**20:.1f} MiB compared, 0 wrong"
    survived = r", 1 kill survived in [0-9]+\.[0-9] s" if kill else ""
    assert re.fullmatch(re.escape(expected) + survived, verdict)
    assert done.stderr.count("kill -9 ") == kill
    found = json.loads(path.read_text())
    assert (found["compared_bytes"], found["verdict"]) == (compared, verdict)


def test_an_interrupt_while_prefill_is_closed_still_closes_the_engine(capsys, monkeypatch):
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
    assert main([*SMALL, "--requests", "10"]) == 130
    said = capsys.readouterr()
    assert said.err == "replay: interrupted\n"
    assert said.out.startswith("FAIL 10 requests")
    assert closed == [True]


def test_help_lists_every_exit_status(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert re.findall(r"\b(\d+) (?:if|for)\b", said[said.index("Exit status") :]) == ["0", "1", "2", "3", "130"]


def test_progress_is_a_line_every_few_seconds(capsys, monkeypatch):
    monkeypatch.setattr(report, "_EVERY_S", 0.0)
    assert main([*SMALL[:-1], "--requests", "10"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"{number}/10 done, pulls [0-9.e-]+ GiB/s, [0-9,.]+ [KM]?i?B right, [0-9,]+ s left", line)


def running(pid):
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


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
            (other,) = eventually(lambda: children(decode.pid), LIMIT_S)
            os.killpg(decode.pid, number)  # as a terminal does
            said, errors = decode.communicate(timeout=LIMIT_S)
        finally:
            decode.kill()
    eventually(lambda: not running(other), LIMIT_S)
    assert shared_memory() == before
    assert decode.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert errors == "replay: interrupted\n"
        kills = ", 1 kill survived in [0-9.]+ s" if not early else ""
        assert re.fullmatch(f"FAIL [0-9,]+ requests?, .* compared, 0 wrong{kills}\n", said)
