"""`slime check` shows what a run would be, quickly and without torch."""

import json
import subprocess
import sys

import pytest

from flows.cli.main import main
from slime_core.check.data import Keys, scan
from slime_core.check.model import parameters
from slime_core.check.tokenizer import CheckTokenizer
from slime_core.data.sources import SourceSettings
from slime_core.weights.tables import read_shape
from tests.unit.check.model_folders import MODEL, QUICKSTART, TRAIN, large_model


def report(capsys, *arguments) -> dict:
    assert main(["check", str(QUICKSTART), "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_of_the_quickstart(capsys, tmp_path):
    found = report(capsys, "--workspace", tmp_path / "w", "--device", "cpu")
    assert found["problems"] == found["notes"] == []
    assert found["data"]["rows"] == 4096 and found["data"]["first_prompt"] == "9770="
    assert found["data"]["first_prompt_tokens"] == found["data"]["longest_prompt_tokens"] == 5
    assert found["model"]["parameters"] == 212_928
    assert found["rewards"] == {"exact_match": "needs a label"}
    plan = found["plan"]
    assert (plan["engine"], plan["engines"], plan["trainer_ranks"]) == ("embedded", 1, 1)
    assert (plan["samples_an_iteration"], plan["optimizer_steps"]) == (128, 60)
    assert plan["response_tokens_an_iteration_at_most"] == 128 * 6
    assert plan["evaluations"] == 7
    assert plan["trainer_bytes"] == plan["trainer_bytes_a_rank"] == 212_928 * 16
    assert plan["log_prob_bytes_a_rank"] == 5 * 4 * 100 * 2048, "logits of a micro-batch"
    assert plan["kv_cache_bytes_at_most"] == 128 * 256 * plan["kv_cache_bytes_a_token"]
    assert not (tmp_path / "w").exists()


def test_memory_is_told_by_rank(capsys, tmp_path):
    """Two replicas of a model on two ranks each: halves of it, and quarters of Adam's moments."""
    four = ("--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 2, "--device", "cpu",
            "--rollout-max-prompt-len", 5)  # fmt: skip
    plan = report(capsys, "--workspace", tmp_path / "w", *four)["plan"]
    assert plan["trainer_bytes"] == 212_928 * 16
    assert plan["trainer_bytes_a_rank"] == 212_928 * (8 // 2 + 8 // 4)
    assert plan["log_prob_bytes_a_rank"] == 5 * 4 * (100 // 2) * 2048
    assert plan["kv_cache_bytes_at_most"] == 128 * (5 + 6) * plan["kv_cache_bytes_a_token"]


def test_a_context_parallel_rank_is_planned_for_all_tokens_that_it_holds(capsys, tmp_path):
    """A pack then has max_tokens_per_gpu tokens for each of them."""

    def peak(ranks, *more):
        given = ("--actor-num-gpus-per-node", ranks, "--device", "cpu", *more)
        return report(capsys, "--workspace", tmp_path / "w", *given)["plan"][
            "policy_peak_bytes_a_rank"]  # fmt: skip

    shared = peak(2)  # data-parallel ranks hold the same states
    assert peak(2, "--context-parallel-size", 2) >= shared


def test_samples_without_others_to_compare_with_are_noted(capsys, tmp_path):
    alone = ("--workspace", tmp_path / "w", "--n-samples-per-prompt", 1)
    (note,) = report(capsys, *alone)["notes"]
    assert "n_samples_per_prompt 1: grpo compares" in note and "advantage 0" in note
    plus = ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages")
    for fine in (plus, ("--disable-rewards-normalization",), ("--loss-type", "sft_loss")):
        assert report(capsys, *alone, *fine)["notes"] == []


def test_blocks_are_not_looked_at_and_the_report_says_so(capsys, tmp_path):
    found = report(capsys, "--store-url", "block:nowhere", "--workspace", tmp_path)
    [note] = [text for text in found["notes"] if "block" in text]
    assert note.startswith("not looked at") and "store_url block:nowhere" in note


def test_the_report_for_people_ends_with_the_verdict(capsys, tmp_path):
    assert main(["check", str(QUICKSTART), "--workspace", str(tmp_path / "w")]) == 0
    shown = capsys.readouterr().out
    assert "'9770='" in shown and "212,928" in shown
    assert shown.strip().splitlines()[-1].startswith("ready to train")
    assert main(["check", str(QUICKSTART), "--rm-type", "mth"]) == 2
    assert "unknown --rm-type 'mth'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "limit", [("--rollout-max-context-len", 100), ("--rollout-max-prompt-len", 5)]
)
def test_prompts_and_responses_count_up_to_their_own_limits(capsys, tmp_path, limit):
    """Both are cut or left out before they reach the model's context of 256 tokens."""
    rows = [{"input": text, "label": "1"} for text in ("9770=", "97709770=")]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lengths = ("--prompt-data", tmp_path / "p.jsonl", "--rollout-max-response-len", 250)
    assert main(["check", str(QUICKSTART), *map(str, lengths)]) == 2
    assert "p.jsonl, row 2) = 259 tokens" in capsys.readouterr().out
    assert report(capsys, *lengths, *limit)["problems"] == []


def test_what_needs_sglang_is_said_once(capsys, tmp_path):
    found = report(
        capsys, "--sglang-mem-fraction-static", 0.5, "--sglang-random-seed", 3, "--device", "cpu"
    )
    assert found["notes"] == [
        "needs SGLang, so the embedded engine ignores it: --sglang-mem-fraction-static"
    ]


def test_a_model_of_4b_parameters_is_looked_at_in_seconds_without_torch(tmp_path):
    folder = large_model(tmp_path / "4b")
    assert parameters(read_shape(folder)) == 4_022_468_096
    code = (
        "import sys\nfrom flows.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'ray', 'megatron', 'mlflow', 'prefect', 'sglang'}\n"
        "print(status, sorted(heavy & set(sys.modules)))\n"
    )
    arguments = [
        "check", str(QUICKSTART), "--hf-checkpoint", str(folder), "--json",
        "--workspace", str(tmp_path / "w"), "--megatron", '{"num_layers": 36}',
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    shown, _, last = done.stdout.strip().rpartition("\n")
    assert last == "0 []", done.stdout + done.stderr
    assert json.loads(shown)["plan"]["parameters"] == 4_022_468_096


def test_the_tokenizer_of_the_check_gives_the_tokens_and_texts_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    ours = CheckTokenizer(MODEL)
    messages = [{"role": "user", "content": "5281="}, {"role": "assistant", "content": "1258"}]
    for text in ("5281=", "12", "="):
        assert ours.encode(text) == list(theirs.encode(text, add_special_tokens=False))
    kwargs = {"tokenize": False, "add_generation_prompt": True, "tools": None}
    assert ours.apply_chat_template(messages, **kwargs) == theirs.apply_chat_template(
        messages, **kwargs
    )
    assert ours.size == len(theirs)


def test_a_large_file_is_read_for_its_time_only():
    settings = SourceSettings(label_key="label")
    found = scan(str(TRAIN), settings, Keys("prompt_data", "input_key", "label_key"), 0.0)
    assert not found.complete and found.rows == 64


def test_messages_are_fine_where_a_generate_function_takes_them(capsys, tmp_path):
    (tmp_path / "g.py").write_text("async def generate(args, sample, sampling_params): ...\n")
    row = {"input": [{"role": "user", "content": "12="}], "label": "12"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    found = report(
        capsys, "--prompt-data", tmp_path / "p.jsonl", "--workspace", tmp_path / "w",
        "--custom-generate-function-path", tmp_path / "g.py", "--tool-paths", "calculator",
    )  # fmt: skip
    assert found["problems"] == [] and found["data"]["first_prompt"] == "12="
    assert found["rollout"] == {str(tmp_path / "g.py"): "async def, called for each sample"}
