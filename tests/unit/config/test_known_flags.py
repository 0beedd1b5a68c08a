"""The table of slime's flags is whole, says what is true, and names tests that exist."""

import ast
import csv
from functools import cache
from pathlib import Path

import pytest

from slime_core.config.fields import OPEN_GROUPS, field_groups
from slime_core.config.known_flags import COLUMNS, TAKEN, known_flags, table, why_not
from slime_core.doors.options import SWITCHES

ROOT = Path(__file__).parents[3]
ROWS = list(known_flags().values())
REFUSABLE = ("train_backend", "qwen_gdn_backend", "megatron_deepgemm_", "allgather_cp",
             "freeze_indexer", "rollout_buffer_url", "fetch_trajectory_retry_times",
             "rollout_task_type", "http_proxy", "min_batch_collection_ratio",
             "log_probs_max_tokens_per_gpu")  # fmt: skip


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_field_stands_in_the_table_and_every_field_of_the_table_in_the_tree():
    own = {row.name for row in ROWS if row.status == "works" and row.name == row.field}
    missing = set(field_groups()) - own
    assert not missing, f"add to slime_core/config/known_flags.csv: works rows for {missing}"
    assert own == set(field_groups()) | set(OPEN_GROUPS)
    assert {row.field for row in ROWS if row.field} == own


@pytest.mark.parametrize("row", [row for row in ROWS if row.status in TAKEN],
                         ids=lambda row: row.name)  # fmt: skip
def test_what_works_names_a_test_that_exists(row):
    path, _, name = row.where.partition("::")
    assert name.startswith("test_") and name in names_in(path), row.where


def test_what_does_not_work_says_what_it_waits_for_or_why():
    for row in ROWS:
        assert row.status in ("works", "no effect", "later", "refused")
        if row.status not in TAKEN:
            assert row.where and not row.field, row
            assert row.where in (why_not(row.name) or ""), row
        else:
            assert why_not(row.name) is None


def test_only_what_may_be_refused_is():
    for row in ROWS:
        if row.status == "refused" and not row.where.startswith("loads pre-training data"):
            assert row.name.startswith(REFUSABLE), row


def test_flags_of_megatron_and_sglang_that_slimes_own_scripts_carry_stand_in_the_table():
    carried = ("bf16", "swiglu", "normalization", "rotary_base", "rotary_percent", "tokenizer_type",
               "no_position_embedding", "untie_embeddings_and_output_weights", "seq_length",
               "sglang_mem_fraction_static", "sglang_context_length", "sglang_log_level",
               "sglang_disable_cuda_graph", "sglang_attention_backend", "sglang_tp_size",
               "sglang_enable_deterministic_inference")  # fmt: skip
    assert not set(carried) - set(known_flags())


def test_the_published_table_is_made_from_this_one():
    with (ROOT / "docs" / "flags.csv").open(encoding="utf-8", newline="") as file:
        published = [tuple(row) for row in csv.reader(file)]
    again = "python -m slime_core.config.known_flags > docs/flags.csv"
    assert published == [COLUMNS, *table()], f"made anew by: {again}"


def test_what_works_without_a_field_is_what_happens_anyway():
    always = {row.name for row in ROWS if row.status == "works" and not row.field}
    assert always == set(SWITCHES)
