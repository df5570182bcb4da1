"""Kills or stops the remote process before or during a transfer, and measures when the local side gets which error.

Also checks whether transfers work afterwards, with a restarted or resumed remote process. Not for: thorough tests of
our own faults (``tests/test_peer_faults.py``).
"""

from __future__ import annotations

import dataclasses
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from between import case_of
from between.adapter import PULL, REMOTE, Case
from between.pair import Failed, Pair, Pattern
from between.systems import HIXL, HIXL_TCP, PEERS, TCP, Peer
from comparison import reason
from rows import LIMIT, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

BLOCK = 256 << 10
CUT_S, QUICK_CUT_S = 60.0, 8.0
WATCH_S, QUICK_WATCH_S = 3.0, 0.5  # seconds that transfers must continue after the fault to count as unaffected
WARM_S = 0.4
MANY = 10**6
BESIDE = "; clocked beside another pair of the same system whose remote side is stopped"
# These settings differ from a measured one only in the transport of UCX.
SKIPPED = (("ucxx", "cma"), ("ucxx", TCP), ("ours", HIXL), ("ours", HIXL_TCP))


@dataclasses.dataclass(frozen=True)
class Fault:
    """The signal to the remote process, and whether it is sent during a pull."""

    signal: signal.Signals
    middle: bool

    @property
    def text(self) -> str:
        """The text for the row."""
        how = "killed" if self.signal == signal.SIGKILL else "stopped"
        return f"remote side {how} " + ("in the middle of a pull" if self.middle else "before a pull")


FAULTS = [Fault(number, middle) for number in (signal.SIGKILL, signal.SIGSTOP) for middle in (False, True)]
KILLS = 2  # of them come first


def parts(ask: Ask) -> list[str]:
    """One for each system and setting."""
    known = [(name, peer) for name, peer in PEERS.items() if name not in SKIPPED and peer.system != LIMIT]
    wanted = ["/".join(name) for name, peer in known if ask.wants(peer.asked_as)]
    return wanted[:1] if ask.quick else wanted


def run(ask: Ask, part: str) -> Iterator[Row]:
    """Run the kills one by one. The two stops may take long and use no CPU, so they run at the same time."""
    system, _, which = part.partition("/")
    peer, pattern = PEERS[system, which], Pattern(ask.mib << 20)
    # Each thread gets its own copy of the environment, because the store writes its port there.
    jobs = [
        partial(one, ask, dataclasses.replace(peer, environment=dict(peer.environment)), pattern, f) for f in FAULTS
    ]
    for job in jobs[:KILLS]:
        yield job()
    with ThreadPoolExecutor(len(jobs) - KILLS) as pool:
        yield from pool.map(lambda job: job(), jobs[KILLS:])


def one(ask: Ask, peer: Peer, pattern: Pattern, fault: Fault) -> Row:
    """Measure one fault with a new pair."""
    row = Row("faults", fault.text, peer.system, peer.setting, unit="s")
    try:
        pair = Pair(peer, pattern, ask.folder, apart=ask.apart)
    except Exception as failure:  # noqa: BLE001  (a peer that is not here is a row with its reason)
        return dataclasses.replace(row, note=reason(failure))
    cut = QUICK_CUT_S if ask.quick else CUT_S
    case = case_of(PULL, BLOCK, pattern.size // BLOCK, pattern.size)
    try:
        transfer(pair, case)
        seconds, said, alive = struck(pair, fault, cut, QUICK_WATCH_S if ask.quick else WATCH_S)
        after, well = afterwards(pair, fault, case) if alive else ("the local side had to be killed", False)
        note = f"{said}; {after}" + ("" if fault.signal == signal.SIGKILL else BESIDE)
        return dataclasses.replace(
            row, median=seconds, low=seconds, high=seconds, samples=[seconds], verified=well, note=note
        )
    except Exception as failure:  # noqa: BLE001  (as above)
        return dataclasses.replace(row, note=reason(failure))
    finally:
        pair.end()


def transfer(pair: Pair, case: Case) -> None:
    """Pull everything once, and check the bytes."""
    pair.lay(case)
    target = pair.destination(PULL)
    target.do("poison")
    pair.timed("go", "", times=1)
    wrong = target.do("wrong")
    if wrong:
        raise AssertionError(f"wrong bytes: {wrong}")


def struck(pair: Pair, fault: Fault, cut: float, watch: float) -> tuple[float, str, bool]:
    """Return the seconds from the fault to the answer, the answer, and whether the local side still responds."""
    remote, local = pair.both
    pair.attended(MANY)
    if fault.middle:
        local.tell("until_it_fails", WARM_S + watch)
        time.sleep(WARM_S)
    at = time.monotonic()
    remote.signal(fault.signal)
    if fault.signal == signal.SIGKILL:
        remote.process.wait(20)
    if not fault.middle:
        local.tell("until_it_fails", watch)
    try:
        said, when, times = local.answer(cut)
    except Failed as gone:
        taken = local.process.poll() is not None
        text = str(gone) if taken else f"no answer within {cut:.0f} s, where it was cut off"
        return (time.monotonic() - at if taken else cut), text, False
    if not said:
        return 0.0, f"does not mind: {times} pulls went on", True
    return when - at, said, True


def afterwards(pair: Pair, fault: Fault, case: Case) -> tuple[str, bool]:
    """Whether a pull works again."""
    remote, _local = pair.both
    again = "started again and linked again"
    try:
        if fault.signal == signal.SIGKILL:
            remote.end()
            pair.remote = pair.start(REMOTE)
            _, hello = pair.remote.do("hello")
            relink(pair, hello)
        else:
            again = "let go on"
            remote.signal(signal.SIGCONT)
            pair.over()
            if not local_works(pair, case):
                _, hello = remote.do("hello")
                relink(pair, hello)
                again = "let go on and linked again"
        transfer(pair, case)
    except Exception as failure:  # noqa: BLE001  (whatever it is, it is the result)
        return f"{again}: fails ({reason(failure)})", False
    return f"{again}: a pull is right again", True


def local_works(pair: Pair, case: Case) -> bool:
    """Whether a pull over the old link works."""
    try:
        transfer(pair, case)
    except Exception:  # noqa: BLE001  (then it is linked again)
        return False
    return True


def relink(pair: Pair, hello: object) -> None:
    """Link to the remote side again."""
    _, local = pair.both
    pair.attended(1)
    local.do("relink", hello)
    pair.over()
