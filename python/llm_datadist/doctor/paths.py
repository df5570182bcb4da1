"""Which path the bytes of a pull would take from each kind of peer, and why it is not a faster one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llm_datadist.doctor.findings import OK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.doctor.findings import Finding

__all__ = ["Path", "expected"]


class Path(NamedTuple):
    """The path of the bytes of one kind of memory.

    Attributes:
        peer: where the peer runs, and where its memory comes from.
        path: the path, as ``stats()["links"]`` names it.
        reason: why it is not a faster one. Empty for the fastest.
    """

    peer: str
    path: str
    reason: str


def expected(findings: Sequence[Finding], *, token: bool) -> Iterator[Path]:
    """Yield the paths that peers use with the default options. ``token``: whether this side has a token."""
    yield Path("this host, cache in a pool", "mapped", "")
    reads = next(finding for finding in findings if finding.subject.startswith("reads of registered memory"))
    if reads.verdict == OK:
        yield Path("this host, registered memory", "process", "only pools are mapped; each piece costs a system call")
    else:
        yield Path("this host, registered memory", "sockets", f"process_vm_readv: {reads.value}")
    yield _between_hosts(findings, token=token)
    yield Path("another host, registered memory", "sockets", "UCX reads only pools")


def _between_hosts(findings: Sequence[Finding], *, token: bool) -> Path:
    peer = "another host, cache in a pool"
    devices = [finding for finding in findings if finding.subject.startswith("RDMA device")]
    library = next(finding for finding in findings if finding.subject.startswith("UCX"))
    if not any(finding.verdict == OK for finding in devices):
        return Path(peer, "sockets", "this host has no RDMA device that is active")
    if library.verdict != OK:
        return Path(peer, "sockets", f"{library.subject}: {library.value}")
    if not token:
        return Path(peer, "sockets", "UCX needs a token: set link_token_file on both sides")
    return Path(peer, "fabric", "if the peer uses the same version of UCX; otherwise sockets")
