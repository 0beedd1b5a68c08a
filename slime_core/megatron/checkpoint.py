"""torch_dist checkpoints of model, distributed optimizer and schedule, in any parallel layout.

Always with the distributed optimizer and the fully reshardable format, also on one rank: the two
kinds of optimizer cannot read each other's checkpoints. torch's AdamW keeps its step count per
parameter, where Megatron expects it per group, so loading goes in the steps below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.checkpoint_writer import StagedSave
from slime_core.megatron.chunks import load_states, sharded_states
from slime_core.megatron.host_memory import copy_threads
from slime_core.megatron.optimizer import TrainState, members
from slime_core.megatron.together import first_failure

FORMAT = "fully_reshardable"
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
# What configuration and layout decide anew at every start; the rest comes from the file.
_CONFIGURED = (
    "lr",
    "max_lr",
    "min_lr",
    "weight_decay",
    "start_wd",
    "end_wd",
    "betas",
    "eps",
    "is_expert_parallel",
)


def stage_state(
    state: TrainState, folder: Path, copied: bool, extra: dict[str, Any] | None = None
) -> StagedSave:
    """Stages model, optimizer and schedule for an empty folder. A collective.

    Args:
        copied: training may go on before the files are written.
        extra: plain values that `load_checkpoint` returns.
    """
    with copy_threads(_on_gpu(state)):
        content = _sharded(state, loading=False) | {"extra": extra or {}}
        return StagedSave(content, folder, copied=copied)


def load_checkpoint(state: TrainState, directory: str | Path) -> dict[str, Any]:
    """Restores a checkpoint, whatever the parallel layout it was written in. A collective.

    The folder must have been verified against its manifest: parts of the format are pickles.

    Returns:
        The extra values given when it was written.

    Raises:
        TrainerError: no checkpoint there.
    """
    with copy_threads(_on_gpu(state)):
        loaded = read_sharded(_sharded(state, loading=True), Path(directory))
        load_states(state.models, loaded)
        _load_optimizer(state.optimizer, loaded["optimizer"])
    state.scheduler.num_steps = 0  # load_state_dict adds to it
    state.scheduler.load_state_dict(loaded["scheduler"])
    return loaded["extra"]


def read_sharded(content: dict[str, Any], folder: Path) -> Any:
    """Reads what a StagedSave wrote, into the form of `content`. A collective.

    Raises:
        TrainerError: nothing there, or it does not fit.
    """
    if not (folder / "metadata.json").is_file():
        raise TrainerError(f"{folder} holds no finished checkpoint")
    try:
        return dist_checkpointing.load(content, str(folder))
    except (CheckpointingException, CheckpointException) as error:
        said = first_failure(error) if isinstance(error, CheckpointException) else str(error)
        raise TrainerError(
            f"checkpoint {folder} cannot be read: {said}; without it "
            "the run goes on from an older one, or trains its stored batches again"
        ) from error


def _on_gpu(state: TrainState) -> bool:
    return next(state.model.parameters()).is_cuda


def _sharded(state: TrainState, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": FORMAT,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel.replica_group(),
        # Layers usually stand stacked in one tensor, which must not have holes.
        "non_homogeneous_layers": state.model.partly_trained,
    }
    _fill_state(state.optimizer)
    model = sharded_states(state.models, metadata)
    return model | {
        "optimizer": state.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        ),
        "scheduler": state.scheduler.state_dict(),
    }


def _fill_state(optimizer: MegatronOptimizer) -> None:
    """Allocates AdamW's moments where no step was taken yet; Megatron reads their shapes."""
    for member in members(optimizer):
        if not _over_torch_adam(member):
            continue
        adam = member.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0, dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _over_torch_adam(member: MegatronOptimizer) -> bool:
    return isinstance(member, DistributedOptimizer) and isinstance(
        member.optimizer, (torch.optim.Adam, torch.optim.AdamW)
    )


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    """Where experts are spread over ranks, they have an optimizer of their own. Tensors come as
    this layout asked for them, and what is no tensor as that of the file has it."""
    own = members(optimizer)
    parts = [loaded, *(loaded[index] for index in sorted(k for k in loaded if isinstance(k, int)))]
    saved = [part for part in parts if "optimizer" in part]
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    for index, member in enumerate(own):
        plain = saved[min(index, len(saved) - 1)]
        part = {key: value for key, value in plain.items() if not isinstance(key, int)}
        part["optimizer"] = part["optimizer"] | {"param_groups": _matching_groups(member, groups)}
        if _over_torch_adam(member):
            asked = loaded if len(own) == 1 else loaded[index]
            part["param_state"] = asked["param_state"]
        _load_member(member, part)


@torch.no_grad()
def _load_member(member: Any, part: dict[str, Any]) -> None:
    if not _over_torch_adam(member):
        member.load_state_dict(part)
        return
    parameters = part.pop("param_state")
    part.pop("param_state_sharding_type", None)
    member.load_state_dict(part)  # hyper-parameters and the step count
    # The next call copies every key that the optimizer holds, but the file has no `step` per
    # parameter; and one tensor shared by all would be advanced once per parameter.
    adam_state = member.optimizer.state
    steps = {parameter: float(held.pop("step")) for parameter, held in adam_state.items()}
    member.load_parameter_state_from_fully_reshardable(parameters)
    for parameter, step in steps.items():
        adam_state[parameter]["step"] = torch.tensor(step, dtype=torch.float32)


def _matching_groups(
    member: MegatronOptimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved hyper-parameters of each of this optimizer's groups.

    Expert weights form a group of their own only where experts are spread over ranks, so the
    flag is left out of the comparison where nothing matches with it.
    """

    def key(group: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)

    without_flag = tuple(name for name in _GROUP_KEYS if name != "is_expert_parallel")
    found = []
    for group in member.optimizer.param_groups:
        for names in (_GROUP_KEYS, without_flag):
            fitting = [other for other in saved if key(other, names) == key(group, names)]
            if fitting:
                own = {name: group[name] for name in _CONFIGURED if name in group}
                found.append(fitting[0] | own)
                break
        else:
            raise TrainerError(
                "the checkpoint has no parameter group like "
                f"{dict(zip(_GROUP_KEYS, key(group, _GROUP_KEYS), strict=True))}"
            )
    return found
