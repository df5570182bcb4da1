"""Clients and keepers that are killed at random moments, while a naive map says what may be read.

LLM_DATADIST_KILL_SECONDS is how long that goes on, and 10 by default. Not for: a keeper that is stopped or is away
(`test_store.py`), and what a holder says (`test_serve.py`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist import Error, KeeperObserver, Store
from peers import eventually

from . import mapped_store
from .mapped_store import TTL, Losses, MappedStore, Setting
from .stores import LIMIT, child_of, key

if TYPE_CHECKING:
    from typing_extensions import Self

    from llm_datadist.stats import KeeperStats

SECONDS = float(os.environ.get("LLM_DATADIST_KILL_SECONDS", "10"))
CLIENTS = 3
ROUND_SECONDS = 5.0
LONG = 600.0
"""Seconds in which each kind of kill happens."""
_SIZES = {4096: 100, 64 << 10: 40, 1 << 20: 12, 3 << 20: 11}
"""Bytes of a value, and keys of a client: so many that a keeper has 16 slots, of which a store may lease 4."""
KILLS = ("clients killed", "keepers killed, values kept", "keepers killed, values lost", "holders killed")
LEASES = f"""
import hashlib, sys, time
from llm_datadist import Store
store = Store(sys.argv[1], namespace="leases", value=int(sys.argv[2]), timeout={LIMIT})
print(*store.lease([hashlib.sha224(b"2").digest()], ttl={TTL}), flush=True)
time.sleep({LIMIT})
"""


class Round:
    """A keeper and its clients. `kill_one` kills one of these processes and starts another one in its place."""

    def __init__(self, folder: Path, seed: str, *, fits: bool, counts: Counter[str]) -> None:
        self.dice, self.counts = random.Random(seed), counts  # noqa: S311
        size, keys = self.dice.choice(list(_SIZES.items()))
        self.setting = Setting(folder / "keeper", folder, keys, size, fits)
        self.losses = Losses(folder)
        # The keeper needs free slots for values that it copies: at most 8 a client.
        self.slots = CLIENTS * (keys + 8) if fits else CLIENTS * keys // 2
        self.stack = ExitStack()
        with ExitStack() as begun:
            begun.push(self.stack)
            self.errors = self.stack.enter_context((folder / "errors").open("w+"))
            self.serve = self.started_keeper()
            self.clients = [self.started_client(number) for number in range(CLIENTS)]
            begun.pop_all()

    def started_keeper(self) -> subprocess.Popen[str]:
        self.crashed = False
        memory = f"{self.slots * self.setting.value >> 10}KiB"
        options = ("--memory", memory, "--value", f"{self.setting.value >> 10}KiB", "--socket", self.setting.socket)
        started = self.started(sys.executable, "-m", "llm_datadist", "serve", *map(str, options))
        assert started.stdout is not None
        assert started.stdout.readline().startswith(f"ready: {self.slots} values"), self.printed()
        return started

    def started_client(self, number: int) -> subprocess.Popen[str]:
        arguments = (*self.setting, number, CLIENTS, self.dice.randrange(1 << 30))
        started = self.started(sys.executable, mapped_store.__file__, *map(str, arguments))
        assert started.stdout is not None
        assert started.stdout.readline() == "begun\n", self.printed()
        return started

    def started(self, *command: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)  # noqa: S603
        self.stack.callback(self.close, started)
        return started

    def printed(self) -> str:
        self.errors.flush()
        return Path(self.errors.name).read_text()

    def kill_one(self) -> None:
        kinds = (self.kill_client, self.kill_child, self.kill_holder)
        self.dice.choices(kinds, (0.55, 0.3, 0.15))[0]()

    def kill_client(self) -> None:
        """The clients go on in the middle of calls, so each has a call of any kind when it is killed."""
        number = self.dice.randrange(CLIENTS)
        self.end(self.clients[number])
        self.counts["clients killed"] += 1
        self.until_stable(CLIENTS - 1)
        self.clients[number] = self.started_client(number)

    def end(self, client: subprocess.Popen[str]) -> None:
        self.close(client)
        assert client.returncode == -signal.SIGKILL, self.printed()

    def until_stable(self, clients: int) -> None:
        """Wait until the keeper knows the end of a client, so that it copies nothing for it any more."""

        def holds() -> bool:
            assert not any(client.poll() == 1 for client in self.clients), self.printed()
            stats = self.stats()
            return stats is not None and stats["clients"] == clients

        for _ in range(2):
            eventually(holds)
            time.sleep(0.02)

    def stats(self) -> KeeperStats | None:
        try:
            with KeeperObserver(self.setting.socket, timeout=LIMIT) as observer:
                return observer.stats()
        except Error:
            return None

    def kill_child(self) -> None:
        """The values stay, unless it is the second time: then the memory may be the reason, and is emptied."""
        self.until_stable(CLIENTS)  # the child from before is gone, and the next one serves
        again, self.crashed = self.crashed, True
        if again:
            self.losses.add()
        killed = child_of(self.serve)
        os.kill(killed, signal.SIGKILL)
        self.counts["keepers killed, values lost" if again else "keepers killed, values kept"] += 1
        if again:
            self.until_stable(CLIENTS)
            self.losses.add()

    def kill_holder(self) -> None:
        self.losses.add()
        self.close(self.serve)
        self.counts["holders killed"] += 1
        self.serve = self.started_keeper()
        self.until_stable(CLIENTS)
        self.losses.add()

    def finish(self) -> None:
        """End all clients, and compare what they have left with the maps."""
        for client in self.clients:
            self.end(client)
            self.counts["clients killed"] += 1
        eventually(lambda: (stats := self.stats()) is not None and stats["leased"] == stats["clients"] == 0)
        assert any(self.lease_ended_first() for _ in range(3)), "leases of killed clients stay"
        self.counts["leases ended with their client"] += 1
        for number in range(CLIENTS):
            mapped = MappedStore(self.setting, number, 0)
            eventually(lambda mapped=mapped: mapped.store.stats()["keeper"] is not None)
            mapped.read_all()
            mapped.store.close()
            self.counts.update(mapped.map.counts())

    def lease_ended_first(self) -> bool:
        """Return whether the lease of a killed client ends before leases that are older and as long.

        If this process does not run for the time of a lease, all of them may have ended by then.
        """
        size = self.setting.value
        with Store(self.setting.socket, namespace="leases", value=size, timeout=LIMIT) as store:
            keys = [key(number) for number in range(3)]
            store.put(keys, [bytes(size)] * 3)  # those of an earlier try may be there
            assert store.lease(keys[:2], ttl=TTL) == [True, True]
            client = self.started(sys.executable, "-c", LEASES, str(self.setting.socket), str(size))
            assert client.stdout is not None
            assert client.stdout.readline() == "True\n", self.printed()
            leased = self.leased()
            if leased != 3:
                return False
            self.end(client)
            eventually(lambda: self.leased() != 3)
            return self.leased() == 2

    def leased(self) -> int | None:
        stats = self.stats()
        return None if stats is None else stats["leased"]

    @staticmethod
    def close(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


@pytest.mark.parametrize("fits", [True, False], ids=["fit", "replaced"])
def test_killed_at_any_moment_no_wrong_byte_is_read_and_no_confirmed_value_is_lost(tmp_path: Path, fits: bool) -> None:
    counts: Counter[str] = Counter()
    begin, first = time.monotonic(), random.randrange(1 << 30)  # noqa: S311
    while counts["rounds"] == 0 or time.monotonic() - begin < SECONDS / 2:
        folder = tmp_path / str(counts["rounds"])
        folder.mkdir()
        seed = f"{first} {counts['rounds']}"
        print(f"seed {seed}")  # noqa: T201
        with Round(folder, seed, fits=fits, counts=counts) as this:
            end = time.monotonic() + min(ROUND_SECONDS, SECONDS / 2)
            while time.monotonic() < end:
                time.sleep(this.dice.uniform(0, 0.4))
                this.kill_one()
            this.finish()
        counts["rounds"] += 1
    print(dict(counts))  # noqa: T201
    assert counts["hits"]
    if SECONDS >= LONG:
        assert all(counts[name] for name in (*KILLS, "leases held")), counts
