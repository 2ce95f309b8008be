"""Any input is either accepted, or refused with one line per problem and without writing files."""

import json
import random
import shutil
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.load import load
from inference.text import generate_text
from run import checkpoint, errors, hardware
from run.compose import compose
from run.settings import Settings, flatten
from tests.conftest import saved, settings_of, tell, tree_of
from tests.tools.families import write_tokenizer
from tools import export_hf, import_hf
from tools.formats.hf_config import to_hf_config
from training import setup

NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1", "2", "3", "0.5", "1e-30", "1e400", str(2**63))
NESTED = ("[1]", "[]", "[a,b]", "{a:1}", "{}", "${x}", "${oc.env:HOME}", "${")
TEXTS = ("", "null", "true", "abc", "../x", "'a b'", "é🐈", "'", "x=y")
VALUES = (*NUMBERS, *NESTED, *TEXTS)
ATTENTION = ("attention=mla", "attention=local_global", "attention=gdn", "attention=absent")
MODEL = ("model=tiny", "model=../../x", "optimizer=adamw", "schedule=cosine")
DATA = ("data=text", "data=tinystories", "experiment=tinystories")
GROUPS = (*ATTENTION, *MODEL, *DATA)


def seeds(cases: int, most: int) -> list:
    """One seed with few cases, and four that run only with `-m long`, with many cases each."""
    return [(cases, 0), *(pytest.param(most, seed, marks=pytest.mark.long) for seed in range(1, 5))]


def words_of(draw: random.Random) -> list[str]:
    """Random overrides: an optional group and one to three keys, some unknown, with random values."""
    words = draw.sample(GROUPS, draw.randint(0, 2))
    known = settings_of(*(word for word in words if "absent" not in word and ".." not in word))
    keys = [*Settings.model_fields, *dict(flatten(known.model_dump()))]
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(keys)
        unknown = [f"+{key}", f"++{key}", f"{key}.more", "new", "+new", "~seed", f"+{key}.new"]
        key = draw.choice([*12 * [key], *unknown])
        words.append(key if key.startswith("~") else f"{key}={draw.choice(VALUES)}")
    return words


def compose_and_build(words: list[str]) -> None:
    settings = setup.check_buildable(compose(words))
    hardware.pick_precision(settings.precision, hardware.pick_device(settings.device))


def exit_code(take: Callable, argument: object) -> int | None:
    """Call a function as a command does; return its exit code, or None for an unexpected error."""
    try:
        with errors.report_errors(), errors.exit_on_invalid_input():
            take(argument)
        return 0
    except SystemExit as end:
        return end.code
    except Exception:
        traceback.print_exc()
        return None


@pytest.mark.parametrize(("cases", "seed"), seeds(15, 500))
def test_any_config_is_accepted_or_refused_with_a_message(
    capfd, tmp_path, monkeypatch, cases, seed
):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    for _ in range(cases):
        words = words_of(draw)
        code = exit_code(compose_and_build, words)
        out, err = capfd.readouterr()
        lines = err.splitlines()
        assert code in (0, 1, 2) and out == "", (words, err)
        assert all(line.startswith("error: ") for line in lines), (words, err)
        assert bool(lines) == (code != 0), words
    assert not list(tmp_path.iterdir())


HOSTILE = (None, True, -1, 0, 10**30, 0.5, 1e300, "", "x", "\ud800", "deep", [], {}, [[]])


def spoil(content, draw: random.Random):
    """Replace one value somewhere in JSON content."""
    if not isinstance(content, dict | list) or not content or draw.random() < 0.1:
        return draw.choice(HOSTILE)
    keys = [*content] if isinstance(content, dict) else range(len(content))
    key = draw.choice(keys)
    content[key] = spoil(content[key], draw)
    return content


def spoil_file(path: Path, draw: random.Random) -> None:
    """Replace a value in JSON; change a byte of another file, or keep only the beginning."""
    raw = bytearray(path.read_bytes())
    at = draw.randrange(len(raw))
    if path.suffix == ".json":
        raw = json.dumps(spoil(json.loads(raw), draw)).replace('"deep"', 2000 * "[").encode()
    elif draw.random() < 0.5:
        raw[at] ^= 1 << draw.randrange(8)
    else:
        raw = raw[:at]
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


@pytest.mark.parametrize(("cases", "seed"), seeds(20, 500))
def test_any_model_is_accepted_or_refused_with_a_message(cases, seed, tokenizer, tmp_path, capfd):
    """Uses Hugging Face folders and checkpoints with both kinds of tokenizers."""
    text = tell(tmp_path).read_text(encoding="utf-8")
    write_tokenizer(tmp_path, "TinyLlama-1.1B", text.split("\n"))
    readers = {}
    for number, each in enumerate((tokenizer, import_hf.import_tokenizer(tmp_path))):
        run = tmp_path / f"run{number}"
        saved(run, tree_of("llama"), each)
        export_hf.main(Namespace(run=run, out=tmp_path / f"hf{number}", dtype="f32"))
        readers[tmp_path / f"hf{number}"] = take_folder
        readers[checkpoint.find_model(run)] = take_checkpoint
    draw = random.Random(seed)
    for _ in range(cases):
        original = draw.choice([*readers])
        folder = shutil.copytree(original, tmp_path / "copies" / "x")
        unread = ("state.pt", "manifest.json")
        files = [file for file in sorted(folder.iterdir()) if file.name not in unread]
        path = draw.choice(files)
        spoil_file(path, draw)
        code = exit_code(readers[original], folder)
        assert code in (0, 2, 3, 4), (path, capfd.readouterr().err)
        shutil.rmtree(tmp_path / "copies")
