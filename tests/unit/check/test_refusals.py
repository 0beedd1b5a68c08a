"""What cannot work is refused before anything starts: one sentence each, status 2, no traces."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yaml import safe_load

import flows.launch
from flows.cli.main import main
from tests.unit.check.model_folders import MODEL, QUICKSTART, TRAIN, copy_of_the_model

Arguments = list[Any]
GOOD = {"input": "5281=", "label": "1258"}


def prompts(folder: Path, *rows: object, name: str = "p.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def plugin(folder: Path, text: str) -> Path:
    path = folder / "grade.py"
    path.write_text(text)
    return path


def config_file(folder: Path, text: str) -> Arguments:
    path = folder / "run.yaml"
    path.write_text(f"extends: {QUICKSTART}\n{text}")
    return [path]


def data(*rows: object) -> Callable[[Path], Arguments]:
    return lambda folder: [QUICKSTART, "--prompt-data", prompts(folder, *rows)]


def flags(*given: object) -> Callable[[Path], Arguments]:
    return lambda folder: [QUICKSTART, *given]


def yaml(text: str) -> Callable[[Path], Arguments]:
    return lambda folder: config_file(folder, text)


def evaluated(entry: str) -> Callable[[Path], Arguments]:
    dataset = f"{{name: a, path: {TRAIN}, {entry}}}"
    return yaml(f"eval: {{eval_config: {{datasets: [{dataset}]}}}}")


def model(**config: Any) -> Callable[[Path], Arguments]:
    return lambda folder: [
        QUICKSTART, "--hf-checkpoint", copy_of_the_model(folder / "m", **config)
    ]  # fmt: skip


def model_without(name: str) -> Callable[[Path], Arguments]:
    def make(folder: Path) -> Arguments:
        copy = copy_of_the_model(folder / "m")
        (copy / name).unlink()
        return [QUICKSTART, "--hf-checkpoint", copy]

    return make


def model_with(name: str, text: str) -> Callable[[Path], Arguments]:
    def make(folder: Path) -> Arguments:
        copy = copy_of_the_model(folder / "m")
        (copy / name).write_text(text)
        return [QUICKSTART, "--hf-checkpoint", copy]

    return make


def model_cut(keep: int) -> Callable[[Path], Arguments]:
    def make(folder: Path) -> Arguments:
        copy = copy_of_the_model(folder / "m")
        os.truncate(copy / "model.safetensors", keep)
        return [QUICKSTART, "--hf-checkpoint", copy]

    return make


def graded_by(text: str, name: str = "") -> Callable[[Path], Arguments]:
    return lambda folder: [QUICKSTART, "--custom-rm-path", f"{plugin(folder, text)}{name}"]


def file_as(flag: str, path: str = "taken/inside") -> Callable[[Path], Arguments]:
    def make(folder: Path) -> Arguments:
        (folder / "taken").write_text("")
        return [QUICKSTART, flag, folder / path]

    return make


def _without_prompts(folder: Path) -> Path:
    path = folder / "run.yaml"
    own = safe_load(QUICKSTART.read_text())
    del own["data"]["prompt_data"]
    own["rollout"]["hf_checkpoint"] = str(MODEL)
    own["eval"] = {}
    path.write_text(json.dumps(own))
    return path


HOOKS = """
def weights(args, pg_loss): ...
def advantages(args, rollout_data): ...
reduce = 3
async def postprocess(args, rollout_id, rollout_data): ...
"""

ROLLOUT = """
def answer(args, sample, sampling_params): ...
def respond(args): ...
def keep(samples): ...
def look(args, sample): ...
def remove(args): ...
def process(args, samples): ...
number = 7
"""


AWAITED = """
async def init(args): ...
def look(args, model, store_prefix): yield
async def batch(args, samples): ...
def choose(args, rollout_id, buffer, num_samples): yield []
"""


def megatron_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def config_of_preset(folder: Path, name: str) -> Arguments:
    text = (QUICKSTART.parent / "models" / f"{name}.yaml").read_text()
    options = json.dumps(safe_load(text)["megatron"])
    (folder / "run.yaml").write_text(f"extends: {QUICKSTART}\nmegatron: {options}\n")
    return [folder / "run.yaml"]


CASES: dict[str, tuple[Callable[[Path], Arguments], list[str]]] = {
    # prompts
    "no prompts file": (
        lambda folder: [QUICKSTART, "--prompt-data", TRAIN.with_name("trian.jsonl")],
        ["prompt_data:", "trian.jsonl: no such file; did you mean", "train.jsonl?"],
    ),
    "empty prompts file": (data(), ["prompt_data:", "p.jsonl holds no prompts: the file is empty"]),
    "broken JSON": (data(GOOD, "{no"), ["p.jsonl, line 2: not JSON", "--max-bad-rows"]),
    "a row without its key": (
        data(GOOD, {"label": "1"}),
        ["p.jsonl, line 2: no key 'input'; the row has label"],
    ),
    "an empty prompt": (
        data(GOOD, {"input": "", "label": "1"}),
        ["p.jsonl, line 2: the prompt under 'input' is empty"],
    ),
    "a key that no row has": (
        data({"inputs": "1=", "label": "1"}, {"inputs": "2=", "label": "2"}),
        ["no row of", "the key 'input' (input_key)", "inputs, label: set --input-key inputs"],
    ),
    "a label key that no row has": (
        data({"input": "1=", "answer": "1"}),
        ["the key 'label' (label_key)", "input, answer: choose one of them with --label-key"],
    ),
    "labels that are all null": (
        data({"input": "1=", "label": None}),
        ["has a label under 'label' (all are null)", "exact_match compares with"],
    ),
    "messages without a template": (
        data({"input": [{"role": "user", "content": "1="}], "label": "1"}),
        ["p.jsonl, row 1: the prompt is a list of messages: set apply_chat_template"],
    ),
    "a grader that rows name": (
        data({**GOOD, "metadata": {"rm_type": "maths"}}),
        ["unknown --rm-type 'maths'; did you mean math?"],
    ),
    "no evaluation file": (
        yaml("eval: {eval_config: {datasets: [{name: a, path: ./none.jsonl}]}}"),
        ["eval dataset a:", "none.jsonl: no such file"],
    ),
    "an evaluation file without its key": (
        evaluated("label_key: right"),
        ["eval dataset a: no row of", "the key 'right' (eval_label_key)"],
    ),
    # graders
    "unknown grader": (
        flags("--rm-type", "exact"),
        ["unknown --rm-type 'exact'; did you mean exact_match? known: code", "math_verify"],
    ),
    "no module": (
        flags("--custom-rm-path", "nowhere.at.all:f"),
        ["custom_rm_path: nowhere.at.all:f: no module named 'nowhere'; install it, start from"],
    ),
    "no function": (
        graded_by("import json\ndef grade(args, sample): return 1\n", ":reward"),
        ["grade.py:reward:", "has no 'reward'; it has grade"],
    ),
    "wrong signature": (
        graded_by("def grade(sample): return 1\n", ":grade"),
        ["grade.py:grade(sample) does not fit: it is called as (args, sample)"],
    ),
    "functions of the trainer that do not fit": (
        lambda folder: [
            *(QUICKSTART, "--use-tis"),
            *("--custom-tis-function-path", f"{plugin(folder, HOOKS)}:weights"),
            *("--custom-advantage-function-path", f"{folder / 'grade.py'}:advantage"),
            *("--custom-pg-loss-reducer-function-path", f"{folder / 'grade.py'}:reduce"),
            *("--rollout-data-postprocess-path", f"{folder / 'grade.py'}:postprocess"),
        ],
        [
            "custom_tis_function_path: ",
            "grade.py:weights(args, pg_loss) does not fit: it is called as (args=..., pg_loss=...,",
            "grade.py:advantage: ",
            "has no 'advantage'; did you mean advantages?",
            "grade.py:reduce is of type int; a function(total_lengths, response_lengths,",
            "grade.py:postprocess must be a plain `def`: nothing awaits it",
        ],
    ),
    "functions of the rollout that do not fit": (
        lambda folder: [
            *(QUICKSTART, "--custom-generate-function-path", f"{plugin(folder, ROLLOUT)}:respond"),
            *("--dynamic-sampling-filter-path", f"{folder / 'grade.py'}:keep"),
            *("--rollout-sample-hook-path", f"{folder / 'grade.py'}:look"),
            *("--rollout-sample-filter-path", f"{folder / 'grade.py'}:remove"),
            *("--custom-reward-post-process-path", f"{folder / 'grade.py'}:proces"),
            *("--tool-paths", f"{folder / 'grade.py'}:number"),
        ],
        [
            *("custom_generate_function_path: ", "dynamic_sampling_filter_path: ", "tool_paths: "),
            *("rollout_sample_hook_path: ", "rollout_sample_filter_path: "),
            "custom_reward_post_process_path: ",
            "grade.py:respond(args) does not fit: it is called as (args, sample, sampling_params",
            "grade.py:keep(samples) does not fit: it is called as (args, samples)",
            "grade.py:look(args, sample) does not fit: it is called as (args, sample, rollout_id=",
            "grade.py:remove(args) does not fit: it is called as (args, groups)",
            "has no 'proces'; did you mean process?",
            "grade.py:number: a Tool or a function is needed",
        ],
    ),
    "a function that converts samples and does not fit": (
        lambda folder: [
            QUICKSTART,
            *("--custom-convert-samples-to-train-data-path", f"{plugin(folder, ROLLOUT)}:remove"),
        ],
        [
            "custom_convert_samples_to_train_data_path: ",
            "grade.py:remove(args) does not fit: it is called as (args, samples)",
        ],
    ),
    "functions that would only be called and never awaited": (
        lambda folder: [
            *(QUICKSTART, "--custom-megatron-init-path", f"{plugin(folder, AWAITED)}:init"),
            *("--custom-megatron-before-log-prob-hook-path", f"{folder / 'grade.py'}:look"),
            *("--custom-convert-samples-to-train-data-path", f"{folder / 'grade.py'}:batch"),
            *("--dynamic-sampling-filter-path", f"{folder / 'grade.py'}:batch"),
            *("--buffer-filter-path", f"{folder / 'grade.py'}:choose"),
        ],
        [
            *("custom_megatron_init_path: ", "custom_megatron_before_log_prob_hook_path: "),
            *("dynamic_sampling_filter_path: ", "buffer_filter_path: "),
            "grade.py:init must be a plain `def`: nothing awaits it",
            "grade.py:look must return instead of `yield`: nothing of it would run",
            "grade.py:batch must be a plain `def`: nothing awaits it",
            "grade.py:choose must return instead of `yield`",
        ],
    ),
    "a function for groups that takes a sample": (
        lambda folder: [
            *(QUICKSTART, "--custom-rm-path", f"{plugin(folder, ROLLOUT)}:answer", "--group-rm"),
        ],
        ["grade.py:answer must be `async def`, since it is awaited"],
    ),
    "a file that raises": (
        graded_by("import nothing_like_it\n", ":grade"),
        ["grade.py raised ModuleNotFoundError when it was imported"],
    ),
    # options
    "unknown Megatron option": (
        yaml("megatron: {wieght_decay: 0.1}"),
        ["unknown megatron option 'wieght_decay'; did you mean 'weight_decay'?"],
    ),
    "wrong type of a Megatron option": (
        yaml("megatron: {adam_beta2: high, recompute_num_layers: two}"),
        ["2 problems", "'adam_beta2' must be float, not 'high'", "'recompute_num_layers' must be"],
    ),
    "a Megatron option against the model": (
        yaml("megatron: {num_layers: 3}"),
        ["'num_layers' is 3, but the model's config.json makes it 2"],
    ),
    "warm-up longer than the run": (
        yaml("megatron: {lr_warmup_iters: 90, lr_decay_style: linear}"),
        ["lr_warmup_iters 90 must be below"],
    ),
    "misspelt SGLang option": (
        flags("--sglang-mem-fraction-statc", "0.5"),
        ["--sglang-mem-fraction-statc is no option of SGLang", "--sglang-mem-fraction-static?"],
    ),
    "wrong type of an SGLang option": (
        flags("--sglang-context-length", "long"),
        ["--sglang-context-length must be a whole number, not 'long'"],
    ),
    # model
    "no model folder": (
        flags("--hf-checkpoint", "Qwen/Qwen3-4B"),
        ["hf_checkpoint Qwen/Qwen3-4B: no such folder; download it first (hf download Qwen/Q"],
    ),
    "a folder that is no model": (
        flags("--hf-checkpoint", QUICKSTART.parent),
        ["is not a model: it has no config.json (it has", "quickstart.yaml"],
    ),
    "a Megatron checkpoint without its iteration, as the reference": (
        lambda folder: [
            QUICKSTART, "--use-kl-loss", "--ref-load", megatron_folder(folder / "m_torch_dist"),
        ],
        ["m_torch_dist/latest_checkpointed_iteration.txt names", "is no torch_dist checkpoint"],
    ),
    "a Megatron checkpoint in place of the model": (
        lambda folder: [QUICKSTART, "--hf-checkpoint", megatron_folder(folder / "m")],
        ["hf_checkpoint", "is a Megatron checkpoint: give a Hugging Face folder"],
    ),
    "a start that is no Megatron checkpoint": (
        flags("--megatron-load", QUICKSTART.parent),
        ["megatron_load", "is no Megatron checkpoint: it has neither"],
    ),
    "slime's flags that are not there": (
        flags("--colocate", "--train-backend", "fsdp", "--num-layers", "3"),
        ["--colocate is not there yet, it waits for", "--train-backend is refused: Megatron-core"],
    ),
    "an engine of two sizes": (
        flags("--sglang-tp-size", "2", "--rollout-num-gpus-per-engine", "1"),
        ["--sglang-tp-size 2 x --sglang-pp-size 1 needs 2 GPUs, but", "per_engine is 1"],
    ),
    "a preset of another model": (
        lambda folder: config_of_preset(folder, "qwen3-0.6B"),
        ["'num_layers' is 28, but the model's config.json makes it 2", "'hidden_size' is 1024",
         "'vocab_size' is 151936"],
    ),
    "no tokenizer": (model_without("tokenizer.json"), ["has no tokenizer: tokenizer.json"]),
    "no weights": (model_without("model.safetensors"), ["has no weights: model.safetensors or"]),
    "missing keys": (
        model(num_hidden_layers=None, rms_norm_eps=None),
        ["config.json lacks num_hidden_layers, rms_norm_eps: take the model's own"],
    ),
    "a value that is no size": (
        model(hidden_size="96"),
        ["config.json: hidden_size must be a whole number from 1, not '96'"],
    ),
    "unsupported family": (
        model(model_type="gpt2"),
        ["model_type 'gpt2' is not supported; the supported ones are llama, qwen2, qwen3"],
    ),
    "weights that are cut off": (
        model_cut(400_000),
        ["model.safetensors is cut off or damaged: 400000 of 854184 bytes: copy or download"],
    ),
    "a header that is cut off": (model_cut(100), ["is cut off: it has only 100 bytes"]),
    "other hidden size": (
        model(hidden_size=48),
        ["do not belong together: model.embed_tokens.weight is [100, 96] in model.safetensors, "
         "but config.json makes it [100, 48] (vocab_size 100, hidden_size 48)"],
    ),
    "other number of layers": (
        model(num_hidden_layers=3, layer_types=None),
        ["num_hidden_layers is 3, but the weights have 2 layers"],
    ),
    "other vocabulary": (model(vocab_size=90), ["is [100, 96]", "makes it [90, 96]"]),
    "a size of another type": (
        model(head_dim="24"), ["config.json: head_dim must be a whole number from 1, not '24'"]
    ),
    "a value of another type": (
        model(rope_parameters="x"), ["config.json holds a value of a type that it never has"]
    ),
    "a pointer instead of weights": (
        model_with("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid 1\n"),
        ["model.safetensors is a pointer of Git LFS, not the weights: run `git lfs pull`"],
    ),
    "a broken tokenizer": (
        model_with("tokenizer.json", "{"), ["tokenizer.json is not a tokenizer"]
    ),
    "a template that refuses": (
        lambda folder: [
            *model_with("chat_template.jinja", "{{ raise_exception('no') }}")(folder),
            "--apply-chat-template",
        ],
        ["train.jsonl, row 1: the chat template refused the messages: TemplateError: no"],
    ),
    "an evaluation with a wrong type": (
        evaluated("temperature: hot"),
        ["eval dataset 'a': temperature must be a number of at least 0, not 'hot'"],
    ),
    "an evaluation longer than the context": (
        evaluated("max_response_len: 400"),
        ["eval dataset a: max_response_len 400", "lower it to at most 251"],
    ),
    "an empty slice": (
        flags("--prompt-data", f"{TRAIN}@[5:5]"), ["holds no prompts: the slice is empty"]
    ),
    "an MLflow that does not exist": (
        flags("--mlflow-tracking-uri", "foo://x"), ["MLflow cannot be reached at foo://x: give"]
    ),
    # lengths
    "no room for the response": (
        flags("--rollout-max-response-len", "252"),
        ["rollout_max_response_len 252 + the longest prompt of 5 tokens", "= 257 tokens",
         "context has 256 (max_position_embeddings): lower it to at most 251"],
    ),
    "a context that the engine makes shorter": (
        flags("--sglang-context-length", "10"), ["context has 10 (--sglang-context-length)"],
    ),
    # places
    "a workspace below a file": (
        file_as("--workspace"), ["workspace", "taken is a file: choose another with --workspace"],
    ),
    "a workspace that cannot be written": (
        flags("--workspace", "/proc/none"), ["slime: workspace /proc/none cannot be written"],
    ),
    "a store below a file": (file_as("--store-url"), ["store", "another with --store-url"]),
    "a store that nobody knows": (
        flags("--store-url", "ftp://bucket/runs"), ["unknown scheme ftp://; use s3://, gs://,"],
    ),
    "a file that is no database": (
        lambda folder: [
            QUICKSTART, "--mlflow-tracking-uri",
            f"sqlite:///{prompts(folder, 'x' * 2000, name='m.db')}",
        ],
        ["m.db is not an MLflow database: choose another with --mlflow-tracking-uri"],
    ),
    "MLflow below a file": (
        lambda folder: [QUICKSTART, "--mlflow-tracking-uri", f"sqlite:///{TRAIN}/m.db"],
        ["MLflow's folder", "is a file", "or --no-use-mlflow"],
    ),
    # sources and media
    "no prompts at all": (
        lambda folder: [_without_prompts(folder)],
        ["data.prompt_data is missing: set it in the YAML file or as --prompt-data"],
    ),
    "a source that is no class": (
        lambda folder: [QUICKSTART, "--data-source-path", f"{plugin(folder, ROLLOUT)}:keep"],
        ["is a function; a class with get_samples is needed"],
    ),
    "a buffer filter that cannot be called": (
        lambda folder: [QUICKSTART, "--buffer-filter-path", f"{plugin(folder, ROLLOUT)}:keep",
                        "--dynamic-sampling-filter-path", "check_reward_nonzero_std"],
        ["keep(samples) does not fit: it is called as (args, buffer, num_samples)"],
    ),
    "a buffer filter without a buffer": (
        flags("--buffer-filter-path", "fifo"), ["groups that come back, and none can"],
    ),
    "a rollout function that cannot be called": (
        lambda folder: [QUICKSTART, "--rollout-function-path", f"{plugin(folder, ROLLOUT)}:keep"],
        ["is called as (args, rollout_id, data_source, evaluation=...)"],
    ),
    "weights that do not fit the files": (
        flags("--prompt-data", TRAIN, TRAIN, "--prompt-data-weights", "1", "2", "3"),
        ["prompt_data_weights has 3 weights and prompt_data names 2 files"],
    ),
    "a vision model to train": (
        model(vision_config={"depth": 2}), ["is a vision model, which is not trained here yet"],
    ),
    "media for a text model": (
        lambda folder: [QUICKSTART, "--multimodal-keys", '{"image": "pics"}', "--prompt-data",
                        prompts(folder, GOOD | {"pics": []})],
        ["multimodal_keys puts image into prompts, and", "is a text model"],
    ),
    # configuration
    "a wrong type of a flag": (
        flags("--seed", "many"), ["--seed must be a whole number of at least 0 and", "not 'many'"]
    ),
    "a size of nothing": (
        flags("--tensor-model-parallel-size", "0", "--weight-decay", "-1"),
        ["'tensor_model_parallel_size' must be at least 1, not 0", "'weight_decay' must be at"],
    ),
    "a seed that numpy does not take": (
        flags("--seed", str(2**64)), ["--seed must be a whole number", "at most 4294967295"]
    ),
    "a wrong type in a file": (
        yaml("rollout: {n_samples_per_prompt: 0}\ntrain: {lr: fast}"),
        ["run.yaml: train.lr must be a number of at least 0, not 'fast'",
         "run.yaml: rollout.n_samples_per_prompt must be a whole number of at least 1, not 0"],
    ),
    "a choice that does not exist": (
        flags("--kl-loss-type", "k9"), ["--kl-loss-type must be one of k1, k2, k3"]
    ),
    "broken YAML": (yaml("run: [1"), ["run.yaml, line 2, column 8 is not valid YAML"]),
    "tabs in YAML": (yaml("run:\n\tseed: 1\n"), ["line 3: YAML is indented with spaces"]),
    "several rules": (
        flags("--global-batch-size", "7", "--no-use-dynamic-batch-size"),
        ["cannot be divided by global_batch_size 7", "max_tokens_per_gpu has an effect only"],
    ),
    "a GPU that is not there": (
        flags("--device", "cuda"), ["device cuda: this machine shows no NVIDIA GPU"],
    ),
    "several problems of several kinds": (
        flags("--rm-type", "mth", "--sglang-foo", "1", "--prompt-data", "none.jsonl"),
        ["3 problems, so nothing was started", "- prompt_data: none.jsonl", "- unknown --rm-type",
         "- --sglang-foo is no option"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_start_that_cannot_work_is_refused_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("the run was chosen although its configuration cannot work")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(flows.launch, "choose", started)
    monkeypatch.setattr(flows.launch.Launch, "start", started)
    make, sentences = CASES[name]
    given = [str(word) for word in make(tmp_path)]
    own = [] if "--workspace" in given else ["--workspace", str(tmp_path / "runs")]
    before = sorted(tmp_path.rglob("*"))
    status = main(["train", *given, *own])
    shown = capsys.readouterr()
    assert status == 2, shown
    assert shown.err.startswith("slime: ") and "Traceback" not in shown.err + shown.out
    for sentence in sentences:
        assert sentence in shown.err
    made = [path for path in tmp_path.rglob("*") if path not in before]
    assert not [path for path in made if "__pycache__" not in str(path)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_places_without_the_right_to_write_are_named(tmp_path, capsys):
    database = tmp_path / "m.db"
    database.write_bytes(b"")
    database.chmod(stat.S_IRUSR)
    uri = f"sqlite:///{database}"
    assert main(["check", str(QUICKSTART), "--mlflow-tracking-uri", uri]) == 2
    assert "m.db is read-only" in capsys.readouterr().out


def test_names_are_suggested_only_where_they_are_near(capsys):
    assert main(["train", str(QUICKSTART), "--qqqq", "1"]) == 2
    assert capsys.readouterr().err.strip().endswith("`slime train --help` lists all flags")
    assert main(["prain"]) == 2 and "did you mean train?" in capsys.readouterr().err


def test_the_model_of_the_cases_is_the_shipped_one():
    assert (MODEL / "config.json").is_file()
