"""The program between the clients and the servers of prefill and decode."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Sequence
    from types import TracebackType

PATHS = ("/v1/completions", "/v1/chat/completions")
# What decode must know about a prefill beside the ticket of a request.
PREFILL_KEYS = ("engine_id", "addresses", "block_sizes", "stages")
REQUEST_S = 3600
CHUNK = 65_536


@dataclass(frozen=True)
class Server:
    """A server of vLLM, or one of its data-parallel ranks. Each rank has a KV cache of its own."""

    url: str  # http://host:port
    rank: int | None = None  # None: the server has one rank

    @property
    def headers(self) -> dict[str, str]:
        """The header by which vLLM gives a request to this rank."""
        return {} if self.rank is None else {"X-data-parallel-rank": str(self.rank)}


class Proxy:
    """Passes each request to a prefill and then to a decode, or to both at the same time. They take turns.

    Args:
        prefills: the servers of prefill.
        decodes: the servers of decode.
        layerwise: whether decode gets a request together with prefill, and receives layers while prefill computes. The
            proxy learns the addresses of the engines of each prefill from its first response.
    """

    def __init__(self, prefills: Sequence[Server], decodes: Sequence[Server], *, layerwise: bool = False) -> None:
        self._urls = {server.url for server in (*prefills, *decodes)}
        self._prefills = itertools.cycle(prefills)
        self._decodes = itertools.cycle(decodes)
        self._layerwise = layerwise
        self._where: dict[Server, dict[str, Any]] = {}

    async def __aenter__(self) -> Proxy:  # noqa: PYI034 - Self needs Python 3.11
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def runner(self) -> web.AppRunner:
        """Return the server that clients talk to. When a client goes, its request ends in both servers."""
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post(path, self._serve) for path in PATHS])
        return web.AppRunner(app, handler_cancellation=True)

    async def until_ready(self, processes: list[Process]) -> None:
        """Wait until all servers respond.

        Raises:
            RuntimeError: one of the servers has ended.
        """
        for url in self._urls:
            while not await self._responds(f"{url}/health"):
                if any(process.returncode is not None for process in processes):
                    raise RuntimeError("a server has ended; its output says why")
                await asyncio.sleep(0.5)

    async def _responds(self, url: str) -> bool:
        try:
            async with self._session.get(url) as found:
                return found.status == web.HTTPOk.status_code
        except aiohttp.ClientError:
            return False

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if _has_several_prompts(asked):
            # They are several requests, but the response of prefill has the parameters of one. Decode computes them.
            return await self._decoded(request, asked, None)
        prefill = next(self._prefills)
        where = self._where.get(prefill) if self._layerwise else None
        if where is None:
            return await self._decoded(request, asked, await self._prefilled(prefill, request.path, asked))
        # Prefill lends the prompt under this name, and decode asks for it.
        ticket = uuid.uuid4().hex
        prefilled = asyncio.create_task(self._prefilled(prefill, request.path, asked, ticket))
        try:
            params = {"do_remote_prefill": True, "llm_datadist": {**where, "ticket": ticket}}
            response = await self._decoded(request, asked, params)
            await prefilled
        finally:
            prefilled.cancel()  # if the client has gone
        return response

    async def _prefilled(
        self, prefill: Server, path: str, asked: dict[str, Any], ticket: str | None = None
    ) -> dict[str, Any] | None:
        """Have prefill compute the prompt. Return what decode needs, or ``None`` if decode must compute it."""
        left_out = ("stream_options", "max_completion_tokens")
        body = {name: value for name, value in asked.items() if name not in left_out}
        params: dict[str, Any] | None = {"do_remote_decode": True}
        if ticket is not None:
            params = {"do_remote_decode": True, "llm_datadist": {"ticket": ticket}}
        body |= {"max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": params}
        try:
            async with self._session.post(prefill.url + path, json=body, headers=prefill.headers) as response:
                response.raise_for_status()
                found = await response.json()
        except (aiohttp.ClientError, ValueError):
            # If prefill returns, it listens elsewhere.
            self._where.pop(prefill, None)
            return None
        params = found.get("kv_transfer_params")
        if params is not None:
            self._where[prefill] = {name: params["llm_datadist"][name] for name in PREFILL_KEYS}
        return params

    async def _decoded(
        self, request: web.Request, asked: dict[str, Any], params: dict[str, Any] | None
    ) -> web.StreamResponse:
        """Pass on the response of decode. Without parameters, decode computes the prompt itself.

        Those of a client are never passed on: they name the peers that decode connects to.
        """
        body = {**asked, "kv_transfer_params": params}
        decode = next(self._decodes)
        async with self._session.post(decode.url + request.path, json=body, headers=decode.headers) as found:
            response = web.StreamResponse(status=found.status, headers={"Content-Type": found.content_type})
            await response.prepare(request)
            async for chunk in found.content.iter_chunked(CHUNK):
                await response.write(chunk)
            await response.write_eof()
            return response


def _has_several_prompts(asked: dict[str, Any]) -> bool:
    prompt = asked.get("prompt")
    return isinstance(prompt, list) and any(isinstance(item, (str, list)) for item in prompt)
