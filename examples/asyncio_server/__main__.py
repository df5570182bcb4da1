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

from blocks import BLOCK_BYTES, MOST_BLOCKS, TENSORS, blocks_needed, pool_bytes
from messages import HOST, received, send

if TYPE_CHECKING:
    from asyncio.subprocess import Process

START_LIMIT_S = 20.0
LIMIT_S = 60.0
POOL_LIMIT = 256 << 20
MOST_IN_FLIGHT = POOL_LIMIT // pool_bytes(MOST_BLOCKS)


class Server:
    """A server process, and where it can be reached."""

    def __init__(self, name: str, process: Process, at: dict[str, Any]) -> None:
        self.name, self.process, self.at = name, process, at

    @classmethod
    async def start(cls, name: str, *arguments: str) -> Server:
        """Start a process and wait until it listens."""
        program = str(Path(__file__).with_name(f"{name}_server.py"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, program, *arguments, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_LIMIT_S)
        if not line:
            raise RuntimeError(f"{name} ended before it listened")
        return cls(name, process, json.loads(line))

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def stop(self) -> bool:
        """Close the pipe to the process, which then ends. Return whether it ends well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return await asyncio.wait_for(self.process.wait(), START_LIMIT_S) == 0
        except asyncio.TimeoutError:
            return False

    async def report(self) -> dict[str, Any]:
        """Ask the process for its free blocks and counts."""
        reader, writer = await asyncio.open_connection(HOST, self.at["port"])
        send(writer, do="report")
        try:
            return dict(json.loads(await reader.readline()))
        finally:
            writer.close()


class FrontEnd:
    """Starts the servers, sends them the requests, and gathers the outcomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._servers: dict[str, Server] = {}
        self.outcomes: dict[int, str] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.ended_well = False

    async def run(self) -> None:
        """Serve all requests, and stop the servers. They never outlive this call."""
        try:
            await self._start("decode", str(self._options.in_flight))
            await self._start("prefill")
            reader, decode = await asyncio.open_connection(HOST, self._servers["decode"].at["port"])
            send(decode, do="use_prefill", **self._servers["prefill"].at)
            requests = iter(range(self._options.requests))
            for number in islice(requests, 2 * self._options.in_flight):  # half of them wait in decode
                send(decode, do="serve", request=number)
            async for answer in received(reader):
                self.outcomes[answer["request"]] = answer["outcome"]
                if len(self.outcomes) == self._options.requests // 2:
                    await self._disturb(decode)
                if len(self.outcomes) == self._options.requests:
                    break
                if (request := next(requests, None)) is not None:
                    send(decode, do="serve", request=request)
            self.reports = {name: await server.report() for name, server in self._servers.items()}
            decode.close()
            self.ended_well = all([await server.stop() for server in self._servers.values()])
        finally:
            for server in self._servers.values():
                await server.kill()

    async def _start(self, name: str, *arguments: str) -> None:
        self._servers[name] = await Server.start(name, *arguments)

    async def _disturb(self, decode: asyncio.StreamWriter) -> None:
        """Do in the middle of the run what the options ask for."""
        if self._options.cut:
            send(decode, do="cut")
        if self._options.kill:
            await self._servers["prefill"].kill()
            await self._start("prefill")
            send(decode, do="use_prefill", **self._servers["prefill"].at)


def summarize(front_end: FrontEnd, requests: int, seconds: float) -> bool:
    """Print what has happened, and return whether everything is right."""
    outcomes = Counter(front_end.outcomes.values())
    lost = requests - outcomes["right"] - outcomes["wrong"]
    size = sum(blocks_needed(request) for request in front_end.outcomes) * TENSORS * BLOCK_BYTES
    print(f"{outcomes['right']} right, {outcomes['wrong']} wrong, {lost} lost, {size >> 20} MiB in {seconds:.1f} s")
    decode = front_end.reports.get("decode", {"links": 0, "busy": 0, "failures": {}})
    print(f"links: {decode['links']}; pulls that were refused with LLM_LINK_BUSY and repeated: {decode['busy']}")
    print(f"requests computed again: {sum(decode['failures'].values())} {decode['failures'] or ''}".rstrip())
    leaked = 0
    for name, report in front_end.reports.items():
        print(f"{name}: {report['free']} of {report['blocks']} blocks are free")
        leaked += report["blocks"] - report["free"]
    if not front_end.ended_well:
        print("a server did not end well")
    return outcomes["right"] == requests and leaked == 0 and front_end.ended_well


def main() -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=64, help=f"requests at a time, 1 to {MOST_IN_FLIGHT}")
    parser.add_argument("--kill", action="store_true", help="kill prefill in the middle, and start another one")
    parser.add_argument("--cut", action="store_true", help="drop the link in the middle")
    options = parser.parse_args()
    if options.requests < 1 or not 1 <= options.in_flight <= MOST_IN_FLIGHT:
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
