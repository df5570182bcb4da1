"""`llm-datadist doctor`: facts of hosts that the tests make up, and a link between two processes that is measured."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.doctor import host, paths, report, software
from llm_datadist.doctor.cli import main
from llm_datadist.doctor.findings import NOTE, OK, PROBLEM, Finding
from peers import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

COMMAND = (sys.executable, "-m", "llm_datadist", "doctor")
EPERM = 1


def make(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def by_subject(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The findings by subject. Each that is not ok says what to do."""
    found = {finding.subject: finding for finding in findings}
    assert all(bool(finding.advice) == (finding.verdict != OK) for finding in found.values())
    return found


def test_a_host_without_any_of_the_files(tmp_path: Path) -> None:
    found = by_subject(host.examine(tmp_path))
    assert found["RDMA devices"].value == "none"
    assert found["accelerators"].value == "none"
    assert found["networks"].value == "none is up"
    assert found["huge pages"].verdict == NOTE
    assert "NUMA nodes" not in found


def test_a_control_group_and_two_nodes(tmp_path: Path) -> None:
    files = {
        "proc/sys/kernel/osrelease": "6.1.0\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": f"{3 << 30}\n",
        "proc/meminfo": "MemTotal:       8388608 kB\nMemAvailable:   2097152 kB\nHugePages_Total:       0\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        **{f"sys/devices/system/node/node{number}/x": "" for number in range(2)},
    }
    root = make(tmp_path, files)
    found = by_subject([*host.processor(root), *host.memory(root)])
    assert found["kernel"].value == "6.1.0"
    assert found["CPUs that the control group allows"].value == "1.5"
    assert found["memory"].value == "8.0 GiB, of which 2.0 GiB are available"
    assert found["memory that the control group allows"].value == "3.0 GiB"
    assert found["huge pages"] == Finding("huge pages", "madvise")
    assert found["NUMA nodes"].value == "2"


@pytest.mark.parametrize("choice", ["always madvise [never]", ""])
def test_huge_pages_that_are_off(tmp_path: Path, choice: str) -> None:
    make(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": choice, "sys/fs/cgroup/memory.max": "max\n"})
    found = by_subject(host.memory(tmp_path))
    assert found["huge pages"].verdict == NOTE
    assert "memory that the control group allows" not in found


def test_the_limit_of_open_files_says_how_many_links_fit(tmp_path: Path) -> None:
    few = by_subject(host.limits(tmp_path, files=1024, locked=resource.RLIM_INFINITY))
    assert "at most 244 links" in few["open files (ulimit -n)"].advice
    for many in (4096, resource.RLIM_INFINITY):
        assert by_subject(host.limits(tmp_path, files=many))["open files (ulimit -n)"].verdict == OK


def test_locked_memory_matters_for_rdma(tmp_path: Path) -> None:
    name = "locked memory (ulimit -l)"
    assert by_subject(host.limits(tmp_path, locked=8 << 20))[name] == Finding(name, "8192 KiB")
    make(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"})
    assert by_subject(host.limits(tmp_path, locked=8 << 20))[name].verdict == PROBLEM
    assert by_subject(host.limits(tmp_path, locked=resource.RLIM_INFINITY))[name].verdict == OK


@pytest.mark.parametrize(
    ("scope", "errno", "user", "verdict"),
    [
        (None, None, 1000, OK),
        ("1", None, 1000, OK),
        ("2", None, 1000, NOTE),
        ("2", None, 0, OK),
        ("3", None, 0, NOTE),
        ("0", EPERM, 0, NOTE),
    ],
)
def test_reads_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str | None, errno: int | None, user: int, verdict: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    make(tmp_path, {} if scope is None else {"proc/sys/kernel/yama/ptrace_scope": scope})
    [finding] = host.process_reads(tmp_path, lambda: errno)
    assert finding.verdict == verdict
    assert errno is None or "Operation not permitted" in finding.value


def test_this_process_may_read_itself() -> None:
    assert host._reads_itself() is None


def test_networks_and_rdma_devices(tmp_path: Path) -> None:
    files = {
        "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/docker0/operstate": "down\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    }
    for name, speed in (("eth0", 100_000), ("eth1", 25_000)):
        folder = f"sys/class/net/{name}"
        files |= {f"{folder}/operstate": "up\n", f"{folder}/speed": f"{speed}\n", f"{folder}/device/x": ""}
    root = make(tmp_path, files)
    found = by_subject([*host.networks(root), *host.rdma_devices(root)])
    assert found["networks"].value == "eth0 (100 Gbit/s), eth1 (25 Gbit/s)"
    assert "link_addresses" in found["networks"].advice
    assert found["RDMA device mlx5_0, port 1"] == Finding(
        "RDMA device mlx5_0, port 1", "ACTIVE, Ethernet, 400 Gb/sec (4X NDR)"
    )
    assert found["RDMA device mlx5_1, port 1"].verdict == NOTE


def test_accelerators(tmp_path: Path) -> None:
    names = ("nvidia0", "nvidia1", "nvidiactl", "davinci0", "davinci_manager")
    [finding] = host.accelerators(make(tmp_path, {f"dev/{name}": "" for name in names}))
    assert (finding.value, finding.verdict) == ("2 of NVIDIA, 1 of Ascend", NOTE)


def test_a_library_that_is_no_ucx() -> None:
    for library, reason in (("/nowhere/libucp.so.0", "/nowhere/libucp.so.0"), ("libc.so.6", "ucp_get_version")):
        finding = software.ucx(library)
        assert finding.verdict == NOTE
        assert reason in finding.value


def facts(*, device: str | None = OK, library: str = OK, reads: str = OK) -> list[Finding]:
    """What decides about paths."""
    devices = Finding("RDMA devices", "none", NOTE, "x")
    if device is not None:
        devices = Finding("RDMA device mlx5_0, port 1", "x", device, "")
    return [Finding("reads of registered memory of …", "no", reads), devices, Finding("UCX (x)", "missing", library)]


@pytest.mark.parametrize(
    ("given", "token", "path", "reason"),
    [
        (facts(), True, "fabric", "same version"),
        (facts(), False, "sockets", "token"),
        (facts(device=None), True, "sockets", "no RDMA device"),
        (facts(device=NOTE), True, "sockets", "no RDMA device"),
        (facts(library=NOTE), True, "sockets", "missing"),
    ],
)
def test_the_path_between_hosts(given: list[Finding], token: bool, path: str, reason: str) -> None:
    found = {expected.peer: expected for expected in paths.expected(given, token=token)}
    between = found["another host, cache in a pool"]
    assert between.path == path
    assert reason in between.reason
    assert found["this host, cache in a pool"].path == "mapped"


def test_the_path_of_registered_memory() -> None:
    for verdict, path in ((OK, "process"), (NOTE, "sockets")):
        found = {one.peer: one for one in paths.expected(facts(reads=verdict), token=False)}
        assert found["this host, registered memory"].path == path


def test_the_report_has_every_finding_and_its_advice() -> None:
    text = report.findings_text([Finding("a", "1"), Finding("longer", "2", PROBLEM, "do this")])
    assert text.splitlines() == ["ok      a       1", "PROBLEM longer  2", "                -> do this"]


def test_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert main(["--json", str(file)]) in {0, 1}
    found = json.loads(file.read_text())
    text = capsys.readouterr().out
    assert {finding["subject"] for finding in found["findings"]} >= {"kernel", "memory", "llm_datadist", "Python"}
    assert all(finding["subject"] in text for finding in found["findings"])
    assert len(found["paths"]) == 4
    assert main(["--json", "-"]) in {0, 1}
    captured = capsys.readouterr()
    assert json.loads(captured.out).keys() == found.keys()
    assert "kernel" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to", "10.0.0.1"],
        ["--to", ":26010"],
        ["--to", "10.0.0.1:0"],
        ["--to", "10.0.0.1:65536"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--seconds", "x"],
        ["--serve", "--to", "10.0.0.1:1"],
        ["--nonsense"],
    ],
)
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[0].lstrip("-") in capsys.readouterr().err


def test_a_peer_that_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    for address in (f"127.0.0.1:{free_ports()}", "no-such-host.invalid:26010"):
        assert main(["--to", address]) == 2
        assert "doctor --serve" in capsys.readouterr().err


def test_a_token_file_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--to", "127.0.0.1:26010", "--token-file", "/nowhere/token"]) in {1, 2}
    assert "/nowhere/token" in capsys.readouterr().err


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A process that serves, its address, and its token file."""
    token = tmp_path / "token"
    token.write_text("a shared token of some length")
    token.chmod(0o600)
    address = f"127.0.0.1:{free_ports()}"
    command = [*COMMAND, "--serve", address, "--seconds", "60", "--token-file", str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        assert address in process.stdout.readline()
        yield address, str(token)
        process.terminate()


def test_a_link_is_measured(serving: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address, token = serving
    file = tmp_path / "link.json"
    assert main(["--to", address, "--seconds", "0.4", "--token-file", token, "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())["link"]
    assert [(row["options"], row["path"]) for row in rows] == [
        ("default options", "mapped"),
        ("sockets only", "sockets"),
    ]
    for row in rows:
        assert 0 < row["pull_us"][0] <= row["pull_us"][1]
        assert 0 < row["push_us"][0] <= row["push_us"][1]
        assert min(row["pull_gbs"], row["push_gbs"]) > 0
    assert rows[0]["reason"] == ""
    assert "no memory is shared" in rows[1]["reason"]
    text = capsys.readouterr().out
    assert "pull 16 KiB" in text
    assert "sockets only: sockets, because the link uses TCP" in text


def test_a_peer_with_another_token(
    serving: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_text("another token, of some length")
    other.chmod(0o600)
    assert main(["--to", serving[0], "--seconds", "0.4", "--token-file", str(other)]) == 2
    assert "cannot link to" in capsys.readouterr().err
