"""The proxy of `examples/vllm`, between servers that the tests control."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

sys.path.append(str(Path(__file__).parents[2] / "examples/vllm"))
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

LIMIT_S = 20
PARAMS = {"llm_datadist": {"ticket": "t", "engine_id": "e", "addresses": ["127.0.0.1:1"], "block_sizes": [32]}}
BODY = {"prompt": [1, 2], "max_tokens": 4}


@asynccontextmanager
async def serving(runner: web.AppRunner) -> AsyncIterator[str]:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def server(answer: Callable[[dict[str, Any]], Awaitable[web.Response]]) -> web.AppRunner:
    async def handle(request: web.Request) -> web.Response:
        return await answer(await request.json())

    app = web.Application()
    app.add_routes([web.post("/v1/completions", handle)])
    return web.AppRunner(app, handler_cancellation=True)


async def answered(params: dict[str, Any] | None = None) -> web.Response:
    return web.json_response({"kv_transfer_params": params})


def test_a_client_that_goes_ends_its_request_in_decode() -> None:
    async def run() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def decode(_: Any) -> web.Response:
            begun.set()
            try:
                await asyncio.sleep(LIMIT_S)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return await answered()

        async with (
            serving(server(lambda _: answered(PARAMS))) as prefill,
            serving(server(decode)) as decoding,
            Proxy(prefill, decoding) as proxy,
            serving(proxy.runner()) as url,
            aiohttp.ClientSession() as session,
        ):
            client = asyncio.create_task(session.post(f"{url}/v1/completions", json=BODY))
            await asyncio.wait_for(begun.wait(), LIMIT_S)
            client.cancel()
            await asyncio.wait_for(cancelled.wait(), LIMIT_S)

    asyncio.run(run())


def test_the_address_of_a_prefill_that_fails_is_forgotten() -> None:
    """The next request goes to prefill first, and to decode with the addresses of its response."""

    async def run() -> None:
        works = True
        given: list[Any] = []

        async def prefill(_: Any) -> web.Response:
            if not works:
                raise web.HTTPBadGateway
            return await answered(PARAMS)

        async def decode(body: dict[str, Any]) -> web.Response:
            given.append(body.get("kv_transfer_params"))
            return await answered()

        async with (
            serving(server(prefill)) as prefilling,
            serving(server(decode)) as decoding,
            Proxy(prefilling, decoding, layerwise=True) as proxy,
            serving(proxy.runner()) as url,
            aiohttp.ClientSession() as session,
        ):
            for works in (True, True, False, True):  # noqa: B007 - `prefill` reads it
                async with session.post(f"{url}/v1/completions", json=BODY) as response:
                    await response.read()
        tickets = [params["llm_datadist"]["ticket"] for params in given]
        # The second and the third request were given to both servers, with a ticket of the proxy.
        assert [ticket == "t" for ticket in tickets] == [True, False, False, True]

    asyncio.run(run())
