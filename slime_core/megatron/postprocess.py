"""`--rollout-data-postprocess-path`: an iteration's data as the user's function leaves it.

It is called once an iteration, when log-probs, values and advantages are there and before the first
optimizer step, on every rank with the data of the whole batch.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch, segment_sums
from slime_core.errors import PluginError
from slime_core.megatron import parallel
from slime_core.megatron.hooks import TOKEN_COLUMNS, row_facts, row_tensors
from slime_core.plugins.threads import bounded
from slime_core.plugins.trainer_hooks import TrainerHook, TrainerHooks

MASKS = "loss_masks"
_OTHERWISE = {
    "rewards": "advantages have been made of it: change advantages",
    "teacher_log_probs": "advantages have been made of it: change advantages",
    "log_probs": "these settings do not read it any more",
    "advantages": "these settings do not read it any more",
    "ref_log_probs": "these settings read it only with use_kl_loss",
    "rollout_log_probs": "these settings read it only with use_tis, use_rs, rs_veto_threshold or "
    "use_rollout_logprobs",
}


@dataclass(frozen=True)
class Postprocessed:
    """An iteration's data before its steps.

    Attributes:
        batch: with the loss masks, and the denominators that follow from them.
        columns: see signals.response_columns.
        changed: slime's name -> bool [sum R], where the function changed something; loss_masks is
            always there if a function was called.
        digest: sha256 of the changed columns, "" without a function.
    """

    batch: TrainBatch
    columns: dict[str, torch.Tensor]
    changed: dict[str, np.ndarray] = field(default_factory=dict)
    digest: str = ""

    def counts(self, rows: Sequence[int]) -> dict[str, float]:
        """Response tokens of some rows that were changed, for the metrics of their step."""
        chosen = np.isin(self.batch.response_rows, np.asarray(rows, dtype=np.int64))
        return {
            "postprocess_masked_tokens" if name == MASKS else f"postprocess_changed_{name}": float(
                (where & chosen).sum()
            )
            for name, where in self.changed.items()
        }


def postprocess(
    hooks: TrainerHooks,
    algorithm: AlgorithmSettings,
    data: Postprocessed,
    rollout_id: int,
    seed: int,
    limit_s: float,
) -> Postprocessed:
    """What the function makes of the data, as it is without one. A collective.

    Args:
        rollout_id: the iteration.
        seed: of Python's, numpy's and torch's generators during the call.
        limit_s: deadline of the function.

    Raises:
        PluginError: the same on all ranks; what the function did wrong on the first of them, or
            that ranks were given different data.
    """
    hook = hooks.postprocess
    if hook is None:
        return data
    found, error = data, ""
    try:
        found = changed_by(hook, hooks.args, algorithm, data, rollout_id, seed, limit_s)
    except PluginError as raised:
        error = str(raised)
    everyone = parallel.gather_objects((error, found.digest))
    for rank, (text, digest) in enumerate(everyone):
        if text:
            raise PluginError(text if len(everyone) == 1 else f"on rank {rank}, {text}")
        if digest != everyone[0][1]:
            raise PluginError(
                f"{hook.name} changed other data on rank {rank} than on rank 0: what it does may "
                "depend on its arguments alone (random, numpy.random and torch are seeded for it)"
            )
    return found


def changed_by(
    hook: TrainerHook,
    args: Any,
    algorithm: AlgorithmSettings,
    data: Postprocessed,
    rollout_id: int,
    seed: int,
    limit_s: float,
) -> Postprocessed:
    """Calls the function on copies and takes over what it may change.

    Raises:
        PluginError: it failed, or changed something else, or to values that cannot be trained.
    """
    shown = _shown(algorithm, data.columns)
    given, before = (_facts(data, shown) for _ in range(2))
    device = given[MASKS][0].device if given[MASKS] else torch.device("cpu")

    def call() -> Any:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.no_grad():
            return hook(args, rollout_id, given)

    with _seeded(seed):
        result = bounded(hook.name, call, limit_s, "half of stage_timeout_s")
    if result is not None and result is not given:
        raise PluginError(
            f"{hook.name} returned {type(result).__name__}, which nothing reads: it must change "
            "rollout_data itself"
        )
    may_change = [name for name in (MASKS, *shown) if _is_read(algorithm, name)]
    _check_others(hook, before, given, may_change)
    mask = _new_masks(hook, before, given)
    changed = {MASKS: mask != data.batch.loss_mask}
    columns, digest = dict(data.columns), hashlib.sha256(mask.tobytes())
    for name in may_change[1:]:
        ours = shown[name]
        rows = [row.to(device, columns[ours].dtype) for row in row_tensors(hook, given, name)]
        values = torch.cat(rows)
        where = _changes(hook, name, columns[ours], values, data.batch)
        if where.any():
            changed[name] = where
            columns[ours] = values
            digest.update(name.encode() + values.cpu().numpy().tobytes())
    if algorithm.use_rollout_logprobs:
        columns["old"] = columns["rollout"]
    return Postprocessed(_masked(data.batch, mask), columns, changed, digest.hexdigest())


def _shown(algorithm: AlgorithmSettings, columns: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """slime's name -> ours of each token column that the function sees."""
    names = {theirs: ours for ours, theirs in TOKEN_COLUMNS.items() if ours in columns}
    if algorithm.use_rollout_logprobs:  # `old` are the engine's, which have a name of their own
        names.pop("log_probs", None)
        names |= {"log_probs": "train"} if "train" in columns else {}
    return names


def _facts(data: Postprocessed, shown: Mapping[str, str]) -> dict[str, Any]:
    """rollout_data, which shares nothing with the batch or other calls."""
    batch = data.batch
    device = next((c.device for c in data.columns.values()), torch.device("cpu"))
    mask = torch.from_numpy(batch.loss_mask == 1).to(device)
    facts = copy.deepcopy(row_facts(batch, range(batch.num_rows), mask))
    for theirs, ours in shown.items():
        facts[theirs] = [row.clone() for row in data.columns[ours].split(facts["response_lengths"])]
    facts[MASKS] = [row.clone() for row in facts[MASKS]]
    return facts


def _is_read(algorithm: AlgorithmSettings, name: str) -> bool:
    """Whether the steps read what the function sees under a name."""
    own = algorithm.loss_type == "custom_loss"
    policy = own or algorithm.loss_type == "policy_loss"
    engine = algorithm.use_tis or algorithm.use_rs or algorithm.use_rollout_logprobs
    return {
        MASKS: True,
        "advantages": policy,
        "log_probs": policy
        and not algorithm.use_rollout_logprobs
        and not algorithm.true_on_policy_mode,
        "rollout_log_probs": own or engine or algorithm.rs_veto_threshold is not None,
        "ref_log_probs": own or algorithm.use_kl_loss,
        "values": True,
        "returns": True,
    }.get(name, False)


def _check_others(
    hook: TrainerHook,
    before: Mapping[str, Any],
    given: Mapping[str, Any],
    may_change: Sequence[str],
) -> None:
    """Raises PluginError where something was changed that no step reads, or that is fixed."""
    allowed = f"it may change {', '.join(may_change)}"
    for name in before:
        if name not in given:
            raise PluginError(f"{hook.name} removed rollout_data[{name!r}]: {allowed}")
        if name not in may_change and not _same(before[name], given[name]):
            why = _OTHERWISE.get(name, "it is fixed by now")
            raise PluginError(f"{hook.name} changed rollout_data[{name!r}], but {why} ({allowed})")
    for name in given:
        if name not in before:
            raise PluginError(
                f"{hook.name} added rollout_data[{name!r}], which nothing reads: {allowed}"
            )


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype:
            return False
        return torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) or one != one


def _new_masks(
    hook: TrainerHook, before: Mapping[str, Any], given: Mapping[str, Any]
) -> np.ndarray:
    """uint8 [sum R]."""
    rows = row_tensors(hook, given, MASKS)
    for place, (row, old) in enumerate(zip(rows, before[MASKS], strict=True)):
        if not ((row == 0) | (row == 1)).all():
            raise PluginError(f"{hook.name}: loss_masks of row {place} hold more than 0 and 1")
        if (row.to(old) > old).any():
            raise PluginError(
                f"{hook.name}: loss_masks of row {place} are 1 where they were 0: a token can be "
                "taken out of training, but not brought in, since its log-probs were not read"
            )
    return torch.cat([row.cpu() for row in rows]).numpy().astype(np.uint8)


def _changes(
    hook: TrainerHook, name: str, old: torch.Tensor, new: torch.Tensor, batch: TrainBatch
) -> np.ndarray:
    """bool [sum R]: where a column was changed. Raises PluginError where that is not finite."""
    where = (new != old) & ~(new.isnan() & old.isnan())
    bad = where & ~new.isfinite()
    if bad.any():
        place = int(bad.int().argmax())
        row = int(batch.response_rows[place])
        raise PluginError(
            f"{hook.name}: {name} of row {row} is {new[place].item()} at response token "
            f"{place - int(batch.response_offsets[row])}"
        )
    return where.cpu().numpy()


def _masked(batch: TrainBatch, mask: np.ndarray) -> TrainBatch:
    """The batch with other loss masks; each rollout is divided by the tokens it has left."""
    gone = segment_sums((batch.loss_mask - mask).astype(np.int64), batch.response_offsets)
    _, rollout = np.unique(batch.rollout_ids, return_inverse=True)
    left = batch.denominators - np.bincount(rollout, weights=gone)[rollout]
    return replace(batch, loss_mask=mask, denominators=left)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers that the function draws are the same on all ranks and in a replay."""
    python, others = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(others)
