"""What an engine says: whether it opens on this host, how it reads another process, and whether it uses UCX.

The engine chooses the paths. So the report opens one, links it to another process, and asks for its statistics.
"""

from __future__ import annotations

import os
import platform
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from llm_datadist import __version__
from llm_datadist.commands.doctor import devices
from llm_datadist.commands.doctor.finding import NOTE, PROBLEM, Finding
from llm_datadist.native import Engine, Error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ENGINE = "an engine with a pool"
_TOKENS = ("LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN")
_OTHER = [sys.executable, "-m", "llm_datadist", "doctor", "--serve", "127.0.0.1:0", "--seconds", "30"]
_LIMIT_S = 10.0
_MEANINGS = {
    "mapped": "shared memory: the reader copies mapped memory of the owner",
    "process": "reads by process id (process_vm_readv); at most 2 MiB through rings in shared memory",
    "stream": "rings in shared memory or sockets: the owner sends the bytes",
    "none": "the peer has no pool",
}
"""How memory is read, as `LinkStats` names it → what that means."""


def findings(root: Path, options: Mapping[str, Any]) -> list[Finding]:
    """Return what an engine says that is opened with these options."""
    found = [
        Finding("libraries", "llm_datadist", __version__),
        Finding("libraries", "Python", platform.python_version()),
        _token(),
    ]
    try:
        with Engine(pool="32MiB", listen="127.0.0.1:0", **options) as engine:
            found += [_ucx(root, engine.stats()["ucx"]), Finding("engine", _ENGINE, "can be opened")]
            return [*found, *_link(engine)]
    except (Error, OSError, MemoryError, RuntimeError) as error:  # also a limit that Python meets first
        remedy = "follow the text of the error; the limits above may be the cause"
        text = f"{type(error).__name__}: {error}"
        return [*found, Finding("engine", _ENGINE, "cannot be opened", PROBLEM, text, remedy)]


def _token() -> Finding:
    names = [name for name in _TOKENS if os.environ.get(name)]
    none = "none in the environment: without token_file, only processes of this user on this host may link"
    return Finding("libraries", "token", f"{names[0]} is set" if names else none)


def _ucx(root: Path, stats: Mapping[str, Any]) -> Finding:
    if stats["reason"] is None:
        return Finding("libraries", "UCX", f"{stats['version']}, used between hosts")
    if devices.no_rdma(root) is not None:
        return Finding("libraries", "UCX", "not needed without an RDMA device")
    remedy = "install UCX 1.13 or later if you want RDMA, or name its library with the option ucx_library; set a token"
    return Finding("libraries", "UCX", "not used", NOTE, f"{stats['reason']}; sockets are used between hosts", remedy)


def _link(engine: Engine) -> list[Finding]:
    """Link to another process of this host, and return how each kind of its memory is read."""
    line, said = "", ""
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(_OTHER, stdout=pipe, stderr=pipe, text=True, errors="replace") as other:  # noqa: S603
            try:
                ready = other.stdout is not None and select.select([other.stdout], [], [], _LIMIT_S)[0]
                line = other.stdout.readline() if ready and other.stdout is not None else ""
                engine.link(line.partition("serving at ")[2].partition(";")[0], timeout=_LIMIT_S).result()
                link = engine.stats()["links"][0]
            finally:
                other.kill()
                said = "" if other.stderr is None else other.stderr.read()  # at most what fits in the pipe
    except (Error, OSError, IndexError) as error:
        lines = [] if line else said.split("\n")  # one that does not serve has said why
        reason = next((text.strip() for text in reversed(lines) if text.strip()), error)
        meaning = f"another process of this host cannot be linked to: {reason}"
        return [Finding("engine", "link to a process", "fails", PROBLEM, meaning, "follow the text of the error")]
    pools, registered = link["pools"], link["registered"]
    remedy = "allow the calls of shared memory and of reads by process id in the container (seccomp, ptrace_scope)"
    found = []
    for name, way, best in (("allocated caches", pools, "mapped"), ("registered memory", registered, "process")):
        given = (NOTE, link["refusal"] or "no memory is shared", remedy) if way != best else ()
        found.append(Finding("engine", f"{name} of a process", _MEANINGS[way], *given))
    return found
