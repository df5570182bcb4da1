"""What `llm-datadist doctor` says about a host, from made-up `/proc` and `/sys` folders.

Not for: measurements (`test_doctor_link.py`).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import llm_datadist
from llm_datadist.commands.doctor import devices, host, kernel_calls, libraries, limits, paths, report
from llm_datadist.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from llm_datadist.commands.doctor.kernel_calls import KernelCalls
from llm_datadist.commands.main import main

if TYPE_CHECKING:
    from pathlib import Path

WORKS = KernelCalls()
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            {files:<20} 1048576              files
Max locked memory         {locked:<20} unlimited            bytes
Max address space         {space:<20} unlimited            bytes
Max file size             unlimited            unlimited            bytes
"""
STATUS = "Name:\tpython\nUid:\t1000\t1001\t1000\t1000\nNSpid:\t77\nCapEff:\t{caps}\nCpus_allowed_list:\t{cpus}\n"
PTRACE = f"{1 << 19:016x}"


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


def everything(root: Path, calls: KernelCalls = WORKS) -> list[Finding]:
    return [*host.findings(root), *limits.findings(root, calls), *devices.findings(root)]


class Ucx(libraries.UcxLibrary):
    """A stand-in for a library that was loaded."""

    def __init__(self, version: tuple[int, int, int] | None = (1, 17, 0), reason: str | None = None) -> None:
        self.name, self.version, self.reason = "libucp.so.0", version, reason


def test_a_host_without_limits_has_neither_notes_nor_problems(root: Path) -> None:
    found = everything(root)
    assert len(found) > 15
    assert [finding for finding in found if finding.verdict != OK] == []
    values = {finding.name: finding.value for finding in found}
    assert values["kernel"] == "Linux 6.8.0-40-generic"
    assert values["CPUs"] == "5 of 16 usable, A CPU of tests"
    assert values["memory"] == "16.0 GiB, 8.0 GiB available"
    assert values["user"] == "user id 1001"  # the effective one
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


def test_limits_of_control_groups_of_version_1_are_read(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job/step\n3:cpuset:/other")
    write(root, "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", str(2**63 - 4096))  # none
    write(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(2**30))
    write(root, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "400000")
    write(root, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    assert host.memory_limit(root) == 2**30
    assert host.cpu_limit(root) == 4.0
    write(root, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1")
    assert host.cpu_limit(root) is None


def test_a_group_outside_the_mounted_ones_is_not_followed(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../../sibling")
    write(root, "sys/sibling/memory.max", "4096")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    assert host.memory_limit(root) is None


@pytest.mark.parametrize(("files", "links"), [(1024, "244"), (50, "4"), (4095, "1,011")])
def test_few_open_files_limit_the_links(root: Path, files: int, links: str) -> None:
    write(root, "proc/self/limits", LIMITS.format(files=files, locked="unlimited", space="unlimited"))
    found = named(limits.findings(root, WORKS), "open files (ulimit -n)")
    assert found.verdict == NOTE
    assert found.value == f"{files:,} (hard limit 1,048,576): {links} incoming links"
    assert "ulimit -n 65536" in found.remedy


def test_locked_memory_matters_only_with_an_rdma_device(root: Path) -> None:
    write(root, "proc/self/limits", LIMITS.format(files=65536, locked=8 * 2**20, space=2**40))
    name = "locked memory (ulimit -l)"
    assert named(limits.findings(root, WORKS), name).verdict == OK
    rdma(root)
    found = named(limits.findings(root, WORKS), name)
    assert (found.value, found.verdict) == ("8.0 MiB", NOTE)
    assert named(limits.findings(root, WORKS), "address space (ulimit -v)").value == "1.0 TiB"


@pytest.mark.parametrize(
    ("scope", "caps", "permitted"),
    [
        (None, "0", True),
        ("0", "0", True),
        ("1", "0", True),
        ("2", "0", False),
        ("2", PTRACE, True),
        ("2", f"{1 << 18:x}", False),
        ("3", PTRACE, False),
    ],
)
def test_yama_decides_about_reads_by_process_id(root: Path, scope: str | None, caps: str, permitted: bool) -> None:
    if scope is not None:
        write(root, "proc/sys/kernel/yama/ptrace_scope", scope)
    write(root, "proc/self/status", STATUS.format(caps=caps, cpus="0-3"))
    found = named(limits.findings(root, WORKS), "reads by process id")
    assert found.verdict == (OK if permitted else NOTE)
    assert found.value.startswith("permitted" if permitted else "refused")
    assert ("with CAP_SYS_PTRACE" in found.value) == (caps == PTRACE)
    registered = paths.paths(root, WORKS, Ucx(), {})[1]
    assert registered.path == ("process" if permitted else "rings")


def test_calls_that_the_kernel_refuses_change_the_paths(root: Path) -> None:
    calls = KernelCalls("memfd_create failed", "process_vm_readv failed", "pidfd_open failed")
    found = limits.findings(root, calls)
    shared, reads = (named(found, name) for name in ("shared memory (memfd)", "reads by process id"))
    assert (shared.verdict, reads.verdict) == (PROBLEM, NOTE)
    assert "memfd_create failed" in shared.meaning
    assert "process_vm_readv failed" in reads.meaning
    pools, registered, _ = paths.paths(root, calls, Ucx(), {})
    assert (pools.path, pools.reasons) == ("sockets", ("memfd_create failed",))
    assert (registered.path, registered.reasons[0]) == ("sockets", "process_vm_readv failed")
    handle = paths.paths(root, KernelCalls(process_handle="pidfd_open failed"), Ucx(), {})[1]
    assert (handle.path, handle.reasons[0]) == ("rings", "pidfd_open failed")


def test_this_process_may_make_the_calls() -> None:
    calls = kernel_calls.try_all()
    assert calls.shared_memory is None  # every test with an engine needs it
    if hasattr(os, "pidfd_open"):
        assert calls.process_handle is None


def test_a_call_that_fails_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "refused by the test")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # above the highest id of a process
    calls = kernel_calls.try_all()
    assert calls.shared_memory == "memfd_create failed (errno=1): Operation not permitted"
    assert calls.process_handle == "pidfd_open failed (errno=1): Operation not permitted"
    assert calls.process_read == "process_vm_readv failed (errno=3): No such process"


def test_small_pages_are_noted(root: Path) -> None:
    write(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force")
    found = named(limits.findings(root, WORKS), "transparent huge pages")
    assert (found.value, found.verdict) == ("anonymous: madvise, shared: never", NOTE)
    assert "huge_pages=" in found.remedy
    write(root, "proc/sys/kernel/osrelease", "6.0.1")
    assert "6.1" in named(limits.findings(root, WORKS), "transparent huge pages").remedy


def test_a_host_whose_networks_are_down_reaches_no_other_host(root: Path) -> None:
    network(root, "eth0", state="down", speed="-1")
    found = named(devices.findings(root), "interfaces")
    assert (found.value, found.verdict) == ("eth0", NOTE)


def test_several_cards_are_noted_but_no_bridges(root: Path) -> None:
    network(root, "docker0", state="up", speed="10000")
    write(root, "sys/class/net/eth0/device/vendor", "0x15b3")
    assert not [finding for finding in devices.findings(root) if finding.name == "several networks"]
    network(root, "eth1", state="up", speed="100000")
    write(root, "sys/class/net/eth1/device/vendor", "0x15b3")
    found = named(devices.findings(root), "several networks")
    assert (found.value, found.verdict) == ("eth0, eth1", NOTE)
    assert "option addresses" in found.remedy


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


def test_accelerators_are_named_as_unused(root: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci3", "davinci_manager"):
        write(root, f"dev/{name}", "")
    found = devices.findings(root)
    assert named(found, "NVIDIA").value == "nvidia0, nvidia1"
    assert named(found, "Ascend").value == "davinci3"
    assert "does not use accelerators" in named(found, "Ascend").meaning


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv", "a PID namespace"])
def test_containers_are_noted(root: Path, mark: str) -> None:
    if mark.startswith("a "):
        write(root, "proc/self/status", STATUS.format(caps="0", cpus="0").replace("\t77", "\t77\t1"))
    else:
        write(root, mark, "")
    assert named(host.findings(root), "container").verdict == NOTE


def test_a_user_namespace_is_noted(root: Path) -> None:
    write(root, "proc/self/uid_map", "         0       1000          1")
    found = named(host.findings(root), "user")
    assert (found.value, found.verdict) == ("user id 1001, in a user namespace", NOTE)


def test_an_empty_root_is_no_failure(tmp_path: Path) -> None:
    found = everything(tmp_path)
    assert named(found, "memory").value == "unknown"
    assert named(found, "kernel").verdict == PROBLEM
    assert report.findings(found, paths.paths(tmp_path, WORKS, Ucx(), {}), 100)


TOKEN = {"LLM_DATADIST_TOKEN_FILE": "/run/token"}


def test_ucx_is_used_only_with_a_device_a_library_and_a_token(root: Path) -> None:
    rdma(root)
    assert paths.paths(root, WORKS, Ucx(), TOKEN)[2] == paths.PeerPath(
        "other host, or other network namespace", "fabric", ()
    )
    lacking = {
        "no token": paths.paths(root, WORKS, Ucx(), {}),
        "too old": paths.paths(root, WORKS, Ucx((1, 12, 0), "too old"), TOKEN),
    }
    (root / "dev/infiniband/uverbs0").unlink()
    lacking["uverbs"] = paths.paths(root, WORKS, Ucx(), TOKEN)
    for reason, found in lacking.items():
        assert found[2].path == "sockets"
        assert len(found[2].reasons) == 1
        assert reason in found[2].reasons[0]


def test_ucx_that_is_missing_is_noted_only_beside_an_rdma_device(root: Path) -> None:
    missing = libraries.UcxLibrary("libucp_of_no_system.so.0")
    assert missing.version is None
    assert missing.reason is not None
    assert "libucp_of_no_system.so.0" in missing.reason
    assert named(libraries.findings(root, missing, {}), "UCX").verdict == OK
    rdma(root)
    assert named(libraries.findings(root, missing, {}), "UCX").verdict == NOTE
    assert named(libraries.findings(root, Ucx(), {}), "UCX").value == "1.17.0 (libucp.so.0)"


@pytest.mark.parametrize(("version", "usable"), [((1, 12, 9), False), ((1, 13, 0), True), ((2, 0, 0), False)])
def test_versions_of_ucx_are_those_that_the_engine_accepts(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], usable: bool
) -> None:
    class Loaded:
        def __init__(self, _name: str) -> None:
            self.environment = dict(os.environ)
            assert os.environ["UCX_HANDLE_ERRORS"] == "none"
            assert os.environ["UCX_MEM_EVENTS"] == "y"  # the choice of the user remains

        def ucp_get_version(self, *numbers: object) -> None:
            for number, value in zip(numbers, version):
                number._obj.value = value  # type: ignore[attr-defined]

    monkeypatch.setattr(ctypes, "CDLL", Loaded)
    monkeypatch.delenv("UCX_HANDLE_ERRORS", raising=False)
    monkeypatch.setenv("UCX_MEM_EVENTS", "y")
    found = libraries.UcxLibrary()
    assert found.version == version
    assert (found.reason is None) == usable
    assert "UCX_HANDLE_ERRORS" not in os.environ


def test_the_token_is_never_shown(root: Path) -> None:
    secret = {"LLM_DATADIST_TOKEN": "a secret of this test"}
    found = libraries.findings(root, Ucx(), secret)
    assert named(found, "token").value == "LLM_DATADIST_TOKEN is set"
    assert "a secret" not in repr(found)
    assert named(libraries.findings(root, Ucx(), {"LLM_DATADIST_TOKEN": ""}), "token").value.startswith("none")


def test_the_report_shows_meaning_and_remedy_and_fits_its_width() -> None:
    found = [
        Finding("host", "good", "fine"),
        Finding("host", "bad", "a value " * 20, PROBLEM, "it fails", "repair it"),
        Finding("limits", "small", "7", NOTE, "it is small", "raise it"),
    ]
    peers = [paths.PeerPath("near", "mapped"), paths.PeerPath("far away", "sockets", ("one", "two"))]
    text = report.findings(found, peers, 80)
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
    assert [line.strip() for line in lines if "Not faster" in line] == [
        "Not faster, because one.",
        "Not faster, because two.",
    ]
    assert lines[-1] == "1 problem, 1 note"
    assert [line for line in lines if line and not line.startswith(" ")] == [
        "host",
        "limits",
        "path of the bytes, by peer",
        "1 problem, 1 note",
    ]


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
    assert [path["peer"].split(",")[0] for path in found["paths"]] == ["same host", "same host", "other host"]
    assert values["kernel"] in text
    assert main(["doctor", "--json", "-"]) == status
    shown = capsys.readouterr()
    assert json.loads(shown.out)["paths"] == found["paths"]
    assert values["kernel"] in shown.err


@pytest.mark.parametrize("verdict", [OK, NOTE, PROBLEM])
def test_only_a_problem_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    made = [Finding("host", "made up", "value", verdict, "meaning", "remedy")]
    monkeypatch.setattr(host, "findings", lambda _root: made)
    for module in (limits, devices, libraries):
        monkeypatch.setattr(module, "findings", lambda *_: [])
    assert main(["doctor"]) == int(verdict == PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--to nowhere", "argument --to: 'nowhere' is not of the form HOST:PORT"),
        ("--to 127.0.0.1:0", "with a port from 1 to 65535"),
        ("--to 127.0.0.1:65536", "with a port from 1 to 65535"),
        ("--to ::1:26500", "or [IPV6]:PORT"),
        ("--to no.such.host.invalid:1", "--to: the host of 'no.such.host.invalid:1' is not known"),
        ("--serve localhost:0", "argument --serve: 'localhost:0' has a host name; an IP address is needed"),
        ("--serve 127.0.0.1:65536", "with a port from 0 to 65535"),
        ("--serve --to 127.0.0.1:1", "not allowed with argument"),
        ("--serve --seconds 0", "argument --seconds: '0' is not a number of seconds from 0.001 to 99,999"),
        ("--to 127.0.0.1:1 --seconds 1e3", "argument --seconds: '1e3' is not a number of seconds"),
        ("--to 127.0.0.1:1 --token-file /no/file", "argument --token-file: there is no file '/no/file'"),
        ("--ucx-library /no/file", "argument --ucx-library: there is no file '/no/file'"),
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
    found = named(limits.findings(root, WORKS), "file size (ulimit -f)")
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
        ("RLIMIT_AS", None, "no memory for"),
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
    assert "PROBLEM an engine with a pool cannot be opened without errors" in report_text
    assert text in report_text
    assert "Traceback" not in done.stderr


def test_report_opens_an_engine_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_calls.open_engine() is None
    monkeypatch.setenv("LLM_DATADIST_TOKEN", "")
    assert "LLM_DATADIST_TOKEN is set, but empty" in (kernel_calls.open_engine() or "")
