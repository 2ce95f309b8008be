"""What is mistyped is answered with what was meant, in one line; and a notebook composes configs."""

import subprocess
import sys

import pytest

from data.files import TEXT_SUFFIXES, find_files
from run import cli, config, errors
from run.instantiate import instantiate
from tests.conftest import ROOT
from train import check_arguments
from training.setup import load_settings

MISTYPED = {  # what is typed: exit code, what the line offers after "fix: "
    # keys without their group, misspelt, or of another name elsewhere
    "lr=0.1": (1, "optimizer.lr"),
    "~lr": (1, "optimizer.lr"),
    "learning_rate=0.1": (1, "optimizer.lr"),
    "dropout=0.1": (1, "attention.dropout"),
    "softcap=30": (1, "model.softcap or attention=softcap or attention.softcap"),
    "batch_size=32": (1, "batch_tokens or micro_batch"),
    "+batch_size=32": (2, "batch_tokens or micro_batch"),
    "attention.windw=5": (1, "attention.window"),
    "attention.heads=2": (1, "model.heads"),
    "attention=local_global attention.window=5": (
        1,
        "attention.kinds.full.window or attention.kinds.local.window",
    ),
    "attention=mla attention.rnk=4": (1, "attention.rank"),
    "optimizer=adamw optimizer.beta=[0.9,0.9]": (1, "optimizer.betas"),
    "mode.dept=3": (1, "model.depth"),
    "model.n_layer=3": (1, "model.depth"),
    "eval_evry=5": (1, "eval_every"),
    "max_step=5": (1, "steps"),
    "data.path=my.txt": (1, "data=text or data=tokens"),
    "zyzzyva=5": (1, "python train.py --help, which lists all"),
    # groups and choices
    "attnetion=mqa": (1, "attention"),
    "modle=tiny": (1, "model"),
    "attention=gqq": (1, "attention=gqa"),
    "optimizer=adam": (1, "optimizer=adamw"),
    "optimizer=zyzzyva": (1, "optimizer=adamw or optimizer=lion or optimizer=muon"),
    "model=15M": (1, "model=15m"),
    "schedule=cosin": (1, "schedule=cosine"),
    "experiment=tinystores": (1, "experiment=tinystories"),
    "optimizer=sdg": (1, "optimizer=adamw or optimizer=lion or optimizer=muon"),
    "attention={a:1}": (1, "attention=alibi or attention=chunked or"),
    "attention=gqa,mqa": (1, "python -m tools.compare attention=gqa,mqa"),
    "seed=range(3)": (1, "python -m tools.compare 'seed=range(3)'"),
    "epochs=3": (1, "max_epochs or steps"),
    # values
    "max_epochs=0": (2, "max_epochs=4"),
    "micro_batch=0": (2, "micro_batch=null"),
    "device=gpu": (2, "device=cuda"),
    "precision=bf61": (2, "precision=bf16"),
    "precision=bfloat16": (2, "precision=bf16"),
    "compile=yes": (2, "compile=true"),
    "compile=1": (2, "compile=auto"),
    "resume=no": (2, "resume=false"),
    "wandb=ofline": (2, "wandb=offline"),
    "steps=nul": (2, "steps=null"),
    "context=1": (2, "context=256"),
    "max_minutes=0": (2, "max_minutes=5"),
    "optimizer.lr=nan": (2, "optimizer.lr=0.02"),
    "optimizer=adamw optimizer.lr=-1": (2, "optimizer.lr=0.002"),
    "optimizer.betas=[0.9,-1]": (2, "optimizer.betas=[0.9,0.95]"),
    "model.heads=0": (2, "model.heads=4"),
    "attention.sink=no": (2, "attention.sink=true or false"),
    "attention=local_global attention.kinds.full.window=9.5": (2, "attention.kinds.full.window=1"),
    "model.dim=wide": (2, "model.dim=1"),
    "optimizer.lr=fast": (2, "optimizer.lr=1.0"),
    "schedule.warmup=0.5": (2, "schedule.warmup=1"),
    "+attention.windw=5": (2, "attention.window"),
    "+optimizer.momentm=0.5": (2, "optimizer.momentum"),
    "batch_tokens=1000": (2, "batch_tokens=768 or batch_tokens=1024"),
}


@pytest.mark.parametrize("typed", MISTYPED)
def test_what_is_mistyped_is_answered_with_what_was_meant(typed, capfd, monkeypatch):
    code, fix = MISTYPED[typed]
    overrides = typed.split()
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    with pytest.raises(SystemExit) as end, config.report_errors(), errors.user_input():
        load_settings(config.compose(["name=test", *overrides]))
    (line,) = capfd.readouterr().err.splitlines()
    problem, _, answer = line.partition(". fix: ")
    assert problem.startswith("error: ") and answer.startswith(fix), line
    assert answer == fix or " or" in answer.removeprefix(fix), line
    assert end.value.code == code


COMMANDS = {
    "--model small": (2, "fix: model=small\n"),
    "--model=small": (2, "fix: model=small\n"),
    "--model": (2, "fix: model=VALUE\n"),
    "lr=0.1": (1, "fix: optimizer.lr\n"),
    "attention=gqa,mqa": (1, "fix: python -m tools.compare attention=gqa,mqa or"),
    "model=15": (2, "fix: model=15m\n"),
    "attention=null": (2, "fix: attention=alibi or attention=chunked or"),
}


@pytest.mark.parametrize("typed", COMMANDS)
def test_the_training_command_gives_these_answers(typed, command):
    result = command("train.py", *typed.split())
    assert result.err.startswith("error: ") and len(result.err.splitlines()) == 1
    assert result.code == COMMANDS[typed][0] and COMMANDS[typed][1] in result.err


def test_a_choice_of_an_experiment_that_is_not_there_ends(monkeypatch, tmp_path):
    """What Hydra refuses in a yaml is no override, so the answer does not compose that yaml again."""
    problem = "In 'experiment/x': Could not override 'modle'. No match in the defaults list."
    assert config.composing_problem(ValueError(problem), ["experiment=x"]).startswith(problem[:-1])


def test_a_notebook_composes_configs_from_any_folder(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import hydra
hydra.initialize(None, version_base="1.3")  # another library's
from run.config import compose
first = compose(["model=tiny"])
second = compose(["attention=mla", "optimizer.lr=0.5"])
assert type(first) is type(first["model"]) is dict and first["model"]["depth"] == 2
assert (first["name"], second["name"]) == ("stdlib-tiny-gqa", "stdlib-small-mla")
assert second["optimizer"]["lr"] == 0.5 != first["optimizer"]["lr"]
from model.build import build_model
build_model(first["model"])
try:
    compose(["model=tinny"])
except Exception as error:
    assert str(error).endswith("fix: model=tiny"), error
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert not list(tmp_path.iterdir())


def test_an_argument_of_a_wrong_type_is_answered_with_an_example():
    tree = {"_target_": "model.rope.Linear", "factor": "four"}
    with pytest.raises(
        ValueError, match=r"factor must be float \(got 'four'\). fix: model.factor=1.0"
    ):
        instantiate(tree)


def test_bounds_are_told_in_words():
    with pytest.raises(Exception, match="must be at least 2, got 1"):
        cli.bounded_number(int, 2)("1")
    with pytest.raises(Exception, match="must be from 0 to 1, got 5"):
        cli.bounded_number(float, 0, 1)("5")


def test_no_fix_says_merely_to_change_something():
    for path in ROOT.rglob("*.py"):
        if not {"tests", ".venv", ".cache"} & set(path.relative_to(ROOT).parts):
            text = path.read_text()
            for empty in ("change it", "change one", "one of them"):
                assert f"fix: {empty}" not in text, path


def test_a_folder_of_other_files_is_answered_with_how_to_name_them(tmp_path):
    (tmp_path / "package").mkdir()
    for name in ("a.py", "package/b.py", "package/b.pyc", "read.me"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=r"no \.txt or \.jsonl or \.parquet files") as refused:
        find_files(str(tmp_path), TEXT_SUFFIXES)
    answer = str(refused.value).partition("fix: data.path=")[2].strip("'")
    assert answer == f"{tmp_path}/**/*.py"
    assert [path.name for path in find_files(answer, TEXT_SUFFIXES)] == ["a.py", "b.py"]


def test_no_argument_is_no_mistake():
    check_arguments([])
