"""slime's names without slime: each stands for something, and a real slime is left alone."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins import slime_alias
from slime_core.plugins.args_view import ArgsView
from slime_core.sample import Sample
from tests.unit.config.trees import small

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", sorted(slime_alias.ALIASES))
def test_every_name_stands_for_something(module):
    slime_alias.install()
    found = importlib.import_module(module)
    for name in slime_alias.ALIASES[module]:
        assert getattr(found, name) is not None


def test_the_names_are_ours_and_unknown_ones_are_named():
    slime_alias.install()
    types = importlib.import_module("slime.utils.types")
    assert types.Sample is Sample and types.Sample.Status.COMPLETED.value == "completed"
    with pytest.raises(ImportError, match=r"slime.utils.types of slime-flow has no ParamInfo; it"):
        importlib.import_module("slime.utils.types").ParamInfo  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"slime\.backends"):
        importlib.import_module("slime.backends")


def test_an_installed_slime_is_what_plug_ins_get(tmp_path):
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime/__init__.py").write_text("REAL = True\n")
    (tmp_path / "p.py").write_text(
        "import slime\nasync def reward(args, sample): return slime.REAL"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from slime_core.plugins.load import load\n"
        f"load({str(tmp_path / 'p.py')!r}); import slime; assert slime.REAL"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


def test_args_have_slimes_other_names_and_settings_of_ones_own():
    args = ArgsView(small(custom_config={"search_url": "http://x", "turns": [1]}))
    assert (args.search_url, args.partial_rollout, args.buffer_filter_path) == (
        "http://x", False, None,
    )  # fmt: skip
    assert args.sglang_router_ip and args.sglang_router_port
    args.turns.append(2)
    assert ArgsView(small(custom_config={"turns": [1]})).turns == [1]


def test_no_name_with_slimes_default_is_a_setting_here():
    from slime_core.config.fields import field_groups
    from slime_core.plugins.upstream_args import UPSTREAM

    assert not set(UPSTREAM) & set(field_groups())


def test_run_on_the_rollouts_own_loop_says_so_instead_of_waiting_for_itself():
    from slime_core.rollout.generate import Sampling
    from slime_core.rollout.runtime import Runtime
    from slime_core.rollout.slime_names import run

    async def never() -> None: ...

    async def body() -> None:
        there = Runtime(None, None, None, None, Sampling(9, {}, 5.0), lambda sample: 0)  # type: ignore[arg-type]
        with there.active(), pytest.raises(PluginError, match="await the coroutine here"):
            run(never())
        assert await asyncio.to_thread(run, asyncio.sleep(0, "done")) == "done"

    asyncio.run(body())
