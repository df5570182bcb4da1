"""The proxy of `examples/vllm`, between servers that the tests control."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

sys.path.append(str(Path(__file__).parents[2] / "examples/vllm"))
from proxy import Proxy, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

LIMIT_S = 20
PREFILL = {"engine_id": "e", "addresses": ["127.0.0.1:1"], "block_sizes": [32], "stages": 1}
PARAMS = {"llm_datadist": {"ticket": "t", **PREFILL}}
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


def server(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.AppRunner:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer)])
    return web.AppRunner(app, handler_cancellation=True)


async def asked(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        await response.read()


async def answered(params: dict[str, Any] | None = None) -> web.Response:
    return web.json_response({"kv_transfer_params": params})


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_ends_its_request_in_decode(streams: bool) -> None:
    """Before the first token, and while decode streams them."""

    async def run() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def decode(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            try:
                if streams:
                    await response.prepare(request)
                begun.set()
                for _ in range(LIMIT_S):
                    if streams:
                        await response.write(b"data: token")
                    await asyncio.sleep(1)
            except (asyncio.CancelledError, ConnectionError):
                cancelled.set()
                raise
            return response

        async with (
            serving(server(lambda _: answered(PARAMS))) as prefill,
            serving(server(decode)) as decoding,
            Proxy([Server(prefill)], [Server(decoding)]) as proxy,
            serving(proxy.runner()) as url,
            aiohttp.ClientSession() as session,
        ):
            client = asyncio.create_task(asked(session, url))
            await asyncio.wait_for(begun.wait(), LIMIT_S)
            client.cancel()
            await asyncio.wait_for(cancelled.wait(), LIMIT_S)

    asyncio.run(run())


@pytest.mark.parametrize("status", [500, 502])
def test_the_address_of_a_prefill_that_fails_is_forgotten(status: int) -> None:
    """The next request goes to prefill first, and to decode with the addresses of its response."""

    async def run() -> None:
        works = True
        given: list[Any] = []

        async def prefill(_: Any) -> web.Response:
            return await answered(PARAMS) if works else web.json_response({"error": "engine dead"}, status=status)

        async def decode(request: web.Request) -> web.Response:
            given.append((await request.json()).get("kv_transfer_params"))
            return await answered()

        async with (
            serving(server(prefill)) as prefilling,
            serving(server(decode)) as decoding,
            Proxy([Server(prefilling)], [Server(decoding)], layerwise=True) as proxy,
            serving(proxy.runner()) as url,
            aiohttp.ClientSession() as session,
        ):
            for works in (True, True, False, True):  # noqa: B007 - `prefill` reads it
                await asked(session, url)
        tickets = [params["llm_datadist"]["ticket"] for params in given]
        # The second and the third request were given to both servers, with a ticket of the proxy.
        assert [ticket == "t" for ticket in tickets] == [True, False, False, True]

    asyncio.run(run())


@pytest.mark.parametrize("prompt", [[1, 2], ["one", "two"]])
def test_the_parameters_of_a_client_do_not_reach_a_server(prompt: list[Any]) -> None:
    """Prefill fails, or is not asked, so the proxy has none itself."""

    async def run() -> None:
        given: list[Any] = []

        async def prefill(request: web.Request) -> web.Response:
            given.append((await request.json())["kv_transfer_params"])
            return web.json_response({}, status=500)

        async def decode(request: web.Request) -> web.Response:
            given.append((await request.json()).get("kv_transfer_params"))
            return await answered()

        async with (
            serving(server(prefill)) as prefilling,
            serving(server(decode)) as decoding,
            Proxy([Server(prefilling)], [Server(decoding)]) as proxy,
            serving(proxy.runner()) as url,
            aiohttp.ClientSession() as session,
        ):
            body = {"prompt": prompt, "kv_transfer_params": PARAMS}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
        assert given == [{"do_remote_decode": True}, None][isinstance(prompt[0], str) :]

    asyncio.run(run())


@pytest.mark.parametrize("layerwise", [False, True])
def test_data_parallel_ranks_get_the_requests_that_decode_reads_from_them(layerwise: bool) -> None:
    """Two servers of prefill with two ranks each, and two of decode. They take turns."""

    async def run() -> None:
        computed: dict[str, str] = {}  # which engine has computed the request with a ticket
        read: list[tuple[str, str]] = []  # the engine and the ticket that decode was given
        decodes: list[str] = []

        def prefill(name: str) -> web.AppRunner:
            async def answer(request: web.Request) -> web.Response:
                engine = f"{name}_dp{request.headers['X-data-parallel-rank']}"
                params = (await request.json())["kv_transfer_params"]
                ticket = params.get("llm_datadist", {}).get("ticket", f"{engine} {len(computed)}")
                computed[ticket] = engine
                return await answered({"llm_datadist": {**PREFILL, "ticket": ticket, "engine_id": engine}})

            return server(answer)

        def decode(name: str) -> web.AppRunner:
            async def answer(request: web.Request) -> web.Response:
                decodes.append(name + request.headers.get("X-data-parallel-rank", ""))
                given = (await request.json())["kv_transfer_params"]["llm_datadist"]
                read.append((given["engine_id"], given["ticket"]))
                return await answered()

            return server(answer)

        async with (
            serving(prefill("a")) as a,
            serving(prefill("b")) as b,
            serving(decode("c")) as c,
            serving(decode("d")) as d,
            Proxy(
                [Server(url, rank) for url in (a, b) for rank in range(2)],
                [Server(c), Server(d, 0), Server(d, 1)],
                layerwise=layerwise,
            ) as proxy,
            serving(proxy.runner()) as url,
            aiohttp.ClientSession() as session,
        ):
            for _ in range(12):
                await asked(session, url)
        assert {ticket: engine for engine, ticket in read} == computed
        assert [engine for engine, _ in read] == ["a_dp0", "a_dp1", "b_dp0", "b_dp1"] * 3
        assert decodes == ["c", "d0", "d1"] * 4

    asyncio.run(run())
