"""Facts about the host, from ``/proc`` and ``/sys``. Each function takes the root of these folders."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from llm_datadist.doctor.findings import NOTE, PROBLEM, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["accelerators", "examine", "limits", "memory", "networks", "process_reads", "processor", "rdma_devices"]

# Incoming links of an engine: a quarter of the open files after these are subtracted (docs/links.md).
_KEPT_FILES, _WANTED_FILES = 48, 4096
_GIB = 2**30
_SIZE = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)
# The values of kernel.yama.ptrace_scope. The engine lifts 1 for its own process.
_ADMIN_ONLY, _NEVER = 2, 3


def examine(root: Path = Path("/")) -> list[Finding]:
    """Return all facts about the host."""
    parts = (processor, memory, limits, process_reads, networks, rdma_devices, accelerators)
    return [finding for part in parts for finding in part(root)]


def _text(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def processor(root: Path) -> Iterator[Finding]:
    """The kernel, the CPUs, and the limit of the control group."""
    yield Finding("kernel", _text(root / "proc/sys/kernel/osrelease") or "unknown")
    yield Finding("CPUs of this process", str(len(os.sched_getaffinity(0))))
    quota, _, period = (_text(root / "sys/fs/cgroup/cpu.max") or "max").partition(" ")
    if quota.isdigit() and period.isdigit():
        share = int(quota) / int(period)
        advice = "copies and transfers get no more CPU time than that; keep copy_workers at or below it"
        yield Finding("CPUs that the control group allows", f"{share:.1f}", NOTE, advice)
    nodes = [
        name for name in _names(root / "sys/devices/system/node") if name.startswith("node") and name[4:].isdigit()
    ]
    if len(nodes) > 1:
        advice = "memory of another node is slower; bind the process and its pools to one node (numactl)"
        yield Finding("NUMA nodes", str(len(nodes)), NOTE, advice)


def memory(root: Path) -> Iterator[Finding]:
    """The memory, the limit of the control group, and huge pages."""
    sizes = dict(_SIZE.findall(_text(root / "proc/meminfo") or ""))
    total, free = (int(sizes.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    yield Finding("memory", f"{total / _GIB:.1f} GiB, of which {free / _GIB:.1f} GiB are available")
    most = _text(root / "sys/fs/cgroup/memory.max")
    if most is not None and most.isdigit():
        yield Finding("memory that the control group allows", f"{int(most) / _GIB:.1f} GiB", NOTE, "pools must fit")
    choices = _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = choices.partition("[")[2].partition("]")[0]
    if chosen in {"always", "madvise"}:
        yield Finding("huge pages", chosen)
    else:
        advice = "pools use small pages, and copies are slower: set transparent_hugepage to madvise"
        yield Finding("huge pages", chosen or "none in this kernel", NOTE, advice)


def limits(root: Path, files: Optional[int] = None, locked: Optional[int] = None) -> Iterator[Finding]:
    """The limits of open files and of locked memory, of this process unless they are given."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if files is None else files
    links = max(4, min(4096, (files - _KEPT_FILES) // 4)) if files != resource.RLIM_INFINITY else 4096
    if files == resource.RLIM_INFINITY or files >= _WANTED_FILES:
        yield Finding("open files (ulimit -n)", str(files))
    else:
        advice = f"an engine accepts at most {links} links from peers; raise the limit for more"
        yield Finding("open files (ulimit -n)", str(files), NOTE, advice)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked is None else locked
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory (ulimit -l)", "unlimited")
        return
    found = Finding("locked memory (ulimit -l)", f"{locked >> 10} KiB")
    if _names(root / "sys/class/infiniband"):
        advice = "RDMA devices pin whole pools, so UCX fails beyond it; raise the limit"
        found = Finding(found.subject, found.value, PROBLEM, advice)
    yield found


def _reads_itself() -> Optional[int]:
    """Read memory of this process as the engine reads that of a peer. Return the error number, or ``None``."""

    class Range(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("len", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"probe"), ctypes.create_string_buffer(len(b"probe"))
    here, there = (Range(ctypes.addressof(buffer), len(b"probe")) for buffer in (target, source))
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    done = read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return None if done == len(b"probe") else ctypes.get_errno()


def process_reads(root: Path, reads: Callable[[], Optional[int]] = _reads_itself) -> Iterator[Finding]:
    """Whether a peer on this host can read registered memory, which depends on ptrace."""
    subject = "reads of registered memory of peers on this host"
    slower = "such memory goes through sockets, about half as fast; caches in pools are not affected"
    errno = reads()
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    level = int(scope) if scope is not None and scope.isdigit() else 0
    if errno is not None:
        advice = f"{slower}. A security profile of the container (seccomp) forbids process_vm_readv"
        yield Finding(subject, f"refused: {os.strerror(errno)}", NOTE, advice)
    elif level >= _ADMIN_ONLY and (level >= _NEVER or os.geteuid() != 0):
        yield Finding(subject, f"kernel.yama.ptrace_scope = {level}", NOTE, f"{slower}. Set it to 1 or 0")
    else:
        yield Finding(subject, "allowed")


def networks(root: Path) -> Iterator[Finding]:
    """The network interfaces that are up, with their speed."""
    up = []
    for name in _names(root / "sys/class/net"):
        folder = root / "sys/class/net" / name
        if name == "lo" or _text(folder / "operstate") not in {"up", "unknown"}:
            continue
        speed = _text(folder / "speed") or ""
        real = speed.isdigit() and (folder / "device").exists()
        up.append((name, f"{name} ({int(speed) / 1000:g} Gbit/s)" if speed.isdigit() else name, real))
    shown = ", ".join(text for _, text, _ in up) or "none is up"
    several = sum(real for _, _, real in up) > 1
    if several:
        advice = "pulls and pushes use one of them; link_addresses spreads large ones over several"
        yield Finding("networks", shown, NOTE, advice)
    else:
        yield Finding("networks", shown)


def rdma_devices(root: Path) -> Iterator[Finding]:
    """The RDMA devices, with the state of their ports."""
    folder = root / "sys/class/infiniband"
    devices = _names(folder)
    if not devices:
        advice = "between hosts, bytes travel through TCP"
        yield Finding("RDMA devices", "none", NOTE, advice)
    for device in devices:
        for port in _names(folder / device / "ports"):
            place = folder / device / "ports" / port
            state = (_text(place / "state") or "unknown").partition(": ")[2] or "unknown"
            layer, rate = _text(place / "link_layer") or "unknown", _text(place / "rate") or "unknown rate"
            value = f"{state}, {layer}, {rate}"
            if state == "ACTIVE":
                yield Finding(f"RDMA device {device}, port {port}", value)
            else:
                yield Finding(f"RDMA device {device}, port {port}", value, NOTE, "UCX cannot use this port")


def accelerators(root: Path) -> Iterator[Finding]:
    """The accelerators, which this version does not use."""
    found = []
    driver = _text(root / "proc/driver/nvidia/version")
    cards = [name for name in _names(root / "dev") if name.startswith("nvidia") and name[6:].isdigit()]
    if driver is not None or cards:
        found.append(f"{len(cards)} of NVIDIA")
    ascend = [name for name in _names(root / "dev") if name.startswith("davinci") and name[7:].isdigit()]
    if ascend:
        found.append(f"{len(ascend)} of Ascend")
    if found:
        yield Finding("accelerators", ", ".join(found), NOTE, "this version keeps caches in host memory only")
    else:
        yield Finding("accelerators", "none")
