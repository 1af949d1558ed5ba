"""The record of a whole run: of one commit, and continued. None of it needs CUDA."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.emulated_gpu import whole
from tests.emulated_gpu.errors import EmulationError

_REPORT = '<testsuites><testsuite><testcase name="test_a"/></testsuite></testsuites>'
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """A repository with two files of tests, which the whole run is of."""
    tests = tmp_path / "tests"
    tests.mkdir()
    files = [tests / name for name in ("test_one.py", "test_two.py")]
    for file in files:
        file.write_text("")
    monkeypatch.setattr(whole, "_TESTS", tests)
    monkeypatch.setattr(whole, "KEPT", tests / "emulated_gpu" / "last_run.json")
    monkeypatch.setattr(whole, "PAGE", tests / "emulated_gpu" / "last_run.md")
    monkeypatch.setattr(whole, "version", lambda _package: "1")
    monkeypatch.setattr(whole, "parts", lambda: [whole.Part(file, ()) for file in files])
    (tests / "emulated_gpu").mkdir()

    def run(*arguments: str) -> str:
        as_somebody = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *as_somebody, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run("init", "-q")
    run("add", "-A")
    run("commit", "-qm", "one")
    return run


class Runs:
    """Runs of pytest that pass; the process ends before the one that is named, and within it as the status says."""

    def __init__(self, **ends_within: int) -> None:
        self.files: list[str] = []
        self.ends_before = ""
        self.ends_within = ends_within

    def __call__(self, arguments: Sequence[str]) -> int:
        name = Path(arguments[-1]).name
        if name == self.ends_before:
            raise KeyboardInterrupt
        self.files.append(name)
        if (status := self.ends_within.get(Path(name).stem)) is not None:
            return status
        [report] = [each for each in arguments if each.startswith("--junitxml=")]
        Path(report.partition("=")[2]).write_text(_REPORT)
        return 0


def test_what_was_broken_off_goes_on(git: Git) -> None:
    runs, head = Runs(), git("rev-parse", "--short=12", "HEAD").strip()
    runs.ends_before = "test_two.py"
    with pytest.raises(KeyboardInterrupt):
        whole.run_all(runs, [])
    assert f"What ran by now, ran at commit {head}: 1 passed, 0 failed" in whole.PAGE.read_text()
    assert "Not run yet:\n\n- tests/test_two.py memory alone\n" in whole.PAGE.read_text()
    git("add", "-A")
    git("commit", "-qm", "the record alone")
    runs.ends_before = ""
    assert whole.run_all(runs, []) == 0
    assert runs.files == ["test_one.py", "test_two.py"]
    assert f"All of it ran at commit {head}: 2 passed, 0 failed" in whole.PAGE.read_text()
    assert "Not run" not in whole.PAGE.read_text()
    whole.run_all(runs, [])  # of what is complete there is nothing to go on with
    assert runs.files == ["test_one.py", "test_two.py"] * 2


@pytest.mark.parametrize("status", [137, 0])
def test_a_process_that_ends_without_a_result_has_failed(
    git: Git, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    runs = Runs(test_one=status)
    assert whole.run_all(runs, []) == 1
    said = whole.PAGE.read_text()
    assert ": 1 passed, 1 failed, in" in said
    assert "| tests/test_one.py | memory alone | 0 | 1 | 0 | 0 |" in said
    assert f"Failed:\n\n- tests/test_one.py memory alone: ended with status {status}\n" in said
    assert whole.run_all(runs, ["one"]) == 1
    assert "| tests/test_one.py | memory alone | 0 | 1 | 0 | 0 |" in capsys.readouterr().err


def test_results_of_two_commits_are_not_mixed(git: Git) -> None:
    runs = Runs()
    runs.ends_before = "test_two.py"
    with pytest.raises(KeyboardInterrupt):
        whole.run_all(runs, [])
    (whole._TESTS / "test_one.py").write_text("# changed")
    with pytest.raises(EmulationError) as caught:
        whole.run_all(runs, [])
    assert str(caught.value) == (
        "--all: its record names a commit, and there are changes: commit them, or name the files to run"
    )
    git("commit", "-qam", "two")
    runs.ends_before = ""
    whole.run_all(runs, [])
    assert runs.files == ["test_one.py", "test_one.py", "test_two.py"]


def test_without_a_commit_files_can_be_named(git: Git, tmp_path: Path) -> None:
    (tmp_path / ".git").rename(tmp_path / "elsewhere")
    (tmp_path / ".git").write_text("no repository")
    with pytest.raises(EmulationError) as caught:
        whole.run_all(Runs(), [])
    assert str(caught.value) == "--all: its record names a commit, and here is none; name the files to run"
    runs = Runs()
    assert whole.run_all(runs, ["two"]) == 0
    assert runs.files == ["test_two.py"]
    assert not whole.PAGE.exists()
