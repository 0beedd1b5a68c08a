"""What `slime eval` refuses before any engine is there."""

import pytest

from slime_core.check.evaluation import require_evaluation
from slime_core.config.loading import load_config
from slime_core.errors import ConfigError
from tests.unit.check.test_refusals import QUICKSTART


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"multimodal_keys": {"image": "pics"}}, "multimodal_keys puts image into prompts"),
        ({"sglang": {"no_such_option": 1}}, "no_such_option|no-such-option"),
    ],
)
def test_a_start_and_an_evaluation_refuse_the_same(tmp_path, monkeypatch, overrides, sentence):
    monkeypatch.chdir(QUICKSTART.parents[1])
    whole = {"workspace": str(tmp_path), "device": "cpu", **overrides}
    require_evaluation(load_config(QUICKSTART, whole | {"multimodal_keys": None, "sglang": {}}))
    with pytest.raises(ConfigError, match=sentence):
        require_evaluation(load_config(QUICKSTART, whole))
