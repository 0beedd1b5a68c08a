"""Each rule over several fields: what passes, and the one sentence for what does not."""

import pytest

from slime_core.errors import ConfigError
from tests.unit.config.trees import small

TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"global_batch_size": 4, "num_steps_per_rollout": 3},
            ("4 x n_samples_per_prompt 2 = 8 samples", "4 x num_steps_per_rollout 3 = 12"),
        ),
        ({"global_batch_size": 3}, ("8 samples an iteration", "global_batch_size 3")),
        ({"global_batch_size": 16}, ("global_batch_size 16: choose a divisor of 8",)),
        ({"num_steps_per_rollout": 3}, ("num_steps_per_rollout 3: choose a divisor of 8",)),
        ({"global_batch_size": 1}, ("1 samples would split a group of 2",)),
        ({"num_steps_per_rollout": 8}, ("would split a group of 2",)),
        ({"use_dynamic_batch_size": True}, ("needs max_tokens_per_gpu",)),
        ({"overlong_policy": "drop"}, ("overlong_policy drop needs a limit", "max_tokens_per_gpu")),
        ({"max_tokens_per_gpu": 10}, ("only with use_dynamic_batch_size",)),
        ({"eps_clip": 1.0}, ("eps_clip 1.0 would allow negative ratios",)),
        ({"eps_clip_high": 0.0}, ("eps_clip_high 0.0 must be above 0",)),
        ({"eval_interval": 2}, ("needs held-out prompts",)),
        ({"eval_prompt_data": ["a", "b"]}, ("without eval_interval",)),
        ({"eval_config": {"datasets": []}}, ("without eval_interval",)),
        ({"eval_interval": 2, "eval_prompt_data": ["a"]}, ("pairs of name and file", "1 entries")),
        ({"rm_type": None}, ("no reward is configured", "rm_type", "custom_rm_path")),
        ({"label_key": None}, ("exact_match compares with a label: set label_key",)),
        ({"rm_type": "remote_rm", "label_key": None}, ("asks a reward server: set rm_url",)),
        ({"rm_type": "boxed_remote_rm"}, ("asks a reward server: set rm_url",)),
        ({"group_rm": True}, ("group_rm hands groups", "set custom_rm_path")),
        ({"reward_shaping": "overlong"}, ("needs overlong_buffer_len", "(8), not None")),
        ({"reward_shaping": "overlong", "overlong_buffer_len": 9}, ("(8), not 9",)),
        ({"overlong_buffer_len": 4}, ("only with reward_shaping overlong",)),
        ({"over_sampling_batch_size": 3}, ("3 is below rollout_batch_size 4",)),
        ({"over_sampling_batch_size": 6}, ("nothing would choose from",)),
        ({"partial_rollout": True}, ("set over_sampling_batch_size above 4",)),
        ({"mask_offpolicy_in_partial_rollout": True}, ("only with partial_rollout",)),
        ({"rollout_top_k": 0}, ("rollout_top_k must be -1 (all tokens) or at least 1, not 0",)),
        ({"eval_top_k": -7}, ("eval_top_k must be -1 (all tokens) or at least 1, not -7",)),
        (
            {
                "custom_update_weight_post_write_path": "f.py",
                "update_weight_transport": "tensor",
            },
            ("tensor does not write: use disk",),
        ),
        (
            {"custom_update_weight_post_write_path": "f.py", "debug_rollout_only": True},
            ("custom_update_weight_post_write_path would never be called", "leave it out"),
        ),
        ({"rollout_stop": ["x", ""]}, ("rollout_stop has an empty text", "leave it out")),
        ({"custom_config": {"lr": 1}}, ("custom_config holds lr", "set it as such")),
        ({"tool_paths": ["calculator"]}, ("slime_core.rollout.multiturn.generate",)),
        (
            {"agent_path": "a.py", "custom_generate_function_path": "g.py"},
            ("(g.py) both answer prompts", "open_session"),
        ),
        (
            {"custom_generate_function_path": "slime_core.agents.generate.generate"},
            ("lets an agent work: set agent_path",),
        ),
        (
            {"rollout_max_prompt_len": 9, "rollout_max_context_len": 9},
            ("no room for a response", "at most 8"),
        ),
        ({"device": "cpu", "actor_num_nodes": 2}, ("actor_num_nodes 2: trainer ranks on several",)),
        (
            {"device": "cpu", "actor_num_gpus_per_node": 3, "megatron": TP2},
            ("size 2 x pipeline_model_parallel_size 1 x context", "node is 3", "a multiple of 2"),
        ),
        ({"megatron": TP2}, ("actor_num_gpus_per_node is 1: make it a multiple of 2",)),
        (
            {
                "device": "cpu",
                "actor_num_gpus_per_node": 2,
                "megatron": TP2 | {"context-parallel-size": 2},
            },
            ("context_parallel_size 2 = 4 ranks hold the model", "node is 2"),
        ),
        (
            {"megatron": {"expert_model_parallel_size": 2}},
            ("expert_model_parallel_size 2 x expert_tensor", "= 2 ranks hold the experts"),
        ),
        ({"rollout_num_gpus_per_engine": 2}, ("rollout_num_gpus_per_engine to 1",)),
        ({"seed": -1}, ("seed", "at least 0", "-1")),
        ({"seed": 2**64}, ("seed", "at most 4294967295")),
        ({"rollout_seed": 2**32}, ("rollout-seed", "at most 4294967295", "4294967296")),
        ({"sglang": {"random_seed": -5}}, ("--sglang-random-seed -5", "from 0 to 4294967295")),
    ],
)
def test_what_contradicts_itself_is_one_sentence_with_its_numbers(overrides, words):
    with pytest.raises(ConfigError) as error:
        small(**overrides)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ({}, 1),
        ({"global_batch_size": 8}, 1),
        ({"global_batch_size": 2}, 4),
        ({"num_steps_per_rollout": 2}, 2),
        ({"global_batch_size": 4, "num_steps_per_rollout": 2}, 2),
    ],
)
def test_steps_follow_from_whatever_is_given(overrides, steps):
    assert small(**overrides).num_steps == steps


@pytest.mark.parametrize(
    "overrides",
    [
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
        {"eps_clip": 0.2, "eps_clip_high": 1.5},
        {"eval_interval": 1, "eval_prompt_data": ["a", "b"]},
        {"rm_type": None, "custom_rm_path": "a.b", "label_key": None},
        {"rm_type": "random", "label_key": None},
        {"num_rollout": 0},
        {"rollout_function_path": "a.b", "over_sampling_batch_size": 6},
        {"rollout_function_path": "a.b", "partial_rollout": True},
        {"device": "cpu", "actor_num_gpus_per_node": 2},
        {
            "device": "cpu",
            "actor_num_gpus_per_node": 4,
            "megatron": {**TP2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
        },
    ],
)
def test_what_fits_together_passes(overrides):
    small(**overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"save_debug_rollout_data": "x.pt"}, "would be written over in each iteration"),
        (
            {"save_debug_rollout_data": "{rollout_id}", "load_debug_rollout_data": "{rollout_id}"},
            "name the same files",
        ),
        (
            {"load_debug_rollout_data": "x", "rollout_function_path": "a.b"},
            "both say where samples come from",
        ),
        ({"debug_rollout_only": True, "debug_train_only": True}, "leave nothing to do"),
        (
            {"offload_train": True, "debug_rollout_only": True},
            "debug_rollout_only starts one of them only: leave offload_train out",
        ),
        ({"offload_train": True, "debug_train_only": True}, "and debug_train_only starts one of"),
        (
            {"debug_rollout_only": True, "load_debug_rollout_data": "x"},
            "leave load_debug_rollout_data out",
        ),
        ({"debug_rollout_only": True, "megatron_load": "x"}, "leave megatron_load out"),
        (
            {"debug_rollout_only": True, "mlflow_log_final_weights": True},
            "leave mlflow_log_final_weights out",
        ),
        ({"debug_train_only": True}, "starts no engine, so it needs samples"),
    ],
)
def test_dumps_of_samples_have_a_file_each_and_one_origin(overrides, words):
    with pytest.raises(ConfigError, match=words):
        small(**overrides)
