"""Every flow and task of the project leaves results, caching and retries to the store."""

import importlib
import inspect
import pkgutil

import pytest
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE

import flows
import tasks
from slime_core.refs import Ref
from tasks._options import as_state, iteration_of


def prefect_objects(kind):
    found = {}
    for package in (flows, tasks):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, kind):
                    found[f"{value.fn.__module__}.{value.name}"] = value
    return found


FLOWS, TASKS = prefect_objects(Flow), prefect_objects(Task)


def test_the_walk_finds_the_flows_and_one_task_a_stage():
    names = ("train.train", "iteration.iteration", "evaluate.evaluate")
    assert set(FLOWS) == {f"flows.{name}" for name in names}
    stages = ("recover", "sample", "generate", "reward", "pack", "train", "sync", "evaluate")
    alone = {f"tasks.evaluate_model.{step}" for step in ("weights", "engines", "evaluate")}
    assert set(TASKS) == {f"tasks.{stage}.{stage}" for stage in stages} | alone


@pytest.mark.parametrize("name", FLOWS)
def test_flows_neither_keep_results_nor_retry(name):
    flow = FLOWS[name]
    assert flow.persist_result is False
    assert flow.retries == 0
    assert flow.result_storage is None
    assert inspect.iscoroutinefunction(flow.fn), "a sync subflow costs a second each"


@pytest.mark.parametrize("name", TASKS)
def test_tasks_neither_keep_results_nor_cache_nor_retry(name):
    task = TASKS[name]
    assert task.persist_result is False
    assert task.cache_policy is NO_CACHE or task.cache_policy == NO_CACHE
    assert task.cache_key_fn is None
    assert task.retries == 0
    assert task.result_storage is None
    assert task.tags == set(), "a tagged task fails where Prefect's API is away"
    assert inspect.iscoroutinefunction(task.fn)


@pytest.mark.parametrize("name", [*TASKS, "flows.iteration.iteration"])
def test_only_integers_refs_and_names_are_parameters(name):
    """Prefect stores parameters attribute by attribute, whatever is in them."""
    function = {**TASKS, **FLOWS}[name].fn
    kinds = {p.annotation for p in inspect.signature(function).parameters.values()}
    names = {"str"} if name == "tasks.evaluate_model.evaluate" else set()  # of a dataset
    assert kinds <= {"int", "Ref"} | names


def test_the_iteration_comes_from_a_ref_or_from_k():
    assert iteration_of({"seal": Ref("s", "seal", 7)}) == 7
    assert iteration_of({"k": 3, "version": 4}) == 3


def test_work_that_was_found_done_has_a_state_of_its_own():
    done = Ref("s", "seal", 7, from_store=True)
    assert as_state(done).name == "Completed (from store)"
    assert as_state(Ref("s", "seal", 7)) == Ref("s", "seal", 7)
    assert as_state(None) is None
