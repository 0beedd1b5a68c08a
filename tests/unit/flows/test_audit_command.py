import pytest

from flows.cli.main import main
from tests.unit.store.runs import stored_run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["base"], "write RUN@K"),
        (["base@x"], "write RUN@K"),
        (["@1"], "write RUN@K"),
        (["other@1"], "other"),
        (["base@0"], "iteration 0 is not in the run: it has trained none"),
        (["base@0", "--layout", "huge"], "layout 'huge': write sizes"),
        (["base@0", "--dtype", "fp8"], "--dtype"),
        (["base@0", "--tolerance", "-1"], "--tolerance must be a number from 0, not '-1'"),
        (["base@0", "--tolerance", "nan"], "--tolerance must be a number from 0, not 'nan'"),
    ],
)
def test_what_cannot_be_audited_is_one_sentence(tmp_path, capsys, arguments, sentence):
    stored_run(tmp_path / "store", "base", 0)
    assert main(["audit", *arguments, "--workspace", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1
