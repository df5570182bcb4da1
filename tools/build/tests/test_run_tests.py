"""`tools/build/run_tests.py`: what it reads from the output of cargo and pytest, and when it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run_tests

RUST = """
running 4 tests
test pins::exclusion ... ok
test links::is FAILED not ... ok
test region::child ... ignored, started by the test below
test kernels::short ... FAILED
test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out
"""
PYTHON = """
created: 3/3 workers
[gw0] [ 20%] PASSED tests/test_a.py::test_one[x FAILED y]
[gw2] [ 40%] SKIPPED tests/test_a.py::test_two
[gw1] [ 60%] FAILED tests/test_a.py::test_three[a b]
[gw1] [ 80%] ERROR tests/test_a.py::test_four
SKIPPED [1] tests/test_a.py:12: only root can start processes of another user
FAILED tests/test_a.py::test_three[a b] - assert 1 == 2
ERROR tests/test_a.py::test_four - OSError
"""
ALONE = """
tests/test_b.py::test_five PASSED                                        [ 33%]
tests/test_b.py::test_six[PASSED] SKIPPED (the reason is long)           [ 66%]
tests/test_b.py::test_seven FAILED                                       [100%]
SKIPPED [1] tests/test_b.py: the reason is long
"""


def part(tmp_path: Path, output: str, status: int = 0) -> run_tests.Part:
    """Return a part whose command printed `output`."""
    code = f"import sys; sys.stdout.write({output!r}); sys.exit({status})"
    made = run_tests.Part("X", [sys.executable, "-c", code], tmp_path / "x.log")
    made.reader.join()
    return made


def test_results_of_cargo_are_counted(tmp_path: Path) -> None:
    rust = part(tmp_path, RUST, 101)
    assert rust.counts == (2, 1, 1)
    assert rust.failed == ["kernels::short"]
    assert rust.skips == {("Rust", "started by the test below"): 1}
    assert (rust.status, rust.good) == (101, False)


@pytest.mark.parametrize(
    ("output", "counts", "skips"),
    [
        (PYTHON, (1, 2, 1), {("tests/test_a.py", "only root can start processes of another user"): 1}),
        (ALONE, (1, 1, 1), {("tests/test_b.py", "the reason is long"): 1}),
    ],
)
def test_results_of_pytest_are_counted(
    tmp_path: Path, output: str, counts: tuple[int, ...], skips: dict[tuple[str, str], int]
) -> None:
    python = part(tmp_path, output)
    assert python.counts == counts
    assert python.skips == skips
    assert not python.good


def test_every_line_of_the_list_names_a_condition() -> None:
    allowed = run_tests.allowed_skips()
    assert len(allowed) > 5
    for when in allowed.values():
        run_tests.holds(when)


@pytest.mark.parametrize(
    ("output", "status", "result", "words"),
    [
        ("test a ... ok\n", 0, 0, "total: 1 passed, 0 failed, 0 skipped"),
        (
            "test a ... ok\ntest b ... ignored, started by the test below\n",
            0,
            0,
            "   1 started by the test below (Rust)",
        ),
        (
            "test a ... ok\ntest b ... ignored, no reason that is known\n",
            0,
            1,
            "skipped without permission: Rust: no reason",
        ),
        ("test a ... ok\n", 101, 1, "exit status 101"),
        ("test a ... FAILED\n", 0, 1, "FAILED a"),
        ("", 0, 1, "X: no test ran"),
    ],
)
def test_summary_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, status: int, result: int, words: str
) -> None:
    assert run_tests.summary([part(tmp_path, output, status)], 0.0) == result
    out = capsys.readouterr().out
    assert words in out
    assert f"make test: {'FAILED' if result else 'passed'} after" in out


def test_a_failed_part_keeps_no_other_from_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [sys.executable, "-c", "print('test a ... FAILED'); raise SystemExit(1)"]
    good = [sys.executable, "-c", "print('test b ... ok')"]
    parts = run_tests.run({"Bad": bad, "Good": good}, tmp_path)
    assert [made.good for made in parts] == [False, True]
    assert "Good: passed: 1 passed, 0 failed, 0 skipped" in capsys.readouterr().out


def test_variables_of_make_do_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAKE_TERMOUT", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.setenv(name, "x")
    assert not [name for name in run_tests.environment() if name.startswith("MAKE")]


def test_every_slow_file_exists() -> None:
    names = [line for line in (run_tests.ROOT / "tests" / "slow.txt").read_text().splitlines() if line[0] != "#"]
    assert names == sorted(names)
    assert [name for name in names if not (run_tests.ROOT / name).is_file()] == []
