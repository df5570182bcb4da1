"""A prefill and a decode server in asyncio, over one link (`python examples/asyncio_server`).

This process is the front end: it starts both servers, sends requests to decode, and gathers the outcomes. When half of
the requests are answered, `--kill` kills prefill with SIGKILL and starts another one, and `--cut` has decode drop the
link. The command exits with 1 if a byte is wrong, a request is lost, or a block is not free at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocks import BLOCK_BYTES, LAYOUT, blocks_needed

if TYPE_CHECKING:
    from asyncio.subprocess import Process

START_LIMIT_S = 20.0
LIMIT_S = 60.0
MAX_IN_FLIGHT = 128


class Server:
    """A server process, and the pipes to it."""

    def __init__(self, name: str, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name, self._process, self._stdin, self._stdout = name, process, process.stdin, process.stdout

    @classmethod
    async def start(cls, name: str, *arguments: str) -> Server:
        """Start a process."""
        program = str(Path(__file__).with_name(f"{name}_server.py"))
        pipe = asyncio.subprocess.PIPE
        return cls(
            name, await asyncio.create_subprocess_exec(sys.executable, program, *arguments, stdin=pipe, stdout=pipe)
        )

    def send(self, **message: Any) -> None:
        """Send a message."""
        self._stdin.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """Wait for the next message."""
        line = await self._stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} has ended")
        return dict(json.loads(line))

    async def stop(self) -> dict[str, Any]:
        """Close the pipe to the process, which then ends. Return its last message. Raises if it does not end well."""
        self._stdin.close()
        report = await asyncio.wait_for(self.receive(), START_LIMIT_S)
        status = await asyncio.wait_for(self._process.wait(), START_LIMIT_S)
        if status != 0:
            raise RuntimeError(f"{self._name} ended with status {status}")
        return report

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class FrontEnd:
    """Starts the servers, sends them the requests, and gathers the outcomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._servers: dict[str, Server] = {}
        self.outcomes: dict[int, str] = {}
        self.reports: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        """Serve all requests, and stop the servers. They never outlive this call."""
        try:
            decode = self._servers["decode"] = await Server.start("decode", str(self._options.in_flight))
            await self._start_prefill(decode)
            requests = iter(range(self._options.requests))
            for number in islice(requests, 2 * self._options.in_flight):  # half of them wait in decode
                decode.send(do="serve", request=number)
            while len(self.outcomes) < self._options.requests:
                answer = await decode.receive()
                self.outcomes[answer["request"]] = answer["outcome"]
                if len(self.outcomes) == self._options.requests // 2:
                    await self._disturb(decode)
                if (request := next(requests, None)) is not None:
                    decode.send(do="serve", request=request)
            for name, server in self._servers.items():
                self.reports[name] = await server.stop()
        finally:
            for server in self._servers.values():
                await server.kill()

    async def _start_prefill(self, decode: Server) -> None:
        """Start a prefill process, and tell decode where it listens."""
        prefill = self._servers["prefill"] = await Server.start("prefill")
        listens = await asyncio.wait_for(prefill.receive(), START_LIMIT_S)
        decode.send(do="use_prefill", **listens)

    async def _disturb(self, decode: Server) -> None:
        """Do in the middle of the run what the options ask for."""
        if self._options.cut:
            decode.send(do="cut")
        if self._options.kill:
            await self._servers["prefill"].kill()
            await self._start_prefill(decode)


def summarize(front_end: FrontEnd, requests: int, seconds: float) -> bool:
    """Print what has happened, and return whether everything is right."""
    outcomes = Counter(front_end.outcomes.values())
    lost = requests - outcomes["right"] - outcomes["wrong"]
    size = sum(blocks_needed(request) for request in front_end.outcomes) * LAYOUT.tensors * BLOCK_BYTES
    print(f"{outcomes['right']} right, {outcomes['wrong']} wrong, {lost} lost, {size >> 20} MiB in {seconds:.1f} s")
    decode = front_end.reports.get("decode", {"links": 0, "busy": 0, "failures": {}})
    print(f"links: {decode['links']}; calls that were refused with Busy and repeated: {decode['busy']}")
    print(f"requests computed again: {sum(decode['failures'].values())} {decode['failures'] or ''}".rstrip())
    for name, report in front_end.reports.items():
        print(f"{name}: {report['free']} of {report['blocks']} blocks are free")
    free = [report["free"] == report["blocks"] for report in front_end.reports.values()]
    return outcomes["right"] == requests and free == [True, True]


def main() -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=64, help=f"requests at a time, 1 to {MAX_IN_FLIGHT}")
    parser.add_argument("--kill", action="store_true", help="kill prefill in the middle, and start another one")
    parser.add_argument("--cut", action="store_true", help="drop the link in the middle")
    options = parser.parse_args()
    if options.requests < 1 or not 1 <= options.in_flight <= MAX_IN_FLIGHT:
        parser.error("--requests or --in-flight is out of range")
    front_end = FrontEnd(options)
    begin = time.perf_counter()
    try:
        asyncio.run(asyncio.wait_for(front_end.run(), LIMIT_S))
    except (asyncio.TimeoutError, OSError, RuntimeError) as error:
        print(f"the run failed: {error!r}", file=sys.stderr)
    return 0 if summarize(front_end, options.requests, time.perf_counter() - begin) else 1


if __name__ == "__main__":
    sys.exit(main())
