"""A discrete-event model of many clients that pull from one owner repeatedly.

Each client goes through its stages in turn, in an endless loop. A stage occupies one server of a station for a time. A
station serves in the order of arrival, with a fixed number of servers. With one station of two cores, this is the
fan-in that the scale benchmark measures with real engines, and the model is checked against it. Not for: the times
(``fleet``).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Station:
    """A number of equal servers, and their queue."""

    name: str
    servers: int
    busy: int = 0
    queue: deque[int] = field(default_factory=deque)
    worked: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Seconds at a station, or without one, as a pure delay. The time is exact or exponentially distributed."""

    station: str
    seconds: float
    exact: bool = True


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    rate: float  # rounds per second, of all clients
    p50: float  # seconds of a round
    p99: float
    used: dict[str, float]  # utilization of the servers of each station


def run(clients: int, stages: list[Stage], servers: dict[str, int], rounds: int = 20_000, seed: int = 1) -> Outcome:
    """Simulate `rounds` rounds after a warm-up of a tenth of that number."""
    if clients < 1 or not stages or any(servers[stage.station] < 1 for stage in stages if stage.station):
        raise ValueError("a crowd needs a client, a stage, and a server at each station")
    return Play(clients, stages, servers, seed).until(rounds)


class Play:
    """The state of one simulation."""

    def __init__(self, clients: int, stages: list[Stage], servers: dict[str, int], seed: int) -> None:
        """Let all clients arrive at once."""
        self.stages = stages
        self.stations = {name: Station(name, count) for name, count in servers.items()}
        self.dice = random.Random(seed)  # noqa: S311  (a simulation)
        self.now = 0.0
        self.counted_from = 0.0
        self.events: list[tuple[float, int, int]] = []  # time, serial number (breaks ties), client
        self.serial = 0
        self.at = [0] * clients
        self.since = [0.0] * clients
        self.times: list[float] = []
        for client in range(clients):
            self.arrive(client)

    def until(self, rounds: int) -> Outcome:
        """Process events until `rounds` rounds are done."""
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
        """End the warm-up, and reset the counters."""
        self.counted_from = self.now
        for station in self.stations.values():
            station.worked = 0.0

    def arrive(self, client: int) -> None:
        """Start a stage: occupy a server, or join the queue."""
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
        """Schedule the end of the stage."""
        stage = self.stages[self.at[client]]
        took = stage.seconds if stage.exact else self.dice.expovariate(1 / stage.seconds)
        if stage.station:
            self.stations[stage.station].worked += took
        self.serial += 1
        heapq.heappush(self.events, (self.now + took, self.serial, client))

    def leave(self, client: int) -> None:
        """End a stage, and serve the next client of the queue."""
        name = self.stages[self.at[client]].station
        if not name:
            return
        station = self.stations[name]
        if station.queue:
            self.serve(station.queue.popleft())
        else:
            station.busy -= 1
