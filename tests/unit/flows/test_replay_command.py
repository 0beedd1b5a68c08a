import pytest

from flows.cli.main import main
from flows.cli.replay import parse_range
from slime_core.errors import ConfigError
from tests.unit.store.runs import stored_run


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(None, range(9, 10)), ("3", range(3, 4)), ("3:5", range(3, 5)), (":2", range(2)),
     ("7:", range(7, 10)), ("20:30", range(20, 30))],
)  # fmt: skip
def test_ranges(text, wanted):
    assert parse_range(text, 10) == wanted


@pytest.mark.parametrize("text", ["x", "5:5", "6:2", "-1:2", "1:2:3", "12:"])
def test_no_ranges(text):
    with pytest.raises(ConfigError, match="write A:B"):
        parse_range(text, 10)


def test_a_fork_is_made_and_listed(tmp_path, capsys):
    stored_run(tmp_path / "store", "base", 3)
    asked = ["fork", "base", "--workspace", str(tmp_path), "--at", "1", "--run-id"]
    assert main([*asked, "twig", "--seed", "5"]) == 0
    wanted = f"slime train CONFIG.yaml --run-id twig --workspace {tmp_path}\n"
    told = capsys.readouterr().out
    assert wanted in told and "initial weights" in told
    assert main(["verify", "twig", "--workspace", str(tmp_path)]) == 0
    assert main(["runs", "--workspace", str(tmp_path)]) == 0
    assert "  fork of base@1\n" in capsys.readouterr().out
    assert main([*asked, "twig"]) == 2
    assert "twig exists already" in capsys.readouterr().err
    assert main([*asked, "no/slash"]) == 2


def test_a_replay_of_nothing_says_so(tmp_path, capsys):
    stored_run(tmp_path / "store", "base", 0)
    assert main(["replay", "base", "--workspace", str(tmp_path)]) == 2
    assert "has trained nothing yet" in capsys.readouterr().err
