"""The L2 adapter of LMCache (0.5.6): its benchmark, and its server, on a CPU."""

from __future__ import annotations

import contextlib
import json
import re
import socket as sockets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import kill, serving
from llm_datadist import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 60.0
LMCACHE = str(Path(sys.executable).with_name("lmcache"))
REQUEST = str(Path(__file__).with_name("lmcache_request.py"))
# 1,024 tokens in chunks of 256.
CHUNKS = 4


def adapter(socket: Path, **options: Any) -> str:
    where = {"module_path": "llm_datadist.integrations.lmcache_l2", "class_name": "KeeperL2"}
    return json.dumps(
        {"type": "plugin", **where, "adapter_params": {"socket": str(socket), "revision": "r", **options}}
    )


def bench(socket: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [LMCACHE, "bench", "l2", "--l2-adapter", adapter(socket), "--lookup-max-hit-rate", "1.0", *more]
    return subprocess.run(  # noqa: S603
        [*command, "--no-skip-verify"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def free_port() -> int:
    with sockets.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


class Server:
    """A running `lmcache server`."""

    def __init__(self, port: int, http_port: int) -> None:
        self.port, self.http_port = port, http_port

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=LIMIT) as answer:
            return json.loads(answer.read())

    def request(self, kind: str, dtype: str = "float16") -> Any:
        command = [sys.executable, REQUEST, str(self.port), str(self.http_port), kind, dtype]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)  # noqa: S603
        return json.loads(ran.stdout.splitlines()[-1])


@contextlib.contextmanager
def server(socket: Path, log: Path, **options: Any) -> Iterator[Server]:
    """Run `lmcache server` with an empty L1."""
    made = Server(free_port(), free_port())
    command = [LMCACHE, "server", "--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--host", "127.0.0.1"]
    command += ["--port", str(made.port), "--http-host", "127.0.0.1", "--http-port", str(made.http_port)]
    command += ["--prometheus-port", str(free_port())]
    with log.open("a") as out:
        process = subprocess.Popen([*command, "--l2-adapter", adapter(socket, **options)], stdout=out, stderr=out)  # noqa: S603
    try:
        end = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(OSError):
                made.get("/status")
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield made
    finally:
        process.terminate()
        process.wait(LIMIT)


def values(socket: Path) -> int:
    """Return how many values the keeper has."""
    with Store(socket, namespace="the test", value=4096) as store:
        return int(store.stats()["keeper"]["values"])


def wait_for_values(socket: Path, count: int) -> None:
    """LMCache stores in the background."""
    end = time.monotonic() + LIMIT
    while values(socket) < count:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(("keys", "kilobytes", "in_flight"), [(64, 64, 1), (16, 2048, 1), (32, 64, 4)])
def test_the_benchmark_reads_the_bytes_that_it_has_written(
    socket: Path, keys: int, kilobytes: int, in_flight: int
) -> None:
    with serving(socket, f"{kilobytes}KiB"):
        shape = ["--num-keys", str(keys), "--data-size-kb", str(kilobytes), "--in-flight", str(in_flight)]
        ran = bench(socket, *shape, "--rounds", "2")
    print(ran.stdout)  # noqa: T201
    assert ran.returncode == 0, ran.stdout
    for kind in ("Store", "Load"):
        counts = re.findall(rf"\[{kind}\] Round.*?=(\d+)/(\d+)", ran.stdout)
        assert len(counts) >= 2, ran.stdout
        assert all(done == asked == str(keys * in_flight) for done, asked in counts), ran.stdout
    assert re.search(r"found=(\d+)/\1\b", ran.stdout), ran.stdout
    assert re.search(r"\[Verify\].*(OK|PASS)", ran.stdout), ran.stdout


def test_the_benchmark_stores_nothing_without_a_keeper(socket: Path) -> None:
    ran = bench(socket, "--num-keys", "4", "--data-size-kb", "64", "--rounds", "1")
    assert "TIMEOUT" not in ran.stdout, ran.stdout
    assert "success_keys=0/4" in ran.stdout, ran.stdout
    assert "is away" in ran.stdout, ran.stdout


def test_a_restarted_server_finds_the_chunks_of_the_first_one(socket: Path, tmp_path: Path) -> None:
    with serving(socket, "1MiB"):
        with server(socket, tmp_path / "first") as first:
            cold = first.request("cold")
            assert cold["hits"] == 0
            assert len(cold["checksums"]) == CHUNKS
            wait_for_values(socket, CHUNKS)
        with server(socket, tmp_path / "second") as second:
            assert second.request("warm") == {"hits": CHUNKS, "checksums": cold["checksums"]}
            status = json.dumps(second.get("/status"))
            assert '"type": "KeeperL2"' in status
            assert f'"hits": {CHUNKS}' in status
        with server(socket, tmp_path / "third", revision="another") as third:
            assert third.request("cold")["hits"] == 0
        with server(socket, tmp_path / "fourth") as fourth:
            assert fourth.request("cold", "bfloat16")["hits"] == 0


def test_a_server_whose_keeper_is_killed_goes_on_with_its_own_memory(socket: Path, tmp_path: Path) -> None:
    with serving(socket, "1MiB") as keeper, server(socket, tmp_path / "log") as running:
        cold = running.request("cold")
        wait_for_values(socket, CHUNKS)
        kill(keeper, socket)
        assert running.request("warm") == {"hits": CHUNKS, "checksums": cold["checksums"]}
        assert '"is_healthy": false' in json.dumps(running.get("/status"))


def test_a_wrong_option_ends_the_server(socket: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown field `sockets`"), server(socket, tmp_path / "log", sockets="k"):
        pass
