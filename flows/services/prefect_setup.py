"""What a Prefect server must hold for us: pool, kinds of blocks, default blocks, an automation.

Everything is made only where it is missing, so what a person has edited stays.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from blocks import ALL, GraderSecrets, RayCluster, SampleStore, Tracking
from slime_core.tracking.mlflow import database_uri

if TYPE_CHECKING:
    from prefect.blocks.core import Block
    from prefect.client.orchestration import PrefectClient

SILENT_S = 300
"""Seconds without a heartbeat after which a run counts as dead. Longer than a server may be away
without harm: while it is away it hears no heartbeat."""
ZOMBIES = "slime: crash runs whose process is gone"
GONE = f"no sign of its process for {SILENT_S} s; `slime resume` goes on"
DEFAULT = "workspace"
ENGINE = "python -m prefect.engine"
"""How the worker starts a flow; `slime up` puts its own Python first on the worker's path."""


async def prepare(workspace: Path, pool: str) -> AsyncIterator[str]:
    """Makes what is missing; gives a sentence for each thing made."""
    async with get_client() as client:
        if await _made_pool(client, pool):
            yield f"work pool {pool}"
        for kind in ALL:
            await kind.aregister_type_and_schema(client=client)  # type: ignore[arg-type]
        for name, block in default_blocks(workspace).items():
            if await _made_block(client, name, block):
                yield f"block {block.get_block_type_slug()}/{name}"
        if not await client.read_automations_by_name(ZOMBIES):
            await client.create_automation(zombie_automation())
            yield f"automation {ZOMBIES!r}"


def default_blocks(workspace: Path) -> dict[str, Block]:
    """Name -> block that a new workspace starts with."""
    absolute = workspace.absolute()
    return {
        DEFAULT: SampleStore(url=str(absolute / "store")),
        "workspace-mlflow": Tracking(uri=database_uri(absolute), experiment="slime-flow"),
        "graders": GraderSecrets(),
        "local": RayCluster(),
    }


def zombie_automation() -> AutomationCore:
    """Shows a run as crashed that has sent heartbeats and then no word for SILENT_S."""
    heartbeat = "prefect.flow-run.heartbeat"
    ends = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
    crash = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=GONE, force=False)
    return AutomationCore(
        name=ZOMBIES,
        description="Prefect itself notices only deaths that a worker sees.",
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *ends},
            match={"prefect.resource.id": "prefect.flow-run.*"},  # type: ignore[arg-type]
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_S),
        ),
        actions=[crash],
    )


async def _made_pool(client: PrefectClient, name: str) -> bool:
    try:
        await client.read_work_pool(name)
        return False
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        # With a command of its own a flow gets signals alone. Without one they go to its process
        # group: Ray's processes die first, and a clean end takes longer than it may.
        template["variables"]["properties"]["command"]["default"] = ENGINE
        await client.create_work_pool(
            WorkPoolCreate(name=name, type="process", base_job_template=template)
        )
        return True


async def _made_block(client: PrefectClient, name: str, block: Block) -> bool:
    try:
        await client.read_block_document_by_name(name, block.get_block_type_slug())
        return False
    except ObjectNotFound:
        await block.asave(name, client=client)
        return True
