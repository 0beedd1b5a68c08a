"""Launch scripts are read as bash would expand them; what only a run would show is an error."""

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.doors.script import read_script
from slime_core.errors import ConfigError

# Each ends in a command that starts train.py; bash and the reader must come to the same words.
SAME = {
    "arrays": 'A=(--seed 1 "two words")\nA+=(x)\npython3 train.py "${A[@]}" ${A[@]}',
    "unquoted values are split": 'A="--seed 1"\nB=\'$A\'\npython train.py $A "$A" $B',
    "empty": 'A=()\nB=""\npython train.py "${A[@]}" ${A[@]} $B "$B" end',
    "defaults": 'N=""\npython train.py ${X:-a b} "${X:-a b}" ${N:-c} ${N-d}'
    " ${V:-$HOME/x} ${Y:-$HOME/x} ${V:+set}",
    "continued lines and comments": "A=(\n  --seed 1 # one\n\n  # --lr 2\n  --lr \\\n  3\n)\n"
    "python train.py \\\n  ${A[@]} # end",
    "joined words": 'D=/data\npython train.py --hf-checkpoint ${D}/"my model"/x$D"y"',
    "escapes": r'python train.py "a\"b\$c" a\ b \"q "x\\y"',
    "json": 'python train.py --train-env-vars \'{"A": "b c"}\' --x={"a":1}',
    "several commands": "A=1; B=2 && C=3\npython train.py $A $B $C > log.txt 2>&1",
    "a pipe": "python train.py --seed 1 2>&1 | tee log.txt",
    "seq": "python train.py --sglang-cuda-graph-bs 1 2 $(seq 8 8 32) `seq 3`",
    "arithmetic": "N=3\npython train.py $((N * 8)) $(($N+1)) $(( (N - 5) / 2 )) $((-7 % N))",
    "heredoc": "cat > /dev/null <<EOF\npython nothing\nEOF\npython train.py --seed 1",
    "exports": "export A=1 B='2 3'\npython train.py $A \"$B\"",
    "adding text": 'A="x"\nA+="y"\npython train.py $A',
    "one of an array": "A=(a b)\npython train.py $A ${A[@]}",
    "home": 'A=~/a\npython train.py ~/m ~ "~/q" x~/y ${B:-~/b} $A',
    "what a chain surely does": "cd / && A=1 && B=2\npkill -0 0 || true\npython train.py $A $B",
    "no arguments of its own": 'python train.py --seed 1 "$@" $*',
    "joined to an array": 'A=(a b)\npython train.py "<${A[@]}>" x${A[@]}y',
    "an array as one word": 'A=(a "b  c")\npython train.py "${A[*]}" "<${A[*]}>" ${A[*]}',
    "elements": 'A=(a "b c")\npython train.py ${A[1]} "${A[1]}" ${A[0]}x "${A[7]}" ${A[7]} end',
    "lengths": 'A=(a "b c" d)\nB=hello\npython train.py ${#A[@]} ${#A[*]} ${#A} ${#B} ${#NO}',
    "ends cut off": "X=/data/qwen/m.tar.gz/\nE=.gz\nA=(a.py b.sh c.py)\npython train.py ${X%/}"
    ' ${X%%/} ${X#/} ${X##*/} ${X%/*} "${X%%/*}" ${X#*/} ${X%q?en*} ${X%nothing}'
    " ${A[@]%.py} ${X%$E/} ${E#.}",
    "escapes with a dollar": r"""python train.py $'a\tb\n\'q\' \x41\u0042\101 "' "$'x'" """
    r"""x$'y'z $"plain" --x=$'\\' '$'""",
    "a value for one command": "A=3\nA=5 true $A\nA=6 B=7 python train.py $A ${B:-none}",
    "a value for a builtin": "A=3\nA=5 export B=$A\nA=6 true\npython train.py $A $B",
    "defaults that stay": ': "${N:=4}" ${M:=5 6}\nK=\n: ${K=x}\n'
    'python train.py $N $M "$K" ${L:=y}$L',
    "an empty array as a value": 'A=()\npython train.py "$A" ${A-none} ${A:+set} end',
    "a loop over names": "A=(x)\nfor i in A B; do true; done\npython train.py ${A[@]}",
    "stars in quotes": 'B="a*"\npython train.py "a*b" a\\*b x="?"',
}


def arguments_of(folder: Path, text: str, **environment: str) -> list[str]:
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(path, environment).arguments


@pytest.mark.parametrize("name", SAME)
def test_bash_comes_to_the_same_words(name, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\nshift\nprintf "%s\\0" "$@" >"$OUT"\n')
    program.chmod(0o755)
    (tmp_path / "python3").symlink_to(program)
    path = tmp_path / "run.sh"
    path.write_text(SAME[name])
    given = {"HOME": "/h", "V": "v", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    out = tmp_path / "out"
    subprocess.run(["bash", str(path)], env={**given, "OUT": str(out)}, cwd=tmp_path, check=True)
    words = out.read_bytes().decode().split("\0")[:-1]
    assert read_script(path, given).arguments == words


def test_sourced_files_are_found_beside_the_script(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL_ARGS=(--num-layers ${LAYERS:-2})")
    text = (
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nLAYERS=3\n'
        'source "${HERE}/models/m.sh"\npython train.py ${MODEL_ARGS[@]} $HERE'
    )
    assert arguments_of(tmp_path, text) == ["--num-layers", "3", str(tmp_path)]
    up = text.replace('[0]}")"', '[0]}")/.."').replace("models", f"{tmp_path.name}/models")
    assert arguments_of(tmp_path, up)[-1] == str(tmp_path.parent)


def test_a_missing_model_script_is_the_preset_of_its_name(tmp_path):
    text = "CKPT_ARGS=(--load x)\nsource scripts/models/qwen3-4B.sh\n"
    text += "python train.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}"
    words = arguments_of(tmp_path, text)
    assert words[words.index("--num-layers") + 1] == "36"
    assert words[-2:] == ["--load", "x"], "the script's own arrays stay"
    seed = "source scripts/models/llama3-8B.sh\npython train.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}"
    assert arguments_of(tmp_path, seed, HF_CHECKPOINT="/m")[-2:] == ["--hf-checkpoint", "/m"]
    with pytest.raises(ConfigError, match=r"\$HF_CHECKPOINT has no value: give it in the env"):
        arguments_of(tmp_path, seed)
    base = arguments_of(tmp_path, text, MODEL_ARGS_ROTARY_BASE="5000000")
    assert base[base.index("--rotary-base") + 1] == "5000000"


def test_the_command_may_stand_behind_a_job_submission(tmp_path):
    text = 'E="{ \\"a\\": \\"$(date)\\" }"\nray job submit --address=x --runtime-env-json="$E" '
    text += "-- python3 ${DIR}/train.py --seed 1"
    assert arguments_of(tmp_path, text) == ["--seed", "1"]
    assert read_script(tmp_path / "run.sh", {}).entry == "train.py"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("python train.py $NOWHERE", "line 1 of run.sh: $NOWHERE has no value: give it in the env"),
        ("A=$(nproc)\npython train.py $A", "what $(nproc) prints is not known without running it"),
        (
            "if true; then\n A=1\nfi\npython train.py $A",
            "it is set inside a block or after && or || at line 2",
        ),
        (
            "for i in 1 2; do A=$i; done\npython train.py $A",
            "inside a block or after && or || at line 1",
        ),
        ("python train.py ${A//x/y}", "${A//x/y} is a form that is not read"),
        ("python train.py $((1 << 3))", "$((1 << 3)) is not counted: 1 << 3 is a form that is not"),
        ("A=x\npython train.py $((A / 0))", "$((A / 0)) is not counted: invalid literal for int"),
        ("python train.py $((4 / 0))", "$((4 / 0)) is not counted"),
        ("echo nothing", "no command starts train.py: is this a launch script?"),
        ("python train.py\npython train.py", "train.py is started at line 1 of run.sh, line 2 of"),
        ("source models/none.sh\npython train.py", "models/none.sh is not there, and no preset"),
        ("source models/glm4-9B.sh\npython train.py", "glm4-9B is not there yet, it waits for"),
        (
            "if x; then\nsource models/qwen3-4B.sh\nfi\npython train.py ${MODEL_ARGS[@]}",
            "$MODEL_ARGS has no value",
        ),
        ("source $WHERE/a.sh\npython train.py", "line 1 of run.sh: $WHERE has no value"),
        ("source run.sh\npython train.py", "run.sh sources itself"),
        ("A=(\n1\npython train.py", "line 1: ( is never closed"),
        ('A="x\npython train.py', 'line 1: " is never closed'),
        ("python train.py ${A", "line 1: { is never closed"),
    ],
)
def test_what_cannot_be_known_is_named_with_its_line(text, sentence, tmp_path):
    with pytest.raises(ConfigError) as error:
        arguments_of(tmp_path, text)
    assert sentence in str(error.value)


@pytest.mark.parametrize("text, part", [
    ('[ -z "$A" ] && A=1\npython train.py $A', "after && or || at line 1"),
    ("grep -q x y || A=2\npython train.py ${A:-1}", "after && or || at line 1"),
    ("[[ 1 == 1 ]] && A=1 || A=2\npython train.py $A", "after && or || at line 1"),
    ("A=()\npython train.py $((A + 1))", "$((A + 1)) is not counted"),
    ("python train.py $(seq 1 99999999999)", "more than 10,000 numbers"),
    ("python train.py $(seq 1 0 5)", "has no end"),
    ("python train.py --bs {1,2}", "{1,2} is a form that is not read"),
    ("python train.py --seed $1", "$1 is an argument of the script"),
    ("python train.py --prompt-data data/*.jsonl", "run.sh: data/*.jsonl has a * outside"),
    ("A=(x?)\npython train.py ${A[@]}", "x? has a ? outside of quotes"),
    ("X=a1\npython train.py ${X%[0-9]}", "the pattern [0-9] has a [, which is not read"),
    ("X=a\npython train.py ${X%'a'}", "the pattern 'a' has a ', which is not read"),
    ("python train.py $'a\\cb'", "line 1: \\c is an escape that is not read"),
    ("python train.py $'\\xff'", "\\xff is a byte that is no text of its own"),
    ("\npython train.py $'a", "line 2: $' is never closed"),
    ("A=1 source m.sh\npython train.py", "line 1 of run.sh: A=... before source is a form"),
    ("A=1\nread -r A < file\npython train.py $A", "read sets it at line 2 of run.sh"),
    ("A=1\nunset A\npython train.py $A", "unset sets it at line 2"),
    ("A=1\nfor A in 2 3; do echo; done\npython train.py $A", "for sets it at line 2"),
    ("A=1\nwhile read -r A; do :; done < f\npython train.py $A", "read sets it at line 2"),
    ("A=1\nif read A; then echo; fi\npython train.py $A", "read sets it at line 2"),
    ("A=1\nlet A=A+1\npython train.py $A", "let sets it at line 2"),
    ("A=1\nprintf -v A x\npython train.py $A", "printf sets it at line 2"),
    ("A=(1 2)\nA[0]=3\npython train.py ${A[@]}", "A[0]=3 sets it at line 2"),
    ("X=a\npython train.py ${X^^} ", "${X^^} is a form that is not read"),
    ("X=a\npython train.py ${X:0:1} ", "${X:0:1} is a form that is not read"),
    ("X=Y\npython train.py ${!X} ", "${!X} is a form that is not read"),
    ("A=(1 2)\npython train.py ${A[@]:1} ", "${A[@]:1} is a form that is not read"),
])  # fmt: skip
def test_what_would_be_read_otherwise_than_bash_does_is_refused(text, part, tmp_path):
    with pytest.raises(ConfigError) as error:
        arguments_of(tmp_path, text)
    assert part in str(error.value)


def test_what_only_a_run_would_show_may_come_from_the_environment(tmp_path):
    text = "[ -e /x ] && A=1\nB=$(nproc)\npython train.py $A $B"
    assert arguments_of(tmp_path, text, A="7", B="8") == ["7", "8"]


def test_what_makes_the_shell_comfortable_is_not_read(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("source venv/bin/activate\n. ~/.bashrc\npython train.py --seed 1")
    (note,) = read_script(path, {}).notes
    assert "source venv/bin/activate (line 1 of run.sh), source ~/.bashrc (line 2" in note


def test_what_an_assignment_gives_to_the_command_is_noted(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("A=1 env B=2 python train.py --seed 1")
    assert read_script(path, {}).notes == ["environment: export it where you start: A, B"]


def test_nothing_is_run(tmp_path):
    text = f"touch {tmp_path}/made\nA=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\n"
    assert arguments_of(tmp_path, text + "python train.py --seed 1") == ["--seed", "1"]
    assert not (tmp_path / "made").exists()


TOKENS = r"""
    A= A $A ${A } ${A[@]} ${A:- $( ) ( ' " \ ; | > <<E E if fi then source x.sh export += $(( )) 1 {
    ` # python train.py --seed = && $ for done $' ${A%* ${#A} ${A##*/} : ${A:=
    read unset A[0]= * \\x4
"""
PIECES = [*TOKENS.split(), " ", "\n", "seq 2"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join)
    | st.lists(st.sampled_from(PIECES), max_size=20).map(" ".join)
    | st.text(max_size=40)
)
def test_any_text_is_read_or_refused_with_an_error_of_ours(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.sh"
    path.write_text(text + "\npython train.py --seed 1", encoding="utf-8")
    with suppress(ConfigError):
        assert read_script(path, {}).entry == "train.py"
