"""What README shows of a run of one's own works as it stands there."""

import json
import re
from pathlib import Path

from flows.cli.main import main
from slime_core.sample import Sample
from tests.unit.check.model_folders import MODEL

README = Path(__file__).parents[3] / "README.md"


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


def test_its_configuration_is_ready_to_train(capsys, tmp_path, monkeypatch):
    """With a smaller model, which has no chat template and holds fewer tokens."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(block("yaml", "prompt_data"))
    row = {"question": "12=", "answer": "12"}
    Path("train.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    Path("Qwen3-0.6B").symlink_to(MODEL)
    smaller = ("--no-apply-chat-template", "--rollout-max-response-len", "16", "--device", "cpu")
    code = main(["check", "run.yaml", *smaller])
    output = capsys.readouterr()
    assert code == 0 and "ready to train" in output.out, output.err


def test_its_reward_function_grades_a_response_with_its_end_token():
    names: dict = {}
    exec(compile(block("python", "def reward"), "README", "exec"), names)
    right, wrong = Sample(response="1239<eos>", label="1239"), Sample(response="9<eos>", label="1")
    assert (names["reward"](None, right), names["reward"](None, wrong)) == (1.0, 0.0)
