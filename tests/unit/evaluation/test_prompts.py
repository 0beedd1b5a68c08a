import json

from slime_core.evaluation.datasets import EvalDataset
from slime_core.evaluation.prompts import one_pass, open_prompts


def test_a_pass_holds_each_prompt_once_with_the_datasets_settings(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"q": f"p{n}", "a": n, "m": {"k": 1, "own": n}} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = EvalDataset(
        name="d",
        path=f"{path}@[1:]",
        input_key="q",
        label_key="a",
        metadata_key="m",
        n_samples_per_eval_prompt=2,
        metadata_overrides={"k": [2]},
        custom_generate_function_path="gen.py",
    )
    source = open_prompts(dataset, tokenizer=None)
    groups = one_pass(dataset, source)
    found = [(s.prompt, s.label, s.group_index, s.index) for group in groups for s in group]
    assert found == [("p1", "1", 0, 0), ("p1", "1", 0, 1), ("p2", "2", 1, 2), ("p2", "2", 1, 3)]
    assert groups[1][0].metadata == {"k": [2], "own": 2}
    assert groups[0][0].generate_function_path == "gen.py"
    groups[0][0].metadata["k"].append(3)
    assert groups[0][1].metadata["k"] == dataset.metadata_overrides["k"] == [2]
    assert one_pass(dataset, source)[1] == groups[1]
