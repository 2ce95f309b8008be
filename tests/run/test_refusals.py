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
from tests.conftest import TINY, settings_of
from tools.compare.plan import plan_variants
from training.setup import read_settings

TRAINED = """
# Unknown keys and presets, and values that cannot be parsed.
lr=0.1                                              1  lr
attention=mla attention.window=4                    1  attention.window
+colour=blue                                        1  colour
hydra.run.dir=mine                                  1  hydra.run.dir
attention=gdn +attention.kinds.recurrent.window=8   1  attention.kinds.recurrent.window
attention=gqq                                       1  attention
attention=../attention/gqa                          1  attention
attention=gqa,mqa                                   1  tools.compare
steps=1,000                                         1  steps
data=text data.path=a data.separator=it's           1  data.separator
# Words that are not KEY=VALUE.
optimizer.lr                                        2  optimizer.lr
~wandb                                              2  ~wandb
--attention=mha                                     2  --attention=mha
# Keys that the run sets.
model.vocab_size=512                                2  data.vocab_size
model.attention.window=5                            2  model.attention
# Types and ranges of keys and of options.
micro_batch=0                                       2  micro_batch
compile=yes                                         2  compile
steps=1.5                                           2  steps
seed=true                                           2  seed
max_minutes=inf                                     2  max_minutes
name=a/b                                            2  name
optimizer.lr=nan                                    2  optimizer.lr
optimizer.betas=[0.9,-1]                            2  optimizer.betas
attention.sink=no                                   2  attention.sink
attention.window=9.5                                2  attention.window
attention.rope_scaling={_target_:model.rope.YaRN}   2  attention.rope_scaling
attention.rope_scaling={_target_:model.rope.YaRN,factor:2,context:8,fast:32,slow:0}  2  slow
attention._target_=os.system                        2  os.system
attention._target_=model.layers.torch.load          2  model.layers.torch.load
# Values that a class refuses.
data=recall data.pairs=[4,4]                        2  data.pairs
attention.kv_heads=3                                2  kv_heads
attention=mla attention.rope_dim=3                  2  attention.rope_dim
attention=nope attention.pattern=[rope,hope]        2  hope
model.heads=3                                       2  heads
ffn.activation=gleu                                 2  ffn.activation
# Combinations.
batch_tokens=1000                                   2  batch_tokens
max_minutes=null max_epochs=null                    2  max_minutes
sharded=true                                        2  sharded
data.tokenizer=any.model data.vocab_size=400        2  data.vocab_size
data=tokens data.tokenizer=any.model data.bos=4     2  data.bos
# Machines and files.
precision=fp16                                      2  fp16
device=cuda                                         2  device=cuda
data=text                                           2  data.path
data=text data.path=my/*.md                         2  my/*.md
init_from=absent                                    2  absent
"""


def cases(table: str) -> list[list[str]]:
    """The columns of a table, which at least two spaces separate, without comments."""
    lines = [line for line in table.splitlines() if line and not line.startswith("#")]
    return [re.split(r"\s{2,}", line) for line in lines]


@pytest.mark.parametrize(("overrides", "code", "named"), cases(TRAINED))
def test_an_invalid_override_is_refused_by_name(
    overrides, code, named, capfd, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as end, errors.report_errors(), errors.exit_on_invalid_input():
        read_settings(["name=test", *overrides.split()])
    (line,) = capfd.readouterr().err.splitlines()
    assert end.value.code == int(code) and line.startswith("error: ") and named in line
    assert not list(tmp_path.iterdir())


def test_all_out_of_range_values_are_reported_at_once(capfd):
    with pytest.raises(SystemExit), errors.exit_on_invalid_input():
        compose(["name=test", "steps=0", "seed=-1", "log_every=0.5"])
    assert len(capfd.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("attnetion", "attention"),  # a group
        ("model.hiden", "model.hidden"),
        ("model.head", "model.heads"),  # in the same group, not optimizer.reference.head
        ("attention.heads", "model.heads"),  # the same name elsewhere, not attention.kv_heads
        ("n_layer", "model.depth"),  # the name in another program
        ("colour", None),
    ],
)
def test_only_similar_keys_are_suggested_for_a_typo(typed, suggested):
    with open_configs():
        assert nearest_key(typed, []) == suggested


def test_names_of_other_programs_stand_for_keys_of_the_default_config():
    known = dict(flatten(settings_of().model_dump()))
    for key in OTHER_NAMES.values():
        group = key.partition(".")[0]
        assert (f"model.{key}" if group == "attention" else key) in known, key
    with pytest.raises(OverrideError, match=r"fix: model\.depth$"):
        compose(["n_layer=3"])


def test_integers_can_be_written_with_an_exponent():
    words = ["steps=1e3", "context=5.12e2", "seed=7.0", "model.dim=1.28e2", "clip=1e0"]
    settings = compose(words)
    found = [settings.steps, settings.context, settings.seed, settings.model["dim"], settings.clip]
    assert repr(found) == "[1000, 512, 7, 128, 1.0]"


PATHS = ("run_dir", "init_from", "data.path", "data.validation", "data.tokenizer")


@pytest.mark.parametrize(
    "values",
    [
        ("Moby Dick, by X.txt", "007", "1e3", "true", "Report (final) [2].txt"),
        ("it's", 'say "hi"', 'back\\slash\\"\\', "{a}: b=c, #1 100%", "~/красный 🐈"),
    ],
)
def test_a_path_is_used_as_typed(values):
    words = [f"{key}={value}" for key, value in zip(PATHS, values, strict=True)]
    settings = compose(["name=007", "data=text", *words])
    data = settings.data
    found = (settings.run_dir, settings.init_from, data["path"], data["validation"])
    assert (*found, data["tokenizer"]) == values
    assert settings.name == "007"


def test_a_path_can_be_null_or_quoted():
    words = ["run_dir=null", 'init_from="a, b"', "+data.tokenizer=null"]
    settings = compose(["name=test", "data=text", *words])
    assert (settings.run_dir, settings.init_from) == (None, "a, b")
    assert settings.data["tokenizer"] is None


def test_a_comma_in_a_data_path_does_not_separate_variants(command, story):
    """Runs on two texts cannot be compared, so the comma belongs to the path."""
    shutil.copy(story, "Moby Dick, by X.txt")
    text = "data.path=Moby Dick, by X.txt"
    words = ["attention=gqa,mqa", *TINY, "data=text", "data.vocab_size=400", text]
    variants = plan_variants(words, "none", None, has_search=False)
    assert [variant.name for variant in variants] == ["gqa", "mqa"]
    assert compose(variants[0].overrides).data["path"] == "Moby Dick, by X.txt"


COMPARED = """
attention=gqa,mhaa                   1  mhaa
attention=gqa,mha seeds=0,1          1  seeds
attention=gqa,mha --seed 0,1         2  --seed
run_dir=mine attention=gqa,mqa       2  run_dir
"""


@pytest.mark.parametrize(("typed", "code", "named"), cases(COMPARED))
def test_invalid_comparison_overrides_are_refused_by_name(command, typed, code, named):
    result = command("tools/compare/__main__.py", *typed.split())
    (line,) = result.err.splitlines()
    assert result.code == int(code) and line.startswith("error: ") and named in line
    assert not Path("runs").exists()


TEXTS = """
data=text data.path=absent.txt                                           absent.txt
data=text data.path=latin.txt                                            latin.txt
data=text data.path=story.txt data.vocab_size=400 batch_tokens=65536     65
data=text data.path=story.txt data.vocab_size=260                        260
data=text data.path=story.txt data.holdout=0                             holdout
data=tinystories                                                         TinyStories
"""


@pytest.mark.parametrize(("overrides", "named"), cases(TEXTS))
def test_a_text_that_cannot_be_used_is_refused_by_name(command, story, overrides, named):
    Path("latin.txt").write_bytes(b"cafe \xff")
    result = command("train.py", *TINY, "steps=2", *overrides.split())
    assert (result.code, result.out) == (2, "")
    *_, line = result.err.splitlines()  # a message about a slow network may come first
    assert line.startswith("error: ") and named in line
    assert not Path("runs").exists()


GENERATED = """
a --run absent                     absent
--seed 1                           prompt
a --prompt-file latin.txt          --prompt-file
a --temperature nan                nan
a --temperature inf                inf
a --top-p 1.5                      1.5
a --max-new-tokens 0               --max-new-tokens
--prompt-file latin.txt            latin.txt
a --compile true --no-cache        --no-cache
"""


@pytest.mark.parametrize(("words", "named"), cases(GENERATED))
def test_an_invalid_option_of_generate_is_refused_by_name(command, drawn_run, words, named):
    Path("latin.txt").write_bytes(b"cafe \xff")
    result = command("generate.py", *words.split())
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ") and named in line


def test_a_bug_in_a_layer_is_not_reported_as_invalid_input(monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr("model.attention.softmax.SoftmaxAttention.project_qkv", fail)
    with pytest.raises(RuntimeError, match="multiplied"), errors.exit_on_invalid_input():
        read_settings(["name=test"])
