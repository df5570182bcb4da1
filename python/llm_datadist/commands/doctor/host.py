"""The host: kernel, CPUs, memory, limits of control groups (cgroups, version 1 and 2), user."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from llm_datadist.commands.doctor.finding import NOTE, PROBLEM, Finding, field_of, names_in, text_of
from llm_datadist.commands.output import size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SECTION = "host"
_ALL_USERS = 2**32 - 1
_UNLIMITED_BYTES = 2**60
"""Control groups of version 1 show a number near 2^63 if there is no limit."""


def kernel_version(root: Path) -> tuple[int, int]:
    """Return the two first numbers of the version of the kernel, or zeros if it is unknown."""
    match = re.match(r"(\d+)\.(\d+)", text_of(root / "proc/sys/kernel/osrelease") or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def findings(root: Path) -> list[Finding]:
    """Return the facts about the host."""
    return [_kernel(root), _cpus(root), _memory(root), _nodes(root), _user(root), _container(root)]


def _kernel(root: Path) -> Finding:
    value = f"Linux {text_of(root / 'proc/sys/kernel/osrelease') or 'of an unknown version'}"
    version = kernel_version(root)
    if version < (5, 1):
        meaning = "Linux 5.1 is needed to protect shared memory from writes of peers; pools go through sockets"
        return Finding(_SECTION, "kernel", value, PROBLEM, meaning, "use Linux 5.9 or later")
    if version < (5, 9):
        meaning = "before Linux 5.9, a receiver of many small segments may not wake; its call then ends at its deadline"
        return Finding(_SECTION, "kernel", value, NOTE, meaning, "use Linux 5.9 or later for links over sockets")
    return Finding(_SECTION, "kernel", value)


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
    model = field_of(root / "proc/cpuinfo", "model name")
    value += f", {model}" if model else ""
    if min(usable, limit or usable) < 2:  # noqa: PLR2004
        meaning = "the threads that copy share one CPU with the program"
        return Finding(_SECTION, "CPUs", value, NOTE, meaning, "give the process two CPUs or more")
    return Finding(_SECTION, "CPUs", value)


def _kilobytes(root: Path, name: str) -> int | None:
    match = re.match(r"(\d+) kB", field_of(root / "proc/meminfo", name) or "")
    return int(match[1]) * 1024 if match else None


def _memory(root: Path) -> Finding:
    total, free = _kilobytes(root, "MemTotal"), _kilobytes(root, "MemAvailable")
    limit = memory_limit(root)
    value = "unknown" if total is None else size(total)
    value += "" if free is None else f", {size(free)} available"
    if limit is None or (total is not None and limit >= total):
        return Finding(_SECTION, "memory", value)
    meaning = "pools count as memory of the control group; the kernel ends a process that exceeds the limit"
    remedy = "choose pool and host_pool below the limit, with room for the program"
    return Finding(_SECTION, "memory", f"{value}, cgroup limit {size(limit)}", NOTE, meaning, remedy)


def _nodes(root: Path) -> Finding:
    count = len(names_in(root / "sys/devices/system/node", "node[0-9]*"))
    if count > 1:
        meaning = "the engine does not choose a node; memory of another node is slower"
        remedy = "run each process on the node of its network card (numactl)"
        return Finding(_SECTION, "memory nodes", str(count), NOTE, meaning, remedy)
    return Finding(_SECTION, "memory nodes", str(count or "unknown"))


def _user(root: Path) -> Finding:
    numbers = (field_of(root / "proc/self/status", "Uid") or "").split()
    value = f"user id {numbers[1]}" if len(numbers) > 1 else "unknown"
    covered = re.findall(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s*$", text_of(root / "proc/self/uid_map") or "", re.MULTILINE)
    if covered and sum(int(count) for _, _, count in covered) < _ALL_USERS:
        meaning = "this is a user namespace; processes outside it are not recognized as the same user"
        remedy = "set a token on both sides of a link that leaves the namespace (token_file)"
        return Finding(_SECTION, "user", f"{value}, in a user namespace", NOTE, meaning, remedy)
    return Finding(_SECTION, "user", value)


def _container(root: Path) -> Finding:
    marks = {".dockerenv": "Docker", "run/.containerenv": "Podman"}
    kinds = [kind for mark, kind in marks.items() if (root / mark).exists()]
    ids = (field_of(root / "proc/self/status", "NSpid") or "").split()
    if kinds or len(ids) > 1:
        meaning = (
            "without a shared network namespace, peers on this host use TCP; without a shared PID namespace, they "
        )
        meaning += "read registered memory through sockets"
        remedy = "share both namespaces between containers of one host (docs: Deployment, Containers)"
        return Finding(_SECTION, "container", ", ".join(kinds) or "a PID namespace", NOTE, meaning, remedy)
    return Finding(_SECTION, "container", "none found")


def memory_limit(root: Path) -> int | None:
    """Return the lowest limit of memory in bytes, or ``None`` if there is none."""
    found = []
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = text_of(folder / name)
            if text and re.fullmatch(r"[0-9]{1,20}", text) and int(text) < _UNLIMITED_BYTES:
                found.append(int(text))
    return min(found, default=None)


def cpu_limit(root: Path) -> float | None:
    """Return the lowest limit of CPU time in CPUs, or ``None`` if there is none."""
    found = []
    for folder in _folders(root, "cpu"):
        quotas = (text_of(folder / "cpu.max") or "").split()
        quotas = quotas or [text_of(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(quotas) == 2 and all(re.fullmatch(r"[0-9]{1,18}", part) for part in quotas) and int(quotas[1]):  # noqa: PLR2004
            found.append(int(quotas[0]) / int(quotas[1]))
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits may apply: of each group of this process, and of the groups around it."""
    mounted = root / "sys/fs/cgroup"
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tops = [mounted / controllers, mounted / controller] if controllers else [mounted, mounted / "unified"]
        inside = PurePosixPath("/" + path.strip("/"))
        for top in tops:
            for group in (inside, *inside.parents):
                if ".." not in group.parts:
                    yield top / str(group).lstrip("/")
