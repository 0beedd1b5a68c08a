"""A function in place of the built-in conversion: what it gave is sealed in the batch."""

import asyncio
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from slime_core.errors import ConfigError, PluginError
from slime_core.refs import Ref
from slime_core.stages.pack import pack
from slime_core.stages.regroup import regrouped
from slime_core.store import layout
from slime_core.store.batch import read_batch
from slime_core.store.documents import read_document
from slime_core.store.load import load_train_batch
from tests.unit.config.trees import small
from tests.unit.stages.test_pack import lab, packed, rows
from tests.unit.store.builders import finished_sample, group_rows

FUNCTION = '''
import numpy as np

def columns(samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [float(s.index) for s in samples],
        "loss_masks": [s.loss_mask for s in samples],
        "sample_indices": [s.index for s in samples],
    }

def plain(args, samples):
    return columns(samples)

def convert(args, samples):
    """Leaves sample 1 out, trains only the last token of sample 3, tags sample 4."""
    samples = [s for s in reversed(samples) if s.index != 1]
    found = columns(samples)
    found["raw_reward"] = [10.0 + s.index for s in samples]
    found["metadata"] = [{"tag": args.seed} if s.index == 4 else None for s in samples]
    found["truncated"] = [int(s.index == 5) for s in samples]
    for s, mask in zip(samples, found["loss_masks"]):
        if s.index == 3:
            mask[:] = [0] * (len(mask) - 1) + [1]
        s.tokens, s.reward = [0], 99.0
    return found

def of_filtered(args, samples):
    assert [s.remove_sample for s in samples] == [s.index in (0, 1, 4, 5) for s in samples]
    return columns([s for s in samples if s.index != 2])

def wrong_mask(args, samples):
    found = columns(samples)
    found["loss_masks"][2] = [3] * len(found["loss_masks"][2])
    return found

def wrong_sums(args, samples):
    return columns(samples) | {"rollout_mask_sums": [np.array([1, 2])] * len(samples)}

def too_large(args, samples):
    return columns(samples) | {"rewards": [-1e300] * len(samples)}

async def awaited(args, samples):
    return columns(samples)

def no_store(args, samples):
    return columns(samples) | {"metadata": [{"a": print}] * len(samples)}

def remove(args, groups):
    for group in groups:
        group[0].remove_sample = group[1].remove_sample = True
'''
NAME = "custom_convert_samples_to_train_data_path"


def function(folder: Path, name: str) -> dict[str, str]:
    (folder / "own.py").write_text(FUNCTION)
    return {NAME: f"{folder / 'own.py'}:{name}"}


def test_what_the_function_gave_is_trained_and_not_asked_for_again(tmp_path):
    ctx = lab(tmp_path, **function(tmp_path, "convert"))
    content = packed(ctx, [group_rows(0), group_rows(1)])
    assert content.rewards == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert content.raw_rewards == [10.0, 1.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    assert content.removed == (1,)
    lengths = [finished_sample(g, i).response_length for g in (0, 1) for i in range(4)]
    expected = [lengths[0], 0, lengths[2], 1, *lengths[4:]]
    assert content.denominators == expected
    told = {name: content.metrics[f"rollout/{name}"] for name in
            ("samples/left_out", "samples/other_mask", "samples/removed", "rewards",
             "trained_tokens")}  # fmt: skip
    assert told == {"samples/left_out": 1.0, "samples/other_mask": 1.0, "samples/removed": 1.0,
                    "rewards": 27 / 7, "trained_tokens": sum(expected)}  # fmt: skip
    source = hashlib.sha256((tmp_path / "own.py").read_bytes()).hexdigest()
    by = read_document(ctx.backend, layout.batch(0)).by
    assert by["converted_by"] == {f"{tmp_path / 'own.py'}:convert": source}

    (tmp_path / "own.py").unlink()
    assert asyncio.run(pack(ctx, Ref("", "scores", 0))).from_store
    stored = read_batch(ctx.backend, 0)
    assert stored is not None and stored.content == content
    batch = load_train_batch(ctx.backend, stored)
    assert batch.mask_sums.tolist() == expected
    assert batch.loss_mask[batch.row_response(3)].tolist() == [0] * (lengths[3] - 1) + [1]
    assert batch.rewards.tolist() == content.rewards
    assert batch.truncated.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert batch.metadata == (*[None] * 4, {"tag": ctx.config.run.seed}, *[None] * 3)
    assert batch.row_tokens(7).tolist() == finished_sample(1, 3).tokens


def test_a_batch_that_is_as_stored_holds_no_changes_of_rows(tmp_path):
    content = packed(
        lab(tmp_path, "a", **function(tmp_path, "plain")), [group_rows(0), group_rows(1)]
    )
    bare = packed(lab(tmp_path, "b"), [group_rows(0), group_rows(1)])
    assert content.rewards == [float(i) for i in range(8)]
    assert (content.removed, content.denominators, content.raw_rewards, content.steps) == (
        (), bare.denominators, bare.raw_rewards, bare.steps,
    )  # fmt: skip
    assert content.converted is not None and not content.converted.masks
    assert bare.converted is None


def test_a_batch_without_such_a_function_is_written_as_before(tmp_path):
    ctx = lab(tmp_path)
    packed(ctx, [group_rows(0), group_rows(1)])
    document = read_document(ctx.backend, layout.batch(0))
    assert "converted" not in document.body and "converted_by" not in document.by


def test_rows_that_a_filter_removed_stay_out(tmp_path):
    ctx = lab(tmp_path, **function(tmp_path, "of_filtered"),
              rollout_sample_filter_path=f"{tmp_path / 'own.py'}:remove")  # fmt: skip
    content = packed(ctx, [group_rows(0), group_rows(1)])
    assert content.removed == (0, 1, 2, 4, 5)
    assert content.metrics["rollout/samples/left_out"] == 1.0
    stored = read_batch(ctx.backend, 0)
    assert stored is not None
    sums = load_train_batch(ctx.backend, stored).mask_sums
    assert np.flatnonzero(sums).tolist() == [3, 6, 7]


@pytest.mark.parametrize(
    ("name", "message"),
    [("wrong_mask", r"own\.py:wrong_mask: loss_masks of row 2 \(sample 2\) must hold 0 and 1"),
     ("wrong_sums", r"rollout_mask_sums of row 0 is array\(\[1, 2\]\), but the masks"),
     ("too_large", r"rewards of row 0 \(sample 0\) is -1e\+300, more than the trainer's float32"),
     ("awaited", "awaited must be a plain `def`: nothing awaits it"),
     ("columns", "does not fit: it is called as"),
     ("no_store", "metadata that the convert function gave for row 0")],
)  # fmt: skip
def test_what_it_returns_is_checked(tmp_path, name, message):
    with pytest.raises(Exception, match=message) as caught:
        packed(lab(tmp_path, **function(tmp_path, name)), [group_rows(0), group_rows(1)])
    assert caught.value.__class__.__module__ == PluginError.__module__


def test_its_rewards_cannot_be_made_again(tmp_path):
    ctx = lab(tmp_path, **function(tmp_path, "convert"))
    content = packed(ctx, [rows(0, 1.0, 2.0, 3.0, 4.0), rows(1, 1.0, 2.0, 3.0, 4.0)])
    for config in (ctx.config, lab(tmp_path, "b").config):
        with pytest.raises(ConfigError, match="made by a function \\(custom_convert_samples"):
            regrouped(ctx.cache, content, config)


@pytest.mark.parametrize(
    "other", [{"custom_reward_post_process_path": "a.b"}, {"reward_shaping": "cosine"}]
)
def test_nothing_else_makes_rewards_beside_it(other):
    with pytest.raises(ConfigError, match=f"{next(iter(other))} would have no effect"):
        small(**{NAME: "a.c"}, **other)


def test_the_stored_batch_is_plain_json(tmp_path):
    ctx = lab(tmp_path, **function(tmp_path, "convert"))
    packed(ctx, [group_rows(0), group_rows(1)])
    body = json.loads(ctx.backend.get(layout.batch(0)))["body"]
    length = finished_sample(0, 3).response_length
    assert body["converted"]["masks"] == {"3": [[length - 1, 1]]}
    assert body["converted"]["truncated"] == {"5": 1}
