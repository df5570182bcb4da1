"""The tables of ``docs/scaling.md``, written from the figures. Each table stands between two marks.

The text around them is written by hand and must not contain figures that a run can change.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import fleet
from figures import ROOT, Curve, Figures
from slopes import digits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAGE = ROOT / "docs" / "scaling.md"
CLIENTS = (1, 2, 8, 64, 512)
MARK = re.compile(r"(<!-- scaling: (\w+) -->\n).*?(<!-- /scaling -->)", re.DOTALL)


def filled(page: str, figures: Figures, source: str) -> str:
    """Return the page with all tables replaced."""
    used = set()

    def one(match: re.Match[str]) -> str:
        used.add(match[2])
        text = said(figures, source) if match[2] == "source" else TABLES[match[2]](figures)
        return f"{match[1]}{text}\n{match[3]}"

    page = MARK.sub(one, page)
    missing = {*TABLES, "source"} - used
    if missing:
        raise ValueError(f"{PAGE.name}: no marks for {', '.join(sorted(missing))}")
    return page


def said(figures: Figures, source: str) -> str:
    """The source of the figures."""
    quick = " This was a quick run with few sizes and one round. Do not rely on it." if figures.quick else ""
    return (
        f"Our own figures are in `benches/results/{source}`, measured on {figures.cpus} cores by "
        f"`cargo bench -p llm-datadist-core --bench scale`.{quick}"
    )


def slopes(figures: Figures) -> str:
    """Every curve with the name of its slope."""
    lines = [
        f"| {curve.name} | {span(curve)} | {digits(curve.first)} | {digits(curve.last)} {curve.unit} | {shape(curve)} "
        f"| {curve.slope.exponent:.2f} |"
        for curve in figures.curves
    ]
    return table("| what | over | first | last | slope | exponent |", lines)


def span(curve: Curve) -> str:
    """The size axis and its first and last value."""
    return f"{curve.of}, {curve.points[0][0]:,.0f} to {curve.points[-1][0]:,.0f}"


def shape(curve: Curve) -> str:
    """The name of a slope. For a rate, the ratio of the last to the first value."""
    if not curve.rates:
        return curve.slope.text(curve.unit, "one")
    times = curve.last / curve.first
    return f"{times:.2f} times from first to last"


def singles(figures: Figures) -> str:
    """The table of single figures."""
    lines = [
        f"| {name} | {digits(float(figure['value']))} {figure['unit']} | {figure['note']} |"
        for name, figure in figures.single.items()
    ]
    return table("| what | figure | how |", lines)


def constants(figures: Figures) -> str:
    """The table of the memory of one object of each kind."""
    lines = []
    for name, what in (
        ("memory of keys, 16 a cache", "a key, its share of a cache of 16 rows included"),
        ("memory of caches without a key", "a cache of two tensors"),
        ("memory of caches with one key each", "the same with a key"),
        ("memory of a call of copy_blocks", "a block in flight, copy"),
        ("memory of a pull, shm", "a block in flight, pull on one host"),
        ("memory of a pull, tcp", "a block in flight, pull by TCP, here"),
        ("memory of the owner during a pull, tcp", "the same, at the owner"),
        ("memory of links, shm", "a link on one host, used once"),
        ("memory of links, tcp", "a link by TCP, used once"),
    ):
        curve = figures.curve(name)
        each = curve.last / curve.points[-1][0]
        million = each * 1e6 / 2**20
        lines.append(f"| {what} | {each:,.0f} B | {million:,.0f} MiB | {curve.slope.text('B', 'one')} |")
    return table("| memory of | bytes | a million of them | how it grows |", lines)


def public(_: Figures) -> str:
    """The table of public figures."""
    lines = [f"| {one.name} | {digits(one.value)} {one.unit} | {one.source} |" for one in fleet.PUBLIC]
    return table("| what | figure | source |", lines)


def prompt(_: Figures) -> str:
    """The description of one prompt."""
    return (
        f"One prompt: {fleet.PROMPT:,} tokens of a model of 70.6 billion parameters with {fleet.LAYERS} layers and "
        f"{fleet.HEADS} heads of {fleet.HEAD} for keys and values, bf16: {fleet.TOKEN // 1024} KiB a token, "
        f"**{fleet.PROMPT_BYTES / 1e9:.2f} GB**, in {fleet.PIECES:,} pieces of {fleet.PIECE // 1024} KiB where a block "
        f"is {fleet.BLOCK_TOKENS} tokens of one tensor. "
        f"A node computes **{fleet.DEMAND:.1f} prompts a second** at most, which is "
        f"{fleet.DEMAND * fleet.PROMPT_BYTES / 1e9:.1f} GB/s to hand over."
    )


def node(figures: Figures) -> str:
    """The table of the capacity of each part of a prefill node, with and without sockets."""
    seen: dict[str, fleet.Use] = {}
    for use in fleet.uses(figures, "tcp"):
        seen.setdefault(use.name, use)
    lines = [
        f"| {use.name} | {digits(use.prompts)} | {digits(use.prompts / fleet.DEMAND)} | {use.source} |"
        for use in seen.values()
    ]
    return table("| part of a prefill node | prompts a second | multiple of what it computes | source |", lines)


def bottlenecks(figures: Figures) -> str:
    """The first and the second bottleneck, by transport."""
    lines = []
    for network, what in (("tcp", "TCP"), ("nixl", "RDMA")):
        first, second = fleet.uses(figures, network)[:2]
        lines.append(
            f"| {what} | {first.name} ({digits(first.prompts / fleet.DEMAND)} times) "
            f"| {second.name} ({digits(second.prompts / fleet.DEMAND)} times) |"
        )
    return table("| bytes travel by | first limit | second limit |", lines)


def host(figures: Figures) -> str:
    """Inside one host, memory bandwidth is the bottleneck."""
    lines = []
    for kib in (16, 64, 256):
        curve = figures.curve(f"pull, shm of blocks of {kib} KiB")
        one, most = curve.first, curve.last
        # A copy reads and writes: two bytes of traffic for each that is moved.
        cores = fleet.MEMORY.value / 2 / one
        lines.append(f"| {kib} KiB | {one:.1f} | {most:.1f} | {most / one:.2f} | {cores:.0f} |")
    head = "| blocks | GB/s, one core | GB/s, all cores here | ratio | cores that fill the memory of the public node |"
    return table(head, lines)


def mesh(figures: Figures) -> str:
    """The links of one engine: to all engines, and to its partners only."""
    lines = []
    for site in fleet.SITES:
        for what, links in (("all with all", site.engines - 1), ("on demand", min(64, site.engines - 1))):
            one = fleet.mesh(figures, links)
            lines.append(
                f"| {site.name}, {site.engines:,} engines | {what} | {links:,} | {one.memory / 2**10:,.0f} KiB "
                f"| {one.descriptors:,.0f} | {one.beats:,.0f} | {digits(one.idle * 100)} % | {digits(one.making)} s "
                f"| {one.refused} |"
            )
    head = (
        "| site | links | links of one engine | memory | descriptors | control messages a second at most "
        "| CPU of a core, idle | time to make them | obstacle |"
    )
    return table(head, lines)


def crowd(figures: Figures) -> str:
    """The table of the model and of real engines."""
    lines = []
    for transport in ("shm", "tcp"):
        known = figures.curve(f"bytes pulled from one engine, {transport}")
        for clients in (count for count in CLIENTS if any(point[0] == count for point in known.points)):
            model = fleet.crowd(figures, transport, clients).rate
            real = fleet.measured_rate(figures, transport, clients)
            lines.append(
                f"| {transport} | {clients} | {real:,.0f} | {model:,.0f} | {model / real:.2f} "
                f"| {digits(clients / real * 1e3)} |"
            )
    head = "| transport | engines that pull | pulls a second, measured | model | model / measured | mean wait, ms |"
    return table(head, lines)


def fan(figures: Figures) -> str:
    """The model with the parts of a prefill node."""
    lines = []
    for name, seconds, servers in fleet.fan_stations(figures):
        for clients in (1, 8, 64, 512):
            out = fleet.fan_in(seconds, servers, clients)
            lines.append(
                f"| {name} | {clients} | {out.rate:.2f} | {out.rate * fleet.PROMPT_BYTES / 1e9:.1f} "
                f"| {digits(out.p50)} |"
            )
    head = "| bytes leave by | engines that pull a prompt each | prompts a second | GB/s | time of one pull, s |"
    return table(head, lines)


def storm(figures: Figures) -> str:
    """All engines link again after a restart."""
    lines = []
    for transport in ("shm", "tcp"):
        lines += [
            f"| {transport} | {one.engines:,} | {one.seconds * 1e3:,.0f} ms | {one.note} |"
            for one in fleet.storms(figures, transport)
        ]
    return table("| transport | engines linked with the owner that died | all are linked again after | source |", lines)


def tables(figures: Figures) -> str:
    """Table sizes of an owner and of a peer."""
    key = figures.curve("memory of keys, 16 a cache")
    longest = figures.curve("longest bind while the table grows")
    lines = [
        f"| {keys:,} keys | {key.slope.at(keys) / 2**20:,.1f} MiB | "
        f"{figures.curve('look up a key').slope.at(keys):,.0f} ns | {longest.slope.at(keys) / 1e3:,.2f} ms |"
        for keys in (10_000, 100_000, 1_000_000)
    ]
    return table("| the table of one engine | memory | a lookup | longest bind (the table grows) |", lines)


TABLES: dict[str, Callable[[Figures], str]] = {
    "slopes": slopes,
    "singles": singles,
    "constants": constants,
    "public": public,
    "prompt": prompt,
    "node": node,
    "bottlenecks": bottlenecks,
    "host": host,
    "mesh": mesh,
    "crowd": crowd,
    "fan": fan,
    "storm": storm,
    "tables": tables,
}


def table(head: str, lines: Sequence[str]) -> str:
    """A Markdown table."""
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *lines])


def in_step(figures: Figures, source: Path) -> bool:
    """Whether the page agrees with the figures."""
    return filled(PAGE.read_text(), figures, source.name) == PAGE.read_text()
