"""What `llm-datadist doctor` says about a host, from made-up `/proc` and `/sys` folders.

Not for: measurements (`test_doctor_link.py`).
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

import llm_datadist
from aarch64.probe import limits_address_space
from emulation import needs
from llm_datadist.commands.doctor import devices, engine, host, report
from llm_datadist.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from llm_datadist.commands.main import main
from memory import in_fresh_process, run_command

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
Max address space         {space:<20} unlimited            bytes
Max file size             {size:<20} unlimited            bytes
"""
KERNEL, ETH0 = "proc/sys/kernel/osrelease", "sys/class/net/eth0"
LOCKED, HUGE = "locked memory (ulimit -l)", "transparent huge pages"
PORT = "sys/class/infiniband/mlx5_0/ports/1"
ACTIVE = {f"{PORT}/state": "4: ACTIVE", f"{PORT}/link_layer": "InfiniBand", f"{PORT}/rate": "200 Gb/sec (4X HDR)"}
RDMA = {**ACTIVE, "dev/infiniband/uverbs0": ""}
STATUS = "Name:\tpython\nUid:\t1000\t1001\t1000\t1000\nNSpid:\t77\nCapEff:\t{caps}\nCpus_allowed_list:\t{cpus}\n"


def limits(**changed: Any) -> dict[str, str]:
    """The file with the limits of a process, none of which limits the engine unless it is changed."""
    given = {"files": 65536, "locked": "unlimited", "space": "unlimited", "size": "unlimited", **changed}
    return {"proc/self/limits": LIMITS.format(**given)}


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(root, name, text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A large host on which nothing limits the engine, without RDMA devices and accelerators."""
    put(tmp_path, limits())
    write(tmp_path, KERNEL, "6.8.0-40-generic")
    write(tmp_path, "proc/self/status", STATUS.format(caps="0" * 16, cpus="0-3,8"))
    write(tmp_path, "proc/self/uid_map", "         0          0 4294967295")
    write(tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB")
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU of tests")
    write(tmp_path, "proc/self/cgroup", "0::/service/engine")
    write(tmp_path, "sys/devices/system/cpu/online", "0-15")
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    for name in ("enabled", "shmem_enabled"):
        write(tmp_path, f"sys/kernel/mm/transparent_hugepage/{name}", "always [madvise] never")
    write(tmp_path, "sys/class/net/lo/type", "772")
    put(tmp_path, {f"{ETH0}/type": "1", f"{ETH0}/operstate": "up", f"{ETH0}/speed": "25000", f"{ETH0}/mtu": "9000"})
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


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


GROUPS = {
    "sys/fs/cgroup/service/engine/memory.max": "max",
    "sys/fs/cgroup/service/memory.max": str(3 * 2**30),
    "sys/fs/cgroup/memory.max": str(4 * 2**30),
    "sys/fs/cgroup/other/memory.max": "4096",
    "sys/fs/cgroup/service/engine/cpu.max": "150000 100000",
    "sys/fs/cgroup/service/cpu.max": "max 100000",
}
NEVER_HUGE = {"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force"}
ROWS: dict[str, tuple[dict[str, str], str, str, str, str]] = {
    **{
        f"kernel {version}": ({KERNEL: version}, "kernel", f"Linux {version}", verdict, "")
        for verdict, versions in {PROBLEM: ["5.0.9"], NOTE: ["5.1.0", "5.8.18"], OK: ["5.9.0", "6.18.44-x"]}.items()
        for version in versions
    },
    **{
        f"{files} open files": (
            limits(files=files),
            "open files (ulimit -n)",
            f"{files:,} (hard limit 1,048,576): {links} incoming links",
            NOTE,
            "ulimit -n 65536",
        )
        for files, links in ((1024, "244"), (50, "4"), (4095, "1,011"))
    },
    "the lowest of all groups around": (
        GROUPS,
        "memory",
        "16.0 GiB, 8.0 GiB available, cgroup limit 3.0 GiB",
        NOTE,
        "",
    ),
    "CPUs of a group": (GROUPS, "CPUs", "5 of 16 usable, cgroup limit 1.5, A CPU of tests", NOTE, ""),
    "locked memory without RDMA": (limits(locked=8 << 20), LOCKED, "8.0 MiB", OK, ""),
    "locked memory with RDMA": ({**limits(locked=8 << 20), **RDMA}, LOCKED, "8.0 MiB", NOTE, ""),
    "address space": (limits(space=2**40), "address space (ulimit -v)", "1.0 TiB", NOTE, ""),
    "file size": (limits(size=1 << 30), "file size (ulimit -f)", "1.0 GiB", NOTE, "no engine opens with a larger pool"),
    "small pages": (NEVER_HUGE, HUGE, "anonymous: madvise, shared: never", NOTE, "huge_pages="),
    "small pages of 6.0": ({**NEVER_HUGE, KERNEL: "6.0.1"}, HUGE, "anonymous: madvise, shared: never", NOTE, "6.1"),
    "no network": ({f"{ETH0}/operstate": "down", f"{ETH0}/speed": "-1"}, "interfaces", "eth0", NOTE, ""),
    "RDMA": (RDMA, "RDMA mlx5_0 port 1", "ACTIVE, InfiniBand, 200 Gb/sec (4X HDR)", OK, ""),
    "RDMA that is down": ({**RDMA, f"{PORT}/state": "1: DOWN"}, "RDMA devices", "not usable", NOTE, "active"),
    "RDMA without a file": (ACTIVE, "RDMA devices", "not usable", NOTE, "uverbs"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_the_report_finds_on_a_host(root: Path, row: str) -> None:
    files, name, value, verdict, text = ROWS[row]
    put(root, files)
    found = named(everything(root), name)
    assert (found.value, found.verdict) == (value, verdict)
    assert text in f"{found.meaning} {found.remedy}"


def test_a_host_without_rdma_says_where_it_looked(root: Path) -> None:
    assert devices.no_rdma(root) == "this host has no RDMA device (/sys/class/infiniband)"
    put(root, RDMA)
    assert devices.no_rdma(root) is None


def test_a_group_outside_the_mounted_ones_is_not_followed(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../../sibling")
    write(root, "sys/sibling/memory.max", "4096")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    assert host.memory_limit(root) is None


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


@pytest.mark.parametrize("pools", ["mapped", "stream"])
@pytest.mark.parametrize("registered", ["process", "stream"])
def test_memory_that_is_read_in_the_slower_way_has_a_note(
    root: Path, monkeypatch: pytest.MonkeyPatch, pools: str, registered: str
) -> None:
    stats: Any = engine.Engine.stats
    ways = {"pools": pools, "registered": registered, "refusal": "the reason"}

    def changed(of: Any) -> Any:
        said = stats(of)
        return {**said, "links": [{**link, **ways} for link in said["links"]]}

    monkeypatch.setattr(engine.Engine, "stats", changed)
    found = of_engine(root)
    memory = [found[f"{name} of a process"] for name in ("allocated caches", "registered memory")]
    verdicts = [NOTE if way == "stream" else OK for way in (pools, registered)]
    assert [finding.verdict for finding in memory] == verdicts
    assert [finding.meaning == "the reason" for finding in memory] == [verdict == NOTE for verdict in verdicts]


def test_ucx_that_the_engine_does_not_use_is_noted_only_beside_an_rdma_device(root: Path) -> None:
    assert of_engine(root)["UCX"].verdict == OK
    put(root, RDMA)
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
    done = run_command("doctor", "--help")
    options = ("serve", "to", "token-file", "ucx-library", "transfer-backend", "seconds", "json")
    assert all(f"--{option}" in done.stdout for option in options)


# The modules take address space themselves, so they are loaded before the limit is set.
LIMITED = """
import pathlib, resource, sys
import llm_datadist.commands.doctor.cli
from llm_datadist.commands.main import main
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.{0}, ({1}, {1}))
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RLIMIT_FSIZE", "1 << 20", "raise the limit of file sizes"),
        ("RLIMIT_NOFILE", "8", "Too many open files"),
        pytest.param("RLIMIT_AS", "used + (16 << 20)", "no memory for", marks=needs("RLIMIT_AS", limits_address_space)),
    ],
)
def test_limit_under_which_no_engine_opens_is_a_problem(name: str, value: str, text: str) -> None:
    """The report opens an engine, so that it cannot say "0 problems" where no engine opens."""
    done = in_fresh_process(LIMITED.format(name, value))
    report_text = " ".join(done.stdout.split())
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "PROBLEM an engine with a pool cannot be opened" in report_text
    assert text in report_text
    assert "Traceback" not in done.stderr
