"""What `llm-datadist doctor` says about a host, from made-up `/proc` and `/sys` folders.

Not for: measurements (`test_doctor_link.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import llm_datadist
from aarch64.probe import limits_address_space
from emulation import needs
from llm_datadist.commands.doctor import devices, engine, host, report
from llm_datadist.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from llm_datadist.commands.main import main

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
Max address space         {space:<20} unlimited            bytes
Max file size             unlimited            unlimited            bytes
"""
STATUS = "Name:\tpython\nUid:\t1000\t1001\t1000\t1000\nNSpid:\t77\nCapEff:\t{caps}\nCpus_allowed_list:\t{cpus}\n"


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A large host on which nothing limits the engine, without RDMA devices and accelerators."""
    write(tmp_path, "proc/sys/kernel/osrelease", "6.8.0-40-generic")
    write(tmp_path, "proc/self/status", STATUS.format(caps="0" * 16, cpus="0-3,8"))
    write(tmp_path, "proc/self/limits", LIMITS.format(files=65536, locked="unlimited", space="unlimited"))
    write(tmp_path, "proc/self/uid_map", "         0          0 4294967295")
    write(tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB")
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU of tests")
    write(tmp_path, "proc/self/cgroup", "0::/service/engine")
    write(tmp_path, "sys/devices/system/cpu/online", "0-15")
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    for name in ("enabled", "shmem_enabled"):
        write(tmp_path, f"sys/kernel/mm/transparent_hugepage/{name}", "always [madvise] never")
    write(tmp_path, "sys/class/net/lo/type", "772")
    network(tmp_path, "eth0", state="up", speed="25000")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def network(root: Path, name: str, state: str, speed: str) -> None:
    for part, text in {"type": "1", "operstate": state, "speed": speed, "mtu": "9000"}.items():
        write(root, f"sys/class/net/{name}/{part}", text)


def rdma(root: Path, state: str = "4: ACTIVE", *, file: bool = True) -> None:
    for part, text in {"state": state, "link_layer": "InfiniBand", "rate": "200 Gb/sec (4X HDR)"}.items():
        write(root, f"sys/class/infiniband/mlx5_0/ports/1/{part}", text)
    if file:
        write(root, "dev/infiniband/uverbs0", "")


def named(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def everything(root: Path) -> list[Finding]:
    return [*host.findings(root), *devices.findings(root)]


def test_a_host_without_limits_has_neither_notes_nor_problems(root: Path) -> None:
    found = everything(root)
    assert len(found) > 9
    assert [finding for finding in found if finding.verdict != OK] == []
    values = {finding.name: finding.value for finding in found}
    assert values["kernel"] == "Linux 6.8.0-40-generic"
    assert values["CPUs"] == "5 of 16 usable, A CPU of tests"
    assert values["memory"] == "16.0 GiB, 8.0 GiB available"
    assert values["open files (ulimit -n)"] == "65,536 (hard limit 1,048,576): 4,096 incoming links"
    assert values["eth0"] == "up, 25 Gbit/s, MTU 9000"
    assert "lo" not in values


@pytest.mark.parametrize(
    ("version", "verdict"), [("5.0.9", PROBLEM), ("5.1.0", NOTE), ("5.8.18", NOTE), ("5.9.0", OK), ("6.18.44-x", OK)]
)
def test_kernels_that_are_too_old_are_named(root: Path, version: str, verdict: str) -> None:
    write(root, "proc/sys/kernel/osrelease", version)
    found = named(host.findings(root), "kernel")
    assert (found.value, found.verdict) == (f"Linux {version}", verdict)


def test_limits_of_control_groups_of_version_2_are_the_lowest_of_all_groups_around(root: Path) -> None:
    assert host.memory_limit(root) is None
    assert host.cpu_limit(root) is None
    write(root, "sys/fs/cgroup/service/engine/memory.max", "max")
    write(root, "sys/fs/cgroup/service/memory.max", str(3 * 2**30))
    write(root, "sys/fs/cgroup/memory.max", str(4 * 2**30))
    write(root, "sys/fs/cgroup/other/memory.max", "4096")
    write(root, "sys/fs/cgroup/service/engine/cpu.max", "150000 100000")
    write(root, "sys/fs/cgroup/service/cpu.max", "max 100000")
    memory, cpus = (named(host.findings(root), name) for name in ("memory", "CPUs"))
    assert (memory.value, memory.verdict) == ("16.0 GiB, 8.0 GiB available, cgroup limit 3.0 GiB", NOTE)
    assert cpus.value.startswith("5 of 16 usable, cgroup limit 1.5, ")
    assert cpus.verdict == NOTE


def test_a_group_outside_the_mounted_ones_is_not_followed(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../../sibling")
    write(root, "sys/sibling/memory.max", "4096")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    assert host.memory_limit(root) is None


@pytest.mark.parametrize(("files", "links"), [(1024, "244"), (50, "4"), (4095, "1,011")])
def test_few_open_files_limit_the_links(root: Path, files: int, links: str) -> None:
    write(root, "proc/self/limits", LIMITS.format(files=files, locked="unlimited", space="unlimited"))
    found = named(host.findings(root), "open files (ulimit -n)")
    assert found.verdict == NOTE
    assert found.value == f"{files:,} (hard limit 1,048,576): {links} incoming links"
    assert "ulimit -n 65536" in found.remedy


def test_locked_memory_matters_only_with_an_rdma_device(root: Path) -> None:
    write(root, "proc/self/limits", LIMITS.format(files=65536, locked=8 * 2**20, space=2**40))
    name = "locked memory (ulimit -l)"
    assert named(host.findings(root), name).verdict == OK
    rdma(root)
    found = named(host.findings(root), name)
    assert (found.value, found.verdict) == ("8.0 MiB", NOTE)
    assert named(host.findings(root), "address space (ulimit -v)").value == "1.0 TiB"


def test_small_pages_are_noted(root: Path) -> None:
    write(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force")
    found = named(host.findings(root), "transparent huge pages")
    assert (found.value, found.verdict) == ("anonymous: madvise, shared: never", NOTE)
    assert "huge_pages=" in found.remedy
    write(root, "proc/sys/kernel/osrelease", "6.0.1")
    assert "6.1" in named(host.findings(root), "transparent huge pages").remedy


def test_a_host_whose_networks_are_down_reaches_no_other_host(root: Path) -> None:
    network(root, "eth0", state="down", speed="-1")
    found = named(devices.findings(root), "interfaces")
    assert (found.value, found.verdict) == ("eth0", NOTE)


def test_rdma_devices_are_listed_with_their_ports(root: Path) -> None:
    assert devices.no_rdma(root) == "this host has no RDMA device (/sys/class/infiniband)"
    rdma(root)
    assert devices.no_rdma(root) is None
    found = named(devices.findings(root), "RDMA mlx5_0 port 1")
    assert (found.value, found.verdict) == ("ACTIVE, InfiniBand, 200 Gb/sec (4X HDR)", OK)


@pytest.mark.parametrize(("state", "file", "reason"), [("1: DOWN", True, "active"), ("4: ACTIVE", False, "uverbs")])
def test_rdma_devices_that_cannot_be_used_are_noted(root: Path, state: str, file: bool, reason: str) -> None:
    rdma(root, state, file=file)
    found = named(devices.findings(root), "RDMA devices")
    assert found.verdict == NOTE
    assert reason in found.meaning


def test_an_empty_root_is_no_failure(tmp_path: Path) -> None:
    found = everything(tmp_path)
    assert named(found, "memory").value == "unknown"
    assert named(found, "kernel").verdict == PROBLEM
    assert report.findings(found, 100)


def of_engine(root: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in engine.findings(root, {})}


def test_the_engine_says_how_it_reads_another_process(root: Path) -> None:
    found = of_engine(root)
    assert found["an engine with a pool"].value == "can be opened"
    pools, registered = found["allocated caches of a process"], found["registered memory of a process"]
    assert (pools.verdict, pools.value.partition(":")[0]) == (OK, "shared memory")  # every test with an engine needs it
    assert (registered.verdict == OK) == registered.value.startswith("reads by process id")


def test_a_process_that_cannot_be_linked_to_is_a_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, meaning in (("", "address"), ("import sys; sys.exit('Traceback\\nno such module')", "no such module")):
        monkeypatch.setattr(engine, "_OTHER", [sys.executable, "-c", program])
        found = of_engine(root)["link to a process"]
        assert (found.verdict, found.value) == (PROBLEM, "fails")
        assert meaning in found.meaning
        assert "Traceback" not in found.meaning


@pytest.mark.parametrize(
    ("pools", "registered", "verdicts"),
    [
        ("mapped", "process", [OK, OK]),
        ("stream", "process", [NOTE, OK]),
        ("mapped", "stream", [OK, NOTE]),
        ("stream", "stream", [NOTE, NOTE]),
    ],
)
def test_memory_that_is_read_in_the_slower_way_has_a_note(
    root: Path, monkeypatch: pytest.MonkeyPatch, pools: str, registered: str, verdicts: list[str]
) -> None:
    stats: Any = engine.Engine.stats
    ways = {"pools": pools, "registered": registered, "refusal": "the reason"}

    def changed(of: Any) -> Any:
        said = stats(of)
        return {**said, "links": [{**link, **ways} for link in said["links"]]}

    monkeypatch.setattr(engine.Engine, "stats", changed)
    found = of_engine(root)
    memory = [found[f"{name} of a process"] for name in ("allocated caches", "registered memory")]
    assert [finding.verdict for finding in memory] == verdicts
    assert [finding.meaning == "the reason" for finding in memory] == [verdict == NOTE for verdict in verdicts]


def test_ucx_that_the_engine_does_not_use_is_noted_only_beside_an_rdma_device(root: Path) -> None:
    assert of_engine(root)["UCX"].verdict == OK
    rdma(root)
    ucx = of_engine(root)["UCX"]
    assert ucx.verdict == (OK if ucx.value.endswith("used between hosts") else NOTE)


def test_the_token_is_never_shown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_TOKEN", "a secret of this test")
    found = of_engine(root)
    assert found["token"].value == "LLM_DATADIST_TOKEN is set"
    assert found["allocated caches of a process"].verdict == OK, "the other process has the same token"
    assert "a secret" not in repr(found)
    monkeypatch.setenv("LLM_DATADIST_TOKEN", "")
    found = of_engine(root)
    assert found["token"].value.startswith("none")
    assert "LLM_DATADIST_TOKEN is set, but empty" in found["an engine with a pool"].meaning


def test_the_report_shows_meaning_and_remedy_and_fits_its_width() -> None:
    found = [
        Finding("host", "good", "fine"),
        Finding("host", "bad", "a value " * 20, PROBLEM, "it fails", "repair it"),
        Finding("limits", "small", "7", NOTE, "it is small", "raise it"),
    ]
    text = report.findings(found, 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  ok       good   fine" in lines
    assert "  PROBLEM  bad    a value a value" in text
    assert [line.strip() for line in lines if ":" in line][:4] == [
        "Meaning: it fails.",
        "To do: repair it.",
        "Meaning: it is small.",
        "To do: raise it.",
    ]
    assert lines[-1] == "1 problem, 1 note"
    assert [line for line in lines if line and not line.startswith(" ")] == ["host", "limits", "1 problem, 1 note"]


def test_doctor_reports_this_host_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    status = main(["doctor", "--json", str(file)])
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    verdicts = [finding["verdict"] for finding in found["findings"]]
    assert status == int(PROBLEM in verdicts)
    values = {finding["name"]: finding["value"] for finding in found["findings"]}
    assert values["llm_datadist"] == llm_datadist.__version__
    assert values["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert f"Linux {os.uname().release}" == values["kernel"]
    assert values["an engine with a pool"] == "can be opened"
    machine, page = os.uname().machine, os.sysconf("SC_PAGE_SIZE")
    assert values["architecture"] == f"{machine}, pages of {page >> 10}.0 KiB"
    assert values["kernel"] in text
    assert main(["doctor", "--json", "-"]) == status
    shown = capsys.readouterr()
    assert [finding["name"] for finding in json.loads(shown.out)["findings"]] == list(values)
    assert values["kernel"] in shown.err


@pytest.mark.parametrize("verdict", [OK, NOTE, PROBLEM])
def test_only_a_problem_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    made = [Finding("host", "made up", "value", verdict, "meaning", "remedy")]
    monkeypatch.setattr(host, "findings", lambda _root: made)
    for module in (devices, engine):
        monkeypatch.setattr(module, "findings", lambda *_: [])
    assert main(["doctor"]) == int(verdict == PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--to nowhere", "--to: 'nowhere' is not HOST:PORT or [IPV6]:PORT of a known host"),
        ("--to no.such.host.invalid:1", "--to: 'no.such.host.invalid:1' is not HOST:PORT"),
        ("--serve --to 127.0.0.1:1", "not allowed with argument"),
        ("--serve --seconds 0", "argument --seconds: '0' is not a number of seconds from 0.001 to 99,999"),
        ("--to 127.0.0.1:1 --seconds 1e3", "argument --seconds: '1e3' is not a number of seconds"),
        ("--seconds 3", "--seconds belongs to --serve or --to"),
        ("--token-file /", "--token-file belongs to --serve or --to"),
        ("--to 127.0.0.1:1 --transfer-backend ucx", "--transfer-backend belongs to --serve"),
        ("--serve --transfer-backend rdma", "invalid choice: 'rdma'"),
        ("--serve --json x", "--json belongs to a report or a measurement, not to --serve"),
        ("--json /no/folder/x", "--json: [Errno 2]"),
        ("extra", "unrecognized arguments: extra"),
    ],
)
def test_options_that_cannot_be_used_exit_2(capsys: pytest.CaptureFixture[str], arguments: str, error: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments.split()])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--to 127.0.0.1:0", "127.0.0.1:0"),
        ("--to 127.0.0.1:1 --token-file /no/file", "/no/file"),
        ("--serve localhost:0", 'listen="localhost:0"'),
        ("--serve 127.0.0.1:65536", 'listen="127.0.0.1:65536"'),
    ],
)
def test_what_the_engine_refuses_exits_2(capsys: pytest.CaptureFixture[str], arguments: str, error: str) -> None:
    assert main(["doctor", *arguments.split()]) == 2
    assert error in capsys.readouterr().err


def test_help_names_every_option() -> None:
    command = [sys.executable, "-m", "llm_datadist", "doctor", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    options = (
        "--serve",
        "--to",
        "--token-file",
        "--ucx-library",
        "--transfer-backend",
        "--seconds",
        "--json",
    )
    assert all(option in done.stdout for option in options)


def test_limit_of_file_sizes_is_a_note(root: Path) -> None:
    text = LIMITS.format(files=65536, locked="unlimited", space="unlimited")
    write(root, "proc/self/limits", re.sub(r"(Max file size +)unlimited", r"\g<1>1073741824", text))
    found = named(host.findings(root), "file size (ulimit -f)")
    assert (found.value, found.verdict) == ("1.0 GiB", NOTE)
    assert "no engine opens with a larger pool" in found.meaning


LIMITED = """
import resource, sys
resource.setrlimit(resource.{0}, ({1}, {1}))
from llm_datadist.commands.main import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RLIMIT_FSIZE", 1 << 20, "raise the limit of file sizes"),
        ("RLIMIT_NOFILE", 8, "Too many open files"),
        pytest.param("RLIMIT_AS", None, "no memory for", marks=needs("RLIMIT_AS", limits_address_space)),
    ],
)
def test_limit_under_which_no_engine_opens_is_a_problem(name: str, value: int | None, text: str) -> None:
    """The report opens an engine, so that it cannot say "0 problems" where no engine opens."""
    if value is None:
        used = "int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()"
        program = LIMITED.format(name, f"({used} + (16 << 20))")
        # The modules take address space themselves, so they are loaded before the limit is set.
        program = "import resource, llm_datadist.commands.doctor.cli\n" + program
    else:
        program = LIMITED.format(name, value)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    report_text = " ".join(done.stdout.split())
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "PROBLEM an engine with a pool cannot be opened" in report_text
    assert text in report_text
    assert "Traceback" not in done.stderr
