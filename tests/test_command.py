"""The commands `llm-datadist` and `python -m llm_datadist`. Not for: replays (`test_replay.py`) and `doctor`
(`test_doctor.py`).
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llm_datadist
from llm_datadist.commands.main import main
from llm_datadist.commands.options import table
from llm_datadist.option_table import (
    ENVIRONMENT,
    NATIVE_ROWS,
    OTHER_VARIABLES,
    TOKEN_VARIABLES,
    native_default,
    native_meaning,
    rows,
)
from memory import run_command

REPLAY = "replay --quiet --requests 10 --layers 1 --head-dim 8 --device-pool 8MiB --host-pool 16MiB"


def test_options_prints_every_option_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert len(rows()) > 35
    for row in rows():
        heading = f"{row.attribute} ({row.key})" if row.key else row.attribute
        facts = f"type: {' or '.join(row.types)}; default: {row.default}"
        assert " ".join(f"{heading} {facts} {row.meaning}".replace("`", "").split()) in text
    assert len(NATIVE_ROWS) > 20
    for row in NATIVE_ROWS:
        assert row.allowed.startswith(("a ", "true "))
        facts = f"{row.allowed}; default: {native_default(row)} {native_meaning(row)}"
        assert " ".join(f"{row.native} {facts}".replace("`", "").split()) in text
    for variable in (*ENVIRONMENT.values(), *TOKEN_VARIABLES.values(), *OTHER_VARIABLES):
        assert variable in text


def test_the_defaults_of_engine_are_in_its_units() -> None:
    times = {row.native: native_default(row) for row in NATIVE_ROWS if row.allowed.startswith("a number of seconds")}
    assert times == {"transfer_poll": "0.00005", "heartbeat": "1", "silence": "5", "pin_limit": "600", "timeout": "10"}
    llm_datadist.Engine(**{name: float(default) for name, default in times.items()}).close()
    defaults = {row.native: native_default(row) for row in NATIVE_ROWS}
    assert (defaults["token_file"], defaults["streams"], defaults["listen"]) == ("as `token`", "0", "no listener")


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--version", [f"llm_datadist {llm_datadist.__version__}\n"]),
        ("--help", ["usage: ", "replay", "doctor", "options"]),
    ],
)
def test_module_is_a_command(argument: str, shown: list[str]) -> None:
    done = run_command(argument)
    assert done.returncode == 0
    for text in shown:
        assert text in done.stdout


@pytest.mark.parametrize("width", [40, 80, 100])
def test_options_fit_the_terminal(width: int) -> None:
    long = [line for line in table(width).splitlines() if len(line) > width and " " in line.strip()]
    assert all("(" in line for line in long), "only the name of an option and its key may be longer"


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["options", "--json"]])
def test_wrong_arguments_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "errors"),
    [
        ("options", 0),
        ("doctor", 0),
        (REPLAY, 0),
        (f"{REPLAY} --json -", 1),  # the table goes to standard error
    ],
)
def test_reader_that_closes_the_pipe_early_is_no_error(arguments: str, errors: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        done = run_command(*arguments.split(), stdout=broken)
    assert done.returncode == 0
    assert "BrokenPipe" not in done.stderr
    assert bool(done.stderr) == bool(errors)


EVERY_COMMAND = [
    "--version",
    "--help",
    "options",
    "doctor",
    "doctor --help",
    "doctor --json -",
    "doctor --serve 127.0.0.1:0 --seconds 0.1",
    "serve --help",
    REPLAY,
    f"{REPLAY} --json -",
]


def ends_with_one_line(done: subprocess.CompletedProcess[str], what: str) -> None:
    """Check that a command which could not write a result said so and failed."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(f"cannot write the results to {what}: {FULL}")


FULL = f"{os.strerror(errno.ENOSPC)} (errno={errno.ENOSPC})"


@pytest.mark.parametrize("arguments", EVERY_COMMAND)
def test_full_standard_output_is_an_error_of_one_line(arguments: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run_command(*arguments.split(), stdout=full)
    ends_with_one_line(done, "standard output")


@pytest.mark.parametrize("arguments", ["doctor", REPLAY])
def test_json_on_a_full_disk_is_an_error_of_one_line_after_the_table(arguments: str) -> None:
    done = run_command(*arguments.split(), "--json", "/dev/full")
    ends_with_one_line(done, "/dev/full")
    assert len(done.stdout) > 500


def test_closed_standard_output_is_an_error() -> None:
    command = f"{sys.executable} -m llm_datadist options >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60, check=False)  # noqa: S602
    error = "llm-datadist: cannot write the results: standard output is closed\n"
    assert (done.returncode, done.stderr) == (1, error)


def test_full_standard_error_does_not_end_a_replay() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run_command(*REPLAY.replace(" --quiet", "").split(), "--json", "-", stderr=full)
    assert done.returncode == 0
    assert json.loads(done.stdout)["leaked_bytes"] == 0


def test_output_that_cannot_show_a_character_shows_a_question_mark() -> None:
    done = run_command("options", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "default: 50 ?s" in done.stdout


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # its import then fails
import llm_datadist.commands.main
sys.exit(llm_datadist.commands.main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "errors"),
    [
        (["options"], ""),
        (["doctor"], ""),
        (["replay"], "llm-datadist: replay needs numpy: pip install llm-datadist[replay]\n"),
        (["replay", "--help"], "llm-datadist: replay needs numpy: pip install llm-datadist[replay]\n"),
    ],
)
def test_only_replay_needs_numpy(arguments: list[str], errors: str) -> None:
    command = [sys.executable, "-c", WITHOUT_NUMPY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (2 if errors else 0, errors)
    assert bool(done.stdout) != bool(errors)
