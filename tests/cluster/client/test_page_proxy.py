"""`forebay page` shows the page as one's account, to one's own browser, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from forebay.cluster.client import Client
from forebay.cluster.client import page_proxy as module
from forebay.cluster.client.page_proxy import PageProxy
from forebay.cluster.config.config import Config
from tests.cluster.harness import PATIENCE_S, Harness, story


@asynccontextmanager
async def proxied(harness: Harness, who: str = "alice") -> AsyncIterator[tuple[PageProxy, aiohttp.ClientSession]]:
    """Yield a proxy and a browser, which keeps cookies."""
    async with Client.from_config(harness.config, who) as client, client.page_proxy() as proxy:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            yield proxy, browser


async def status_of(browser: aiohttp.ClientSession, url: str, **options: object) -> int:
    async with browser.get(url, allow_redirects=False, **options) as answer:  # type: ignore[arg-type]
        return answer.status


@story
async def test_a_link_opens_the_page_of_its_account_once(config: Config) -> None:
    async with Harness(config) as harness:
        assert (await harness.submit(name="mine")).status == 201
        async with proxied(harness) as (proxy, browser):
            base, link = f"http://127.0.0.1:{proxy.port}", proxy.url
            assert await status_of(browser, f"{base}/page") == 403
            async with browser.get(link) as answer:
                text = await answer.text()
                assert answer.status == 200 and "From r1 (leader)" in text and "mine" in text
                assert str(answer.url) == f"{base}/page"
                direct = (await harness.ask("GET", "/page", who="alice")).headers
                for name in ("Content-Security-Policy", "Cross-Origin-Resource-Policy", "X-Content-Type-Options"):
                    assert answer.headers[name] == direct[name]
            for path in ("/page/jobs/1", "/page/page.css", "/page/jobs?state=PENDING"):
                assert await status_of(browser, base + path) == 200
            async with aiohttp.ClientSession() as other:
                assert await status_of(other, link) == 403
                assert await status_of(other, f"{base}/page") == 403
            assert await status_of(browser, link) == 303, "it is the same browser"


@story
async def test_events_come_through_as_they_happen(config: Config) -> None:
    async with Harness(config) as harness, proxied(harness) as (proxy, browser):
        await status_of(browser, proxy.url)
        async with browser.get(f"http://127.0.0.1:{proxy.port}/v1/events") as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert (await harness.submit(name="news")).status == 201
            async with asyncio.timeout(PATIENCE_S):
                while b"job_submitted" not in await answer.content.readany():
                    pass


@story
async def test_nothing_but_reads_of_the_page_from_this_host_is_passed_on(config: Config) -> None:
    async with Harness(config) as harness, proxied(harness, "operator") as (proxy, browser):
        await status_of(browser, proxy.url)
        base = f"http://127.0.0.1:{proxy.port}"
        for path in ("/v1/jobs", "/metrics", "/v1/events/x", "/pages"):
            assert await status_of(browser, base + path) == 404
        async with browser.post(f"{base}/page", data=b"x") as answer:
            assert answer.status == 405
        assert await status_of(browser, f"{base}/page", headers={"Host": f"evil.example:{proxy.port}"}) == 403
        for site in ("cross-site", "same-site"):
            assert await status_of(browser, f"{base}/page", headers={"Sec-Fetch-Site": site}) == 403
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert await status_of(browser, f"{base}/page", headers=link) == 200


@story
async def test_another_account_of_the_machine_is_refused_even_with_the_link(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connections = Path("/proc/net/tcp")
    if not connections.exists():
        pytest.skip("this kernel has no table of connections")
    table = tmp_path / "tcp"

    class Table:
        """Table in which all connections belong to another account."""

        def read_text(self) -> str:
            head, *rows = connections.read_text().splitlines()
            table.touch()
            return "\n".join([head, *(" ".join([*row.split()[:7], "4242", *row.split()[8:]]) for row in rows)])

    async with Harness(config) as harness, proxied(harness) as (proxy, browser):
        with monkeypatch.context() as patch:
            patch.setattr(module, "_CONNECTIONS", Table())
            assert await status_of(browser, proxy.url) == 403
            assert table.exists()
        assert await status_of(browser, proxy.url) == 303


@story
async def test_without_a_replica_the_browser_is_told_so(config: Config) -> None:
    async with Harness(config) as harness, proxied(harness) as (proxy, browser):
        await status_of(browser, proxy.url)
        await harness.server.stop()
        async with browser.get(f"http://127.0.0.1:{proxy.port}/page") as answer:
            assert answer.status == 502 and "no replica is reachable" in await answer.text()
