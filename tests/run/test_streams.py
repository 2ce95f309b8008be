"""Standard streams that are closed, broken, full or without Unicode, and Ctrl-C during startup."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from run import errors
from tests.conftest import LONG, ROOT, saved, tree_of

COMMANDS = {
    "train": f"{sys.executable} {ROOT}/train.py",
    "generate": f"{sys.executable} {ROOT}/generate.py",
    "cost": f"{sys.executable} -m tools.cost",
    "compare": f"{sys.executable} -m tools.compare",
}


def bash(line: str, **env: str) -> subprocess.CompletedProcess:
    """Run a shell command with pipefail."""
    words = ["bash", "-o", "pipefail", "-c", line]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(words, env=environment, capture_output=True, timeout=LONG)


@pytest.fixture
def generate(tmp_path, tokenizer, monkeypatch) -> str:
    """The generate.py command line, in a folder with a run that also generates Russian text."""
    monkeypatch.chdir(tmp_path)
    saved(Path("runs/drawn"), tree_of("gqa", "model.depth=1"), tokenizer)
    return f"{COMMANDS['generate']} --temperature 0 --max-new-tokens 5 --device cpu"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_causes_no_traceback(generate, closed):
    told = bash(f"{generate} --prompt-file <(echo Ann) {closed}")
    assert told.returncode == 0 and b"Traceback" not in told.stderr + told.stdout
    assert bool(told.stdout) == ("1>" not in closed)
    assert (b"tokens/s" in told.stderr) == ("2>" not in closed) and b"tokens/s" not in told.stdout


def test_files_never_reuse_the_descriptor_of_a_closed_stream():
    """Otherwise, libraries would write their error messages to the file."""
    code = "from run import errors; errors.begin_command(); print(open('/dev/zero').fileno())"
    assert int(bash(f'{sys.executable} -c "{code}" 0<&- 2>&-').stdout) > 2


def test_the_exit_code_reports_an_error_that_cannot_be_printed():
    for end in ("2>&-", "2>/dev/full", "2> >(true)", "2>&1 | true"):
        assert bash(f"{COMMANDS['generate']} --colour blue {end}").returncode == 2, end


@pytest.mark.parametrize("line", [f"{command} --help" for command in COMMANDS.values()])
def test_closing_the_pipe_during_help_is_not_an_error(line):
    told = bash(f"{line} | true")
    assert told.returncode == 0 and b"rror" not in told.stderr  # it may mention a slow import


def test_reading_only_the_first_line_of_a_table_is_not_an_error():
    told = bash(f"{COMMANDS['cost']} model=tiny attention=gqa,mha,mqa | head -1")
    assert told.returncode == 0 and told.stdout.startswith(b"attention")
    assert b"rror" not in told.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_writing_standard_output_to_a_full_disk_is_a_storage_error(generate, unbuffered):
    """Without buffering, the first write fails; otherwise a flush fails, and keeps the text."""
    told = bash(f"PYTHONUNBUFFERED={unbuffered} {generate} Ann > /dev/full")
    assert told.returncode == 74
    assert b"No space left on device (standard output or an output file" in told.stderr
    assert told.stderr.endswith(b"). fix: free disk space, or write elsewhere\n")


BROKEN = """
import os
from run import errors
reader, writer = os.pipe()
os.close(reader)
with errors.report_errors(){inner}:
    print("text", flush=True)
    os.write(writer, b"text")
"""


def test_only_a_broken_pipe_on_standard_output_counts_as_success():
    """Any other broken pipe, such as one to a killed process, is an error."""
    for inner, code in (("", 1), (", errors.user_input()", 2)):
        words = [sys.executable, "-c", BROKEN.format(inner=inner)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        told = subprocess.run(words, env=env, capture_output=True, timeout=LONG)
        assert told.returncode == code and b"Broken pipe" in told.stderr
        reader, writer = os.pipe()
        os.close(reader)
        told = subprocess.run(words, env=env, stdout=writer, stderr=subprocess.PIPE, timeout=LONG)
        os.close(writer)
        assert (told.returncode, told.stderr) == (0, b"")


ASCII = ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"})


@pytest.mark.parametrize("env", ASCII)
def test_characters_that_a_stream_cannot_encode_are_escaped(generate, env):
    Path("prompts.txt").write_text("Тест\nAnn", encoding="utf-8")
    plain, escaped = (
        bash(f"{generate} --prompt-file prompts.txt", **more)
        for more in ({"PYTHONIOENCODING": "utf-8"}, env)
    )
    assert "--- 1: Тест\n" in plain.stdout.decode() and escaped.returncode == 0
    # Escaped like Python's backslashreplace.
    expected = plain.stdout.decode().encode("ascii", "backslashreplace")
    assert escaped.stdout == expected and b"\\u0422\\u0435\\u0441\\u0442" in expected


@pytest.mark.parametrize("env", [*ASCII, {}])
@pytest.mark.parametrize("path", ["красный", b"caf\xe9"])
def test_an_error_message_can_contain_any_path(env, path):
    words = [sys.executable, ROOT / "generate.py", "Ann", "--run", path]
    told = subprocess.run(words, env=os.environ | env, capture_output=True, timeout=LONG)
    assert told.returncode == 2 and told.stderr.startswith(b"error: not a run (")


INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_during_imports_causes_no_traceback(tmp_path, name):
    for module in ("torch", "tqdm"):  # the slowest import and the first one
        (tmp_path / f"{module}.py").write_text(INTERRUPT, encoding="utf-8")
    # train.py and tools.compare parse overrides before these imports.
    words = ["env", "--default-signal=INT", *COMMANDS[name].split(), "seed=0"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    told = subprocess.run(words, env=env, capture_output=True, timeout=LONG)
    line = b"error: interrupted. fix: run the command again\n" if name == "compare" else b""
    assert (told.returncode, told.stdout, told.stderr) == (130, b"", line)


def test_an_ignored_ctrl_c_stays_ignored_during_imports():
    """A shell starts background commands with SIGINT ignored."""
    code = "import signal; from run import errors; errors.begin_command(); "
    code += "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    assert bash(f"trap '' INT; {sys.executable} -c '{code}'").returncode == 0


PROBLEMS = {
    "with a file": (FileNotFoundError(2, "No such file", "a.txt"), "No such file (a.txt)"),
    "of a socket": (ConnectionRefusedError(111, "Refused"), "Refused (the network)"),
    "of a name": (socket.gaierror(-2, "Name not known"), "Name not known (the network)"),
    "without a file": (
        PermissionError(13, "Permission denied"),
        "Permission denied (the input files",
    ),
    "without a number": (OSError("odd file"), "odd file (the input files"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_only_network_errors_are_attributed_to_the_network(problem, capfd):
    error, said = PROBLEMS[problem]
    with pytest.raises(SystemExit) as end, errors.user_input():
        raise error
    assert end.value.code == 2 and capfd.readouterr().err.startswith(f"error: {said}")


def test_the_error_names_an_unreadable_file(capfd):
    with pytest.raises(SystemExit), errors.user_input(), errors.naming("a.bin"):
        raise PermissionError(1, "Operation not permitted")
    assert "Operation not permitted (a.bin). fix: check a.bin" in capfd.readouterr().err
    with pytest.raises(OSError, match=r"'b\.bin'"), errors.naming("a.bin"):
        raise FileNotFoundError(2, "No such file", "b.bin")


def test_commands_restore_the_ctrl_c_handler(command):
    command("train.py", "--help").succeeded()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
