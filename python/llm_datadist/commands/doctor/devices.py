"""Networks and RDMA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.commands.doctor.finding import NOTE, Finding, names_in, text_of

if TYPE_CHECKING:
    from pathlib import Path

_NETWORKS = "networks"
_RDMA = "sys/class/infiniband"
_LOOPBACK = "772"
"""Number of the type of a loopback interface in ``/sys/class/net``."""


def findings(root: Path) -> list[Finding]:
    """Return the facts about devices."""
    return [*_interfaces(root), *_rdma(root)]


def no_rdma(root: Path) -> str | None:
    """Return why no RDMA device can be used, or ``None``."""
    names = names_in(root / _RDMA)
    if not names:
        return "this host has no RDMA device (/sys/class/infiniband)"
    if not names_in(root / "dev/infiniband", "uverbs*"):
        return "the RDMA device has no device file (/dev/infiniband/uverbs*)"
    if not any("ACTIVE" in state for name in names for state in _states(root, name)):
        return "no port of an RDMA device is active"
    return None


def _states(root: Path, device: str) -> list[str]:
    ports = root / _RDMA / device / "ports"
    return [text_of(ports / port / "state") or "" for port in names_in(ports)]


def _interfaces(root: Path) -> list[Finding]:
    folder = root / "sys/class/net"
    names = [name for name in names_in(folder) if (folder / name).is_dir()]
    others = [name for name in names if text_of(folder / name / "type") != _LOOPBACK]
    if not any(_is_up(folder / name) for name in others):
        meaning = "no interface is up, except loopback: peers on other hosts cannot be reached"
        remedy = "in a container, attach a network or share that of the host"
        shown = ", ".join(others) or "none"
        return [Finding(_NETWORKS, "interfaces", shown, NOTE, meaning, remedy)]
    return [Finding(_NETWORKS, name, _interface(folder / name)) for name in others]


def _is_up(folder: Path) -> bool:
    return text_of(folder / "operstate") in ("up", "unknown") and text_of(folder / "carrier") != "0"


def _interface(folder: Path) -> str:
    parts = ["up" if _is_up(folder) else text_of(folder / "operstate") or "down"]
    speed = text_of(folder / "speed") or ""
    if speed.isdigit() and int(speed):
        parts.append(f"{int(speed) / 1000:g} Gbit/s")
    parts.append(f"MTU {text_of(folder / 'mtu') or 'unknown'}")
    return ", ".join(parts)


def _rdma(root: Path) -> list[Finding]:
    names = names_in(root / _RDMA)
    if not names:
        return [Finding(_NETWORKS, "RDMA devices", "none: other hosts are reached over TCP")]
    reason = no_rdma(root)
    found = []
    for name in names:
        ports = root / _RDMA / name / "ports"
        for port in names_in(ports):
            state = (text_of(ports / port / "state") or "unknown").rpartition(": ")[2]
            layer, rate = (text_of(ports / port / part) or "unknown" for part in ("link_layer", "rate"))
            value = f"{state}, {layer}, {rate}"
            found.append(Finding(_NETWORKS, f"RDMA {name} port {port}", value))
    if reason is not None:
        remedy = "check the cable and the driver; in a container, pass /dev/infiniband"
        found.append(Finding(_NETWORKS, "RDMA devices", "not usable", NOTE, f"{reason}; sockets are used", remedy))
    return found
