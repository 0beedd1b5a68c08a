import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms.advantages.groups import Groups
from slime_core.algorithms.advantages.grpo import grpo
from slime_core.algorithms.advantages.registry import ESTIMATORS, get_estimator, group_rewards
from slime_core.errors import ConfigError, DataError

CENTRED = [
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "max_rl",
    "pass_at_k",
    "reinforce_plus_plus_baseline",
]
rewards_lists = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=1, max_size=24)


def groups_of(rewards, ids, **more):
    n = len(rewards)
    extra = {"response_lengths": np.arange(1, n + 1), "baseline_rewards": np.full(n, 0.5)}
    return Groups(np.array(rewards), np.array(ids), **(extra | more))


@given(rewards=rewards_lists, data=st.data())
def test_order_of_rows_and_names_of_groups_do_not_matter(rewards, data):
    n = len(rewards)
    ids = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    order = np.array(data.draw(st.permutations(range(n))))
    renamed = np.array([17, 3, 99, 5])[ids]
    for name in ESTIMATORS:
        plain = group_rewards(name, groups_of(rewards, ids))
        moved = group_rewards(
            name,
            groups_of(
                np.array(rewards)[order],
                renamed[order],
                response_lengths=np.arange(1, n + 1)[order],
            ),
        )
        np.testing.assert_allclose(moved, plain[order], rtol=1e-9, atol=1e-12)


@given(rewards=st.lists(rewards_lists, min_size=1, max_size=4))
def test_each_group_stands_on_its_own_whatever_its_size(rewards):
    flat = [r for group in rewards for r in group]
    ids = [i for i, group in enumerate(rewards) for _ in group]
    for name in ("grpo", "dr_grpo", "rloo", "max_rl", "pass_at_k"):
        together = group_rewards(name, groups_of(flat, ids))
        alone = [group_rewards(name, groups_of(g, [0] * len(g))) for g in rewards]
        np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CENTRED)
@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.7], [1 / 3] * 3, [0.0, 0.0]])
def test_equal_rewards_teach_exactly_nothing(name, rewards):
    values = group_rewards(name, groups_of(rewards, [4] * len(rewards)))
    assert values.tolist() == [0.0] * len(rewards)


def test_grpo_is_float64_with_unbiased_std():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.2, 0.9])
    ids = np.array([0, 0, 0, 0, 1, 1])
    values = grpo(Groups(rewards, ids))
    for g in (0, 1):
        own = rewards[ids == g]
        expected = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
        assert values[ids == g].tolist() == pytest.approx(expected.tolist(), rel=1e-14)
    assert values.dtype == np.float64


def test_tiny_differences_survive_where_float32_would_lose_them():
    values = grpo(Groups(np.array([1e4, 1e4 + 1e-4]), np.array([0, 0])))
    assert values.tolist() == pytest.approx([-0.7, 0.7], abs=0.02)


def test_a_fanned_out_rollout_enters_the_statistics_once():
    once = group_rewards("grpo", groups_of([1.0, 0.0, 0.5], [0, 0, 0]))
    fanned = group_rewards(
        "grpo", groups_of([1.0, 1.0, 1.0, 0.0, 0.5], [0] * 5, rollout_ids=[7, 7, 7, 8, 9])
    )
    np.testing.assert_allclose(fanned, once[[0, 0, 0, 1, 2]])
    with pytest.raises(DataError, match="different groups"):
        group_rewards("grpo", groups_of([1.0, 0.0], [0, 1], rollout_ids=[7, 7]))


def test_rloo_is_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.25, 0.5]
    values = group_rewards("rloo", groups_of(rewards, [0] * 4))
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert values.tolist() == pytest.approx(expected)


def test_remax_takes_the_greedy_answer_as_baseline_even_alone():
    values = group_rewards("remax", groups_of([1.0], [0]))
    assert values.tolist() == [0.5]
    with pytest.raises(DataError, match="greedy"):
        group_rewards("remax", Groups(np.array([1.0]), np.array([0])))
    with pytest.raises(DataError, match="group 3 has reward nan"):
        group_rewards("remax", groups_of([1.0], [3], baseline_rewards=[np.nan]))


def test_pass_at_k_pays_only_what_the_best_adds():
    values = group_rewards(
        "pass_at_k", groups_of([0.2, 0.9, 0.5, 1.0, 1.0], [0, 0, 0, 1, 1]), std_normalization=False
    )
    assert values.tolist() == pytest.approx([0.0, 0.4, 0.0, 0.0, 0.0])


def test_gpg_makes_up_for_groups_without_a_gradient():
    values = group_rewards("gpg", groups_of([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]))
    assert values.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])


def test_normalisation_can_be_switched_off():
    groups = groups_of([1.0, 0.0, 0.0], [0, 0, 0])
    assert group_rewards("grpo", groups, rewards_normalization=False).tolist() == [1.0, 0.0, 0.0]
    no_std = group_rewards("grpo", groups, std_normalization=False)
    assert no_std.tolist() == group_rewards("dr_grpo", groups).tolist()


def test_bad_rewards_and_names_are_named():
    with pytest.raises(DataError, match=r"row 1 \(group 6\) is nan"):
        Groups(np.array([1.0, np.nan]), np.array([5, 6]))
    with pytest.raises(DataError, match="group_ids has 1 values for 2"):
        Groups(np.array([1.0, 0.0]), np.array([5]))
    with pytest.raises(DataError, match="opo needs"):
        group_rewards("opo", Groups(np.array([1.0]), np.array([0])))
    with pytest.raises(ConfigError, match="did you mean grpo"):
        get_estimator("grppo")


def test_estimators_do_not_import_torch():
    code = (
        "import sys, slime_core.algorithms.advantages.registry, slime_core.batching.select, "
        "slime_core.batching.pack, slime_core.batching.schedule; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
