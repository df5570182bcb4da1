"""Which path the bytes of each kind of peer would take, and why not a faster one.

The rules are those of docs/links.md ("How bytes travel") and docs/networks.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist.commands.doctor import devices, libraries, limits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llm_datadist.commands.doctor.kernel_calls import KernelCalls
    from llm_datadist.commands.doctor.libraries import UcxLibrary

SHARED, PROCESS, RINGS, SOCKETS, UCX = "mapped", "process", "rings", "sockets", "fabric"
"""Names of the paths in ``stats()["links"]``."""
MEANINGS = {
    SHARED: "shared memory: the reader copies mapped memory of the owner",
    PROCESS: "reads by process id (process_vm_readv); at most 2 MiB through rings in shared memory",
    RINGS: "rings in shared memory: the owner sends the bytes",
    SOCKETS: "sockets: the owner sends the bytes",
    UCX: "UCX: the reader reads the memory of the owner by RDMA",
}
ONLY_POOLS = "only pools can be mapped: allocate caches from a pool"


@dataclass(frozen=True)
class PeerPath:
    """The path of one kind of peer."""

    peer: str  # the kind of peer, and of its memory
    path: str  # name of the path, as in `stats()`
    reasons: tuple[str, ...] = ()  # why no faster path is used; empty if this is the fastest one


def paths(root: Path, calls: KernelCalls, ucx: UcxLibrary, environment: Mapping[str, str]) -> list[PeerPath]:
    """Return the path for each kind of peer, with the default options."""
    return [_pools(calls), _registered(root, calls), _other_host(root, ucx, environment)]


def _pools(calls: KernelCalls) -> PeerPath:
    peer = "same host, allocated caches"
    return PeerPath(peer, SOCKETS, (calls.shared_memory,)) if calls.shared_memory else PeerPath(peer, SHARED)


def _registered(root: Path, calls: KernelCalls) -> PeerPath:
    peer = "same host, registered memory"
    reason = limits.no_process_reads(root, calls)
    if reason is None:
        return PeerPath(peer, PROCESS, (ONLY_POOLS,))
    return PeerPath(peer, SOCKETS if calls.shared_memory else RINGS, (reason, ONLY_POOLS))


def _other_host(root: Path, ucx: UcxLibrary, environment: Mapping[str, str]) -> PeerPath:
    peer = "other host, or other network namespace"
    found = (devices.no_rdma(root), ucx.reason, libraries.no_token(environment))
    reasons = tuple(reason for reason in found if reason is not None)
    return PeerPath(peer, SOCKETS if reasons else UCX, reasons)
