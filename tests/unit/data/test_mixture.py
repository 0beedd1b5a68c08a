"""Weighted files: shares, order and passes of each, whatever draw is asked for."""

import math
from collections import Counter

import pytest

from slime_core.data.mixture import Mixture
from slime_core.data.sources import PromptSource, SourceSettings, epoch_permutation
from slime_core.errors import DataError


def files(folder, *sizes):
    paths = []
    for name, size in zip("abc", sizes, strict=False):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f'{{"input": "{name}{i}"}}\n' for i in range(size)))
        paths.append(str(path))
    return paths


def taken(source, count):
    return [draw.samples[0].prompt for draw in source.draw(count)]


def test_draws_follow_the_weights_and_are_spread(tmp_path):
    settings = SourceSettings(prompt_data_weights=[3.0, 1.0])
    prompts = taken(PromptSource(files(tmp_path, 4, 4), settings), 8)
    assert Counter(p[0] for p in prompts) == {"a": 6, "b": 2}
    assert all("b" in {p[0] for p in prompts[i : i + 4]} for i in (0, 4))
    assert [p for p in prompts if p[0] == "a"] == ["a0", "a1", "a2", "a3", "a0", "a1"]


def test_every_row_of_a_file_comes_before_one_comes_twice(tmp_path):
    settings = SourceSettings(prompt_data_weights=[1.0, 5.0], rollout_shuffle=True)
    source = PromptSource(files(tmp_path, 6, 3), settings)
    prompts = taken(source, 90)
    for name, size in (("a", 6), ("b", 3)):
        own = [p for p in prompts if p[0] == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert source.state()["data_epoch"] == 10


def test_a_restored_source_goes_on(tmp_path):
    settings = SourceSettings(prompt_data_weights=[2.0, 1.0], rollout_shuffle=True)
    paths = files(tmp_path, 5, 4)
    want = taken(PromptSource(paths, settings), 25)
    first = PromptSource(paths, settings)
    begun = taken(first, 13)
    second = PromptSource(paths, settings)
    second.restore(first.state())
    assert begun + taken(second, 12) == want


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1000), (7, 13, 29)])
@pytest.mark.parametrize("weight", [1e-6, 1.0, 50.0])
def test_shares_are_whole_and_nobody_is_left_out(sizes, weight):
    mixture = Mixture(sizes, [weight] + [1.0] * (len(sizes) - 1), epoch_permutation, 1)
    assert sum(mixture.shares) == sum(sizes) and min(mixture.shares) >= 1
    found = Counter(mixture.row(0, place)[0] for place in range(sum(sizes)))
    assert [found[part] for part in range(len(sizes))] == mixture.shares


def test_wrong_weights_are_named(tmp_path):
    with pytest.raises(DataError, match="names 2 files and prompt_data_weights 1"):
        PromptSource(files(tmp_path, 2, 2), SourceSettings(prompt_data_weights=[1.0]))
    for wrong in ([0.0, 1.0], [-1.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [1e308, 1e308]):
        with pytest.raises(DataError, match="must be numbers above 0"):
            PromptSource(files(tmp_path, 2, 2), SourceSettings(prompt_data_weights=wrong))


def test_files_without_weights_follow_each_other(tmp_path):
    assert taken(PromptSource(files(tmp_path, 2, 2), SourceSettings()), 5) == [
        "a0", "a1", "b0", "b1", "a0"]  # fmt: skip
