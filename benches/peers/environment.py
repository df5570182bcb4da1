"""The environment of the figures: machine, versions and settings. It also disables the telemetry of the peers.

Not for: measuring anything.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Disables the telemetry and usage statistics of the peers in every process of the benchmark.
TELEMETRY = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "NIXL_TELEMETRY_ENABLE": "n",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_TE_METRIC": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Less output, and no threads that the peers choose themselves.
QUIET = {"LMCACHE_LOG_LEVEL": "ERROR", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "MC_LOG_LEVEL": "ERROR"}
THREADS = 2
LIBRARIES = ("OMP", "MKL", "OPENBLAS", "NUMBA", "RAYON")
BUDGET = {f"{name}_NUM_THREADS": str(THREADS) for name in LIBRARIES}

# The Python distribution of each system.
DISTRIBUTIONS = {
    "ours": "llm-datadist",
    "numpy": "numpy",
    "torch": "torch",
    "lmcache": "lmcache",
    "nixl": "nixl-cu12",
    "ucx": "libucx-cu12",
    "ucxx": "ucxx-cu12",
    "mooncake": "mooncake-transfer-engine-non-cuda",
}


def variables() -> dict[str, str]:
    """The environment of every process of the benchmark."""
    all_ = {**os.environ, **TELEMETRY, **QUIET, **BUDGET}
    libraries = [str(path) for path in fetched_libraries()]
    if libraries:
        all_["LD_LIBRARY_PATH"] = ":".join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return all_


def fetched_libraries() -> list[Path]:
    """Debian libraries that were unpacked into the environment, where they could not be installed."""
    return sorted(path for path in (Path(sys.prefix) / "debian").glob("usr/lib/*-linux-gnu") if path.is_dir())


def versions() -> dict[str, str]:
    """The version of every installed system."""
    here = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    names = {name.lower().replace("_", "-"): version for name, version in here.items() if name}
    found = {system: names.get(distribution, "not installed") for system, distribution in DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **found}


def described() -> dict[str, Any]:
    """The machine, its kernel and its software."""
    memory = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    huge = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(int(memory["MemTotal"]) / 2**20, 1),
        "system": f"{platform.system()} {release()}",
        "huge pages": {
            "anonymous": chosen(huge / "enabled"),
            "shared memory": chosen(huge / "shmem_enabled"),
            "reserved": memory.get("HugePages_Total", "0"),
        },
        "versions": versions(),
        "telemetry": TELEMETRY,
        "thread budget": THREADS,
    }


def release() -> str:
    """The numbers of the kernel version, without the suffix of the distributor."""
    found = re.match(r"[0-9.]*[0-9]", platform.release())
    return found.group() if found else ""


def moment() -> dict[str, str]:
    """The time and the commit of a measurement. Each group has its own, because groups can run alone."""
    return {
        "when": dt.datetime.now(tz=dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
    }


def commit() -> str:
    """The short name of the commit, with ``+`` if something in the tree has changed since."""
    try:
        name = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "crates", "python", "benches/peers")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return name + ("+" if changed else "")


def git(*words: str) -> str:
    """The output of a git command in this tree."""
    done = subprocess.run(["git", *words], check=True, cwd=ROOT, capture_output=True, text=True, timeout=20)  # noqa: S603, S607
    return done.stdout.strip()


def processor() -> str:
    """The name of the processor, with its model number if the name is generic."""
    words: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        words.setdefault(name.strip(), value.strip())
    name = words.get("model name", platform.machine())
    return f"{name} (family {words['cpu family']} model {words['model']})" if "cpu family" in words else name


def chosen(path: Path) -> str:
    """The active value of a kernel setting, which is the word in brackets."""
    try:
        text = path.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def quiet(limit_s: float) -> bool:
    """Wait until other programs use little CPU, or until the time limit. Return whether the machine is quiet."""
    until = time.monotonic() + limit_s
    while True:
        before = ticks()
        time.sleep(0.1)
        spent, idle = (now - then for now, then in zip(ticks(), before))
        if idle * 10 >= spent * 8:
            return True
        if time.monotonic() >= until:
            return False


def ticks() -> tuple[int, int]:
    """Ticks of all processors since boot: total and idle."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(numbers), sum(numbers[3:5])
