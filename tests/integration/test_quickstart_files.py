"""What configs/quickstart ships is what examples/make_quickstart.py makes, and fit for its use."""

import json
from pathlib import Path

import pytest

from slime_core.data.render import encode
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.plugins.load import load

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "configs" / "quickstart"
SCRIPT = str(ROOT / "examples" / "make_quickstart.py")


def rows(name):
    return [json.loads(line) for line in (SHIPPED / name).open()]


@pytest.mark.parametrize(("name", "which"), [("train.jsonl", 0), ("heldout.jsonl", 1)])
def test_the_script_makes_the_shipped_prompts(name, which, tmp_path):
    strings = load(f"{SCRIPT}:make_prompts")(seed=0)[which]
    load(f"{SCRIPT}:write_prompts")(tmp_path / name, strings)
    assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_heldout_prompts_are_256_and_disjoint_also_from_what_the_warm_start_saw():
    reserved = load(f"{SCRIPT}:is_reserved")
    train, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    assert len({row["input"] for row in heldout}) == len(heldout) == 256
    assert not {row["input"] for row in train} & {row["input"] for row in heldout}
    digits = [tuple(map(int, row["input"][:-1])) for row in train + heldout]
    assert [reserved(one) for one in digits] == [False] * len(train) + [True] * 256


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_labels_are_the_sorted_digits_and_digits_repeat(name):
    for row in rows(name):
        assert row["label"] == "".join(sorted(row["input"].removesuffix("=")))
    repeated = [row for row in rows(name) if len(set(row["label"])) < 4]
    # A random string of four digits has a repeated one with probability 0.496.
    assert 0.4 < len(repeated) / len(rows(name)) < 0.6


def test_the_shipped_model_answers_a_third_of_the_heldout_prompts():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "model")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "model", dtype=torch.float32)
    settings = SourceSettings(label_key="label")
    source = PromptSource(str(SHIPPED / "heldout.jsonl"), settings, tokenizer)
    prompts = [group[0].prompt for group in source.get_samples(256)]
    assert encode(tokenizer, prompts[0]) == [tokenizer.convert_tokens_to_ids(c) for c in prompts[0]]
    torch.manual_seed(0)
    strings = [prompt.removesuffix("=") for prompt in prompts]
    right, known = load(f"{SCRIPT}:sampled_shares")(model, tokenizer, strings)
    assert 0.25 < right < 0.42
    assert known > 0.65
