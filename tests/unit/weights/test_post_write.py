"""A function between writing a folder of weights and loading it: what it sees and gets wrong."""

import asyncio
from types import SimpleNamespace

import pytest

from slime_core.errors import PluginError
from slime_core.weights.sync.post_write import PostWrite, load_post_write

OWN = """
import os, shutil, sys, threading
def notes(args, version_dir, rollout_engines):
    args.seen.append((os.listdir(version_dir), [(e.name, e.url) for e in rollout_engines]))
    return "not used"
async def waits(args, version_dir, rollout_engines): notes(args, version_dir, rollout_engines)
def raises(args, version_dir, rollout_engines): return args.no_such
def exits(args, version_dir, rollout_engines): sys.exit("bye")
def hangs(args, version_dir, rollout_engines): threading.Event().wait()
def forgets(args, version_dir, rollout_engines): return waits(args, version_dir, rollout_engines)
def removes(args, version_dir, rollout_engines): shutil.rmtree(version_dir)
def remote(args, version_dir, rollout_engines): rollout_engines[0].pull_weights.remote()
def two(args, version_dir): pass
"""


def told(tmp_path, name, limit_s=60.0):
    folder = tmp_path / "l0-1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "own.py").write_text(OWN)
    args = SimpleNamespace(seen=[])
    engines = {"engine-1": "http://b", "engine-0": "http://a"}
    hook = PostWrite(f"{tmp_path / 'own.py'}:{name}", args, lambda: engines, limit_s)
    asyncio.run(hook(str(folder)))
    return args.seen


@pytest.mark.parametrize("name", ["notes", "waits"])
def test_it_sees_a_complete_folder_and_the_engines(tmp_path, name):
    engines = [("engine-0", "http://a"), ("engine-1", "http://b")]
    assert told(tmp_path, name) == [(["config.json"], engines)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "raised AttributeError"),
        ("exits", r"called sys\.exit\('bye'\)"),
        ("hangs", r"did not end within 0\.1 s \(half of sync_timeout_s\)"),
        ("forgets", "make it `async def` itself"),
        ("removes", "removed l0-1, which engines load next"),
        ("remote", "have name and url, not pull_weights: engines are HTTP servers"),
        ("two", r"it is called as \(args, version_dir, rollout_engines\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_what_goes_wrong_is_one_sentence(tmp_path, name, says):
    with pytest.raises(PluginError, match=says):
        told(tmp_path, name, 0.1 if name == "hangs" else 60.0)


def test_a_start_looks_at_its_parameters(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(PluginError, match="does not fit"):
        load_post_write(f"{tmp_path / 'own.py'}:two")
