"""Functions of the user's that the trainer calls, each under the flag that names it.

Their parameters are slime's, so functions written for it fit. Whatever is "per row" is a list with
one entry a sample; columns of tokens hold all response tokens, trained or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.args_view import ArgsView
from slime_core.plugins.load import accepts, check_signature, load, source_digest
from slime_core.plugins.user_code import no_exit, raised

LOSS = "custom_loss_function_path"
ADVANTAGE = "custom_advantage_function_path"
TIS = "custom_tis_function_path"
REDUCER = "custom_pg_loss_reducer_function_path"
POSTPROCESS = "rollout_data_postprocess_path"
INIT = "custom_megatron_init_path"
BEFORE_LOG_PROB = "custom_megatron_before_log_prob_hook_path"
BEFORE_STEP = "custom_megatron_before_train_step_hook_path"
CALLS: dict[str, tuple[str, ...]] = {
    LOSS: ("args", "batch", "logits", "sum_of_sample_mean"),
    ADVANTAGE: ("args", "rollout_data"),
    TIS: (
        *("args=", "pg_loss=", "train_log_probs=", "rollout_log_probs=", "loss_masks="),
        *("total_lengths=", "response_lengths="),
    ),
    REDUCER: ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
    POSTPROCESS: ("args", "rollout_id", "rollout_data"),
    INIT: ("args",),
    BEFORE_LOG_PROB: ("args", "model", "store_prefix"),
    BEFORE_STEP: ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
}
ROLES = {
    LOSS: "loss",
    ADVANTAGE: "advantage",
    TIS: "tis",
    REDUCER: "reducer",
    POSTPROCESS: "postprocess",
    INIT: "init",
    BEFORE_LOG_PROB: "before_log_prob",
    BEFORE_STEP: "before_step",
}
"""The field of TrainerHooks for each flag."""
WITH_MODEL = (INIT, BEFORE_LOG_PROB, BEFORE_STEP)
"""They get Megatron's own objects, so they are called by a real trainer only."""


@dataclass(frozen=True)
class TrainerHook:
    """A loaded function.

    Attributes:
        name: flag and import path, for messages.
        takes_metadata: it has a parameter `metadata`, which is then passed by keyword.
        digest: of the file that defines it.
    """

    name: str
    function: Any
    takes_metadata: bool
    digest: str = ""

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Calls the function.

        Raises:
            PluginError: it raised.
        """
        try:
            with no_exit(self.name):
                return self.function(*positional, **keywords)
        except SlimeError:
            raise
        except Exception as error:
            raise PluginError(f"{self.name} raised {raised(error)}") from error


@dataclass(frozen=True)
class TrainerHooks:
    """The functions a trainer calls, None where the built-in way is taken.

    Attributes:
        args: the configuration as plug-ins see it.
    """

    args: ArgsView | None = None
    loss: TrainerHook | None = None
    advantage: TrainerHook | None = None
    tis: TrainerHook | None = None
    reducer: TrainerHook | None = None
    postprocess: TrainerHook | None = None
    init: TrainerHook | None = None
    before_log_prob: TrainerHook | None = None
    before_step: TrainerHook | None = None

    def started(self) -> None:
        """The ranks have met; there is no model yet."""
        if self.init is not None:
            self.init(self.args)

    def reads_log_probs(self, model: Sequence[Any], prefix: str) -> None:
        """Log-probs are read next.

        Args:
            model: the chunks of this rank.
            prefix: whose: "" (the policy), "ref_", "teacher_" or "old_actor_".
        """
        if self.before_log_prob is not None:
            self.before_log_prob(self.args, model, prefix)

    def begins_step(self, rollout_id: int, step_id: int, state: Any) -> None:
        """A step's gradients are computed next.

        Args:
            rollout_id, step_id: the iteration, and the step in it.
            state: a TrainState of megatron/optimizer.py.
        """
        if self.before_step is not None:
            parts = (state.chunks, state.optimizer, state.scheduler)
            self.before_step(self.args, rollout_id, step_id, *parts)

    @property
    def digests(self) -> dict[str, str]:
        """Flag and import path -> digest of the source, of all that are set."""
        found = (getattr(self, role) for role in ROLES.values())
        return {hook.name: hook.digest for hook in found if hook is not None}

    @property
    def read_all_tokens(self) -> bool:
        """Some function looks at the response tokens of a micro-batch, trained or not."""
        return any((self.loss, self.tis, self.reducer))


def load_trainer_hook(flag: str, path: str) -> TrainerHook:
    """Loads the function of one flag.

    Raises:
        PluginError: it does not exist or its parameters do not fit.
    """
    function = load(path)
    metadata = accepts(function, "metadata") if callable(function) else False
    extra = ("metadata=",) if metadata else ()
    check_signature(function, path, (*CALLS[flag], *extra), must_be_plain=True)
    return TrainerHook(f"{flag} {path}", function, metadata, source_digest(function))


def load_trainer_hooks(algorithm: AlgorithmSettings, args: ArgsView | None) -> TrainerHooks:
    """Loads all functions that the settings name.

    Raises:
        PluginError: one does not exist or does not fit.
    """
    found = {}
    for flag, role in ROLES.items():
        path = getattr(algorithm, flag)
        if path is not None:
            found[role] = load_trainer_hook(flag, path)
    return TrainerHooks(args, **found)
