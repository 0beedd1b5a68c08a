"""What a person sees of a run: its pages in a real browser, and their addresses.

With SLIME_REFRESH_IMAGES=1 the pictures in docs/images are taken anew.
"""

import os
import re
import time

import pytest

from tests.e2e.browser import chromium, program
from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
STAGES = ("sample", "generate", "reward", "pack", "train", "sync", "evaluate")
REFRESH = os.environ.get("SLIME_REFRESH_IMAGES") == "1"
SETTLE_S = 5.0


@pytest.fixture(scope="module")
def run(services):
    """A finished run of three iterations; its flow run."""
    few = {"num_rollout": 3, "eval_interval": 1, "skip_eval_before_train": True}
    ended = services.ended(services.start(overrides=few, resume="never"))
    assert ended["state"]["name"] == "Completed", f"{ended['state']}\n{services.logs()}"
    return ended


@pytest.fixture
def page(tmp_path):
    with chromium(tmp_path / "profile") as opened:
        yield opened


def addresses(services, run) -> dict[str, str]:
    lines = services.slime("open", run["name"]).splitlines()
    return {name: place for name, _, place in (re.sub(" +", " ", x).partition(" ") for x in lines)}


def test_open_gives_the_addresses_and_logs_the_lines(services, run):
    found = addresses(services, run)
    assert found["Prefect"] == f"{services.address('server')}/runs/flow-run/{run['id']}"
    served = re.escape(services.address("mlflow"))
    assert re.fullmatch(rf"{served}/#/experiments/\d+/runs/[0-9a-f]{{32}}", found["MLflow"])
    assert found["store"].endswith(f"/store/{run['name']}")
    printed = services.slime("logs", run["name"], "--source", "trainer")
    assert "trainer-0  iteration 2: 128 samples" in printed and "engine-0" not in printed


def test_samples_stand_in_the_table_of_each_iteration(services, run):
    wanted = {"artifacts": {"key": {"any_": [f"iteration-{run['name']}"]}}}
    tables = [one["data"] for one in services.post("/artifacts/filter", wanted)]
    assert len(tables) == 3
    for table in tables:
        rows = re.findall(r"^\| (\d{4}=) \| (.*) \| ([01]) \|$", table, re.MULTILINE)
        assert len(rows) == 3, table
        assert [reward for *_, reward in rows] == sorted(reward for *_, reward in rows)


@pytest.mark.skipif(program() is None, reason="chromium is not installed")
def test_pages_in_a_browser(services, run, page):
    found = addresses(services, run)
    page.open(found["Prefect"])
    text = page.shows(run["name"], "Completed", "trainer-0", "engine-0", "rollout-0")
    assert "Crashed" not in text.split("Logs")[0]
    if REFRESH:
        time.sleep(SETTLE_S)
        page.screenshot(ROOT / "docs" / "images" / "run.png", 1400, 570)
    page.click("Subflow Runs")
    page.shows(*(f"iteration {k:06d}" for k in range(3)))
    page.click("Artifacts")
    page.shows(f"progress-{run['name']}", f"summary-{run['name']}")

    children = services.post(
        "/flow_runs/filter", {"flow_runs": {"name": {"any_": ["iteration 000001"]}}}
    )
    page.open(f"{services.address('server')}/runs/flow-run/{children[0]['id']}")
    page.click("Task Runs")
    page.shows(*(f"{stage} 000001" for stage in STAGES))
    wanted = {"artifacts": {"key": {"any_": [f"summary-{run['name']}"]}}}
    [summary] = services.post("/artifacts/filter", wanted)
    page.open(f"{services.address('server')}/artifacts/artifact/{summary['id']}")
    page.shows("finished after 3 iterations", "rollout/raw_reward")

    page.open(f"{found['MLflow']}/model-metrics")
    page.shows(run["name"], "greedy", "raw_reward")
    if REFRESH:
        time.sleep(SETTLE_S)
        page.screenshot(ROOT / "docs" / "images" / "mlflow.png", 1040, 620)


def test_open_without_services_gives_the_commands(services, run):
    services.slime("down")
    found = addresses(services, run)
    assert "prefect server start" in found["Prefect"]
    assert found["Prefect"].endswith(f"/runs/flow-run/{run['id']}")
    assert "mlflow ui" in found["MLflow"] and "/runs/" in found["MLflow"]
