"""Limits: open files, memory, reads of other processes, shared memory, huge pages."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from llm_datadist.commands.doctor import devices, host
from llm_datadist.commands.doctor.finding import NOTE, PROBLEM, Finding, field_of, text_of
from llm_datadist.commands.output import size

if TYPE_CHECKING:
    from pathlib import Path

    from llm_datadist.commands.doctor.kernel_calls import KernelCalls

_SECTION = "limits"
_RESERVED, _FOR_EACH_LINK = 48, 4
"""Of n open files, an engine keeps 48; each incoming link takes four of the rest (docs/links.md, "Limits")."""
_FEWEST_LINKS, _MOST_LINKS, _FEW_FILES = 4, 4096, 4096
_TOO_LITTLE_SPACE = "no engine opens whose pools do not fit into it; pools of peers that do not fit go through sockets"
_SMALL_FILES = "pools are files in memory, so no engine opens with a larger pool"
_SYS_PTRACE = 19
_ADMIN_ONLY, _NO_ATTACH = 2, 3
"""Values of Yama's ptrace_scope. 0 and 1 suffice: with 1, the engine permits the reads when it links."""


def findings(root: Path, calls: KernelCalls) -> list[Finding]:
    """Return the facts about limits."""
    return [
        _open_files(root),
        _locked_memory(root),
        _size_limit(root, "address space (ulimit -v)", "Max address space", _TOO_LITTLE_SPACE, "remove the limit"),
        _size_limit(root, "file size (ulimit -f)", "Max file size", _SMALL_FILES, "set ulimit -f unlimited"),
        _shared_memory(root, calls),
        _process_reads(root, calls),
        *_huge_pages(root),
        _engine(calls),
    ]


def limit(root: Path, name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of a resource of this process; ``None`` for unlimited or unknown."""
    match = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", text_of(root / "proc/self/limits") or "", re.MULTILINE)
    values = [int(part) if part.isdigit() else None for part in (match.groups() if match else ("", ""))]
    return values[0], values[1]


def no_process_reads(root: Path, calls: KernelCalls) -> str | None:
    """Return why registered memory of another process cannot be read by process id, or ``None``."""
    scope = text_of(root / "proc/sys/kernel/yama/ptrace_scope") or "0"
    if scope == str(_NO_ATTACH):
        return "Yama forbids all reads of other processes (ptrace_scope=3)"
    if scope == str(_ADMIN_ONLY) and not _may_trace(root):
        return "Yama permits such reads only with CAP_SYS_PTRACE (ptrace_scope=2)"
    return calls.process_read or calls.process_handle


def _may_trace(root: Path) -> bool:
    """Return whether this process has CAP_SYS_PTRACE."""
    mask = field_of(root / "proc/self/status", "CapEff") or "0"
    return bool(int(mask, 16) >> _SYS_PTRACE & 1) if re.fullmatch(r"[0-9a-fA-F]+", mask) else False


def _open_files(root: Path) -> Finding:
    name = "open files (ulimit -n)"
    soft, hard = limit(root, "Max open files")
    if soft is None:
        return Finding(_SECTION, name, "unlimited or unknown")
    links = min(max((soft - _RESERVED) // _FOR_EACH_LINK, _FEWEST_LINKS), _MOST_LINKS)
    value = f"{soft:,} (hard limit {'unlimited' if hard is None else f'{hard:,}'}): {links:,} incoming links"
    if soft >= _FEW_FILES:
        return Finding(_SECTION, name, value)
    meaning = f"an engine accepts at most {links:,} links of peers"
    return Finding(
        _SECTION, name, value, NOTE, meaning, "raise it before the engine opens, for example ulimit -n 65536"
    )


def _locked_memory(root: Path) -> Finding:
    name = "locked memory (ulimit -l)"
    soft, _ = limit(root, "Max locked memory")
    value = "unlimited or unknown" if soft is None else size(soft)
    if soft is None or devices.no_rdma(root) is not None:
        return Finding(_SECTION, name, value)
    meaning = "an RDMA device pins whole pools; the engine does not open, or sockets are used, if they exceed the limit"
    return Finding(_SECTION, name, value, NOTE, meaning, "set ulimit -l unlimited, or more than the sizes of the pools")


def _size_limit(root: Path, name: str, resource: str, meaning: str, remedy: str) -> Finding:
    soft, _ = limit(root, resource)
    if soft is None:
        return Finding(_SECTION, name, "unlimited")
    return Finding(_SECTION, name, size(soft), NOTE, meaning, remedy)


def _engine(calls: KernelCalls) -> Finding:
    name = "an engine with a pool"
    if calls.engine is None:
        return Finding(_SECTION, name, "can be opened")
    remedy = "follow the text of the error; the limits above may be the cause"
    return Finding(_SECTION, name, "cannot be opened without errors", PROBLEM, calls.engine, remedy)


def _shared_memory(root: Path, calls: KernelCalls) -> Finding:
    name = "shared memory (memfd)"
    if calls.shared_memory is None:
        return Finding(_SECTION, name, f"works; /dev/shm ({_shm_size(root)}) is not used")
    meaning = f"{calls.shared_memory}; an engine cannot be opened, or its pools go through sockets"
    return Finding(
        _SECTION, name, "fails", PROBLEM, meaning, "allow memfd_create and seals (seccomp), on Linux 5.1 or later"
    )


def _shm_size(root: Path) -> str:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return "absent"
    return size(found.f_blocks * found.f_frsize)


def _process_reads(root: Path, calls: KernelCalls) -> Finding:
    name = "reads by process id"
    scope = text_of(root / "proc/sys/kernel/yama/ptrace_scope")
    capable = "with" if _may_trace(root) else "without"
    yama = "Yama inactive" if scope is None else f"Yama ptrace_scope {scope}"
    reason = no_process_reads(root, calls)
    value = f"{'permitted' if reason is None else 'refused'} ({yama}, {capable} CAP_SYS_PTRACE)"
    if reason is None:
        return Finding(_SECTION, name, value)
    meaning = f"{reason}; peers on this host read registered memory through sockets"
    remedy = "allocate caches from a pool, or permit the reads (ptrace_scope 0 or 1, seccomp)"
    return Finding(_SECTION, name, value, NOTE, meaning, remedy)


def _huge_pages(root: Path) -> list[Finding]:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    chosen = {name: _chosen(text_of(folder / name)) for name in ("enabled", "shmem_enabled")}
    reserved = text_of(root / "proc/sys/vm/nr_hugepages") or "unknown"
    value = f"anonymous: {chosen['enabled']}, shared: {chosen['shmem_enabled']}"
    name = "transparent huge pages"
    found = Finding(_SECTION, name, value)
    if host.kernel_version(root) < (6, 1):
        meaning = "the option huge_pages cannot merge memory before Linux 6.1"
        found = Finding(
            _SECTION, name, value, NOTE, meaning, "use Linux 6.1 or later if small pages cost too much time"
        )
    elif "never" in chosen.values():
        meaning = "that memory has small pages; its first touch, and reads by process id, take longer"
        remedy = 'huge_pages="eager" puts it into huge pages'
        found = Finding(_SECTION, name, value, NOTE, meaning, remedy)
    return [found, Finding(_SECTION, "reserved huge pages", f"{reserved} (not needed)")]


def _chosen(text: str | None) -> str:
    """Return the word in brackets, as in ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else "unknown"
