import sys

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.load import accepts, check_signature, load, source_digest

REWARD = """
import os
async def reward_func(args, sample, **kwargs):
    return 1.0
def helper(x):
    return x
class Holder:
    @staticmethod
    def inner():
        return 3
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a plug-in file; what importing it changes is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def write(content, name="my_reward.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    yield write
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_all_forms_give_the_function(plugin):
    path = plugin(REWARD)
    plugin(REWARD, "pack_a/inner.py")
    forms = ["my_reward.py:reward_func", f"{path}:reward_func", "pack_a.inner.reward_func"]
    forms += ["pack_a.inner:reward_func", "my_reward.py", "./my_reward.py"]
    assert [load(form).__name__ for form in forms] == ["reward_func"] * 6
    assert load("my_reward.py:Holder.inner")() == 3


def test_the_same_path_gives_the_same_object_and_runs_the_file_once(plugin):
    path = plugin("RUNS = []\nRUNS.append(1)\ndef f(): return RUNS\ndef g(): return RUNS\n")
    assert load(f"{path}:f") is load(f"{path}:f")
    assert load(f"{path}:f")() is load(f"{path}:g")() == [1]


def test_files_with_the_same_name_do_not_mix(plugin):
    one, two = (plugin(f"def f(): return {i}", f"{i}/rm.py") for i in (1, 2))
    assert [load(f"{path}:f")() for path in (one, two)] == [1, 2]


def test_a_file_can_import_its_neighbour_also_late(plugin):
    plugin("VALUE = 7", "sub/neighbour_module.py")
    path = plugin("def f():\n    import neighbour_module as n\n    return n.VALUE", "sub/rm.py")
    assert load(f"{path}:f")() == 7


def test_a_bare_file_prefers_the_hooks_names(plugin):
    plugin("def helper(): ...\nasync def other(): ...\nasync def generate(): ...")
    assert load("my_reward.py", ["custom_generate", "generate"]).__name__ == "generate"


def test_a_bare_file_with_several_functions_lists_them(plugin):
    plugin("from os import getcwd\nasync def b(): ...\nasync def a(): ...")
    with pytest.raises(PluginError, match=r"has a, b and no single function named reward_func"):
        load("my_reward.py", ["reward_func"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.py:f", r"missing\.py: no such file"),
        ("no_such_module_x.f", "no module named 'no_such_module_x'; install it"),
        ("json.no_such.f", "no module named 'json.no_such'"),
        ("json:dmups", r"it has no 'dmups'; did you mean dumps\?"),
        ("json.", "is not an import path"),
        ("single", "is not an import path; use pkg.module:name"),
        ("", "is not an import path"),
    ],
)
def test_wrong_paths_say_what_to_do(path, message):
    with pytest.raises(PluginError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 / 0", r"raised ZeroDivisionError when it was imported"),
        ("def f(:", r"raised SyntaxError"),
        ("import no_such_module_y", r"raised ModuleNotFoundError.*no_such_module_y"),
        ("raise SystemExit(3)", r"raised SystemExit"),
    ],
)
def test_code_that_fails_at_import_is_named_and_can_be_mended(content, message, plugin):
    path = plugin(content)
    with pytest.raises(PluginError, match=message):
        load(f"{path}:f")
    plugin("def f(): return 1")
    assert load(f"{path}:f")() == 1


def test_ctrl_c_during_an_import_stays_ctrl_c(plugin):
    path = plugin("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load(f"{path}:f")


CALL = ("args", "sample")


async def good(args, sample, **kwargs): ...
async def with_default(args, sample, evaluation=False): ...
def not_async(args, sample): ...
async def too_few(args): ...
async def too_many(args, sample, extra): ...
async def keyword_only(args, sample, *, extra): ...


class Callable:
    async def __call__(self, args, sample): ...


@pytest.mark.parametrize("function", [good, with_default, Callable()])
def test_fitting_signatures(function):
    check_signature(function, "p", CALL, must_be_async=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (not_async, "must be `async def`"),
        (too_few, r"p\(args\) does not fit: it is called as \(args, sample\)"),
        (too_many, "'extra'"),
        (keyword_only, "'extra'"),
        (3, "p is of type int"),
    ],
)
def test_signatures_that_do_not_fit(function, message):
    with pytest.raises(PluginError, match=message):
        check_signature(function, "p", CALL, must_be_async=True)


def test_only_a_named_keyword_is_asked_for():
    found = [accepts(function, "evaluation") for function in (good, with_default, not_async)]
    assert found == [False, True, False]


def test_source_digest_follows_the_file(plugin):
    path = plugin("def f(): return 1")
    first = source_digest(load(f"{path}:f"))
    plugin("def f(): return 2")
    assert len(first) == 64
    assert source_digest(load(f"{path}:f")) != first
