"""Invalid input is refused with an exit code and one line per problem, before files are written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.files import find_files
from run import aliases, errors
from run.errors import OverrideError
from run.instantiate import instantiate
from run.settings import GROUPS, compose, defaults
from tests.conftest import ROOT, TINY
from tools.compare.plan import plan_variants
from tools.compare.sweep import expand_sweep
from training.setup import set_up_run, unused_keys

# Overrides: the exit code and a part of the error line.
CONFIGS = {
    # Keys that are misspelled, lack their group, or have different names in other programs.
    "lr=0.1": (1, "fix: optimizer=adamw optimizer.lr=0.1 optimizer.reference=null; lr: "),
    "optimizer.lr": (2, "without dashes (got optimizer.lr)"),
    "max_minutes": (2, "fix: max_minutes=5"),
    "batch_token=512": (1, "fix: batch_tokens=512"),
    "+batch_token=512": (1, "fix: batch_tokens=512"),
    "attention.windw=5": (1, "fix: attention.window"),
    "attention.heads=2": (1, "fix: model.heads"),
    "attention=mla attention.rnk=4": (1, "fix: attention.rank=4"),
    "attention=mla attention.window=4": (1, "fix: attention=gqa attention.window=4"),
    "optimizer=adamw optimizer.momentum=0.9": (1, "fix: optimizer=muon optimizer.momentum=0.9"),
    "data.pth=my/texts": (1, "fix: data=text data.path=my/texts"),
    "model.dept=3": (1, "fix: model.depth"),
    "eval_evry=5": (1, "fix: eval_every"),
    "stepss=5": (1, "fix: steps"),
    "zyzzyva=5": (1, "fix: python train.py --help, which lists all keys"),
    "+colour=blue": (1, "unknown (colour)"),
    "+foo=1": (1, "fix: python train.py --help"),
    "model.layers=4": (1, "fix: model.depth=4"),
    "block_size=64": (1, "fix: context=64"),
    "+seed.new=1": (1, "unknown (seed.new)"),
    "~wandb": (2, "fix: wandb=disabled"),
    "--attention=mha": (2, "fix: attention=mha"),
    "+attention.windw=5": (1, "fix: attention.window=5"),
    # Groups and presets.
    "attnetion=mqa": (1, "fix: attention=mqa"),
    "attention=gqq": (1, "fix: attention=gqa"),
    "optimizer=zyzzyva": (1, "fix: optimizer=adamw or optimizer=muon"),
    "model=15M": (1, "fix: model=15m"),
    "experiment=tinystores": (1, "fix: experiment=tinystories"),
    "attention=gqa,mqa": (1, "fix: python -m tools.compare name=test attention=gqa,mqa"),
    "optimizer=adam": (1, "fix: optimizer=adamw"),
    "data=shakespeare_char": (1, "fix: data=tinyshakespeare"),
    # Keys that are set by the run itself.
    "model.vocab_size=512": (2, "fix: data.vocab_size=512"),
    "model.context=64": (2, "fix: context=64"),
    "model.attention=mha": (2, "fix: attention=mha"),
    "model.attention.window=5": (2, "fix: attention.window=5"),
    "data=recall data.context=128": (2, "fix: context=128"),
    "hydra.run.dir=mine": (2, "fix: run_dir=mine"),
    "hydra.verbose=true": (2, "fix: leave hydra.verbose out"),
    "hydra/launcher=joblib": (2, "fix: leave hydra/launcher out"),
    # Values of top-level keys: types and ranges.
    "micro_batch=0": (2, "fix: micro_batch=null"),
    "device=gpu": (2, "must be 'auto', 'cpu', 'cuda' or 'mps' (got 'gpu')"),
    "compile=yes": (2, "compile must be 'auto', true or false (got 'yes'). fix: compile=true"),
    "compile=on": (2, "fix: compile=true"),
    "resume=no": (2, "fix: resume=false"),
    "document_mask=yes": (2, "fix: document_mask=true"),
    "activation_checkpointing=1": (2, "fix: activation_checkpointing=true"),
    "wandb=ofline": (2, "fix: wandb=offline"),
    "wandb=true": (2, "fix: wandb=online"),
    "wandb=none": (2, "fix: wandb=disabled"),
    "precision=bf16-mixed": (2, "fix: precision=bf16"),
    "precision=float32": (2, "fix: precision=fp32"),
    "max_minutes=None": (2, "fix: max_minutes=null"),
    "run_dir=None": (2, "fix: run_dir=null"),
    "init_from=resume": (2, "fix: resume=true"),
    "init_from=scratch": (2, "fix: leave init_from out"),
    "steps=0": (2, "steps must be greater than 0 (got 0). fix: steps=null"),
    "steps=nul": (2, "fix: steps=null"),
    "steps=1,000": (1, "numbers must not contain commas (got steps=1,000). fix: steps=1000"),
    "steps=1e3.5": (2, "fix: steps=1000"),
    "steps=10k": (2, "fix: steps=10000"),
    "steps=[10]": (2, "fix: steps=10"),
    "profile=true": (2, "fix: profile=5"),
    "profile=false": (2, "fix: profile=null"),
    "eval_tokens=true": (2, "fix: eval_tokens=100000"),
    "clip=false": (2, "fix: clip=null"),
    "batch_tokens=0.5M": (2, "fix: batch_tokens=524288"),
    "context=4k batch_tokens=65536": (2, "fix: context=4096"),
    "max_minutes=2h": (2, "fix: max_minutes=120"),
    "max_minutes=90s": (2, "fix: max_minutes=1.5"),
    "data.vocab_size=8k": (
        2,
        "data.vocab_size must be an integer (got '8k'). fix: data.vocab_size=8000",
    ),
    "context=1": (2, "fix: context=256"),
    "max_minutes=inf": (2, "max_minutes must be a finite number (got inf)"),
    "seed=true": (2, "seed must be a valid integer (got true)"),
    "name=a/b": (2, "name must match pattern"),
    "distill_weight=2": (2, "distill_weight must be less than or equal to 1"),
    "batch_tokens=1000": (2, "multiple of 256: whole sequences for every process (got 1000"),
    "batch_tokens=5120 micro_batch=8": (2, "fix: batch_tokens=4096"),
    "max_minutes=null max_epochs=null": (2, "the run would never end"),
    "data=track max_minutes=null": (2, "the run would never end"),
    "sharded=true": (2, "sharding needs more than one process"),
    "attention=null": (2, "must be a string or a list"),
    "model=[1]": (1, "unknown (model=[1]). fix: model=1b"),
    "attention=[gqa,mla]": (1, "fix: python -m tools.compare name=test attention=gqa,mla"),
    "attention=[gqa]": (1, "unknown (attention=[gqa]). fix: attention=gqa"),
    "attention=gqa,mlaa": (1, "fix: python -m tools.compare name=test attention=gqa,mla"),
    "model=124": (1, "fix: model=124m"),
    "steps=[10,20]": (1, "fix: python -m tools.compare name=test steps=10,20"),
    "steps=10,20 lr=1e-3": (1, "fix: python -m tools.compare name=test steps=10,20 optimizer="),
    "data=recall data.pairs=[0,4]": (2, "each row needs at least one pair (data.pairs=[0, 4])"),
    "attention=retention model.dim=100 model.heads=4": (2, "fix: model.dim=104"),
    "attention=differential model.heads=3 model.dim=96 attention.kv_heads=1": (
        2,
        "fix: model.heads=4 attention.kv_heads=4 model.dim=128",
    ),
    "data=recall data.pairs=[4,4]": (2, "data.pairs has duplicates (got [4, 4])"),
    "data=text data.path=my/texts data.separator=it's": (1, """fix: 'data.separator="it'"'"'s"'"""),
    "data=text data.path=my/texts data.text_field=7": (2, """fix: 'data.text_field="7"'"""),
    "steps=${stepps}": (1, "stepps"),
    "distill_weight=0.9": (2, "fix: leave distill_weight out"),
    # Values in groups: wrong types, and values that constructors refuse.
    "optimizer.lr=nan": (2, "optimizer.lr must be a finite number (got nan)"),
    "optimizer.lr=fast": (2, "fix: leave optimizer.lr out"),
    "optimizer.lr=0": (2, "the learning rate is 0"),
    "optimizer.betas=0.9": (
        2,
        "must be a list of numbers (got 0.9). fix: 'optimizer.betas=[0.9,0.95]'",
    ),
    "optimizer.betas=[0.9,-1]": (2, "optimizer.betas"),
    "optimizer=adamw optimizer.betas=[0.9]": (2, "betas"),
    "attention.sink=no": (
        2,
        "attention.sink must be true or false (got 'no'). fix: attention.sink=false",
    ),
    "attention.window=None": (2, "fix: attention.window=null"),
    "model.dim=null": (2, "model.dim must be an integer (got null)"),
    "data=recall data.pairs=x": (2, "a list of integers (got 'x'). fix: 'data.pairs=[4,8]'"),
    "attention=nope attention.pattern=rope": (2, "fix: 'attention.pattern=[rope]'"),
    "attention.softcap=0": (2, "attention.softcap must be greater than 0 (got 0)"),
    "attention.softcap=true": (2, "softcap must be a finite number or null (got true)"),
    "attention.kv_heads=3": (2, "kv_heads=3"),
    "attention.kv_heads=-1": (2, "attention.kv_heads"),
    "attention.window=0": (2, "attention.window"),
    "attention.window=9.5": (2, "9.5"),
    "model=tiny attention.rope_fraction=0.2": (2, "rope_fraction=0.2"),
    "attention.rope_fraction=2": (2, "between 2 and head_dim"),
    "attention.rope_scaling=YaRN": (2, "rope_scaling"),
    "attention.dropout=1.5": (2, "1.5"),
    "attention._target_=os.system": (2, "os.system"),
    "attention=gdn +attention.kinds.recurrent.window=8": (1, "window"),
    "data=${x}": (1, "interpolation"),
    "attention=mla attention.rope_dim=3": (2, "3"),
    "attention=mla attention.head_dim=1": (2, "(got 0). fix: attention.rope_dim=2"),
    "attention=local_global attention.pattern=[]": (2, "fix: attention.pattern=[local,full]"),
    "attention=dsa attention.index_dim=3": (2, "fix: attention.index_dim=4"),
    "attention=mla attention.rank=0": (2, "attention.rank"),
    "attention=mla attention.rank=100000": (2, "fix: attention.rank="),
    "attention=differential attention.kv_heads=1": (2, "kv_heads=1"),
    "attention=nope attention.pattern=[rope,hope]": (2, "'hope', not one of ['nope', 'rope']"),
    "attention=shared_kv attention.share=all": (2, "'all'"),
    "model.heads=0": (2, "model.heads"),
    "model.heads=3": (2, "heads=3"),
    "model.dim=wide": (2, "model.dim must be an integer (got 'wide'). fix: leave model.dim out"),
    "ffn.activation=gleu": (2, "'silu', 'gelu' or 'relu2' (got 'gleu'). fix: ffn.activation=gelu"),
    "ffn.activation=swish": (2, "fix: ffn.activation=silu"),
    "schedule.warmup=0.5": (2, "fix: leave schedule.warmup out"),
    "schedule.cooldown=2": (2, "cooldown"),
    "precision=fp16": (2, "fp16"),
    "device=cuda": (2, "device=cuda"),
    "data=text": (2, "data.path"),
    "data=text data.path=my/*.md": (2, "my/*.md"),
    "data=text data.path=": (2, "(path='')"),
    "init_from=absent": (2, "absent"),
}


@pytest.mark.parametrize("typed", CONFIGS)
def test_an_invalid_override_is_refused_in_one_line_with_a_working_fix(
    typed, capfd, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said = CONFIGS[typed]
    overrides = typed.split()
    with pytest.raises(SystemExit) as end, errors.report_errors(), errors.user_input():
        set_up_run(compose(["name=test", *overrides]), overrides)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and ". fix: " in line and said in line
    assert end.value.code == code and not list(tmp_path.iterdir())

    Path("my/texts").mkdir(parents=True)
    Path("my/texts/a.txt").write_text("text", encoding="utf-8")
    what, _, fix = line.partition(". fix: ")
    words = fixed(overrides, what, fix)
    set_up_run(compose(["name=test", *words]), words)


def fixed(overrides: list[str], what: str, fix: str) -> list[str]:
    """Apply the first fix of an error line to the overrides."""
    if fix.startswith("python -m tools.compare"):
        call = fix.partition(";")[0]
        return plan_variants(shlex.split(call)[3:], "none", None, has_search=False)[0].overrides
    if fix.startswith(("python train.py", "--help")):
        return []
    told = {}
    for word in shlex.split(fix) if not fix.startswith("leave ") else []:
        key, is_override, value = word.partition("=")
        if is_override and not word.startswith("-"):
            told.setdefault(key, value.strip(",;"))
    # The invalid override is the first one in parentheses; the others are kept.
    wrong = {*re.findall(r"[(](?:got )?'?([^ )']+)", what)[:1], *fix.split()[1:2], *told}
    assert told or fix.startswith("leave ")
    kept = []
    for word in overrides:
        key, _, value = word.lstrip("+~-").partition("=")
        if not wrong & {word, key, value}:
            kept.append(word)
    return [*kept, *map("=".join, told.items())]


# Options of nanoGPT, nanochat, litgpt and transformers, and the corresponding overrides.
# The defaults are context=256 batch_tokens=4096 optimizer.lr=0.035.
FOREIGN = {
    "n_layer=12 n_head=8 n_embd=256": "model.depth=12 model.dim=256 model.heads=8",
    "num_hidden_layers=3": "model.depth=3",
    "steps=5 n_layer=2 zyzzyva=5": "model.depth=2",
    "train.max_steps=100": "steps=100 max_minutes=null",
    "max_steps=-1": "steps=null max_minutes=null",
    "max_tokens=1e6": "steps=245 max_minutes=null",  # 1e6 / 4096, rounded up
    "num_train_epochs=3.0": "max_epochs=3 max_minutes=null",
    "batch_size=8": "batch_tokens=2048",  # 8 x 256
    "batch_size=8 block_size=64": "context=64 batch_tokens=512",
    "batch_size=8 context=512": "batch_tokens=4096",
    "experiment=tinystories batch_size=4": "batch_tokens=2048",  # this preset has a context of 512
    "gradient_accumulation_steps=4": "micro_batch=4",  # 4096 / 256 / 4
    "per_device_train_batch_size=8 gradient_accumulation_steps=2": "batch_tokens=4096 micro_batch=8",
    "device_batch_size=4 total_batch_size=8192": "batch_tokens=8192 micro_batch=4",
    "eval_iters=20": "eval_tokens=81920",
    "learning_rate=6e-4": "optimizer=adamw optimizer.lr=6e-4 optimizer.reference=null",
    "lr=0.1": "optimizer=adamw optimizer.lr=0.1 optimizer.reference=null",
    "optimizer=adamw lr=1e-3": "optimizer.lr=1e-3 optimizer.reference=null",
    "optimizer=muon lr=0.02": "optimizer.lr=0.02",
    "training.lr=1e-3": "optimizer=adamw optimizer.lr=1e-3 optimizer.reference=null",
    "embedding_lr=0.35": "optimizer.reference.embedding=10",  # 0.35 / 0.035
    "matrix_lr=0.02 unembedding_lr=0.004": "optimizer.lr=0.02 optimizer.reference.head=0.2",
    "lr=1e-3 embedding_lr=0.1": "optimizer=adamw optimizer.lr=1e-3 optimizer.reference=null",
    "trainer.max_epochs=3": "max_epochs=3 max_minutes=null",
    "trainer.max_epochs=3 max_minutes=9": "max_epochs=3",
    "max_iters=100 max_minutes=9": "steps=100",
    "data=text data.glob=my/*.txt": "data.path=my/*.txt",
    "data=text data.dir=my/texts": "data.path=my/texts",
    "config=configs/model/15m.yaml": "model=15m",
    "random_seed=3": "seed=3",
    "learning_rate=6e-4 min_lr=6e-5": "optimizer=adamw optimizer.lr=6e-4 optimizer.reference=null "
    "schedule.floor=0.1",
    "beta1=0.8": "optimizer.betas=[0.8,0.95]",
    "beta1=0.8 beta2=0.99": "optimizer.betas=[0.8,0.99]",
    "grad_clip=0.0": "clip=null",
    "warmup_ratio=0.1 steps=1000": "schedule.warmup=100",
    "optim=adamw_torch": "optimizer=adamw",
    "lr_scheduler_type=cosine": "schedule=cosine",
    "dtype=bfloat16": "precision=bf16",
    "bf16=True": "precision=bf16",
    "bf16=False": "",
    "wandb_log=True": "wandb=online",
    "wandb_log=False": "",
    "report_to=none": "wandb=disabled",
    "dataset=shakespeare_char": "data=tinyshakespeare",
    "data_dir=my/texts": "data=text data.path=my/texts",
    "out_dir=out": "run_dir=out",
    "resume_from_checkpoint=True": "run_dir=null resume=true",
    "bias=False dropout=0.1": "attention.dropout=0.1 attention.bias=false",
    "attention=kda rope_theta=1e6": "attention.kinds.full.rope_base=1000000",
    "attention=window_nope attention.window=64": "attention.kinds.local.window=64",
    "attention.type=mla": "attention=mla",
    "always_save_checkpoint=True": "",
}


def test_our_name_of_an_option_is_given_even_if_its_value_cannot_be_converted():
    with pytest.raises(OverrideError) as refused:
        compose(["warmup_ratio=0.1"])  # the number of steps is unknown
    assert "fix: replace warmup_ratio with schedule.warmup, which is ratio x" in str(refused.value)


@pytest.mark.parametrize("typed", FOREIGN)
def test_option_names_of_other_programs_are_translated(typed):
    with pytest.raises(OverrideError) as refused:
        compose(typed.split())
    problem, _, fix = str(refused.value).partition(". fix: ")
    told = shlex.split(fix.partition(";")[0])
    if FOREIGN[typed] == "":
        assert fix.startswith("leave ")
        return
    assert told == FOREIGN[typed].split()
    wrong = re.findall(r"[\w.]+", problem)
    compose([word for word in typed.split() if word.partition("=")[0] not in wrong] + told)


# Example values from other programs, for overrides that do not accept 2.
EXAMPLES = {
    "optimizer": "adamw_torch",
    "schedule": "linear",
    "precision": "float16",
    "device": "cpu",
    "wandb": "wandb",
    "data": "shakespeare",
    "model.tied": "True",
    "attention.bias": "True",
    "attention.rope_fraction": "0.5",
    "ffn.activation": "gelu_new",
    "attention": "mha",
    "seed={seeds}": "1",
    "compile": "True",
    "activation_checkpointing": "True",
}


def test_every_translation_composes():
    given = {"context": "256", "batch_tokens": "4096", "steps": "100", "optimizer.lr": "0.035"}
    fixes = set()
    for name, template in aliases.TEMPLATES.items():
        value = EXAMPLES.get(template.partition("={value}")[0], "2")
        told, _ = aliases.translate({name: value}, given)
        assert told, name
        fixes.add(tuple(f"{key}={value}" for key, value in told.items()))
    assert len(fixes) > 50
    # Compose many fixes at once, unless a key or a learning rate would occur twice.
    waiting = []
    for fix in sorted(fixes, key=lambda fix: fix[0].count(".")):
        keys = {word.partition("=")[0] for word in waiting}
        has_rate = "reference" in " ".join(waiting) and "reference" in " ".join(fix)
        if has_rate or keys & {word.partition("=")[0] for word in fix}:
            compose(waiting)
            waiting = []
        waiting += fix
    compose(waiting)


def test_config_keys_do_not_clash_with_translated_names():
    tops = {key for key in defaults() if key not in GROUPS}
    assert not tops & {*aliases.TEMPLATES, *aliases.REASONS}


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
    "distil": "distill",
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
    words = [f"{typed}={number}" for number, typed in enumerate(SUGGESTIONS)]
    with pytest.raises(OverrideError) as refused:
        compose(words)
    fix = str(refused.value).partition(". fix: ")[2].partition(";")[0]
    told = {}
    for word in shlex.split(fix):
        key, _, number = word.partition("=")
        told[int(number)] = key
    for number, (typed, wanted) in enumerate(SUGGESTIONS.items()):
        assert told.get(number) == wanted, typed


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
    with pytest.raises(ValueError, match=re.escape("(got 1.5)")):
        compose(["steps=1.5"])


# Options of Hydra and argparse that train.py lacks, and the suggested command or override.
OPTIONS = {
    "-m attention=gqa,mha model=tiny": "python -m tools.compare attention=gqa,mha model=tiny",
    "--multirun model=tiny": "python -m tools.compare attention=gqa,mha model=tiny",
    "-m seed=1,2 hydra/launcher=joblib": "python -m tools.compare seed=1,2",
    "--config-name fineweb": "python train.py experiment=fineweb",
    "-cn=mine model=tiny": "python train.py model=tiny",
    "--config-path ../conf model=tiny": "python train.py model=tiny",
    "--config-dir=conf": "python train.py",
    "--info defaults": "python train.py --cfg job",
    "--resolve model=tiny": "python train.py --cfg job model=tiny",
    "--cfg job --package model": "python train.py --cfg job",
    "--cfg hydra": "python train.py --cfg job",
    "--hydra-help": "python train.py --help",
    "--config-name tiny": "python train.py model=tiny",
    "-cn tiny attention=mha": "python train.py attention=mha model=tiny",
    "--config configs/experiment/fineweb.yaml": "python train.py experiment=fineweb",
    "--config-file model/tiny.yaml": "python train.py model=tiny",
    "--config mine.yaml": "python train.py --help, which lists all keys",
    "-c mine.yaml model=tiny": "python train.py model=tiny",
    "--lr 1e-3": "optimizer=adamw optimizer.lr=1e-3 optimizer.reference=null",
    "--lr 1e-3 --cfg job": "python train.py --cfg job optimizer=adamw optimizer.lr=1e-3 "
    "optimizer.reference=null",
    "--cfg job --depth 3 model=tiny": "python train.py --cfg job model=tiny model.depth=3",
    "--batch-size 8 -m attention=gqa,mha": "python -m tools.compare attention=gqa,mha "
    "batch_tokens=2048",
    "--attention gqa,mha --max_minutes 1": "python -m tools.compare attention=gqa,mha max_minutes=1",
    "--seeds 0 1": "python -m tools.compare seed=0,1",
    "--learning-rate=1e-3 optimizer=adamw": "optimizer.lr=1e-3 optimizer.reference=null",
    "--batch-size 8 --block_size 64": "context=64 batch_tokens=512",
    "--attention mha --depth=3 --max_minutes 1": "attention=mha max_minutes=1 model.depth=3",
    "--resume": "resume=true",
    "--no-compile": "compile=false",
    "--wandb": "wandb=online",
    "--zyzzyva": "python train.py --help, which lists all keys",
}


@pytest.mark.parametrize("typed", OPTIONS)
def test_the_error_for_an_option_suggests_the_equivalent_override(command, typed):
    result = command("train.py", *typed.split())
    (line,) = result.err.splitlines()
    fix = line.partition(". fix: ")[2].partition(";")[0]
    assert (result.code, result.out, fix) == (2, "", OPTIONS[typed])
    called, *words = shlex.split(fix.removeprefix("python "))
    if called == "-m":
        expand_sweep(words[1:])
    elif called == "train.py" and words[:1] in (["--cfg"], ["--help"]):
        command("train.py", *words).succeeded()
    else:
        compose([word for word in [called, *words] if "=" in word])


# Arguments without an equals sign, and the suggested overrides or command.
BARE = {
    "gqa": "attention=gqa",
    "tiny gqa": "model=tiny attention=gqa",
    "configs/experiment/tinystories.yaml": "experiment=tinystories",
    "model/15m": "model=15m",
    "gqa mha": "python -m tools.compare attention=gqa,mha",
    "attention=gqa mha model=tiny": "python -m tools.compare model=tiny attention=gqa,mha",
    "seed=range(2) lr=1e-3": "python -m tools.compare 'seed=range(2)' optimizer=adamw "
    "optimizer.lr=1e-3 optimizer.reference=null",
    "attention=gqa, mha": "python -m tools.compare attention=gqa,mha",
    "seeds=3": "python -m tools.compare seed=0,1,2",
    "attention=gqa,mhaa lr=1e-3": "python -m tools.compare attention=gqa,mha optimizer=adamw "
    "optimizer.lr=1e-3 optimizer.reference=null",
}


@pytest.mark.parametrize("typed", BARE)
def test_the_error_for_a_value_without_a_key_suggests_the_override(typed):
    with pytest.raises((ValueError, OverrideError)) as refused:
        compose(typed.split())
    fix = str(refused.value).partition(". fix: ")[2].partition(";")[0]
    assert fix == BARE[typed]
    expand_sweep([word for word in shlex.split(fix) if "=" in word])


def test_a_local_yaml_file_is_not_mistaken_for_a_preset(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").touch()
    with pytest.raises(ValueError, match=re.escape("(got tiny.yaml). fix: python train.py --help")):
        compose(["tiny.yaml"])


def test_a_single_number_is_converted_to_a_list():
    settings = compose(["name=test", "data=recall", "data.pairs=4"])
    assert instantiate(settings.data, "data").pairs == [4]


def test_all_missing_paths_are_reported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("here.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match="absent") as refused:
        find_files(["absent", "here.txt", "gone"], (".txt",))
    lines = str(refused.value).splitlines()
    assert ["path='absent'" in lines[0], "path='gone'" in lines[1], len(lines)] == [True, True, 2]


COMPARED = {
    "attention=[gqa,mha]": "attention=gqa,mha",
    "attention=gqa,mha seed=[0,1]": "seed=0,1",
    "attention=gqa,mha seeds=2": "seed=0,1",
    "attention=gqa,mhaa": "attention=gqa,mha",
    "attention=gqa,zyzzyva,mhaa": "attention=gqa,mha",
    "attention=gqa optimizer=muon,adam": "optimizer=muon,adamw",
    "attention=gqa,mha steps=1,000": "steps=1000",
    "--variants gqa,mha": "attention=gqa,mha",
    "--variants gqa,mhaa": "attention=gqa,mha",
    "--attention gqa,mha": "attention=gqa,mha",
    "attention=gqa,mha --dim 64,96": "model.dim=64,96",
    "--attention gqa mha --quick": "attention=gqa,mha",
    "attention=gqa,mha --seeds 0 1": "seed=0,1",
    "attention=gqa,mha --seeds 2 --tune": "seed=0,1",
    "attention=gqa,mha --seed 0,1": "seed=0,1",
    "attention=gqa,mha --max_minutes 3": "max_minutes=3",
    "attention=gqa,mha --tune=true": "--tune",
    "gqa mha": "python -m tools.compare attention=gqa,mha",
    "seeds=0,1": "seed=0,1",
    "n_layer=2,4": "model.depth=2,4",
    "batch_size=8,16": "batch_tokens=2048,4096",
    "attention=gqa,gqq": "attention=gqa",
    "model.layers=2,3": "model.depth=2,3",
    "run_dir=mine attention=gqa,mqa": "--dir FOLDER",
    "resume=true attention=gqa,mqa": "run the same command again, which resumes interrupted runs",
}


@pytest.mark.parametrize("typed", COMPARED)
def test_the_error_for_invalid_comparison_overrides_suggests_a_fix(command, typed):
    result = command("tools/compare/__main__.py", *typed.split())
    (line,) = result.err.splitlines()
    fix = line.partition(". fix: ")[2].partition(";")[0]
    assert fix == COMPARED[typed]
    assert result.code in (1, 2) and not Path("runs").exists()
    expand_sweep([word for word in shlex.split(fix) if "=" in word])


AT_ONCE = (
    "train.py attentoin=gqa",
    "train.py steps=-1",
    "train.py attention=gqq",
    "train.py --help",
    "train.py attention=kda --help",
    "train.py --cfg job model=tiny",
    "train.py -m attention=gqa,mha",
    "-m tools.compare attentoin=gqa,mha",
    "-m tools.compare attention=gqa,mha steps=-1",
    "-m tools.compare --help",
    "-m tools.cost attentoin=gqa",
    "generate.py --max-token 5 x",
)


@pytest.mark.parametrize("call", AT_ONCE)
def test_a_typo_is_reported_before_torch_is_imported(call):
    words = [sys.executable, "-X", "importtime", *call.split()]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8")
    *imported, last = result.stderr.splitlines()
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported}
    assert "run" in names and "torch" not in names
    if result.returncode == 0:
        assert result.stdout
    else:
        assert last.startswith("error: ")


def test_all_out_of_range_values_are_reported_at_once(capfd):
    with pytest.raises(SystemExit), errors.user_input():
        compose(["name=test", "steps=0", "seed=-1", "log_every=0.5"])
    assert len(capfd.readouterr().err.splitlines()) == 3


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
    keys = ("run_dir", "init_from", "distill", "data.path", "data.tokenizer")
    settings = compose(["name=007", "data=text", *(f"{key}={value}" for key in keys)])
    assert (settings.run_dir, settings.init_from, settings.distill) == (value, value, value)
    assert settings.data["path"] == settings.data["tokenizer"] == value
    assert settings.name == "007"


def test_a_path_can_be_null_or_quoted():
    words = ["run_dir=null", 'init_from="a, b"', "distill='c'", "+data.tokenizer=null"]
    settings = compose(["name=test", "data=text", *words])
    assert (settings.run_dir, settings.init_from, settings.distill) == (None, "a, b", "c")
    assert settings.data["tokenizer"] is None


@pytest.mark.parametrize("value", ["Moby Dick, by X.txt", "(a) [2]", "it's", 'say "hi"', "a,\\"])
def test_a_quoted_override_from_a_suggested_fix_is_accepted(value):
    """Tests a key that is not a path, whose value must be quoted."""
    with pytest.raises(OverrideError) as refused:
        compose(["name=test", "data=text", f"data.separator={value}"])
    *_, pasted = shlex.split(str(refused.value).partition("fix: ")[2])
    assert compose(["name=test", "data=text", pasted]).data["separator"] == value


def test_a_comma_in_a_data_path_does_not_separate_variants(command):
    """Runs on two texts cannot be compared, so the comma belongs to the path."""
    Path("Moby Dick, by X.txt").write_text("text", encoding="utf-8")
    words = ["attention=gqa,mqa", "data=text", "data.path=Moby Dick, by X.txt"]
    variants = plan_variants(words, "none", None, has_search=False)
    assert [variant.name for variant in variants] == ["gqa", "mqa"]
    for variant in variants:
        assert words[-1] in variant.overrides  # unchanged, because it names the comparison
        assert compose(variant.overrides).data["path"] == "Moby Dick, by X.txt"


TEXT = ("data=text", "data.path=story.txt")
TRAINING = {
    "an option with dashes": (["--model", "small"], 2, "fix: model=small"),
    "a range of values": (["seed=range(3)"], 1, "python -m tools.compare"),
    "a missing file": (["data=text", "data.path=absent.txt"], 2, "absent.txt"),
    "an empty file": (["data=text", "data.path=empty.txt"], 2, "empty.txt"),
    "bytes that are not UTF-8": (["data=text", "data.path=latin.txt"], 2, "latin.txt: invalid"),
    "too little text": ([*TEXT, "data.vocab_size=400", "batch_tokens=65536"], 2, "need 65"),
    "a vocabulary too small": ([*TEXT, "data.vocab_size=260"], 2, " or more"),
    "no holdout": ([*TEXT, "data.holdout=0"], 2, "holdout"),
    "a model together with init_from": (["init_from=absent"], 2, "(model=tiny). fix: leave"),
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
    assert line.startswith("error: ") and ". fix: " in line and said in line
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
    "a top-p above 1": (["a", "--top-p", "1.5"], 2, "must be from 0 to 1, got 1.5"),
    "a negative length": (["a", "--max-new-tokens", "-5"], 2, "must be at least 1, got -5"),
    "no GPU": (["a", "--device", "cuda"], 2, "cuda"),
    "a missing file": (["--prompt-file", "absent.txt"], 2, "absent.txt"),
    "a file that is not UTF-8": (
        ["--prompt-file", "latin.txt"],
        2,
        "latin.txt: invalid start byte in position 5). fix: ",
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
    assert line.startswith("error: ") and ". fix: " in line and value in line


def test_every_suggested_fix_is_specific():
    for path in ROOT.rglob("*.py"):
        if not {"tests", ".venv", ".cache"} & set(path.relative_to(ROOT).parts):
            text = path.read_text(encoding="utf-8")
            for empty in ("change it", "change one", "one of them"):
                assert f"fix: {empty}" not in text, path


def test_a_bug_in_a_layer_is_not_reported_as_invalid_input(monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr("model.attention.softmax.SoftmaxAttention.project_qkv", fail)
    with pytest.raises(RuntimeError, match="multiplied"), errors.user_input():
        set_up_run(compose(["name=test"]), [])


# Overrides, and the setting that makes each one ineffective.
UNUSED = {
    "max_epochs=2": "steps=2 sets the length",
    "tokens_per_parameter=20": "steps=2 sets the length",
    "data.text_field=body": "only .jsonl, .parquet, .csv have fields",
    "data.vocab_size=5000": "the text is enough for only 400 tokens",
    "data.tokenizer=FILE data.vocab_size=5000": "the tokenizer has 400 tokens",
    "ffn=none model.hidden=8": "there is no feed-forward",
    "attention.rope_base=null attention.rope_fraction=0.5": "attention.rope_base=null",
    "schedule.cooldown=0 schedule.floor=0.1": "schedule.cooldown=0",
}


def test_an_override_without_effect_is_reported(command, story):
    for typed, reason in UNUSED.items():
        settings = compose([*TINY, *TEXT, "name=test", "steps=2", *typed.split()])
        corpus = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=400))
        unused = unused_keys(settings, corpus)
        key, _, _ = typed.split()[-1].partition("=")
        assert reason in unused[key], typed
    words = [*TINY, *TEXT, "data.vocab_size=400", "steps=2", "schedule.warmup=5"]
    result = command("train.py", *words, "max_epochs=2", "eval_tokens=999999").succeeded()
    assert result.err.count("warning: ") == 1
    assert "warning: max_epochs=2 has no effect: steps=2 sets the length of the run\n" in result.err
    assert "held-out tokens, because eval_tokens is larger" in result.err
    assert "0 steps instead of schedule.warmup=5" in result.err
