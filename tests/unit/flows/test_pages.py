"""Texts and events of Prefect's pages."""

from flows.pages.artifacts import Shown, iteration_text, key_of, summary_text
from flows.pages.events import Vitals, alerts

METRICS = {"perf/train_time": 1.5, "perf/sample_time": 0.25, "train/loss": 0.5}


def test_an_iteration_shows_seconds_samples_and_metrics():
    samples = [Shown("<b>a|b", "x\ny_z", 0.0), Shown("p" * 900, "r", 1.0)]
    lines = iteration_text(3, METRICS, samples).splitlines()
    assert lines[0] == "# iteration 000003"
    assert lines.index("| train | 1.500 |") < lines.index("| sample | 0.250 |")
    assert r"| &lt;b>a&#124;b | x y\_z | 0 |" in lines
    assert f"| {'p' * 400}... | r | 1 |" in lines
    assert any(line.startswith("| train/loss | 0.5 | loss |") for line in lines)


def test_samples_that_cannot_be_read_are_explained():
    assert "samples cannot be shown: a part is gone" in iteration_text(0, {}, "a part is gone")


def test_the_end_links_what_has_an_address():
    places = {"store": "/a/b", "MLflow": "http://127.0.0.1:5000/#/x"}
    text = summary_text("r", "stopped", {"progress/iteration": 4.0}, places)
    assert text.startswith("# r stopped after 5 iterations")
    assert "| store | `/a/b` |" in text
    assert "[http://127.0.0.1:5000/#/x](http://127.0.0.1:5000/#/x)" in text
    assert key_of("summary", "Run.With_Odd-Name") == "summary-run-with-odd-name"


def test_alerts_name_what_grew_was_skipped_or_missed():
    metrics = {"train/skipped_steps": 2.0, "eval/held/out/missed": 1.0, "eval/held/out/reward": 0.5}
    found = dict(alerts(7, metrics, Vitals(1, 1), Vitals(2, 4)))
    assert found == {
        "slime.alert.drift": {"iteration": 7, "drifts": 2},
        "slime.alert.engine-restarted": {"iteration": 7, "restarts": 3},
        "slime.alert.skipped-step": {"iteration": 7, "steps": 2},
        "slime.alert.missed-evaluation": {"iteration": 7, "dataset": "held/out"},
    }
    assert alerts(8, {"train/skipped_steps": 0.0}, Vitals(2, 4), Vitals(2, 4)) == []
