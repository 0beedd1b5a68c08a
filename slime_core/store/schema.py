"""Schema v1: the columns of a stored sample.

One row is one sample. Columns with the name of a Sample field hold that field. A value that its
column cannot hold, and every attribute that is not a field, stands in `extra` instead, so that a
sample read back is the sample that was written. New columns of later versions are nullable and
unknown ones become attributes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 1
METADATA_KEY = b"slime"

TEXT = pa.large_utf8()
INT = pa.int64()
SPAN = pa.struct(
    [
        pa.field("start", INT, nullable=False),
        pa.field("length", INT, nullable=False),
        pa.field("weight_version", TEXT, nullable=False),
        pa.field("trainable", pa.bool_(), nullable=False),
    ]
)


def _list(of: pa.DataType) -> pa.DataType:
    """A list with 64-bit offsets, so that no column ends at 2^31 entries."""
    return pa.large_list(pa.field("item", of, nullable=False))


@dataclass(frozen=True)
class Column:
    """A column of the schema.

    Attributes:
        name: column name.
        type: Arrow type.
        how: `plain` (Arrow's own conversion), `list` (numbers per token), `json` (text of
            store.values) or `special` (built by the codec).
        plane: columns of a plane are kept or dropped together.
    """

    name: str
    type: pa.DataType
    how: str = "plain"
    plane: str = "core"


SAMPLE_COLUMNS: tuple[Column, ...] = (
    Column("group_index", INT),
    Column("index", INT),
    Column("rollout_id", INT),
    Column("attempt", INT),
    Column("prompt", TEXT, "special", "text"),
    Column("prompt_messages", TEXT, "special", "text"),
    Column("tokens", _list(pa.int32()), "list"),
    Column("multimodal_inputs", TEXT, "json", "media"),
    Column("multimodal_train_inputs", TEXT, "json", "media"),
    Column("multimodal_train_input_id", TEXT, "plain", "media"),
    Column("apply_chat_template_kwargs", TEXT, "json", "text"),
    Column("response", TEXT, "plain", "text"),
    Column("response_length", INT),
    Column("label", TEXT, "plain", "text"),
    Column("reward", pa.float64(), "special"),
    Column("reward_values", TEXT, "special"),
    Column("loss_mask", _list(pa.uint8()), "list"),
    Column("weight_versions", _list(TEXT)),
    Column("spans", _list(SPAN), "special"),
    Column("rollout_log_probs", _list(pa.float32()), "list", "logprobs"),
    Column("rollout_top_p_token_ids", _list(pa.int32()), "list", "logprobs"),
    Column("rollout_top_p_token_offsets", _list(INT), "list", "logprobs"),
    Column("rollout_routed_experts", pa.large_binary(), "special", "experts"),
    Column("rollout_routed_experts_shape", _list(INT), "special", "experts"),
    Column("rollout_routed_experts_type", TEXT, "special", "experts"),
    Column("teacher_log_probs", _list(pa.float32()), "list", "logprobs"),
    Column("remove_sample", pa.bool_()),
    Column("status", TEXT, "special"),
    Column("metadata", TEXT, "json", "text"),
    Column("generate_function_path", TEXT),
    Column("custom_rm_path", TEXT),
    Column("train_metadata", TEXT, "json"),
    Column("session_id", TEXT),
    Column("non_generation_time", pa.float64()),
    Column("spec_accept_token_num", INT, "special"),
    Column("spec_draft_token_num", INT, "special"),
    Column("spec_verify_ct", INT, "special"),
    Column("completion_token_num", INT, "special"),
    Column("cached_tokens", INT, "special"),
    Column("total_prompt_tokens", INT, "special"),
    Column("extra", TEXT, "special"),
)

DRAW_COLUMNS: tuple[Column, ...] = (
    Column("sample_position", INT, "special"),
    Column("segment", INT, "special"),
    Column("data_epoch", INT, "special"),
    Column("position", INT, "special"),
)
PART_COLUMNS: tuple[Column, ...] = (
    *DRAW_COLUMNS,
    Column("verdict", TEXT, "special"),
    Column("verdict_reason", TEXT, "special"),
    Column("grader_digest", TEXT, "special"),
)

# What was measured while a row was made, not what the row says: two honest executions of the same
# group differ here, so these columns stay out of its digest.
MEASURED = frozenset(
    {
        "session_id",
        "non_generation_time",
        "spec_accept_token_num",
        "spec_draft_token_num",
        "spec_verify_ct",
        "completion_token_num",
        "cached_tokens",
        "total_prompt_tokens",
    }
)


def _schema(columns: tuple[Column, ...]) -> pa.Schema:
    return pa.schema([pa.field(column.name, column.type) for column in columns])


SAMPLE_SCHEMA = _schema(SAMPLE_COLUMNS)
PART_SCHEMA = _schema((*SAMPLE_COLUMNS, *PART_COLUMNS))
DRAWS_SCHEMA = _schema((*SAMPLE_COLUMNS, *DRAW_COLUMNS, Column("source_state", TEXT)))
PLANES = {column.name: column.plane for column in (*SAMPLE_COLUMNS, *PART_COLUMNS)}
