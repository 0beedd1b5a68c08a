"""`slime contract`: functions written for slime pass, and what is wrong with one is a sentence."""

from pathlib import Path

import pytest

from flows.cli.main import main
from slime_core.config.loading import load_config
from slime_core.contracts.hooks import HOOKS, hook_named
from slime_core.contracts.own_rows import own_group
from slime_core.contracts.trials import REWARDS, TRIALS
from slime_core.errors import ConfigError
from slime_core.plugins.trainer_hooks import CALLS
from slime_core.rollout.source_of_run import BUILT_IN

PLUGINS = Path(__file__).parents[2] / "plugins_for_slime"

WRITTEN_FOR_SLIME = [
    ("reward", "rewards.py:reward_func", "were worth [1.0, 0.0, 0.0, 1.0]"),
    ("group-rm", "rewards.py:batched_custom_rm", "were worth"),
    ("--custom-generate-function-path", "multi_turn.py", "4 samples became 4 rows"),
    ("dynamic_sampling_filter_path", "filters.py:check_something_to_learn",
     "a group that is all wrong is dropped (zero_std_0.0)"),
    ("buffer", "filters.py:pop_newest", "it picked 3: [2, 3, 4]"),
    ("rollout_sample_filter_path", "filters.py:remove_truncated", "4 of 8 samples were taken out"),
    ("rollout_sample_hook_path", "filters.py:note_length", "called for 4 samples"),
    ("custom_reward_post_process_path", "rewards.py:reward_post_process",
     "raw rewards [1.0, 0.0, 0.0, 1.0,"),
    ("convert", "convert.py:convert_samples", "of 8 rows 4 were left out and 0 got another mask"),
    ("data_source_path", "source.py:EasyFirst", "(its state is kept)"),
    ("data-source-path", "source.py:Arithmetic", "(its state is kept)"),
    ("agent", "../../examples/agent.py:agent", "4 sessions became 4 rows with the turns"),
    ("custom_rollout_log_function_path", "logs.py:log_rollout", "told of 8 samples"),
    ("rollout_all_samples_process_path", "logs.py:process_all", "told of 8 samples"),
    ("custom_eval_rollout_log_function_path", "logs.py:log_eval", "told of 8 samples"),
    ("rollout", "rollout.py:generate_rollout", "3 groups were drawn, 3 returned, 0 given back"),
]  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["contract", *words])
    shown = capsys.readouterr()
    return status, shown.err or shown.out


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "path", "says"), WRITTEN_FOR_SLIME)
def test_functions_written_for_slime_pass(capsys, hook, path, says):
    status, text = said(capsys, hook, f"{PLUGINS / path}")
    assert status == 0 and says in text, text


WRONG = """
import os, time, threading
async def text(args, sample): return "good"
async def raises(args, sample): return {}["score"]
def two(args): ...
async def hangs(args, sample): time.sleep(60)
async def ends(args, sample): os._exit(3)
async def dies(args, sample): os.kill(os.getpid(), 9)
async def no_tokens(args, sample, sampling_params):
    sample.response = "an answer"
    return sample
async def short_mask(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1]
    return sample
async def turns_missing(args, sample, sampling_params):
    return args.search_url
def keeps_all(args, rollout_id, buffer, num_samples): return list(buffer)
def one_list(args, samples): return [1.0]
def no_masks(args, samples):
    return {"tokens": [s.tokens for s in samples], "rewards": [1.0] * len(samples)}
def no_gradient(args, batch, logits, mean): return mean(logits.sum(-1).detach()), {}
def of_rows(args, batch, logits, mean): return mean(logits[:4, 0]), {}
def too_few(args, rollout_data): rollout_data["advantages"] = rollout_data["log_probs"][1:]
def one(args, *, pg_loss, **others): return pg_loss
def a_number(total_lengths, response_lengths, loss_masks, calculate_per_token_loss): return 1.0
def few(args, rollout_id, data_source, evaluation=False): return data_source.get_samples(1)
class Forgets:
    count = 0
    def __init__(self, args): self.n = args.n_samples_per_prompt
    def get_samples(self, n):
        from slime.utils.types import Sample
        Forgets.count += n
        return [[Sample(prompt=f"{Forgets.count} {i}") for _ in range(self.n)] for i in range(n)]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "name", "says"),
    [
        ("reward", "text", "returned 'good', which is not a number"),
        ("reward", "raises", "raised KeyError: 'score'"),
        ("reward", "two", "does not fit: it is called as (args, sample)"),
        ("reward", "hangs", "did not end within 3 s"),
        ("reward", "ends", "ended its process with status 3; it must return"),
        ("reward", "dies", "ended its process by signal SIGKILL"),
        ("reward", "no_such", "it has no 'no_such'; it has"),
        ("generate", "no_tokens", "has a response without tokens"),
        ("generate", "short_mask", "loss_mask has 1 entries, not 2"),
        ("generate", "turns_missing", "has no attribute 'search_url'"),
        ("buffer", "keeps_all", "returned 5 groups for 3"),
        ("custom_reward_post_process_path", "one_list", "must return (raw_rewards, rewards)"),
        ("convert", "no_masks", "no_masks returned no response_lengths, loss_masks: it must"),
        ("rollout", "few", "returned 1 groups, rollout_batch_size is 3"),
        ("source", "Forgets", "after a restart, not with"),
        ("custom_loss_function_path", "two", "does not fit"),
        ("loss", "no_gradient", "gave a loss without gradient"),
        ("loss", "of_rows", "sum_of_sample_mean takes a value for each of the 14 response tokens"),
        ("advantage", "too_few", "must set rollout_data['advantages'] to a list of 4 tensors"),
        ("tis", "one", "must return (pg_loss, loss masks, metrics)"),
        ("pg_loss_reducer", "a_number", "must return a function from token losses to a number"),
    ],
)
def test_what_is_wrong_is_one_sentence(capsys, tmp_path, hook, name, says):
    (tmp_path / "my.py").write_text(WRONG)
    limit = ("--timeout-s", "3") if name == "hangs" else ()
    status, text = said(capsys, hook, f"{tmp_path / 'my.py'}:{name}", *limit)
    assert status == 2 and text.startswith("slime: ") and "Traceback" not in text
    assert says in text and text.count("\n") == 1, text


TRAINERS = """
import torch
def loss(args, batch, logits, mean):
    targets = torch.cat([t[-n:] for t, n in zip(batch["tokens"], batch["response_lengths"])])
    return mean(-logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]), {"one": torch.ones(())}
def careless(args, batch, logits, mean): return logits.sum(), {}
def advantages(args, rollout_data):
    lengths, rewards = rollout_data["response_lengths"], rollout_data["rewards"]
    rollout_data["advantages"] = [torch.full((n,), r) for n, r in zip(lengths, rewards)]
def nothing(args, *, pg_loss, loss_masks, **others): return pg_loss * 0, loss_masks, {}
def tis(args, *, pg_loss, loss_masks, **others): return pg_loss, loss_masks, {}
def veto(args, rollout_id, rollout_data):
    rollout_data["loss_masks"][0][:2] = 0
    rollout_data["advantages"] = [a / 2 for a in rollout_data["advantages"]]
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: sum(
        (v * m).sum() for v, m in zip(values.split(response_lengths), loss_masks)) / 10
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "name", "says"),
    [
        ("loss", "loss", ("10 of 10 trained tokens have a gradient", "metrics: one 1.0000")),
        ("loss", "careless", ("note: 4 tokens outside of the loss mask have a gradient too",)),
        ("advantage", "advantages",
         ("worth [1.0, -1.0, 0.5, 0.5], are [[1.0, 1.0, 1.0, 1.0, 1.0], [-1.0], [0.5,",)),
        ("tis", "tis", ("10 of 10 trained tokens have a gradient", "pg_loss")),
        ("tis", "nothing", ("note: no token has a gradient, so nothing would be learned",)),
        ("postprocess", "veto", ("2 of 10 trained tokens were masked", "advantages were changed")),
        ("pg_loss_reducer", "reducer", ("10 of 10 trained tokens have a gradient",)),
    ],
)  # fmt: skip
def test_the_trainers_functions_are_called_on_a_batch(capsys, tmp_path, hook, name, says):
    (tmp_path / "my.py").write_text(TRAINERS)
    status, text = said(capsys, hook, f"{tmp_path / 'my.py'}:{name}")
    assert status == 0 and all(words in text for words in says), text
    assert ("outside" in text) == (name == "careless")


def test_an_example_of_the_documentation_passes(capsys):
    status, text = said(capsys, "reward", "examples/partial_credit.py:reward_func")
    assert status == 0 and "set reward_key (" in text, text


OWN = """
async def share(args, sample):
    return sum(a == b for a, b in zip(sample.response, sample.label)) / len(sample.label)
"""
CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"


def test_a_reward_is_tried_on_the_prompts_of_a_configuration(capsys, tmp_path):
    (tmp_path / "my.py").write_text(OWN)
    status, text = said(capsys, "reward", f"{tmp_path / 'my.py'}:share", str(CONFIG))
    assert status == 0, text
    answers = "(its label, the label of another one, empty, 15 kB) were worth [1.0, 0.0, 0.0, 0.0]"
    assert f"4 responses to {CONFIG.parent / 'quickstart/train.jsonl'}, row 1 {answers}" in text
    assert "nothing can be learned" not in text


def test_a_source_of_our_own_names_its_prompts_too():
    built_in = load_config(CONFIG, {"data_source_path": BUILT_IN[0]})
    assert own_group(built_in)[0].endswith("train.jsonl, row 1")
    assert own_group(load_config(CONFIG, {"data_source_path": "my.py:Source"})) is None


def test_without_arguments_it_lists_every_hook(capsys):
    status, text = said(capsys)
    assert status == 0
    assert all(f"\n{hook.name}\n" in text for hook in HOOKS)
    assert {hook.name for hook in HOOKS} == set(TRIALS) | set(REWARDS) | set(CALLS)


def test_hooks_have_short_names_and_near_ones():
    assert hook_named("--custom-rm-path") is hook_named("rm") is hook_named("custom_rm")
    assert hook_named("tis").name == "custom_tis_function_path"
    with pytest.raises(ConfigError, match="there is no hook genrate: did you mean generate"):
        hook_named("genrate")


def test_a_hook_without_a_function_says_how_one_is_written(capsys):
    status, text = said(capsys, "filter")
    assert status == 2 and "it is written as def filter(args, samples)" in text
