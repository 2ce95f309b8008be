"""Any input is either accepted, or refused with one line per problem and without writing files."""

import ast
import json
import random
import shutil
import signal
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.prepare import prepare
from data.tokenizer import Tokenizer
from inference.load import load
from inference.text import generate_text
from run import checkpoint, errors, hardware, instantiate
from run.compose import compose
from run.errors import IntegrityError
from run.settings import Settings, flatten
from tests.conftest import ROOT, saved, settings_of, tell, tree_of
from tests.faults.harness import source
from tests.tools.families import write_tokenizer
from tools import export_hf, import_hf
from tools.formats.hf_config import to_hf_config
from training import setup

VALUES = (
    "",
    "null",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "0.5",
    "1e-30",
    "1e30",
    "1e400",
    str(2**63),
    "abc",
    "[1]",
    "[]",
    "[a,b]",
    "{a:1}",
    "{}",
    "${x}",
    "${oc.env:HOME}",
    "../x",
    "'a b'",
    "é🐈",
    "true",
    "'",
    "${",
    "x=y",
)
GROUPS = [
    "model=tiny",
    "attention=mla",
    "attention=local_global",
    "attention=gdn",
    "optimizer=adamw",
    "data=text",
    "schedule=cosine",
    "attention=absent",
    "model=../../x",
    "experiment=tinystories",
    "data=tinystories",
]


def words_of(draw: random.Random) -> list[str]:
    """Random overrides: an optional group and one to three keys, some unknown, with random values."""
    words = draw.sample(GROUPS, draw.randint(0, 2))
    known = settings_of(*(word for word in words if "absent" not in word and ".." not in word))
    keys = [*Settings.model_fields, *dict(flatten(known.model_dump()))]
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(keys)
        key = draw.choice(
            [key] * 12
            + [f"+{key}", f"++{key}", f"{key}.more", "new", "+new", "~seed", f"+{key}.new"]
        )
        words.append(key if key.startswith("~") else f"{key}={draw.choice(VALUES)}")
    return words


def outcome(words: list[str]) -> int | str:
    """Compose a run without opening any data; return the exit code or an unexpected exception."""
    try:
        with errors.report_errors(), errors.user_input():
            settings = setup.check_buildable(compose(words))
            hardware.pick_precision(settings.precision, hardware.pick_device(settings.device))
        return 0
    except SystemExit as end:
        return end.code
    except Exception as error:
        return repr(error)


def fuzzed(cases: int, seed: int, capfd) -> Iterator[tuple]:
    """Try random inputs, and yield those that are neither accepted nor refused with a message."""
    draw = random.Random(seed)
    for _ in range(cases):
        words = words_of(draw)
        code, told = outcome(words), capfd.readouterr()
        lines = told.err.splitlines()
        alike = all(line.startswith("error: ") for line in lines)
        if code not in (0, 1, 2) or not alike or bool(lines) != (code != 0) or told.out:
            yield words, code, told.err


MANY = [pytest.param(500, seed, marks=pytest.mark.long) for seed in range(1, 5)]


@pytest.mark.parametrize("cases, seed", [(50, 0), *MANY])
def test_any_config_is_accepted_or_refused_with_a_message(
    capfd, tmp_path, monkeypatch, cases, seed
):
    monkeypatch.chdir(tmp_path)
    assert [*fuzzed(cases, seed, capfd)] == [] and not list(tmp_path.iterdir())


def test_fuzzing_detects_a_missing_check(capfd, monkeypatch):
    monkeypatch.setattr(instantiate, "check_arguments", lambda *_, **__: None)
    assert next(fuzzed(600, 13, capfd), None) is not None


def test_any_file_is_read_or_refused_with_a_message(tmp_path):
    draw = random.Random(0)
    good = {
        "txt": "\n<|endoftext|>\n".join(f"story {number}" for number in range(50)).encode(),
        "jsonl": b"".join(b'{"text": "story %d"}\n' % number for number in range(50)),
        "parquet": b"PAR1" + bytes(range(200)) + b"PAR1",
    }
    refused = 0
    for number in range(60):
        kind = draw.choice([*good])
        raw = (
            bytearray(good[kind])
            if draw.random() < 0.7
            else bytearray(draw.randbytes(draw.randint(0, 3000)))
        )
        for _ in range(draw.randint(0, 3) if raw else 0):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(raw[: draw.randint(0, len(raw))] if draw.random() < 0.5 else raw)
        try:
            prepare(source(path), tmp_path / "cache")
        except ValueError as error:
            refused += 1
            assert "fix: " in str(error)
    assert 10 < refused < 60


def test_any_tokenizer_is_accepted_or_refused_with_a_message(tmp_path, story):
    proto = Tokenizer.train(["one two three"] * 99, 300).files["tokenizer.model"]
    draw, path = random.Random(0), tmp_path / "tokenizer.model"
    for _ in range(100):
        raw = bytearray(proto)
        for _ in range(draw.randint(0, 4)):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(raw[: draw.choice([len(raw), len(raw), draw.randrange(len(raw))])])
        try:
            Tokenizer.load(path).encode("one four\n")
        except (ValueError, IntegrityError) as error:
            assert "fix: " in str(error)


HOSTILE = (
    None,
    True,
    -1,
    0,
    2,
    10**30,
    0.5,
    1e300,
    "",
    "x",
    "\ud800",
    "deep",
    [],
    {},
    [[]],
    {"a": 1},
)


def spoil(content, draw: random.Random):
    """Replace one value somewhere in JSON content."""
    if not isinstance(content, dict | list) or not content or draw.random() < 0.1:
        return draw.choice(HOSTILE)
    keys = [*content] if isinstance(content, dict) else range(len(content))
    key = draw.choice(keys)
    content[key] = spoil(content[key], draw)
    return content


def spoil_file(path: Path, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    if path.suffix == ".json" and draw.random() < 0.9:
        raw = json.dumps(spoil(json.loads(raw), draw)).replace('"deep"', 2000 * "[").encode()
    else:
        raw[draw.randrange(len(raw))] = draw.randrange(256)
        raw = raw[: draw.choice([len(raw), draw.randrange(len(raw))])]
    path.write_bytes(raw)


def take_folder(folder: Path) -> None:
    import_hf.main(Namespace(folder=folder, out=folder / "out"))
    take_checkpoint(folder / "out" / "checkpoints" / "step-00000000")


def take_checkpoint(path: Path) -> None:
    """Seal a damaged checkpoint as if it were intact, and use it as the commands do."""
    (path / "manifest.json").unlink()
    with checkpoint.atomic_directory(path.with_name("sealed")) as staging:
        shutil.copytree(path, staging, dirs_exist_ok=True)
    model, tokenizer, _ = load(path.with_name("sealed"), "cpu")
    generate_text(model, tokenizer, "Ann é", max_new_tokens=4)
    tree = checkpoint.load_config(path)["model"]
    to_hf_config(tree)


def is_told(take: Callable, folder: Path) -> bool:
    """True if a folder is accepted, or refused with a message, within 20 seconds."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(20)
    try:
        with errors.report_errors(), errors.user_input():
            take(folder)
    except SystemExit as end:
        return end.code in (2, 3, 4)
    except Exception:
        traceback.print_exc()
        return False
    finally:
        signal.alarm(0)
    return True


@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(n, marks=pytest.mark.long) for n in range(1, 5)]]
)
def test_any_model_is_accepted_or_refused_with_a_message(seed, tokenizer, tmp_path, capfd):
    """Uses Hugging Face folders and checkpoints with both kinds of tokenizers."""
    write_tokenizer(
        tmp_path, "TinyLlama-1.1B", tell(tmp_path).read_text(encoding="utf-8").split("\n")
    )
    sources = {}
    for number, each in enumerate((tokenizer, import_hf.import_tokenizer(tmp_path))):
        run = tmp_path / f"run{number}"
        saved(run, tree_of("llama"), each)
        export_hf.main(Namespace(run=run, out=tmp_path / f"hf{number}", dtype="f32"))
        sources |= {
            tmp_path / f"hf{number}": take_folder,
            checkpoint.find_model(run): take_checkpoint,
        }
    draw = random.Random(seed)
    for _ in range(500 if seed else 20):
        source = draw.choice([*sources])
        folder = shutil.copytree(source, tmp_path / "copies" / "x")
        files = [
            file for file in folder.iterdir() if file.name not in ("state.pt", "manifest.json")
        ]
        spoil_file(draw.choice(sorted(files)), draw)
        assert is_told(sources[source], folder), capfd.readouterr().err
        shutil.rmtree(tmp_path / "copies")


FORBIDDEN = [
    "eval",
    "exec",
    "compile",
    "system",
    "popen",
    "unsafe_load",
    "instantiate",
    "__import__",
    "loads",
]


def test_no_code_executes_its_input():
    for path in (
        path for path in ROOT.rglob("*.py") if not {"tests", ".venv", ".cache"} & set(path.parts)
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
                assert not {"pickle", "marshal", "shelve", "dill"} & (
                    names - {"UnpicklingError"}
                ) or names == {"pickle", "UnpicklingError"}, path
                assert (
                    "instantiate" not in names - {"run.instantiate"}
                    or getattr(node, "module", "") == "run.instantiate"
                ), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called.rpartition(".")[2] not in FORBIDDEN or called in ALLOWED, (
                    path,
                    called,
                )
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("shell") != "True" and "trust_remote_code" not in given, path
                assert called != "torch.load" or given["weights_only"] == "True", path


# `instantiate` refers to run.instantiate, because its import is checked above.
ALLOWED = [
    "re.compile",
    "torch.compile",
    "json.loads",
    "trainer.compile",
    "module.compile",
    "self.model.eval",
    "instantiate",
    "loss_module.eval",
    "self.loss_module.eval",
    "model.eval",
    "trainer.model.eval",
    "self.compile",
    "super().compile",
    "engine.compile",
]
