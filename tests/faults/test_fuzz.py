"""Whatever is given: one line a problem, an exit code that says whose it is, and nothing written."""

import ast
import random
from collections.abc import Iterator

import pytest

from data.prepare import prepare
from data.tokenizer import Tokenizer
from run import errors, hardware, instantiate
from run.errors import IntegrityError
from run.settings import Settings, compose, flatten, report_errors
from tests.conftest import ROOT, settings_of
from tests.faults.harness import source
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
)
VALUES += (
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
GROUPS = (
    "model=tiny",
    "attention=mla",
    "attention=local_global",
    "attention=delta",
    "optimizer=adamw",
    "data=text",
)
GROUPS += (
    "schedule=cosine",
    "attention=absent",
    "model=../../x",
    "experiment=tinystories",
    "data=tinystories",
)


def words_of(draw: random.Random) -> list[str]:
    """A group or none, and one to three keys with anything for a value; now and then an unknown one."""
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
    """The exit code before any data is opened."""
    try:
        with report_errors(), errors.user_input():
            settings = setup.check_buildable(compose(words))
            hardware.pick_precision(settings.precision, hardware.pick_device(settings.device))
        return 0
    except SystemExit as end:
        return end.code
    except Exception as error:
        return repr(error)


def fuzzed(cases: int, seed: int, capfd) -> Iterator[tuple]:
    """What is neither taken nor refused in words."""
    draw = random.Random(seed)
    for _ in range(cases):
        words = words_of(draw)
        code, told = outcome(words), capfd.readouterr()
        lines = told.err.splitlines()
        alike = all(line.startswith("error: ") and "fix: " in line for line in lines)
        if code not in (0, 1, 2) or not alike or bool(lines) != (code != 0) or told.out:
            yield words, code, told.err


def test_any_config_is_taken_or_refused_in_words(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [*fuzzed(100, 0, capfd)] == [] and not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_five_hundred_configs_are_taken_or_refused_in_words(capfd, tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    assert [*fuzzed(500, seed, capfd)] == [] and not list(tmp_path.iterdir())


def test_the_fuzz_sees_rules_that_are_missing(capfd, monkeypatch):
    monkeypatch.setattr(instantiate, "check_arguments", lambda target, arguments, path: None)
    assert next(fuzzed(120, 4, capfd), None) is not None


@pytest.mark.parametrize(
    "words, code", [(["new=1"], 1), (["+new=1"], 1), (["+seed.new=1"], 1), (["~seed"], 2)]
)
def test_what_no_key_is_named_is_unknown(words, code, capfd):
    assert outcome(words) == code
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_any_file_is_read_or_refused_in_words(tmp_path):
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


def test_any_tokenizer_is_taken_or_refused_in_words(tmp_path, story):
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


FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "system",
    "popen",
    "unsafe_load",
    "instantiate",
    "__import__",
    "loads",
}


def test_no_code_runs_what_it_reads():
    for path in (
        path for path in ROOT.rglob("*.py") if not {"tests", ".venv", ".cache"} & set(path.parts)
    ):
        for node in ast.walk(ast.parse(path.read_text())):
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


ALLOWED = {
    "re.compile",
    "torch.compile",
    "json.loads",
    "trainer.compile",
    "module.compile",
    "self.model.eval",
    "instantiate",  # ours: where it is imported from is checked above
}
ALLOWED |= {
    "loss_module.eval",
    "self.loss_module.eval",
    "model.eval",
    "trainer.model.eval",
    "self.compile",
    "super().compile",
    "engine.compile",
}
