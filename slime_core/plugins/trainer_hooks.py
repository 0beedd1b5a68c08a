"""Functions of the user's that the trainer calls, each under the flag that names it.

Their parameters are slime's, so functions written for it fit. Whatever is "per row" is a list with
one entry a sample; columns of tokens hold all response tokens, trained or not.
"""

from __future__ import annotations

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
CALLS: dict[str, tuple[str, ...]] = {
    LOSS: ("args", "batch", "logits", "sum_of_sample_mean"),
    ADVANTAGE: ("args", "rollout_data"),
    TIS: (
        *("args=", "pg_loss=", "train_log_probs=", "rollout_log_probs=", "loss_masks="),
        *("total_lengths=", "response_lengths="),
    ),
    REDUCER: ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
}


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

    @property
    def digests(self) -> dict[str, str]:
        """Flag and import path -> digest of the source, of all that are set."""
        found = (self.loss, self.advantage, self.tis, self.reducer)
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
    check_signature(function, path, (*CALLS[flag], *extra))
    return TrainerHook(f"{flag} {path}", function, metadata, source_digest(function))


def load_trainer_hooks(algorithm: AlgorithmSettings, args: ArgsView | None) -> TrainerHooks:
    """Loads all functions that the settings name.

    Raises:
        PluginError: one does not exist or does not fit.
    """
    found = {}
    for flag, role in (
        (LOSS, "loss"),
        (ADVANTAGE, "advantage"),
        (TIS, "tis"),
        (REDUCER, "reducer"),
    ):
        path = getattr(algorithm, flag)
        if path is not None:
            found[role] = load_trainer_hook(flag, path)
    return TrainerHooks(args, **found)
