"""Commands through the API: exactly once, in order, bounded, and honest about what is not known."""

from cluster.config import Config
from tests.cluster.rig import Rig, story


@story
async def test_a_submitted_job_is_answered_with_its_place_after_the_commit(config: Config) -> None:
    async with Rig(config) as rig:
        answer = await rig.submit()
        assert answer.status == 201, answer
        assert answer.body["job_id"] == 1
        assert answer.body["user"] == "alice"
        assert answer.body["state"] == "PENDING"
        assert answer.body["burst_buffer_state"] == "pending"
        assert answer.revision == answer.body["revision"] == rig.controller.state.revision
        shown = await rig.ask("GET", "/v1/jobs/1", who="bob")
        assert shown.body == answer.body
