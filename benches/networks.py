"""Pulls and pushes between two hosts with shaped links: ``make bench-networks``.

    .venv/bin/python benches/networks.py [--rounds 5] [--mbit 400] [--sizes 16,64]

Two network namespaces stand for the hosts. Two virtual cables connect them, and ``tbf`` limits each of them to the same
rate in both directions. Each row is the median of rounds in which all settings take turns. Needs root and the programs
``ip``, ``tc``, ``unshare`` and ``nsenter``. Not for: the speed of a real network, whose cards and switches this lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

TOKEN = "a shared token of some length"  # noqa: S105 - not a secret
ADDRESSES = (("10.231.8.1", "10.231.8.2"), ("10.231.9.1", "10.231.9.2"))
PORT = 26000
MIB = 1 << 20
# Name: options of both sides, except "addresses", which is one of the owner.
SETTINGS: dict[str, dict[str, Any]] = {
    "one link, one stream": {"streams": 1},
    "one link": {},
    "two links": {"addresses": ADDRESSES[1][1]},
}
OWNER = f"{ADDRESSES[0][1]}:{PORT}"
LIMIT_S = 120.0
ANSWER = "answer: "


def opened(role: str, order: dict[str, Any]) -> tuple[Any, Any]:
    """Open an engine, and allocate its cache of blocks of one MiB."""
    from llm_datadist.native import Engine  # noqa: PLC0415 - not in the parent

    options = {name: value for name, value in order["options"].items() if role == "owner" or name != "addresses"}
    listen = OWNER if role == "owner" else None
    engine = Engine(pool=f"{order['blocks'] + 8}MiB", listen=listen, token=TOKEN, timeout=LIMIT_S, **options)
    return engine, engine.allocate("kv", blocks=order["blocks"], tensors=2, shape=(MIB // 2,), dtype="uint8")


def serve(role: str) -> None:
    """Take orders from the parent, one JSON object a line, and answer each."""
    engine: Any = None
    cache: Any = None
    peer: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if order["do"] == "open":
            engine, cache = opened(role, order)
        elif order["do"] == "link":
            peer = engine.link(OWNER).result()
        elif order["do"] == "move":
            here, there = (side[: order["blocks"]] for side in (cache, peer["kv"]))
            begin = time.perf_counter()
            transfer = engine.pull(here, there) if order["way"] == "pull" else engine.push(there, here)
            transfer.result()
            answer = time.perf_counter() - begin
        elif order["do"] == "close":
            engine.close()
        print(ANSWER + json.dumps(answer), flush=True)


class Host:
    """A process in a network namespace of its own."""

    def __init__(self, role: str) -> None:
        command = ["unshare", "--net", sys.executable, __file__, "--serve", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self.ask("nothing")  # waits until it runs in its namespace

    def ask(self, do: str, **order: Any) -> Any:
        """Have the process carry out an order, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith(ANSWER):  # other lines are those of the log
                return json.loads(line.removeprefix(ANSWER))
        raise SystemExit(f"a host has ended: {do} {order}")

    def run(self, *command: str) -> None:
        """Run a program in the namespace."""
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", *command], check=True)  # noqa: S603, S607

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def end(self) -> None:
        """End the process, and with it the namespace."""
        self._process.kill()
        self._process.wait()


def connect(hosts: tuple[Host, Host], mbit: int) -> None:
    """Lay two cables, and limit their rates."""
    for cable, addresses in enumerate(ADDRESSES):
        names = f"here{cable}", f"there{cable}"
        hosts[0].run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        hosts[0].run("ip", "link", "set", names[1], "netns", str(hosts[1].pid))
        for host, name, address in zip(hosts, names, addresses):
            host.run("ip", "addr", "add", f"{address}/30", "dev", name)
            host.run("ip", "link", "set", name, "up")
            if not mbit:
                continue
            shape = ("rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms")
            host.run("tc", "qdisc", "add", "dev", name, "root", "tbf", *shape)
    for host in hosts:
        host.run("ip", "link", "set", "lo", "up")


def measure(hosts: tuple[Host, Host], options: dict[str, Any], sizes: list[int]) -> dict[tuple[str, int], float]:
    """Open both engines, and return the seconds of each transfer."""
    caller, _ = hosts
    for host in hosts:
        host.ask("open", options=options, blocks=max(sizes))
    caller.ask("link")
    seconds = {}
    for way in ("pull", "push"):
        caller.ask("move", way=way, blocks=max(sizes))  # opens the streams
        for size in sizes:
            seconds[way, size] = caller.ask("move", way=way, blocks=size)
    for host in hosts:
        host.ask("close")
    return seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=int, default=400, help="rate of each link in Mbit/s; 0 for no limit")
    parser.add_argument("--sizes", default="16,64", help="sizes of the transfers in MiB")
    parser.add_argument("--serve", choices=("caller", "owner"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    sizes = [int(size) for size in args.sizes.split(",")]
    hosts = Host("caller"), Host("owner")
    try:
        connect(hosts, args.mbit)
        rounds: dict[str, list[dict[tuple[str, int], float]]] = {name: [] for name in SETTINGS}
        for _ in range(args.rounds):
            for name, options in SETTINGS.items():
                rounds[name].append(measure(hosts, options, sizes))
    finally:
        for host in hosts:
            host.end()
    table(rounds, sizes, args.mbit)


def table(rounds: dict[str, list[dict[tuple[str, int], float]]], sizes: list[int], mbit: int) -> None:
    """Print the medians in MB/s, and their share of the rate of one link."""
    links = f"links of {mbit} Mbit/s" if mbit else "links without a limit"

    def share(speed: float) -> str:
        return f" ({speed / (mbit * 1e6 / 8):.2f})" if mbit else ""

    print(f"| MB/s, {links} | {' | '.join(SETTINGS)} | two links / one | one link / one stream |")
    print("| --- " * (len(SETTINGS) + 3) + "|")
    for way in ("pull", "push"):
        for size in sizes:
            speeds = {
                name: statistics.median(size * MIB / seconds[way, size] for seconds in found)
                for name, found in rounds.items()
            }
            cells = " | ".join(f"{speed / 1e6:.0f}{share(speed)}" for speed in speeds.values())
            ratios = speeds["two links"] / speeds["one link"], speeds["one link"] / speeds["one link, one stream"]
            print(f"| {way}, {size} MiB | {cells} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
