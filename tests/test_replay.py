"""The replay command: complete replays, and replays whose prefill process dies, hangs, writes wrong bytes or leaks.

Not for: its parts (`test_replay_parts.py`).
"""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from llm_datadist.commands.replay import node, prefill
from llm_datadist.commands.replay.cli import main
from test_replay_parts import GOOD, PUBLIC_TRACE, corrupt, public_trace, write_trace

# 16 KiB a block, pools under pressure.
SMALL = ["--layers", "1", "--head-dim", "8", "--device-pool", "8MiB", "--host-pool", "20MiB", "--quiet"]


def _replay(tmp_path, *options):
    path = tmp_path / "results.json"
    status = main([*SMALL, "--json", str(path), *options])
    found = json.loads(path.read_text())
    assert status == (3 if found["requests_too_large"] else 0)
    return found


def _failed(capsys, *options):
    """Run a replay that must fail, and return what it prints."""
    assert main([*SMALL, *options]) == 1
    return capsys.readouterr()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--device-pool", "6MiB", "--host-pool", "9MiB"],
        ["--device-pool", "6MiB", "--host-pool", "16KiB"],
        ["--heads", "2", "--device-pool", "14MiB"],
        ["--layers", "3", "--heads", "2", "--head-dim", "3", "--concurrency", "1"],
        ["--block-tokens", "12", "--head-dim", "7", "--requests", "80", "--device-pool", "4MiB"],
        ["--transport", "tcp"],
        ["--block-tokens", "8", "--requests", "80", "--device-pool", "6MiB"],  # more blocks than one message holds
        ["--block-tokens", "128", "--concurrency", "64", "--seed", "9"],
    ],
)
def test_replay_ends_with_every_byte_right(tmp_path, capsys, options):
    found = _replay(tmp_path, "--requests", "150", *options)
    blocks, calls, other = found["blocks"], found["calls"], found["prefill"]
    requests, engine = found["requests"], found["engine"]
    assert found["leaked_bytes"] == other["leaked_bytes"] == 0
    assert requests == (80 if "--requests" in options else 150)
    assert blocks["device_hits"] > 0
    assert calls["swap out"]["blocks"] > 0
    assert calls["swap in"]["blocks"] == blocks["host_hits"]
    for name in ("swap in", "swap out"):
        assert calls[name]["bytes"] == engine["ops"][name.replace(" ", "_")]["bytes"], "counted on both sides"
    assert calls["pull blocks"]["blocks"] == blocks["computed"] > 0
    assert calls["pull blocks"]["bytes"] == engine["ops"]["pull"]["bytes"] == other["link"]["transfers"]["bytes"]
    assert calls["pull blocks"]["calls"] <= requests - found["requests_too_large"]
    assert other["link"]["transport"] == ("tcp" if "tcp" in options else "shm")
    assert other["restarts"] == []
    if not found["requests_too_large"]:
        total = blocks["device_hits"] + blocks["host_hits"] + blocks["computed"]
        assert total == found["setting"]["block_references"]
    text = capsys.readouterr().out
    for shown in ("swapped in from host", "pulled from prefill", "\npull blocks ", "\ntransport "):
        assert shown in text
    # The kernel's reason why this side cannot read the peer's memory is as long as it is.
    reason = other["link"]["refusal"]
    assert all(len(line) <= 80 or (reason and reason in line) for line in text.splitlines())
    assert text.splitlines()[-1] == found["verdict"]
    assert blocks["wrong"] == 0


def test_requests_larger_than_the_device_are_counted(tmp_path, capsys):
    found = _replay(tmp_path, "--device-pool", "1MiB", "--requests", "100")
    too_large = found["requests_too_large"]
    assert 0 < too_large < 100
    said = capsys.readouterr()
    assert re.fullmatch(rf"FAIL {100 - too_large} requests, .* compared, 0 wrong", said.out.splitlines()[-1])
    needed, size = found["largest_request_blocks"], re.search(r"use --device-pool (\d+MiB) or more", said.err)
    assert f"NOT SERVED: {too_large} of 100 requests, because the device pool is too small" in said.err
    assert f"needs {needed} blocks, and the pool has {found['setting']['device_blocks']};" in said.err
    assert size
    assert _replay(tmp_path, "--device-pool", size[1], "--requests", "100")["requests_too_large"] == 0


@pytest.mark.parametrize(
    ("kind", "numbers", "tiers"),
    [("hit", [1, *range(600, 800, 20)], {"device", "host"}), ("pulled", [1, 900], {"pulled"})],
)
def test_one_wrong_byte_ends_the_replay(capsys, monkeypatch, kind, numbers, tiers):
    found = set()
    for number in numbers:
        with monkeypatch.context() as patched:
            corrupt(patched, **{kind: number})
            said = _failed(capsys, "--requests", "300", "--device-pool", "6MiB")
        assert "WRONG BYTE: request " in said.err
        assert "tensor 1, first wrong byte at offset 4099: expected 0x" in said.err
        assert re.fullmatch(r"FAIL [0-9]+ requests?, [0-9.]+ [KM]iB compared, 1 wrong\n", said.out)
        found.add(said.err.split("(")[1].split(",")[0])
    assert found == tiers


@pytest.mark.parametrize(
    ("options", "shown"), [([], "hit on device                 1"), (["--json", "-"], "pulled from prefill")]
)
def test_trace_file_is_replayed_by_the_command(tmp_path, options, shown):
    path = write_trace(tmp_path, GOOD, {**GOOD, "timestamp": 9000, "hash_ids": [4, 11]})
    command = [sys.executable, "-m", "llm_datadist", "replay", path, "--layers", "1", "--host-pool", "8MiB", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert shown in (done.stderr if options else done.stdout)
    if "--json" in options:
        assert json.loads(done.stdout)["requests"] == 2


@public_trace
def test_start_of_the_public_trace_is_replayed(tmp_path):
    found = _replay(tmp_path, str(PUBLIC_TRACE), "--requests", "400", "--device-pool", "16MiB", "--host-pool", "80MiB")
    assert (found["requests"], found["requests_too_large"], found["leaked_bytes"]) == (400, 0, 0)


@pytest.fixture
def faulty(monkeypatch):
    """A function that makes prefill processes run these lines before they compute, or `work` in place of it."""

    def start(lines, work="real(self, number, first, blocks)", first=""):
        script = f"""
import os, signal, sys, time
from pathlib import Path
from llm_datadist.commands.replay import worker
real = worker.Worker._compute
{first}
def compute(self, number, first, blocks):
{textwrap.indent(lines, "    ")}
    {work}
worker.Worker._compute = compute
sys.exit(worker.main())
"""
        monkeypatch.setattr(prefill, "COMMAND", [sys.executable, "-c", script])

    return start


@pytest.mark.parametrize(("at", "options"), [("1", []), ("half", []), ("100", ["--transport", "tcp"])])
def test_killed_prefill_is_replaced_in_the_middle_of_a_pull(tmp_path, capsys, at, options):
    found = _replay(tmp_path, "--requests", "120", "--kill-prefill-at", at, *options)
    request = {"1": 1, "half": 60, "100": 100}[at]
    said = capsys.readouterr()
    (restart,) = found["prefill"]["restarts"]
    assert (restart["request"], restart["kill"]) == (request, True)
    assert restart["ended"] == "it was killed by signal 9 (SIGKILL), exit status -9"
    assert restart["code"] == "not_linked"
    assert restart["gap_ms"] > 0
    assert found["leaked_bytes"] == found["prefill"]["leaked_bytes"] == 0
    assert found["calls"]["pull blocks"]["blocks"] >= found["blocks"]["computed"]
    for shown in (
        f"in the middle of the pull of request {request}\n",
        f"decode: lost prefill at request {request}: PeerLost: ",
        "decode: it was killed by signal 9 (SIGKILL), exit status -9; starting prefill again (1 of at most 3)\n",
        f"decode: request {request} was recomputed and pulled, ",
    ):
        assert shown in said.err
    seconds = f"{restart['gap_ms'] / 1000:.1f}"
    assert re.fullmatch(
        rf"PASS 120 requests, .* compared, 0 wrong, 1 kill survived in {seconds} s", said.out.splitlines()[-1]
    )


def test_prefill_that_always_dies_is_given_up(faulty, capsys):
    faulty("if number == 20: os._exit(7)")
    said = _failed(capsys, "--requests", "100")
    assert said.err.count("; starting prefill again (") == 3
    assert "replay: the prefill process failed: lost at request " in said.err
    assert said.err.rstrip().endswith("gave up after 3 restarts")
    assert said.out.startswith("FAIL ")


@pytest.mark.parametrize(
    ("fault", "ended", "reason"),
    [
        ("os._exit(3)", "it ended with exit status 3", "the peer closed the connection"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "killed by decode", "no message from the peer"),
        ("time.sleep(1000)", "killed by decode", "did not answer within 6 s"),
    ],
)
def test_prefill_that_ends_or_hangs_is_replaced(tmp_path, capsys, monkeypatch, faulty, fault, ended, reason):
    monkeypatch.setattr(prefill, "_GRACE_S", 0.1)
    once = f"once = Path({str(tmp_path / 'once')!r})\nif number == 50 and not once.exists():\n    once.touch()\n"
    faulty(f"{once}    {fault}")
    monkeypatch.setattr(prefill, "ANSWER_LIMIT_S", 6.0)
    found = _replay(tmp_path, "--requests", "100")
    restart = found["prefill"]["restarts"][0]
    assert restart["ended"].endswith(ended)
    assert reason in restart["reason"]
    assert found["prefill"]["leaked_bytes"] == 0
    assert ", 1 crash survived in " in capsys.readouterr().out.splitlines()[-1]


LINKED = """
import json, sys
from llm_datadist.native import Engine
*_, address, name = json.loads(sys.argv[1])
engine = Engine(name=name)
peer = engine.link(address).result()
"""
ANSWERING = f"""{LINKED}
peer.send(b'{{}}')
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "import time; time.sleep(60)",
            "it did not start: Timeout: it did not answer within 0.5 s; it did not end within 0.1 s and was killed",
        ),
        (
            "raise SystemExit(5)",
            "it did not start: PeerLost: it ended before it had linked; it ended with exit status 5",
        ),
        (ANSWERING, "it sent an invalid message: b'{}'"),
        (ANSWERING.replace("{}", "hello"), "it sent an invalid message: b'hello'"),
        (ANSWERING.replace("b'{}'", 'b\'{"computed": [], "blocks": 1}\''), "it sent an invalid message: b'{"),
    ],
)
def test_prefill_that_does_not_start_ends_the_replay(monkeypatch, capsys, script, reason):
    monkeypatch.setattr(prefill, "COMMAND", [sys.executable, "-c", script])
    if "sleep" in script:
        monkeypatch.setattr(prefill, "ANSWER_LIMIT_S", 0.5)
        monkeypatch.setattr(prefill, "_GRACE_S", 0.1)
    said = _failed(capsys, "--requests", "20").err
    assert f"replay: the prefill process failed: {reason}" in said


WRONG_SLOT_BYTE = """
real(self, number, first, blocks)
if number >= 30:
    self._rows[1][len(blocks) - 1].view("uint8")[77] ^= 0x40
"""


@pytest.mark.parametrize(
    ("lines", "work"),
    [(WRONG_SLOT_BYTE, "pass"), ("", "real(self, number, first + (number == 30 and len(blocks) > 1), blocks)")],
)
def test_wrong_bytes_of_prefill_are_found(faulty, capsys, lines, work):
    faulty(lines, work)
    said = _failed(capsys, "--requests", "100")
    assert "replay: WRONG BYTE: request " in said.err
    assert "(pulled, slot " in said.err
    assert re.fullmatch(r"FAIL .*, 1 wrong\n", said.out)


ONE_PAGE = {"blocks": 1, "tensors": 1, "shape": (8,), "dtype": "uint8"}


ONE_MORE = "worker.Setup.pool_bytes = property(lambda setup: setup.geometry.pool_bytes(setup.blocks + 1))"


def test_leak_of_prefill_is_found(faulty, capsys):
    faulty(f"if number == 7: self.engine.allocate('leaked', **{ONE_PAGE})", first=ONE_MORE)
    assert "LEAK: prefill: 4,096 bytes in use after all was freed" in _failed(capsys, "--requests", "100").err


def test_leak_of_decode_is_found(monkeypatch, capsys):
    pull = node.Node.pull

    def leaking(self, *given, **more):
        pull(self, *given, **more)
        if not self.engine.stats()["table"]["caches"] > 2:
            self.engine.allocate("leaked", **ONE_PAGE)

    monkeypatch.setattr(node.Node, "pull", leaking)
    said = _failed(capsys, "--requests", "5").err
    assert "replay: LEAK: decode: 4,096 bytes in use after all was freed" in said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *[(["--device-pool", text], "is not a size in bytes") for text in ("12parsecs", "0")],
        (["--host-pool", "21GiB"], "of at most 20 GiB"),
        (["--device-pool", "64KiB"], "--device-pool: 65,536 bytes do not hold one block"),
        (["--host-pool", "4KiB"], "--host-pool: 4,096 bytes do not hold one block"),
        *[(["--layers", text], f"'{text}' is not a whole number from 1 to 1,024") for text in ("0", "-1")],
        *[([f"--{name}", "0"], "'0' is not a whole number") for name in ("requests", "kill-prefill-at")],
        *[([f"--{name}", "2.5"], "'2.5' is not a whole number") for name in ("heads", "head-dim")],
        (["--transport", "other"], "invalid choice"),
        (["--block-tokens", "1", "--head-dim", "1"], "must be a multiple of 8"),
        (["no-such-file.jsonl"], "no-such-file.jsonl"),
        (["any.jsonl", "--block-tokens", "16"], "a trace file has blocks of 512 tokens"),
        (["--json", "no-such-folder/results"], "--json: "),
        (["--kill-prefill-at", "21", "--requests", "20"], "--kill-prefill-at: the trace has only 20 requests"),
        (["--no-such-option"], "unrecognized arguments"),
        (["--svg", "rates.svg"], "--svg: only with --hit-rates"),
        (["--hit-rates", "--svg", "-"], "--svg: standard output takes no picture"),
        *[
            (["--hit-rates", "--kill-prefill-at", at], "--kill-prefill-at: --hit-rates has no prefill process")
            for at in ("3", "half")
        ],
        (["--hit-rates", "--svg", "/nowhere/rates.svg"], "--svg: [Errno 2]"),
        (["--hit-rates", "/nowhere/trace"], "/nowhere/trace: [Errno 2]"),
        *[(["--hit-rates", option, "/"], f"{option}: '/' is a folder") for option in ("--svg", "--json")],
    ],
)
def test_unusable_options_exit_2(capsys, options, reason):
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err
