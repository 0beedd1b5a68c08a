"""Every way to start a training looks first."""

import asyncio
import subprocess
import sys

import pytest

from flows import deployed as module
from slime_core.config.loading import load_config
from slime_core.errors import ConfigError
from tests.unit.check.model_folders import QUICKSTART


def test_a_run_that_prefect_starts_is_refused_before_it_is_chosen(monkeypatch, tmp_path):
    def chosen(*_):
        raise AssertionError("the run was chosen although its prompts are not there")

    async def training(_):
        raise AssertionError("the training began")

    monkeypatch.setattr(module, "choose", chosen)
    config = load_config(QUICKSTART, {"workspace": str(tmp_path / "w"), "rm_type": "mth"})
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*none\.jsonl(.|\n)*--rm-type 'mth'"):
        asyncio.run(module.deployed(config, {"prompt_data": "none.jsonl"}, "auto", training))
    assert not (tmp_path / "w").exists()


def test_a_reader_that_leaves_is_no_error():
    """As in `slime models list | head`."""
    command = [sys.executable, "-m", "flows.cli.main", "models", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as slime:
        assert slime.stdout is not None and slime.stderr is not None
        slime.stdout.close()
        assert slime.stderr.read() == b""
        assert slime.wait(60) == 141
