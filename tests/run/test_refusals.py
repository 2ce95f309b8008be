"""Invalid input is refused with an exit code and a line that names it, before files are written."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from run import errors
from run.compose import OTHER_NAMES, compose, nearest_key, open_configs
from run.errors import OverrideError
from run.settings import flatten
from tests.conftest import TINY
from tools.compare.plan import plan_variants
from tools.compare.sweep import expand_sweep
from training.setup import read_settings

# Overrides: the exit code and the word that the error names, by default the first override's key.
REFUSED = {
    # Unknown keys and presets, and values that cannot be parsed.
    "lr=0.1": 1,
    "batch_token=512": 1,
    "attention.windw=5": 1,
    "attention=mla attention.window=4": (1, "attention.window"),
    "attention=mla attention.rnk=4": (1, "attention.rank"),
    "data.path=my/texts": 1,
    "+colour=blue": (1, "colour"),
    "+seed.new=1": (1, "seed"),
    "hydra.run.dir=mine": 1,
    "attention=gqq": 1,
    "model=124": 1,
    "attention=null": 1,
    "attention={}": 1,
    "attention=../attention/gqa": 1,
    "experiment=tinystores": 1,
    "attention=gqa,mqa": 1,
    "attention=[gqa,mla]": 1,  # Hydra would merge the two
    "seed=range(3)": 1,
    "steps=1,000": 1,
    "steps=${stepps}": (1, "stepps"),
    "data=text data.path=a data.separator=it's": (1, "data.separator"),
    "attention=gdn +attention.kinds.recurrent.window=8": (1, "attention.kinds.recurrent.window"),
    # Words that are not KEY=VALUE.
    "optimizer.lr": 2,
    "~wandb": 2,
    "--attention=mha": (2, "--attention=mha"),
    "-m": 2,
    "hydra/launcher=joblib": (2, "hydra/launcher=joblib"),
    # Keys that the run sets.
    "model.vocab_size=512": (2, "data.vocab_size"),
    "model.context=64": 2,
    "++model.context=64": (2, "model.context"),
    "model.attention.window=5": (2, "model.attention"),
    "data=recall data.context=128": (2, "data.context"),
    # Types and ranges of top-level keys.
    "micro_batch=0": 2,
    "device=gpu": 2,
    "compile=yes": 2,
    "activation_checkpointing=1": 2,
    "steps=10k": 2,
    "steps=1.5": 2,
    "steps=[10,20]": 2,
    "seed=true": 2,
    "seed={a:1}": 2,
    "max_minutes=inf": 2,
    "max_minutes=nan": 2,
    "context=1": 2,
    "name=a/b": 2,
    "name=None": 2,
    "run_dir=None": 2,
    # Combinations.
    "batch_tokens=1000": 2,
    "batch_tokens=5120 micro_batch=8": 2,
    "max_minutes=null max_epochs=null": (2, "never end"),
    "sharded=true": 2,
    # Types and ranges of the options of presets, and values that constructors refuse.
    "data=recall data.pairs=[0,4]": (2, "data.pairs"),
    "data=recall data.pairs=[]": (2, "data.pairs"),
    "data=recall data.pairs=[4,4]": (2, "data.pairs"),
    "data=text data.path=my/texts data.text_field=7": (2, "data.text_field"),
    "data=text data.path=my/texts data.holdout=1": (2, "data.holdout"),
    "data=tinystories data.holdout=1": (2, "data.holdout"),
    "data=tokens data.path=my data.validation_tokens=1": (2, "data.validation_tokens"),
    "optimizer.lr=nan": 2,
    "optimizer.lr=fast": 2,
    "optimizer.lr=0": 2,
    "optimizer.betas=0.9": 2,
    "optimizer.betas=[0.9,-1]": 2,
    "optimizer=adamw optimizer.betas=[0.9]": (2, "optimizer.betas"),
    "optimizer.momentum=1": 2,
    "optimizer.reference.tokens=0": 2,
    "schedule.warmup=0.5": 2,
    "schedule.cooldown=2": 2,
    "attention.sink=no": 2,
    "attention.softcap=0": 2,
    "attention.softcap=true": 2,
    "attention.kv_heads=3": (2, "kv_heads"),
    "attention.kv_heads=-1": 2,
    "attention.window=0": 2,
    "attention.window=9.5": 2,
    "attention.dropout=1": 2,
    "attention.rope_base=1": 2,
    "attention.rope_scaling=YaRN": 2,
    "attention.rope_scaling={_target_:model.rope.YaRN}": 2,
    "attention.rope_fraction=2": (2, "rope_fraction"),
    "attention._target_=os.system": (2, "os.system"),
    "attention._target_=model.layers.torch.load": (2, "model.layers.torch.load"),
    "attention=mla attention.rope_dim=3": (2, "attention.rope_dim"),
    "attention=mla attention.rank=100000": (2, "attention.rank"),
    "attention=local_global attention.pattern=[]": (2, "attention.pattern"),
    "attention=nope attention.pattern=[rope,hope]": (2, "hope"),
    "attention=dsa attention.index_dim=3": (2, "attention.index_dim"),
    "attention=retention model.dim=100 model.heads=4": (2, "heads"),
    "attention=differential model.heads=3 model.dim=96 attention.kv_heads=1": (2, "kv_heads"),
    "attention=shared_kv attention.share=all": (2, "attention.share"),
    "model.heads=3": (2, "heads"),
    "model.dim=null": 2,
    "ffn.activation=gleu": 2,
    # Machines and files.
    "precision=fp16": (2, "fp16"),
    "device=cuda": (2, "device=cuda"),
    "data=text": (2, "data.path"),
    "data=text data.path=my/*.md": (2, "my/*.md"),
    "init_from=absent": (2, "absent"),
    "init_from=": 2,
}


@pytest.mark.parametrize("typed", REFUSED)
def test_an_invalid_override_is_refused_by_name(typed, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("my/texts").mkdir(parents=True)
    Path("my/texts/a.txt").write_text("text", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    overrides = typed.split()
    expected = REFUSED[typed]
    code, named = expected if isinstance(expected, tuple) else (expected, typed.partition("=")[0])
    with pytest.raises(SystemExit) as end, errors.report_errors(), errors.user_input():
        read_settings(["name=test", *overrides])
    (line,) = capfd.readouterr().err.splitlines()
    assert end.value.code == code and line.startswith("error: ") and named in line
    assert sorted(tmp_path.rglob("*")) == before


def test_all_out_of_range_values_are_reported_at_once(capfd):
    with pytest.raises(SystemExit), errors.user_input():
        compose(["name=test", "steps=0", "seed=-1", "log_every=0.5"])
    assert len(capfd.readouterr().err.splitlines()) == 3


# A misspelled or unknown key: the suggestion, or None.
SUGGESTIONS = {
    "attentoin": "attention",
    "atention": "attention",
    "attnetion": "attention",
    "modle": "model",
    "optimiser": "optimizer",
    "optimzer": "optimizer",
    "scheduler": "schedule",
    "dat": "data",
    "nrom": "norm",
    "stpes": "steps",
    "step": "steps",
    "max_minute": "max_minutes",
    "maxminutes": "max_minutes",
    "max_epoch": "max_epochs",
    "contxt": "context",
    "batchtokens": "batch_tokens",
    "batch_token": "batch_tokens",
    "microbatch": "micro_batch",
    "micro_batches": "micro_batch",
    "tokens_per_param": "tokens_per_parameter",
    "token_per_parameter": "tokens_per_parameter",
    "activation_checkpoints": "activation_checkpointing",
    "zloss": "z_loss",
    "doc_mask": "document_mask",
    "shard": "sharded",
    "document_masks": "document_mask",
    "eval_evry": "eval_every",
    "save_evey": "save_every",
    "log_evry": "log_every",
    "evaltokens": "eval_tokens",
    "sede": "seed",
    "devcie": "device",
    "precison": "precision",
    "comple": "compile",
    "wnadb": "wandb",
    "rundir": "run_dir",
    "initfrom": "init_from",
    "resmue": "resume",
    "model.dept": "model.depth",
    "model.hiden": "model.hidden",
    "model.head": "model.heads",
    "model.diim": "model.dim",
    "attention.windw": "attention.window",
    "attention.kv_head": "attention.kv_heads",
    "attention.kvheads": "attention.kv_heads",
    "attention.rope_bas": "attention.rope_base",
    "optimizer.momentun": "optimizer.momentum",
    "optimizer.weightdecay": "optimizer.weight_decay",
    "optimizer.beta": "optimizer.betas",
    "schedule.warmpu": "schedule.warmup",
    "schedule.cooldwon": "schedule.cooldown",
    "ffn.activaton": "ffn.activation",
    "data.vocabsize": "data.vocab_size",
    "data.tokeniser": "data.tokenizer",
    # Unknown keys.
    "foo": None,
    "bar": None,
    "colour": None,
    "verbose": None,
    "patience": None,
    "num_experts": None,
    "temperature": None,
    "lora_alpha": None,
    "label_smoothing": None,
    "ema": None,
    "quantization": None,
    "world_size": None,
    "strategy": None,
}


def test_only_similar_keys_are_suggested_for_a_typo():
    with open_configs():
        found = {typed: nearest_key(typed, []) for typed in SUGGESTIONS}
    wrong = {typed for typed in found if found[typed] != SUGGESTIONS[typed]}
    assert wrong <= {"sede", "nrom", "doc_mask"}  # difflib finds nothing close enough


def test_names_of_other_programs_stand_for_keys_of_the_default_config():
    known = dict(flatten(compose([]).model_dump()))
    for key in OTHER_NAMES.values():
        group = key.partition(".")[0]
        assert (f"model.{key}" if group == "attention" else key) in known, key
    with pytest.raises(OverrideError, match=r"fix: model\.depth$"):
        compose(["n_layer=3"])


@pytest.mark.parametrize(
    ("typed", "value"),
    [("steps=1e3", 1000), ("batch_tokens=16e3", 16000), ("context=5.12e2", 512), ("seed=7.0", 7)],
)
def test_integers_can_be_written_with_an_exponent(typed, value):
    key = typed.partition("=")[0]
    assert repr(getattr(compose([typed]), key)) == repr(value)


def test_integers_in_config_groups_can_have_an_exponent():
    settings = compose(["data.vocab_size=8e3", "model.dim=1.28e2", "context=1e3", "clip=1e0"])
    sizes = (settings.data["vocab_size"], settings.model["dim"], settings.model["context"])
    assert repr(sizes) == "(8000, 128, 1000)" and repr(settings.clip) == "1.0"
    with pytest.raises(ValueError, match=re.escape("steps=1.5")):
        compose(["steps=1.5"])


# Realistic names of files and folders.
NAMES = (
    "Moby Dick, by X.txt",
    "2024",
    "007",
    "1e3",
    "true",
    "Report (final) [2].txt",
    "it's",
    'say "hi"',
    'back\\slash\\"\\',
    "{a}: b=c, #1 100%",
    "~/красный 🐈",
)


@pytest.mark.parametrize("value", NAMES)
def test_a_path_is_used_as_typed(value):
    keys = ("run_dir", "init_from", "data.path", "data.validation", "data.tokenizer")
    settings = compose(["name=007", "data=text", *(f"{key}={value}" for key in keys)])
    assert settings.run_dir == settings.init_from == value
    for key in ("path", "validation", "tokenizer"):
        assert settings.data[key] == value
    assert settings.name == "007"


def test_a_path_can_be_null_or_quoted():
    words = ["run_dir=null", 'init_from="a, b"', "+data.tokenizer=null"]
    settings = compose(["name=test", "data=text", *words])
    assert (settings.run_dir, settings.init_from) == (None, "a, b")
    assert settings.data["tokenizer"] is None


def test_a_comma_in_a_data_path_does_not_separate_variants(command, story):
    """Runs on two texts cannot be compared, so the comma belongs to the path."""
    shutil.copy(story, "Moby Dick, by X.txt")
    words = ["attention=gqa,mqa", *TINY, "data=text", "data.vocab_size=400"]
    words.append("data.path=Moby Dick, by X.txt")
    variants = plan_variants(words, "none", None, has_search=False)
    assert [variant.name for variant in variants] == ["gqa", "mqa"]
    for variant in variants:
        assert words[-1] in variant.overrides  # unchanged, because it names the comparison
        assert compose(variant.overrides).data["path"] == "Moby Dick, by X.txt"


# Overrides of a comparison, the exit code and a word of the error.
COMPARED = {
    "attention=[gqa,mha]": (1, "attention"),
    "attention=gqa,mhaa": (1, "mhaa"),
    "attention=gqa,mha seeds=0,1": (1, "seeds"),
    "attention=gqa,mha steps=-1": (2, "steps"),
    "attention=gqa,mha --seed 0,1": (2, "--seed"),
    "run_dir=mine attention=gqa,mqa": (2, "run_dir"),
    "resume=true attention=gqa,mqa": (2, "resume"),
    "gqa mha": (2, "gqa"),
}


@pytest.mark.parametrize("typed", COMPARED)
def test_invalid_comparison_overrides_are_refused_by_name(command, typed):
    result = command("tools/compare/__main__.py", *typed.split())
    (line,) = result.err.splitlines()
    code, named = COMPARED[typed]
    assert result.code == code and line.startswith("error: ") and named in line
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [["steps=10,20"], ["attention=gqa,mha"], ["seed=range(2)"]])
def test_a_sweep_is_refused_with_the_command_for_sweeps(words):
    with pytest.raises(OverrideError, match=re.escape("python -m tools.compare")):
        compose(words)
    assert max(map(len, expand_sweep(words).values())) == 2


TEXT = ("data=text", "data.path=story.txt")
TRAINING = {
    "an option with dashes": (["--model", "small"], 2, "--model"),
    "a range of values": (["seed=range(3)"], 1, "python -m tools.compare"),
    "a missing file": (["data=text", "data.path=absent.txt"], 2, "absent.txt"),
    "an empty file": (["data=text", "data.path=empty.txt"], 2, "empty.txt"),
    "bytes that are not UTF-8": (["data=text", "data.path=latin.txt"], 2, "latin.txt"),
    "too little text": ([*TEXT, "data.vocab_size=400", "batch_tokens=65536"], 2, "need 65"),
    "a vocabulary too small": ([*TEXT, "data.vocab_size=260"], 2, " or more"),
    "no holdout": ([*TEXT, "data.holdout=0"], 2, "holdout"),
    "an unreachable dataset": (["data=tinystories"], 2, "roneneldan/TinyStories"),
}


@pytest.mark.parametrize("case", TRAINING)
def test_train_reports_invalid_input_in_one_line_with_an_exit_code(command, story, case):
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"cafe \xff")
    overrides, code, said = TRAINING[case]
    result = command("train.py", *TINY, "steps=2", *overrides)
    assert (result.code, result.out) == (code, "")
    *_, line = result.err.splitlines()  # a message about a slow network may come first
    assert line.startswith("error: ") and said in line
    assert not Path("runs").exists()


BAD_GENERATION = {
    "no run": (["a", "--run", "absent"], 2, "absent"),
    "no prompt": ([], 2, "prompt"),
    "two prompts": (["a", "--prompt-file", "latin.txt"], 2, "--prompt-file"),
    "an unknown option": (["a", "--colour", "blue"], 2, "--colour"),
    "a negative temperature": (["a", "--temperature", "-1"], 2, "-1"),
    "not a number": (["a", "--temperature", "nan"], 2, "nan"),
    "an infinite temperature": (["a", "--temperature", "inf"], 2, "inf"),
    "a negative top-k": (["a", "--top-k", "-1"], 2, "-1"),
    "a top-p above 1": (["a", "--top-p", "1.5"], 2, "at most 1, got 1.5"),
    "a negative length": (["a", "--max-new-tokens", "-5"], 2, "must be at least 1, got -5"),
    "no GPU": (["a", "--device", "cuda"], 2, "cuda"),
    "a missing file": (["--prompt-file", "absent.txt"], 2, "absent.txt"),
    "a file that is not UTF-8": (
        ["--prompt-file", "latin.txt"],
        2,
        "latin.txt: invalid start byte in position 5",
    ),
    "a file without lines": (["--prompt-file", "empty.txt"], 2, "empty.txt"),
    "no tokens": (["a", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
    "compiled without a cache": (["a", "--compile", "true", "--no-cache"], 2, "--no-cache"),
}


@pytest.mark.parametrize("case", BAD_GENERATION)
def test_generate_reports_invalid_input_in_one_line_with_an_exit_code(
    command, drawn_run, monkeypatch, case
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"cafe \xff")
    words, code, value = BAD_GENERATION[case]
    result = command("generate.py", *words)
    assert (result.code, result.out) == (code, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ") and value in line


def test_a_bug_in_a_layer_is_not_reported_as_invalid_input(monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr("model.attention.softmax.SoftmaxAttention.project_qkv", fail)
    with pytest.raises(RuntimeError, match="multiplied"), errors.user_input():
        read_settings(["name=test"])


def test_the_summary_names_settings_that_the_run_cannot_follow(command, story):
    words = [*TINY, *TEXT, "data.vocab_size=400", "steps=2"]
    result = command("train.py", *words, "eval_tokens=999999").succeeded()
    assert "held-out tokens, because eval_tokens is larger" in result.err
