"""The site's query that aborts a drill, answered by a double of Prometheus."""

from __future__ import annotations

import pytest
from aiohttp import web

from forebay.cluster.drills.machines import Alarm
from tests.cluster.harness import story
from tests.ports import free_port

RESULTS, SILENCE = "the Prometheus query {} has results", "Prometheus did not answer the query {}"

ANSWERS = (
    ('{"status":"success","data":{"resultType":"vector","result":[]}}', 200, ""),
    (
        '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"1"]}]}}',
        200,
        RESULTS,
    ),
    ('{"status":"error","errorType":"bad_data","error":"parse error"}', 400, SILENCE),
    ('{"status":"success","data":{"resultType":"vector","result":[]}}', 503, SILENCE),
    ('{"status":"success","data":[]}', 200, SILENCE),
    ("[1]", 200, SILENCE),
    ("it works", 200, SILENCE),
)


@pytest.mark.parametrize(("text", "status", "said"), ANSWERS)
def test_query_results_or_a_missing_answer_abort_a_drill(text: str, status: int, said: str) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query["query"])
        return web.Response(text=text, status=status)

    @story
    async def run() -> None:
        app = web.Application()
        app.router.add_get("/prometheus/api/v1/query", answer)
        runner, port = web.AppRunner(app), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        found = await Alarm(f"http://127.0.0.1:{port}/prometheus/", 'up{job="a b"} == 0').ask()
        await runner.cleanup()
        assert found == said.format('up{job="a b"} == 0')

    run()
    assert asked == ['up{job="a b"} == 0']


@story
async def test_an_unreachable_prometheus_aborts_a_drill() -> None:
    assert (
        await Alarm(f"http://127.0.0.1:{free_port()}", "up == 0").ask() == "Prometheus did not answer the query up == 0"
    )
