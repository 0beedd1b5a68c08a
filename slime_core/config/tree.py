"""The configuration tree: frozen, typed, every field documented, names unique over the tree.

The classes of fields are explained in base.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slime_core.config import rules
from slime_core.config.algorithm import AlgorithmGroup
from slime_core.config.base import Group, Identity, Numeric, Operational
from slime_core.config.rollout import RewardsGroup, RolloutGroup
from slime_core.seeds import MOST_SEED
from slime_core.store.layout import MOST_NUMBER


class RunGroup(Group):
    """The run itself."""

    run_name: Identity[str] = "run"
    """Name of the training; the run id is made from it."""
    seed: Identity[int] = Field(default=1234, ge=0, le=MOST_SEED)
    """Seed of the run; every random choice derives from it by counters."""
    num_rollout: Numeric[int] = Field(ge=0, le=MOST_NUMBER)
    """Iterations to train. 0 only evaluates. Raising it continues a finished run."""
    workspace: Operational[str] = "runs"
    """Folder that holds runs, logs, the MLflow database and the Prefect database."""


class StoreGroup(Group):
    """Where draws, Sample batches, ledgers and checkpoints are committed."""

    store_url: Operational[str | None] = None
    """URL that holds all runs; default: the folder `store` in the workspace."""
    store_fsync: Operational[bool] = True
    """Flush each object to the disk before it counts as committed (local stores)."""
    lease_ttl_s: Operational[float] = Field(default=20.0, ge=1)
    """Seconds after which a silent owner of a run counts as gone."""
    store_pause_s: Operational[float] = Field(default=3600.0, ge=0)
    """Longest pause of a stage, in seconds, while the store is away (throttling, outage, expired
    credentials, full disk); 0 ends the run at once."""


class ClusterGroup(Group):
    """Processes and devices. Without GPUs, sizes mean processes."""

    ray_address: Operational[str | None] = None
    """Ray cluster that stands already: HOST:PORT, auto for the one on this machine, or local for a
    Ray of the run's own. Default RAY_ADDRESS, else local."""
    device: Operational[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device of trainer and engines; auto takes CUDA where torch finds a GPU."""
    actor_num_nodes: Operational[int] = Field(default=1, ge=1)
    """Nodes of the trainer."""
    actor_num_gpus_per_node: Operational[int] = Field(default=1, ge=1)
    """Trainer ranks per node."""
    rollout_num_gpus: Operational[int] = Field(default=1, ge=1)
    """GPUs (on CPU: processes) of all engines together."""
    rollout_num_gpus_per_engine: Operational[int] = Field(default=1, ge=1)
    """GPUs of one engine."""
    rollout_engine: Operational[Literal["auto", "embedded", "sglang"]] = "auto"
    """Generation server; auto takes SGLang on CUDA where its package is installed, else the
    embedded engine."""
    offload_train: Operational[bool] = False
    """Move what the trainer holds to host memory while engines generate, so that its GPU is free
    for them; it comes back for the next training."""
    threads_per_process: Operational[int] = Field(default=1, ge=1)
    """Compute threads of each trainer rank and engine on CPU."""


class DataGroup(Group):
    """Prompts."""

    multimodal_keys: Identity[dict[str, str] | None] = None
    """Keys of media by kind, such as {image: images}; prompts say <image> where one belongs."""
    data_source_path: Identity[str | None] = None
    """Import path of a class with get_samples(num_samples), made with (args) or (dataset, args), in
    place of our reader of prompts."""
    disable_rollout_global_dataset: Operational[bool] = False
    """Draw no prompts: rollout_function_path brings its own."""
    prompt_data: Identity[str | list[str] | None] = None
    """Prompts file (.jsonl or .parquet, also .gz or .zst; a path, http://, https:// or s3://), with
    an optional slice: path@[a:b]; several are read one after the other, or by their weights."""
    prompt_data_weights: Identity[list[float] | None] = None
    """How often each of several prompts files is drawn from, in relation to the others."""
    input_key: Identity[str] = "input"
    """Key of the prompt: a string or a list of messages."""
    label_key: Identity[str | None] = None
    """Key of the right answer, where the reward needs one."""
    metadata_key: Identity[str] = "metadata"
    """Key of a dict that travels with the sample."""
    tool_key: Identity[str | None] = "tools"
    """Key of the tool descriptions (JSON schemas) that a prompt offers the model."""
    apply_chat_template: Identity[bool] = False
    """Render prompts through the tokenizer's chat template."""
    apply_chat_template_kwargs: Identity[dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the chat template."""
    rollout_shuffle: Identity[bool] = False
    """Shuffle the prompts anew in each pass over the data."""
    rollout_max_prompt_len: Identity[int | None] = Field(default=None, ge=1)
    """Prompts of more tokens are left out (and counted); none without it."""
    max_bad_rows: Operational[int] = Field(default=0, ge=0)
    """Broken rows that may be skipped (they are counted) before the run stops."""

    @field_validator("prompt_data", mode="after")
    @classmethod
    def _one_file(
        cls, value: str | list[str] | None, info: ValidationInfo
    ) -> str | list[str] | None:
        """A list of one file is that file, as a flag gives it; without any, something else has to
        bring prompts."""
        others = info.data.get("data_source_path"), info.data.get("disable_rollout_global_dataset")
        if not value and not any(others):
            raise PydanticCustomError("missing", "no prompts")
        return value[0] if isinstance(value, list) and len(value) == 1 else value


class TrainGroup(Group):
    """Optimisation. Megatron's own options stand in `megatron`."""

    global_batch_size: Numeric[int | None] = Field(default=None, ge=1)
    """Samples of one optimizer step; follows from the rollout if num_steps_per_rollout is set."""
    num_steps_per_rollout: Numeric[int | None] = Field(default=None, ge=1)
    """Optimizer steps of one iteration; 1 if neither this nor global_batch_size is set."""
    micro_batch_size: Operational[int] = Field(default=1, ge=1)
    """Samples of a micro-batch without dynamic batching."""
    use_dynamic_batch_size: Operational[bool] = False
    """Pack micro-batches by tokens."""
    max_tokens_per_gpu: Operational[int | None] = Field(default=None, ge=1)
    """Most tokens of a dynamic micro-batch."""
    overlong_policy: Numeric[Literal["error", "truncate", "drop"]] = "error"
    """What becomes of a sequence longer than max_tokens_per_gpu: stop, cut its end off, or leave
    it untrained."""
    lr: Numeric[float] = Field(default=1e-6, ge=0)
    """Learning rate."""
    clip_grad: Numeric[float] = Field(default=1.0, ge=0)
    """Bound of the gradient norm; 0 does not clip."""
    only_train_params_name_list: Identity[list[str] | None] = None
    """Train only parameters whose Megatron name fits one of these patterns, such as mlp; layers
    are numbered over the whole model."""
    freeze_params_name_list: Identity[list[str] | None] = None
    """Leave parameters as they are whose Megatron name fits one of these patterns."""
    save_interval: Operational[int | None] = Field(default=None, ge=1)
    """Iterations between checkpoints, besides those that max_replay_s asks for."""
    max_replay_s: Operational[float] = Field(default=300.0, gt=0)
    """Training seconds that a resume may have to repeat before a checkpoint is written."""
    save_best_metric: Operational[str | None] = None
    """Also keep the checkpoint that is the best by this metric, such as eval/greedy."""
    save_best_lowest: Operational[bool] = False
    """The lowest value of save_best_metric is the best one."""
    async_save: Operational[bool] = False
    """Write a checkpoint's files while training goes on; the state is copied in memory first."""
    save_hf: Operational[str | None] = None
    """Folder for the weights in Hugging Face form, written with each checkpoint; `{rollout_id}` in
    it stands for the iteration."""
    skipped_steps_limit: Operational[int] = Field(default=3, ge=1)
    """Iterations in a row with a NaN or Inf step after which the run stops."""


class EvalGroup(Group):
    """Evaluation on held-out prompts."""

    eval_interval: Operational[int | None] = Field(default=None, ge=1)
    """Iterations between evaluations; none without it."""
    eval_prompt_data: Operational[list[str]] = Field(default_factory=list)
    """Pairs of name and prompts file."""
    eval_config: Operational[dict[str, Any] | str | None] = None
    """Datasets with their own settings (`defaults`, `datasets`), or the path of such a YAML."""
    eval_function_path: Operational[str | None] = None
    """Import path of a function like rollout_function_path for evaluations; default that one."""
    custom_eval_rollout_log_function_path: Operational[str | None] = None
    """Import path of `log(rollout_id, args, data, extra_metrics)`, which is told of each dataset's
    evaluation and changes nothing."""
    eval_input_key: Operational[str | None] = None
    """Key of the prompt; default input_key."""
    eval_label_key: Operational[str | None] = None
    """Key of the right answer; default label_key."""
    n_samples_per_eval_prompt: Operational[int] = Field(default=1, ge=1)
    """Samples of each prompt."""
    eval_temperature: Operational[float | None] = Field(default=None, ge=0)
    """Temperature; 0 is greedy. Default rollout_temperature."""
    eval_top_p: Operational[float | None] = Field(default=None, gt=0, le=1)
    """Nucleus; default rollout_top_p."""
    eval_top_k: Operational[int | None] = None
    """Top-k; default rollout_top_k."""
    eval_max_response_len: Operational[int | None] = Field(default=None, ge=1)
    """Most tokens of a response; default rollout_max_response_len."""
    eval_reward_key: Operational[str | None] = None
    """Which entry of a dict reward is the score; default reward_key."""
    skip_eval_before_train: Operational[bool] = False
    """Leave out the evaluation of the initial weights."""


class SyncGroup(Group):
    """Moving new weights into the engines."""

    update_weight_transport: Operational[Literal["disk", "tensor"]] = "disk"
    """disk writes safetensors that the engines load; tensor sends buckets over HTTP."""
    update_weight_buffer_size: Operational[int] = Field(default=512 * 2**20, ge=1)
    """Bytes of a bucket (tensor transport)."""
    custom_update_weight_post_write_path: Operational[str | None] = None
    """Import path of `hook(args, version_dir, rollout_engines)`, called when a version's folder is
    written and no engine has loaded it (disk transport)."""
    canary_tolerance: Operational[float | None] = Field(default=None, gt=0)
    """Largest difference of trainer and engine log-probs on the canary tokens; default 1e-5 in
    fp32 (0.05 where SGLang serves, whose attention is tf32) and 0.3 in bf16."""


class TrackingGroup(Group):
    """Metrics."""

    use_mlflow: Operational[bool] = True
    """Send metrics to MLflow (JSONL is always written)."""
    mlflow_tracking_uri: Operational[str | None] = None
    """MLflow server or database; default MLFLOW_TRACKING_URI, else a database in the workspace."""
    mlflow_experiment_name: Operational[str | None] = None
    """Experiment; default MLFLOW_EXPERIMENT_NAME, else slime-flow."""
    mlflow_system_metrics: Operational[bool] = False
    """Send the load of the machine to MLflow every ten seconds."""
    mlflow_log_final_weights: Operational[bool] = False
    """Log the final weights to MLflow as a Hugging Face folder (artifact `weights`)."""
    ui_log_lines_per_s: Operational[float] = Field(default=20.0, ge=0)
    """Lines a second that the logs of trainer, rollout worker and engines may add to the run's log
    in Prefect; 0 adds none."""
    ui_keep_iterations: Operational[int | None] = Field(default=200, ge=50)
    """Newest iterations of the run that Prefect's pages keep; none keeps all."""
    ui_prune_other_servers: Operational[bool] = False
    """Delete older iterations also from a Prefect server that the workspace did not start."""


class FaultToleranceGroup(Group):
    """Deadlines and repair budgets."""

    start_timeout_s: Operational[float] = Field(default=300.0, gt=0)
    """Deadline for an engine or trainer to come up."""
    request_timeout_s: Operational[float] = Field(default=600.0, gt=0)
    """Deadline of one generation request."""
    stage_timeout_s: Operational[float] = Field(default=3600.0, gt=0)
    """Deadline of one stage of an iteration."""
    stall_timeout_s: Operational[float] = Field(default=1800.0, gt=0)
    """Seconds without a finished iteration after which Prefect gets an event; the run goes on."""
    sync_timeout_s: Operational[float] = Field(default=300.0, gt=0)
    """Deadline of one weight sync."""
    engine_restarts: Operational[int] = Field(default=3, ge=0)
    """Restarts of one engine, or of the rollout worker, that a stage may spend."""
    orphan_timeout_s: Operational[float] = Field(default=60.0, ge=2)
    """Seconds without a sign of life of the command after which a run's processes on a Ray cluster
    that stands already are ended there."""
    max_group_attempts: Operational[int] = Field(default=3, ge=1)
    """Attempts at a group before it is dropped with its reason."""


class DebugGroup(Group):
    """For people who look into a run."""

    log_level: Operational[Literal["DEBUG", "INFO", "WARNING", "ERROR"]] = "INFO"
    """Level of the log files in the workspace."""
    save_debug_rollout_data: Operational[str | None] = None
    """File for the samples of each iteration as slime dumps them; `{rollout_id}` stands for its
    number."""
    load_debug_rollout_data: Operational[str | None] = None
    """Such files: train on their samples instead of generating."""
    debug_rollout_only: Identity[bool] = False
    """Generate, grade and store samples with the weights of hf_checkpoint, without a trainer."""
    debug_train_only: Operational[bool] = False
    """Train on samples that need no engine (load_debug_rollout_data, sft_loss); none is started and
    nothing is evaluated."""


class RunConfig(Group):
    """Everything a run needs. The same tree stands behind flags, YAML and the Prefect form."""

    run: RunGroup
    data: DataGroup
    rollout: RolloutGroup
    rewards: RewardsGroup = RewardsGroup()
    algorithm: AlgorithmGroup = AlgorithmGroup()
    train: TrainGroup = TrainGroup()
    eval: EvalGroup = EvalGroup()
    store: StoreGroup = StoreGroup()
    cluster: ClusterGroup = ClusterGroup()
    sync: SyncGroup = SyncGroup()
    tracking: TrackingGroup = TrackingGroup()
    fault_tolerance: FaultToleranceGroup = FaultToleranceGroup()
    debug: DebugGroup = DebugGroup()
    megatron: Annotated[dict[str, Any], "numeric"] = Field(default_factory=dict)
    """Megatron's options under their own names."""
    sglang: Annotated[dict[str, Any], "operational"] = Field(default_factory=dict)
    """SGLang's server options under their own names."""

    @model_validator(mode="after")
    def _cross_field_rules(self) -> RunConfig:
        rules.validate(self)
        return self

    @property
    def num_steps(self) -> int:
        """Optimizer steps of one iteration."""
        samples = self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        if self.train.num_steps_per_rollout is not None:
            return self.train.num_steps_per_rollout
        if self.train.global_batch_size is not None:
            return samples // self.train.global_batch_size
        return 1
