"""Estimates for one node, a rack and ten thousand nodes, from the measured constants.

Public figures of hardware and of models are here, with their sources. All other figures come from ``figures``. Not for:
the tables and the text of the page (``document``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crowd_model import Outcome, Stage, run

if TYPE_CHECKING:
    from figures import Figures

GIGA = 1e9


@dataclass(frozen=True)
class Public:
    """A figure from a public source."""

    name: str
    value: float
    unit: str
    source: str


# Peak bandwidth of each part, as its vendor states it.
NIC_400 = Public(
    "network adapter, 400 Gbit/s", 50.0, "GB/s", "NVIDIA ConnectX-7 user manual: single-port NDR 400 Gb/s and 400GbE"
)
NIC_200 = Public("network adapter, 200 Gbit/s", 25.0, "GB/s", "the same manual: NDR200 200 Gb/s and 200GbE")
WIRE = Public(
    "share of a 200 Gbit/s line that 64 KiB blocks reach",
    23.9 / 25.0,
    "",
    "published for the original: 23.9 GB/s over RoCE",
)
PCIE = Public("PCI Express 5.0, 16 lanes", 63.0, "GB/s", "32 GT/s x 16, 128b/130b (PCI-SIG); before packet overhead")
MEMORY = Public(
    "memory of a node", 2 * 307.2, "GB/s", "two sockets of eight channels of DDR5-4800 (Xeon 8480C), before any loss"
)
ADAPTERS = Public("adapters of a node", 8, "", "DGX H100 reference architecture: eight single-port ConnectX-7")
CORES = Public("cores of a node", 112, "", "DGX H100: two Xeon Platinum 8480C, 112 cores in all")
ENGINES = Public("engines of a node", 8, "", "one for each of the eight GPUs of a DGX H100")
FLOPS = Public("H100 SXM, bf16, dense", 989.4, "TFLOP/s", "NVIDIA H100 data sheet: 1,979 with sparsity, half without")
BUSY = Public(
    "share of that which a prefill reaches", 0.5, "", "an assumption, on the high side: it asks more of the network"
)
PUBLIC = (NIC_400, NIC_200, WIRE, PCIE, MEMORY, ADAPTERS, CORES, ENGINES, FLOPS, BUSY)

# Llama 3.1 70B, bf16, as its public configuration says: 80 layers, 8 key and value heads of 128.
LAYERS, HEADS, HEAD, WIDTH = 80, 8, 128, 2
TOKEN = LAYERS * 2 * HEADS * HEAD * WIDTH
BLOCK_TOKENS = 16
PIECE = BLOCK_TOKENS * HEADS * HEAD * WIDTH
PROMPT = 4096
PROMPT_BYTES = PROMPT * TOKEN
PIECES = PROMPT_BYTES // PIECE
PARAMETERS = 70.6e9
# Prompts per second that the eight accelerators of a node compute: two operations for each parameter and token.
DEMAND = FLOPS.value * 1e12 * BUSY.value * ENGINES.value / (2 * PARAMETERS * PROMPT)

# Limits of the engine (docs/links.md), and default limits of the system.
MAX_LINKS = 4096
HEARTBEAT_S = 1.0
DESCRIPTORS_USUAL = 1024
MAPPINGS_USUAL = 65_530
FAN = 1 << 20  # bytes of one pull of the fan-in benchmark
PAIR = 2  # number of clients whose CPU cost is the input of the model


@dataclass(frozen=True)
class Site:
    """A number of nodes, half of which run prefill."""

    name: str
    nodes: int

    @property
    def engines(self) -> int:
        """The number of engines of all nodes."""
        return self.nodes * int(ENGINES.value)


SITES = (Site("one node", 1), Site("a rack", 32), Site("a cluster", 10_000))


@dataclass(frozen=True)
class Mesh:
    """The cost of all links of one engine."""

    links: int
    memory: float
    descriptors: float
    mappings: float
    beats: float  # messages per second that it sends and receives, at most
    idle: float  # share of a core
    making: float  # seconds to make all links of one engine, one after another

    @property
    def refused(self) -> str:
        """The limit that is exceeded, if any."""
        if self.links > MAX_LINKS:
            return f"more than {MAX_LINKS:,} links (a limit of ours)"
        if self.mappings > MAPPINGS_USUAL:
            return "`vm.max_map_count` as it is usually set"
        if self.descriptors > DESCRIPTORS_USUAL:
            return "`ulimit -n` 1,024; raise it"
        return "-"


def mesh(figures: Figures, links: int, transport: str = "tcp") -> Mesh:
    """The cost of one engine with this many links."""
    idle = figures.curve(f"CPU while nothing is asked, {transport}")
    return Mesh(
        links=links,
        memory=links * figures.curve(f"memory of links, {transport}").slope.each,
        descriptors=links * figures.figure(f"descriptors of a link, {transport}"),
        mappings=links * figures.figure(f"mappings of a link, {transport}"),
        # Both sides of a link send pings, and both answer.
        beats=4 * links / HEARTBEAT_S,
        idle=idle.slope.at(links) / 1e6 if links else 0.0,
        making=links * figures.curve(f"make one more link, {transport}").last / 1e6,
    )


def crowd(figures: Figures, transport: str, clients: int) -> Outcome:
    """Simulate the fan-in benchmark from the CPU cost of two clients. Both sides share the cores of one machine."""
    owner = figures.curve(f"CPU of the owner, {transport}").at(PAIR) * FAN / GIGA
    puller = figures.curve(f"CPU of those that pull, {transport}").at(PAIR) * FAN / GIGA
    stages = [Stage("cores", seconds, exact=False) for seconds in (puller, owner) if seconds > 0]
    return run(clients, stages, {"cores": figures.cpus}, rounds=max(6000, clients * 12))


def measured_rate(figures: Figures, transport: str, clients: int) -> float:
    """The measured pulls per second of real engines."""
    return figures.curve(f"bytes pulled from one engine, {transport}").at(clients) * GIGA / FAN


@dataclass(frozen=True)
class Use:
    """One resource of a prefill node, and the prompts per second for which it is sufficient."""

    name: str
    prompts: float
    source: str


def uses(figures: Figures, network: str) -> list[Use]:
    """The prompts per second that each part of a prefill node can transfer. The smallest is the bottleneck."""
    found = []
    if network == "tcp":
        pulling = figures.curve("bytes pulled from one engine, tcp")
        owner = figures.curve("CPU of the owner, tcp").last
        found += [
            Use("one stream of TCP", pulling.first * GIGA / PROMPT_BYTES, "measured: one engine pulls over loopback"),
            Use("all cores, busy with TCP alone", CORES.value / (owner * PROMPT_BYTES / GIGA), "measured CPU per GB"),
        ]
    line = WIRE.value * NIC_400.value * GIGA
    found += [
        Use("one adapter of 400 Gbit/s", line / PROMPT_BYTES, "public"),
        Use("eight adapters", ADAPTERS.value * line / PROMPT_BYTES, "public"),
        Use("the 16 lanes of one adapter", PCIE.value * GIGA / PROMPT_BYTES, "public"),
        Use("its memory, read once", MEMORY.value * GIGA / PROMPT_BYTES, "public"),
        Use("requests: ask, release (two round trips)", 1e6 / released(figures), "measured, one connection at a time"),
        Use("planning of 40,960 pieces, one thread", 1e6 / planned(figures), "measured: blocks of 64 bytes"),
    ]
    return sorted(found, key=lambda use: use.prompts)


def released(figures: Figures) -> float:
    """Microseconds of a pull by key at the largest table."""
    return figures.curve("pull by a key never used before, which is released, tcp").last


def planned(figures: Figures) -> float:
    """Microseconds of a request for the pieces of a prompt, almost without bytes."""
    return figures.curve("pull, tcp of blocks of 64 bytes").slope.at(PIECES)


@dataclass(frozen=True)
class Storm:
    """One owner restarts, and this many engines link again."""

    engines: int
    seconds: float
    note: str


def storms(figures: Figures, transport: str) -> list[Storm]:
    """Estimates from the slope of the measured ones. The note says where a limit of the engine is exceeded."""
    curve = figures.curve(f"all are linked again, {transport}")
    found = [Storm(int(point[0]), point[1] / 1e3, "measured") for point in curve.points if point[0] in (64, 512)]
    for engines in (MAX_LINKS, 10_000):
        note = "from the slope" if engines <= MAX_LINKS else f"from the slope; {MAX_LINKS:,} at a time are let in"
        found.append(Storm(engines, curve.slope.at(engines) / 1e3, note))
    return found


def fan_stations(figures: Figures) -> list[tuple[str, float, int]]:
    """Transports out of a prefill node: name, seconds of one prompt at one server, and number of servers."""
    alone = figures.curve("bytes pulled from one engine, tcp").first * GIGA
    line = WIRE.value * NIC_400.value * GIGA
    # The number of streams that the cores can drive at full speed.
    streams = int(CORES.value / (figures.curve("CPU of the owner, tcp").last * alone / GIGA))
    return [
        ("TCP, a stream for each, all cores", PROMPT_BYTES / alone, streams),
        ("RDMA, one adapter of 400 Gbit/s", PROMPT_BYTES / line, 1),
        ("RDMA, eight adapters", PROMPT_BYTES / line, int(ADAPTERS.value)),
    ]


def fan_in(seconds: float, servers: int, clients: int) -> Outcome:
    """Simulate engines that repeatedly pull one prompt each over one transport."""
    return run(clients, [Stage("out", seconds)], {"out": servers}, rounds=max(4000, clients * 12))
