"""A suggestion is made only where it is likely to be right."""

import pytest

from slime_core.near import nearest


@pytest.mark.parametrize(
    ("name", "known", "close"),
    [
        ("rollout_batchsize", ["rollout_batch_size", "rollout_seed"], "rollout_batch_size"),
        ("trian", ["train", "runs", "gc"], "train"),
        ("lrr", ["lr", "clip_grad"], "lr"),
        ("rollout-batch", ["rollout-batch-size", "rollout-seed"], "rollout-batch-size"),
        ("rollout", ["rollout-batch-size", "rollout-seed"], None),
        ("gpt2", ["qwen2", "llama"], None),
        ("foo", ["fork", "lr"], None),
        ("exit", ["export", "verify"], None),
        ("", ["a"], None),
    ],
)
def test_the_nearest_name_is_near_or_none(name, known, close):
    assert nearest(name, known) == close
