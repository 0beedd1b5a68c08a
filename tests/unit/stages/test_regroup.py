"""A stored batch with other rewards: the same rows, and what another algorithm starts from."""

import pytest

from slime_core.config.loading import apply_overrides, build_config
from slime_core.errors import ConfigError, MissingError
from slime_core.stages.regroup import regrouped
from slime_core.store.batch import read_batch
from slime_core.store.load import load_train_batch
from slime_core.store.scores import RowScore, find_scorer, put_scores
from slime_core.store.seal import read_seal
from tests.unit.stages.test_pack import lab, packed, rows
from tests.unit.stages.test_pack_estimators import EXPECTED, REWARDS


def config_of(ctx, **changes):
    tree = ctx.config.model_dump(mode="json")
    return build_config(apply_overrides(tree, changes))


@pytest.fixture
def ctx(tmp_path):
    made = lab(tmp_path)
    packed(made, [rows(0, *REWARDS)], [rows(1, 2.0, 2.0, 2.0, 2.0)])
    return made


@pytest.fixture
def content(ctx):
    batch = read_batch(ctx.backend, 0)
    assert batch is not None
    return batch.content


def overlay(ctx, scorer, rewards):
    seal = read_seal(ctx.backend, 0)
    scores = [RowScore(i // 4, 0, i % 4, reward) for i, reward in enumerate(rewards)]
    put_scores(ctx.backend, scorer, seal, scores)


def test_the_configuration_it_was_packed_with_gives_the_same_batch(ctx, content):
    assert regrouped(ctx.cache, content, ctx.config) == content


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "gpg"])
def test_another_algorithm_starts_from_other_numbers(ctx, content, name):
    found = regrouped(ctx.cache, content, config_of(ctx, advantage_estimator=name))
    assert found.rewards == pytest.approx([*EXPECTED[name], 0, 0, 0, 0])
    assert (found.groups, found.steps, found.raw_rewards) == (
        content.groups, content.steps, content.raw_rewards,
    )  # fmt: skip


def test_the_rewards_of_another_grader(ctx, content):
    overlay(ctx, "abc", [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 4.0])
    config = config_of(ctx, advantage_estimator="dr_grpo")
    found = regrouped(ctx.cache, content, config, "abc")
    assert found.raw_rewards == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 4.0]
    assert found.rewards == pytest.approx([0.5, -0.5, -0.5, 0.5, -1.0, -1.0, -1.0, 3.0])


def test_a_row_that_the_other_grader_could_not_grade_is_left_out(ctx, content):
    overlay(ctx, "abc", [1.0, None, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    config = config_of(ctx, advantage_estimator="dr_grpo")
    found = regrouped(ctx.cache, content, config, "abc")
    assert found.rewards == pytest.approx([0.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert found.removed == (1,)
    batch = read_batch(ctx.backend, 0)
    assert batch is not None
    trained = load_train_batch(ctx.backend, type(batch)(found, batch.digest)).mask_sums
    assert trained[1] == 0 and (trained[[0, 2, 3]] > 0).all()


def test_a_grader_is_found_by_the_beginning_of_its_digest(ctx, content):
    with pytest.raises(ConfigError, match="none: `slime rescore` makes them"):
        find_scorer(ctx.backend, "a")
    overlay(ctx, "abc", [1.0] * 8)
    overlay(ctx, "abd", [1.0] * 8)
    assert find_scorer(ctx.backend, "abd") == "abd"
    with pytest.raises(ConfigError, match="2 graders with a digest that begins with 'ab'"):
        find_scorer(ctx.backend, "ab")
    with pytest.raises(MissingError):
        regrouped(ctx.cache, content, ctx.config, "other")


def test_rewards_that_a_function_of_the_user_s_made_stay(ctx, content):
    config = config_of(ctx, custom_reward_post_process_path="module.function")
    with pytest.raises(ConfigError, match=r"were made by module\.function"):
        regrouped(ctx.cache, content, config)
