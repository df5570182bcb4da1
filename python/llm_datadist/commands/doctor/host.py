"""The host: kernel, CPUs, memory, limits of control groups (version 2) and of the process, huge pages."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from llm_datadist.commands.doctor import devices
from llm_datadist.commands.doctor.finding import NOTE, PROBLEM, Finding, field_of, text_of
from llm_datadist.commands.output import size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HOST, _LIMITS = "host", "limits"
_RESERVED, _FOR_EACH_LINK = 48, 4
"""Of n open files, an engine keeps 48; each incoming link takes four of the rest (docs/links.md, "Limits")."""
_MIN_LINKS, _MAX_LINKS, _ENOUGH_FILES = 4, 4096, 4096
_TOO_LITTLE_SPACE = "no engine opens whose pools do not fit into it; pools of peers that do not fit go through sockets"
_SMALL_FILES = "pools are files in memory, so no engine opens with a larger pool"


def findings(root: Path) -> list[Finding]:
    """Return the facts about the host."""
    return [
        _kernel(root),
        Finding(_HOST, "architecture", f"{os.uname().machine}, pages of {size(os.sysconf('SC_PAGE_SIZE'))}"),
        _cpus(root),
        _memory(root),
        _open_files(root),
        _locked_memory(root),
        _size_limit(root, "address space (ulimit -v)", "Max address space", _TOO_LITTLE_SPACE, "remove the limit"),
        _size_limit(root, "file size (ulimit -f)", "Max file size", _SMALL_FILES, "set ulimit -f unlimited"),
        _huge_pages(root),
    ]


def _version(root: Path) -> tuple[int, int]:
    """Return the two first numbers of the version of the kernel, or zeros if it is unknown."""
    match = re.match(r"(\d+)\.(\d+)", text_of(root / "proc/sys/kernel/osrelease") or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _kernel(root: Path) -> Finding:
    value = f"Linux {text_of(root / 'proc/sys/kernel/osrelease') or 'of an unknown version'}"
    if _version(root) < (5, 1):
        meaning = "Linux 5.1 is needed to protect shared memory from writes of peers; pools go through sockets"
        return Finding(_HOST, "kernel", value, PROBLEM, meaning, "use Linux 5.9 or later")
    if _version(root) < (5, 9):
        meaning = "before Linux 5.9, a receiver of many small segments may not wake; its call then ends at its deadline"
        return Finding(_HOST, "kernel", value, NOTE, meaning, "use Linux 5.9 or later for links over sockets")
    return Finding(_HOST, "kernel", value)


def _counted(ranges: str) -> int:
    """Return how many numbers a list such as ``0-3,8`` has."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", ranges)
    return sum(int(last or first) - int(first) + 1 for first, last in parts)


def _cpus(root: Path) -> Finding:
    online = _counted(text_of(root / "sys/devices/system/cpu/online") or "")
    usable = _counted(field_of(root / "proc/self/status", "Cpus_allowed_list") or "") or online
    limit = cpu_limit(root)
    value = f"{usable} of {online or usable} usable"
    value += "" if limit is None else f", cgroup limit {limit:g}"
    value += f", {model}" if (model := field_of(root / "proc/cpuinfo", "model name")) else ""
    if min(usable, limit or usable) < 2:  # noqa: PLR2004
        meaning = "the threads that copy share one CPU with the program"
        return Finding(_HOST, "CPUs", value, NOTE, meaning, "give the process two CPUs or more")
    return Finding(_HOST, "CPUs", value)


def _memory(root: Path) -> Finding:
    total, free = (
        int(match[1]) * 1024 if match else None
        for match in (
            re.match(r"(\d+) kB", field_of(root / "proc/meminfo", name) or "") for name in ("MemTotal", "MemAvailable")
        )
    )
    limit = memory_limit(root)
    value = "unknown" if total is None else size(total)
    value += "" if free is None else f", {size(free)} available"
    if limit is None or (total is not None and limit >= total):
        return Finding(_HOST, "memory", value)
    meaning = "pools count as memory of the control group; the kernel ends a process that exceeds the limit"
    remedy = "choose pool and host_pool below the limit, with room for the program"
    return Finding(_HOST, "memory", f"{value}, cgroup limit {size(limit)}", NOTE, meaning, remedy)


def memory_limit(root: Path) -> int | None:
    """Return the lowest limit of memory in bytes, or ``None`` if there is none."""
    texts = (text_of(folder / "memory.max") or "" for folder in _groups(root))
    return min((int(text) for text in texts if re.fullmatch(r"[0-9]{1,20}", text)), default=None)


def cpu_limit(root: Path) -> float | None:
    """Return the lowest limit of CPU time in CPUs, or ``None`` if there is none."""
    texts = (text_of(folder / "cpu.max") or "" for folder in _groups(root))
    quotas = [match for match in (re.fullmatch(r"([0-9]{1,18}) ([1-9][0-9]{0,17})", text) for text in texts) if match]
    return min((int(quota[1]) / int(quota[2]) for quota in quotas), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control group of this process, and of the groups around it."""
    path = field_of(root / "proc/self/cgroup", "0:")
    inside = PurePosixPath("/" + (path or "").strip("/"))
    for group in (inside, *inside.parents):
        if path is not None and ".." not in group.parts:
            yield root / "sys/fs/cgroup" / str(group).lstrip("/")


def _limit(root: Path, name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of a resource of this process; ``None`` for unlimited or unknown."""
    match = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", text_of(root / "proc/self/limits") or "", re.MULTILINE)
    soft, hard = (int(part) if part.isdigit() else None for part in (match.groups() if match else ("", "")))
    return soft, hard


def _open_files(root: Path) -> Finding:
    name = "open files (ulimit -n)"
    soft, hard = _limit(root, "Max open files")
    if soft is None:
        return Finding(_LIMITS, name, "unlimited or unknown")
    links = min(max((soft - _RESERVED) // _FOR_EACH_LINK, _MIN_LINKS), _MAX_LINKS)
    value = f"{soft:,} (hard limit {'unlimited' if hard is None else f'{hard:,}'}): {links:,} incoming links"
    if soft >= _ENOUGH_FILES:
        return Finding(_LIMITS, name, value)
    meaning = f"an engine accepts at most {links:,} links of peers"
    remedy = "raise it before the engine opens, for example ulimit -n 65536"
    return Finding(_LIMITS, name, value, NOTE, meaning, remedy)


def _locked_memory(root: Path) -> Finding:
    name = "locked memory (ulimit -l)"
    soft, _ = _limit(root, "Max locked memory")
    value = "unlimited or unknown" if soft is None else size(soft)
    if soft is None or devices.no_rdma(root) is not None:
        return Finding(_LIMITS, name, value)
    meaning = "an RDMA device pins whole pools; the engine does not open, or sockets are used, if they exceed the limit"
    return Finding(_LIMITS, name, value, NOTE, meaning, "set ulimit -l unlimited, or more than the sizes of the pools")


def _size_limit(root: Path, name: str, resource: str, meaning: str, remedy: str) -> Finding:
    soft, _ = _limit(root, resource)
    if soft is None:
        return Finding(_LIMITS, name, "unlimited")
    return Finding(_LIMITS, name, size(soft), NOTE, meaning, remedy)


def _huge_pages(root: Path) -> Finding:
    folder, name = root / "sys/kernel/mm/transparent_hugepage", "transparent huge pages"
    chosen = {of: re.search(r"\[(\w+)\]", text_of(folder / of) or "") for of in ("enabled", "shmem_enabled")}
    anonymous, shared = (match[1] if match else "unknown" for match in chosen.values())
    value = f"anonymous: {anonymous}, shared: {shared}"
    if _version(root) < (6, 1):
        meaning = "the option huge_pages cannot merge memory before Linux 6.1"
        return Finding(_LIMITS, name, value, NOTE, meaning, "use Linux 6.1 or later if small pages cost too much time")
    if "never" in (anonymous, shared):
        meaning = "that memory has small pages; its first touch, and reads by process id, take longer"
        return Finding(_LIMITS, name, value, NOTE, meaning, 'huge_pages="eager" puts it into huge pages')
    return Finding(_LIMITS, name, value)
