"""Many clients at few stations, event by event: what a crowd gets from one owner when everybody asks again and again.

Each client goes through its stages in turn, forever. A stage takes the time of one server of a station; a station
serves in the order of arrival, with as many servers as it has. With one station of two cores this is the fan-in that
the scale benchmark measures with real engines, which is what it is checked against. Not for: where the times come from
(``fleet``).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Station:
    """Servers that are alike, and the queue before them."""

    name: str
    servers: int
    busy: int = 0
    queue: deque[int] = field(default_factory=deque)
    worked: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Seconds at a station, or at none: a wait that needs nobody. Exact, or random without a memory."""

    station: str
    seconds: float
    exact: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    rate: float  # rounds a second, of all clients
    p50: float  # seconds of a round
    p99: float
    used: dict[str, float]  # share of each station's servers that worked


def run(clients: int, stages: list[Stage], servers: dict[str, int], rounds: int = 20_000, seed: int = 1) -> Outcome:
    """Play until so many rounds are done; the first tenth is not counted."""
    if clients < 1 or not stages or any(servers[stage.station] < 1 for stage in stages if stage.station):
        raise ValueError("a crowd needs a client, a stage, and a server at each station")
    return Play(clients, stages, servers, seed).until(rounds)


class Play:
    """The state of one run."""

    def __init__(self, clients: int, stages: list[Stage], servers: dict[str, int], seed: int) -> None:
        """Everybody arrives at once."""
        self.stages = stages
        self.stations = {name: Station(name, count) for name, count in servers.items()}
        self.dice = random.Random(seed)  # noqa: S311  (a simulation)
        self.now = 0.0
        self.counted_from = 0.0
        self.events: list[tuple[float, int, int]] = []  # when, a number that breaks ties, which client
        self.serial = 0
        self.at = [0] * clients
        self.since = [0.0] * clients
        self.times: list[float] = []
        for client in range(clients):
            self.arrive(client)

    def until(self, rounds: int) -> Outcome:
        """Let events happen."""
        warm, done = rounds // 10, 0
        while done < rounds + warm:
            self.now, _, client = heapq.heappop(self.events)
            self.leave(client)
            self.at[client] += 1
            if self.at[client] == len(self.stages):
                done += 1
                if done > warm:
                    self.times.append(self.now - self.since[client])
                elif done == warm:
                    self.start_counting()
                self.at[client], self.since[client] = 0, self.now
            self.arrive(client)
        spent = self.now - self.counted_from
        self.times.sort()
        return Outcome(
            rate=len(self.times) / spent,
            p50=self.times[len(self.times) // 2],
            p99=self.times[len(self.times) * 99 // 100],
            used={name: min(1.0, one.worked / spent / one.servers) for name, one in self.stations.items()},
        )

    def start_counting(self) -> None:
        """What was before is the warm-up."""
        self.counted_from = self.now
        for station in self.stations.values():
            station.worked = 0.0

    def arrive(self, client: int) -> None:
        """Begin a stage: be served, or wait for it."""
        name = self.stages[self.at[client]].station
        if not name:
            self.serve(client)
            return
        station = self.stations[name]
        if station.busy < station.servers:
            station.busy += 1
            self.serve(client)
        else:
            station.queue.append(client)

    def serve(self, client: int) -> None:
        """The stage will end after its time."""
        stage = self.stages[self.at[client]]
        took = stage.seconds if stage.exact else self.dice.expovariate(1 / stage.seconds)
        if stage.station:
            self.stations[stage.station].worked += took
        self.serial += 1
        heapq.heappush(self.events, (self.now + took, self.serial, client))

    def leave(self, client: int) -> None:
        """End a stage: the next in the queue is served."""
        name = self.stages[self.at[client]].station
        if not name:
            return
        station = self.stations[name]
        if station.queue:
            self.serve(station.queue.popleft())
        else:
            station.busy -= 1
