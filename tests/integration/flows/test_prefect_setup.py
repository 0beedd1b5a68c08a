"""What `slime up` makes in a Prefect server: once, and never over what a person has changed."""

import asyncio

from prefect.client.orchestration import get_client
from prefect.states import Pending, Running, Scheduled
from pydantic import SecretStr

from blocks import GraderSecrets, SampleStore
from flows.prefect_api import end_dead
from flows.services.prefect_setup import SILENT_S, ZOMBIES, prepare
from flows.train import train
from slime_core.run.ending import note_end, noted_end


async def made(folder) -> list[str]:
    return [one async for one in prepare(folder, "pool-of-setup")]


def test_what_is_missing_is_made_once_and_edits_stay(server, tmp_path):
    first = asyncio.run(made(tmp_path))
    assert first == [
        "work pool pool-of-setup",
        "block slime-sample-store/workspace",
        "block slime-tracking/workspace-mlflow",
        "block slime-grader-secrets/graders",
        "block slime-ray-cluster/local",
        f"automation {ZOMBIES!r}",
    ]
    loaded = SampleStore.load("workspace")
    assert loaded.url == str(tmp_path / "store") and "only once" in loaded.check()
    edited = GraderSecrets(entries={"JUDGE_KEY": SecretStr("mine")})
    edited.save("graders", overwrite=True)
    assert asyncio.run(made(tmp_path)) == []
    kept = GraderSecrets.load("graders").environment()
    assert kept == {"JUDGE_KEY": "mine"}


def test_the_automation_waits_longer_than_two_missed_heartbeats(server, tmp_path):
    async def read():
        async with get_client() as client:
            return await client.read_automations_by_name(ZOMBIES)

    asyncio.run(made(tmp_path))
    [automation] = asyncio.run(read())
    assert automation.trigger.within.total_seconds() == SILENT_S > 120
    assert "prefect.flow-run.heartbeat" in automation.trigger.after
    assert [action.type for action in automation.actions] == ["change-flow-run-state"]


def test_flow_runs_without_a_training_are_crashed_once_their_process_is_gone(server):
    """Those that a worker had taken and that never came so far that they had a run's name."""

    async def check():
        async with get_client() as client:
            flow_id = await client.create_flow(train)
            deployment = await client.create_deployment(flow_id, name="orphans")
            ids = {
                name: (
                    await client.create_flow_run_from_deployment(deployment, name=name, state=state)
                ).id
                for name, state in (
                    ("gone", Running()), ("taken", Pending()), ("alive", Running()),
                    ("waiting", Scheduled()),
                )
            }  # fmt: skip
            crashed = await end_dead(lambda _: False, lambda one: one != ids["alive"])
            states = {
                name: (await client.read_flow_run(one)).state.type.value
                for name, one in ids.items()
            }
            for one in ids.values():
                await client.delete_flow_run(one)
            await client.delete_deployment(deployment)
            return crashed, states

    crashed, states = asyncio.run(check())
    assert sorted(crashed) == [("gone", "crashed"), ("taken", "crashed")]
    assert states == {
        "gone": "CRASHED", "taken": "CRASHED", "alive": "RUNNING", "waiting": "SCHEDULED",
    }  # fmt: skip


def test_runs_that_died_unseen_are_shown_as_crashed(server):
    async def check():
        async with get_client() as client:
            runs = {
                name: await client.create_flow_run(train, tags=[f"run:{name}"], state=Running())
                for name in ("dead", "alive")
            }
            crashed = await end_dead(lambda run_id: run_id == "dead", lambda _: False)
            states = {
                name: (await client.read_flow_run(run.id)).state for name, run in runs.items()
            }
            await client.delete_flow_run(runs["alive"].id)
            return crashed, states

    crashed, states = asyncio.run(check())
    assert crashed == [("dead", "crashed")]
    assert states["dead"].is_crashed() and "slime resume" in states["dead"].message
    assert states["alive"].is_running()


def test_runs_that_ended_while_prefect_was_away_are_shown_as_they_ended(server, tmp_path):
    """What they noted counts for their own flow run, and for no earlier one."""
    ends = {"done": "finished", "told": "interrupted", "broken": "failed", "other": "finished"}

    async def check():
        async with get_client() as client:
            runs = {
                name: await client.create_flow_run(train, tags=[f"run:{name}"], state=Running())
                for name in ends
            }
            for name, run in runs.items():
                (tmp_path / name).mkdir()
                note_end(tmp_path / name, "another" if name == "other" else str(run.id), ends[name])
            found = await end_dead(
                lambda run_id: run_id in ends,
                lambda _: False,
                lambda run_id, shown_as: noted_end(tmp_path / run_id, str(shown_as)),
            )
            return found, {
                name: (await client.read_flow_run(run.id)).state.type.value
                for name, run in runs.items()
            }

    found, states = asyncio.run(check())
    assert dict(found) == ends | {"other": "crashed"}
    assert states == {
        "done": "COMPLETED", "told": "CANCELLED", "broken": "FAILED", "other": "CRASHED",
    }  # fmt: skip
