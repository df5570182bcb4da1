"""The systems that are measured between two processes, their settings, and which of them are compared.

``pool``: memory that the system chooses, on one host. ``registered``: existing memory of the process. ``tcp``:
transports that also work between hosts, over the loopback. ``hixl`` and ``hixl-tcp``: the module hixl in place of the
native engine, and of the peers those that also read by address. Not for: the calls of a system (its adapter).
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from between.adapter import AUTO, HUGE, PAGES
from rows import LIMIT, OURS, Missing

if TYPE_CHECKING:
    from between.adapter import Adapter

POOL, REGISTERED, TCP = "pool", "registered", "tcp"
HIXL, HIXL_TCP = "hixl", "hixl-tcp"
STORE_PORT = "LLM_DATADIST_BENCH_STORE_PORT"
ADAPTERS = {
    OURS: ("between.ours", "Ours"),
    LIMIT: ("between.bare", "Bare"),
    HIXL: ("between.hixl", "Hixl"),
    "nixl": ("between.nixl", "Nixl"),
    "mooncake": ("between.mooncake", "Engine"),
    "mooncake store": ("between.store", "Store"),
    "ucxx": ("between.ucxx", "Ucxx"),
}


@dataclass(frozen=True)
class Peer:
    """One system in one setting."""

    system: str
    setting: str
    environment: dict[str, str] = field(default_factory=dict)
    attends: bool = False  # whether the remote process must drive the system during a transfer
    restless: bool = False  # whether it uses CPU while idle; it is then stopped outside its turns
    once: bool = False  # whether a repeated push has no effect, so that a turn has only one
    threads: int = 1
    note: str = ""

    @property
    def asked_as(self) -> str:
        """The name of the system in ``--systems``."""
        return self.system.split()[0]


NO_THREAD = "no progress thread: both processes poll while it is their turn"
SHM = {"UCX_TLS": "posix,sysv,self,tcp"}
TWO_SIDED = (
    "two-sided: the local side asks by a message, the remote side posts one tagged send a block, in the order that "
    "the local side expects"
)
AS_IT_COMES = "as it comes"
HIXL_NOTE = "transfer_sync of the module hixl; its list of operations is made outside the clock"

PEERS = {
    ("ours", POOL): Peer(OURS, POOL, threads=2, note="a request is planned within the clock"),
    ("ours", REGISTERED): Peer(OURS, REGISTERED, threads=2, note="memory of the process, read by process id"),
    ("ours", TCP): Peer(OURS, TCP, threads=2),
    ("ours", HIXL): Peer(OURS, HIXL, threads=2, note=HIXL_NOTE),
    ("ours", HIXL_TCP): Peer(OURS, HIXL_TCP, {"LLM_DATADIST_TRANSPORT": "tcp"}, threads=2, note=HIXL_NOTE),
    ("limit", POOL): Peer(LIMIT, "mapped", threads=2),
    ("limit", REGISTERED): Peer(LIMIT, "process_vm", threads=2),
    ("limit", TCP): Peer(LIMIT, "stream", attends=True, note="the same bytes in one piece, one stream"),
    ("nixl", AS_IT_COMES): Peer(
        "nixl", AS_IT_COMES, restless=True, note="its progress thread runs in both; request prepared outside the clock"
    ),
    ("nixl", "cma"): Peer(
        "nixl", "no thread", attends=True, note=f"{NO_THREAD}; UCX's own choice of lanes; request prepared"
    ),
    ("nixl", "shm"): Peer(
        "nixl", "tuned: shm, no errors", SHM, attends=True, note=f"{NO_THREAD}; no error handling; request prepared"
    ),
    ("nixl", TCP): Peer(
        "nixl", "tcp, no thread", {"UCX_TLS": "tcp,self"}, attends=True, note=f"{NO_THREAD}; request prepared"
    ),
    ("mooncake", TCP): Peer(
        "mooncake",
        "engine, tcp",
        note="over tcp, the only way of its CPU wheel; 1,024 blocks a call, its limit; its own threads",
    ),
    ("mooncake store", TCP): Peer(
        "mooncake store",
        "tcp",
        once=True,
        note="over tcp, the only way of its CPU wheel; put and get of one object a block, remote segment of the store; "
        "what was put is checked by getting it",
    ),
    ("ucxx", AS_IT_COMES): Peer("ucxx", AS_IT_COMES, attends=True, note=TWO_SIDED),
    ("ucxx", "shm"): Peer("ucxx", "shm, no errors", {"UCX_TLS": "posix,sysv,self,tcp"}, attends=True, note=TWO_SIDED),
    ("ucxx", "cma"): Peer("ucxx", "cma, no errors", {"UCX_TLS": "cma,self,tcp"}, attends=True, note=TWO_SIDED),
    ("ucxx", TCP): Peer("ucxx", TCP, {"UCX_TLS": "tcp,self"}, attends=True, note=TWO_SIDED),
}
# Kind of memory → the peers that are compared with ours and with the limit.
BESIDE = {
    POOL: (
        ("nixl", AS_IT_COMES),
        ("nixl", "shm"),
        ("mooncake", TCP),
        ("mooncake store", TCP),
        ("ucxx", AS_IT_COMES),
        ("ucxx", "shm"),
    ),
    REGISTERED: (("nixl", AS_IT_COMES), ("nixl", "cma"), ("nixl", "shm"), ("ucxx", "cma")),
    TCP: (("nixl", TCP), ("mooncake", TCP), ("mooncake store", TCP), ("ucxx", TCP)),
    HIXL: (("nixl", AS_IT_COMES), ("nixl", "cma"), ("nixl", "shm"), ("mooncake", TCP)),
    HIXL_TCP: (("nixl", TCP), ("mooncake", TCP)),
}
SAME_LIMIT = {HIXL: REGISTERED, HIXL_TCP: TCP}  # kinds of memory without a limit of their own


def of_kind(kind: str, pages: str = "") -> list[Peer]:
    """The systems that are compared in one kind of memory: ours first, the limit last.

    With ``AUTO``, each system chooses its pages, and the limit uses huge pages, which are the fastest.
    """
    peers = [PEERS["ours", kind], *(PEERS[name] for name in BESIDE[kind]), PEERS["limit", SAME_LIMIT.get(kind, kind)]]
    way = {LIMIT: HUGE} if pages == AUTO else {}
    return [
        dataclasses.replace(peer, environment={**peer.environment, PAGES: way.get(peer.system, pages)})
        for peer in peers
    ]


def adapter(system: str, setting: str) -> type[Adapter]:
    """The class that drives a system in a setting."""
    module, name = ADAPTERS[HIXL if setting in SAME_LIMIT else system]
    kind: type[Adapter] = getattr(importlib.import_module(module), name)
    return kind


def attendant(peer: Peer, folder: Path) -> Optional[subprocess.Popen[bytes]]:
    """Start the third process that a system needs, if any: the master of the store."""
    if peer.system != "mooncake store":
        return None
    found = Path(sys.prefix) / "bin" / "mooncake_master"
    package = next(Path(sys.prefix).glob("lib/python*/site-packages/mooncake/mooncake_master"), found)
    program = shutil.which(str(package))
    if program is None:
        raise Missing("not here: mooncake_master")
    port, metrics = free_port(), free_port()
    peer.environment[STORE_PORT] = str(port)
    words = [program, "--rpc_port", str(port), "--metrics_port", str(metrics), "--enable_metric_reporting=false"]
    with (folder / "mooncake-master.log").open("wb") as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)  # noqa: S603
    until = time.monotonic() + 20
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    process.kill()
    process.wait(20)
    raise Missing("mooncake_master does not listen")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
