"""Every field has one place, one class and a sentence; the digests follow the classes."""

import pytest
from pydantic import ValidationError

from slime_core.config.fields import (
    class_of,
    field_groups,
    field_info,
    group_types,
    identity_digest,
    numeric_changes,
    numeric_digest,
    values,
)
from slime_core.config.tree import RunConfig
from tests.unit.config.trees import small

CHANGED = {
    "eval_top_p": 0.5,  # another valid value for fields whose type does not give one by itself
    "device": "cpu",
    "rollout_engine": "embedded",
    "old_log_probs": "recompute",
    "update_weight_transport": "tensor",
    "log_level": "DEBUG",
    "eval_config": {"datasets": []},
    "advantage_estimator": "rloo",
    "kl_loss_type": "k3",
    "loss_type": "sft_loss",
    "overlong_policy": "drop",
    "tis_level": "sequence",
    "tis_mode": "mask",
    "rs_level": "sequence",
    "rs_estimator": "k2",
    "num_critic_only_steps": 1,
    "failed_samples": "drop",
    "tool_parser": "glm",
    "reward_error_policy": "drop",
    "reward_shaping": "cosine",
    "over_sampling_batch_size": 8,
    "prompt_data_weights": [2.0, 1.0],
    "save_debug_rollout_data": "{rollout_id}.pt",
    "multimodal_keys": {"image": "images"},
}
TOGETHER = {  # fields that only pass the rules with others
    "eval_interval": {"eval_prompt_data": ["a", "b"]},
    "eval_prompt_data": {"eval_interval": 1},
    "eval_config": {"eval_interval": 1},
    "use_dynamic_batch_size": {"max_tokens_per_gpu": 64},
    "max_tokens_per_gpu": {"use_dynamic_batch_size": True},
    "overlong_policy": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
    "debug_train_only": {"load_debug_rollout_data": "x"},
    "gamma": {"advantage_estimator": "ppo"},
    "lambd": {"advantage_estimator": "ppo"},
    "value_clip": {"advantage_estimator": "ppo"},
    "critic_lr": {"advantage_estimator": "ppo"},
    "use_opd": {"opd_teacher_load": "t", "use_opd": True},
    "opd_kl_coef": {"opd_teacher_load": "t", "use_opd": True},
    "opd_teacher_load": {"opd_teacher_load": "t", "use_opd": True},
    "num_critic_only_steps": {"advantage_estimator": "ppo"},
    "sapo_tau_pos": {"advantage_estimator": "sapo"},
    "sapo_tau_neg": {"advantage_estimator": "sapo"},
    "disable_compute_advantages_and_returns": {"loss_type": "sft_loss"},
    "custom_loss_function_path": {"loss_type": "custom_loss"},
    "custom_tis_function_path": {"use_tis": True},
    "kl_loss_coef": {"use_kl_loss": True},
    "kl_loss_type": {"use_kl_loss": True},
    "use_unbiased_kl": {"use_kl_loss": True},
    "ref_update_interval": {"use_kl_loss": True},
    "keep_old_actor": {"old_actor_update_interval": 2, "keep_old_actor": True},
    "old_actor_update_interval": {"old_actor_update_interval": 2, "keep_old_actor": True},
    "kl_coef": {"advantage_estimator": "ppo"},
    "tis_clip": {"use_tis": True},
    "tis_clip_low": {"use_tis": True},
    "tis_level": {"use_tis": True},
    "tis_mode": {"use_tis": True},
    "tis_batch_normalize": {"use_tis": True},
    "ipo_threshold": {"advantage_estimator": "ipo"},
    "ipo_kl_tau": {"advantage_estimator": "ipo"},
    "rs_estimator": {"use_rs": True},
    "rs_level": {"use_rs": True},
    "rs_upper_bound": {"use_rs": True},
    "rs_lower_bound": {"use_rs": True, "rs_upper_bound": 8.0},
    "kl_target": {"advantage_estimator": "ppo", "kl_coef": 0.1},
    "kl_horizon": {"advantage_estimator": "ppo", "kl_coef": 0.1, "kl_target": 0.1},
    "use_opsm": {"use_rollout_logprobs": True},
    "tool_paths": {"custom_generate_function_path": "g.py"},
    "over_sampling_batch_size": {"dynamic_sampling_filter_path": "f.py:f"},
    "buffer_filter_path": {"dynamic_sampling_filter_path": "f.py:f"},
    "prompt_data_weights": {"prompt_data": ["a", "b"]},
    "disable_rollout_global_dataset": {"rollout_function_path": "f.py:f", "prompt_data": None},
    "partial_rollout": {"over_sampling_batch_size": 8},
    "mask_offpolicy_in_partial_rollout": {"over_sampling_batch_size": 8, "partial_rollout": True},
    "group_rm": {"custom_rm_path": "r.py"},
    "overlong_buffer_len": {"reward_shaping": "overlong"},
    "opsm_delta": {"use_rollout_logprobs": True, "use_opsm": True},
}
FIXED = {  # one value works so far
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "rollout_num_gpus_per_engine",
}


def another(name: str):
    """A value other than the small configuration's."""
    if name in CHANGED:
        return CHANGED[name]
    config = small()
    old = getattr(getattr(config, field_groups()[name]), name)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old * 2 if old > 0 else 5
    if isinstance(old, float):
        return old / 2 if old else 0.5
    if isinstance(old, str):
        return old + "x"
    if isinstance(old, dict):
        return {"a": 1}
    text = str(field_info(name).annotation)
    if "list" in text:
        return ["a", "b"] if "str" in text else [1]
    return "x" if "str" in text else 2


def test_every_field_has_one_class_and_a_sentence():
    for name in field_groups():
        assert class_of(name) in ("identity", "numeric", "operational")
        text = field_info(name).description
        assert text and text.endswith("."), name


def test_names_are_unique_and_no_group_is_called_like_a_field():
    names = [name for model in group_types().values() for name in model.model_fields]
    assert len(names) == len(set(names)) == len(field_groups())
    assert not set(names) & set(RunConfig.model_fields)


def test_nothing_changes_a_configuration():
    config = small()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.train = config.train  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(set(field_groups()) - FIXED))
def test_a_field_moves_exactly_the_digest_of_its_class(name):
    with_it = TOGETHER.get(name, {})
    before, after = small(), small(**{**with_it, name: another(name)})
    moved = {
        "identity": identity_digest(before) != identity_digest(after),
        "numeric": numeric_digest(before) != numeric_digest(after),
    }
    expected = {kind: class_of(name) == kind for kind in moved}
    for other in with_it:
        expected = {kind: expected[kind] or class_of(other) == kind for kind in moved}
    assert moved == expected


def test_open_groups_have_a_class_too():
    assert numeric_digest(small()) != numeric_digest(small(megatron={"weight_decay": 0.1}))
    assert numeric_digest(small()) == numeric_digest(small(sglang={"dtype": "float32"}))
    assert values(small(sglang={"a": 1}), "operational")["sglang"] == {"a": 1}
    assert "megatron" not in values(small(), "identity")


def test_numeric_changes_are_told_with_both_values():
    before = small(lr=3e-4, megatron={"weight_decay": 0.1})
    after = small(lr=1e-4, megatron={"adam_beta2": 0.98}, sglang={"dtype": "float32"})
    assert numeric_changes(before, after) == [
        "adam_beta2 unset -> 0.98", "lr 0.0003 -> 0.0001", "weight_decay 0.1 -> unset",
    ]  # fmt: skip
    assert numeric_changes(before, before) == []


def test_where_the_model_lies_is_operational_though_megatrons_options_are_numeric():
    one = small(megatron={"weight_decay": 0.1})
    spread = small(
        device="cpu",
        actor_num_gpus_per_node=2,
        megatron={"weight_decay": 0.1, "--tensor-model-parallel-size": 2},
    )
    assert numeric_digest(one) == numeric_digest(spread)
    assert values(spread, "numeric")["megatron"] == {"weight_decay": 0.1}
    assert values(spread, "operational")["megatron"] == {"--tensor-model-parallel-size": 2}
