"""`slime up`: Prefect's server, a worker and MLflow's page in the background."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from flows.services import processes, stack
from flows.services.environment import prefect_environment
from flows.services.stack import Plan
from slime_core.check.places import writable
from slime_core.config.flags import FlagParser, parse


def main(arguments: list[str]) -> int:
    """Starts what does not run yet, and prints what does."""
    options = parse(_parser(), arguments)
    plan = Plan(
        Path(options.workspace).absolute(),
        options.prefect_port,
        options.mlflow_port,
        options.pool,
        options.at_once,
    )
    writable(plan.workspace, "workspace", "--workspace")
    project = plan.project
    started = [stack.start_server(plan), stack.start_mlflow(plan)]
    for service in started:
        if service is not None:
            stack.wait_answers(plan.workspace, service)
    api_url = stack.api_url_of(plan.workspace)
    if api_url is None:
        raise processes.ServiceError(
            f"Prefect's server has ended: see {processes.log_of(plan.workspace, stack.SERVER)}"
        )
    os.environ.update(prefect_environment(plan.workspace, api_url))
    for made in asyncio.run(_prepare(plan)):
        print(f"made      {made}")
    stack.deploy(plan, api_url)
    print(f"deployed  {project / stack.PROJECT_FILE}")
    started.append(stack.start_worker(plan, api_url))
    names = {service.name for service in started if service is not None}
    for name in (stack.SERVER, stack.MLFLOW, stack.WORKER):
        service = processes.running(plan.workspace, name)
        if service is None:
            raise processes.ServiceError(
                f"{stack.TITLES[name]} ended at its start; the end of "
                f"{processes.log_of(plan.workspace, name)}:\n"
                f"{processes.log_tail(plan.workspace, name)}"
            )
        word = "started" if name in names else "runs already"
        print(f"{stack.TITLES[name]:<8}  {service.address}  {word}, process {service.process.pid}")
    print(f"logs in {processes.folder_of(plan.workspace)}; `slime down` ends these")
    print(f"for commands of prefect: export PREFECT_API_URL={api_url}")
    return 0


def _parser() -> FlagParser:
    made = FlagParser(prog="slime up", description=__doc__)
    made.add_argument("--workspace", default="runs", help="folder that holds the runs")
    made.add_argument("--prefect-port", type=int, help="port of Prefect's page (4200; 0 any)")
    made.add_argument("--mlflow-port", type=int, help="port of MLflow's page (5000; 0 any)")
    made.add_argument("--pool", default="slime", help="name of the work pool")
    made.add_argument(
        "--at-once", type=int, default=1, help="runs the worker holds at once; others wait"
    )
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


async def _prepare(plan: Plan) -> list[str]:
    from flows.services.ended import tell_the_dead
    from flows.services.prefect_setup import prepare

    made = [one async for one in prepare(plan.workspace, plan.pool)]
    for run_id, how in await tell_the_dead(plan.workspace):
        word = "stopped" if how == "interrupted" else how
        print(f"{word:<9} {run_id}, whose process is gone")
    return made
