"""Every contestant in a process of its own, in turns; what has been done is not done again."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.peers.records import Contest, Contestant, Key, Measured, Record, RecordFile, Status, key_text, not_run

ROOT = Path(__file__).parents[3]
ROUNDS = {"tiny": 1, "small": 3, "full": 3}
# a contestant that takes longer has failed; under ten minutes, so that one run of the command can always do one
MOST_SECONDS = {"tiny": 120, "small": 480, "full": 540}
_ALWAYS = ("torch", "transformers", "accelerate")
_CHILD = (sys.executable, "-m", "tests.bench.peers.child")
_TAIL = 4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Turn:
    """One contestant's turn in one round."""

    contest: Contest
    contestant: Contestant
    key: Key


@dataclass(frozen=True)
class Here:
    """What runs are made with.

    Args:
        scale: one of `records.SCALES`.
        device: in words.
        has_gpu: whether it is one.
        code: digest of memlab's source.
    """

    scale: str
    device: str
    has_gpu: bool
    code: str


def here(scale: str) -> Here:
    """This machine, and memlab as it is."""
    import torch

    if torch.cuda.is_available():
        return Here(scale, torch.cuda.get_device_name(), True, code_digest())
    threads = torch.get_num_threads()
    return Here(scale, f"CPU, {threads} thread{'s' * (threads > 1)}", False, code_digest())


def has_gpu() -> bool:
    """Whether runs here are on a GPU."""
    import torch

    return torch.cuda.is_available()


def code_digest() -> str:
    """A digest of memlab's source: results of other source are measured anew."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "memlab").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def turns(contests: Sequence[Contest], where: Here) -> list[Turn]:
    """All turns, round by round: in each, contest by contest, everyone has a turn, and who begins changes.

    A run that is broken off has thus something of every contest.
    """
    listed = []
    for number in range(ROUNDS[where.scale]):
        for contest in contests:
            order = contest.contestants if number % 2 == 0 else contest.contestants[::-1]
            listed += [Turn(contest, each, _key(contest, each, number, where)) for each in order]
    return listed


def _key(contest: Contest, contestant: Contestant, number: int, where: Here) -> Key:
    packages = sorted({*_ALWAYS, *contestant.needs})
    found = {each: version_of(each) for each in packages}
    return Key(contest.name, contestant.name, number, where.scale, where.device, where.code, found)


def version_of(package: str) -> str:
    """Version of an importable package, or "" when it is not installed."""
    if importlib.util.find_spec(package) is None:
        return ""
    return importlib.metadata.version(package.replace("_", "-"))


def why_not(turn: Turn, where: Here) -> str:
    """Why a contestant cannot be asked here; empty when it can."""
    if turn.contestant.gpu_only and not where.has_gpu:
        return f"needs a GPU: {turn.contestant.gpu_only}"
    missing = [each for each in turn.contestant.needs if not turn.key.versions[each]]
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'memlab[peers]'"
    return ""


def run_all(
    contests: Sequence[Contest], where: Here, stored: RecordFile, say: Say, *, minutes: float | None = None
) -> int:
    """Run what has not been run yet.

    Args:
        contests: which, in order.
        where: this machine.
        stored: what has been done; every result is added as it is made.
        say: told a line before each turn.
        minutes: end before this time is over, rather than begin a turn that may not.

    Returns:
        How many turns remain.
    """
    began, all_turns = time.monotonic(), turns(contests, where)
    if stored.damaged:
        say(f"{stored.path.name}: {stored.damaged} line(s) broken off in the middle are left out")
    done = stored.done()
    waiting = [turn for turn in all_turns if key_text(turn.key) not in done]
    if len(waiting) < len(all_turns):
        say(f"{len(all_turns) - len(waiting)} of {len(all_turns)} runs are there already; going on with the rest")
    process = Fresh(where) if where.has_gpu else Forked(where)
    with closing(process):
        return _take_all(
            waiting, where, stored, process, say, began + minutes * 60 if minutes is not None else math.inf
        )


def _take_all(
    waiting: Sequence[Turn], where: Here, stored: RecordFile, process: Fresh | Forked, say: Say, deadline: float
) -> int:
    """Take turns until one may not end in time; returns how many remain."""
    for number, turn in enumerate(waiting):
        remaining = len(waiting) - number
        if time.monotonic() + _longest(stored, turn) > deadline:
            say(f"stopped before time is over: {remaining} runs remain; the same command goes on with them")
            return remaining
        say(f"{turn.contest.name}: {turn.contestant.name}, round {turn.key.round + 1} ({remaining} to go)")
        record = take(turn, where, process)
        stored.add(record)
        if record.status is not Status.MEASURED:
            say(f"  {record.status}: {record.reason}")
    return 0


def _longest(stored: RecordFile, turn: Turn) -> float:
    """How long such a turn may take: what this one took before, else half of what it is allowed."""
    before = [
        each.wall_seconds
        for each in stored.records
        if (each.key.contest, each.key.contestant, each.key.scale)
        == (turn.key.contest, turn.key.contestant, turn.key.scale)
    ]
    return 1.2 * max(before) if before else MOST_SECONDS[turn.key.scale] / 2


def take(turn: Turn, where: Here, process: Fresh | Forked) -> Record:
    """One turn, in a process of its own."""
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    reason = why_not(turn, where)
    if reason:
        return not_run(turn.key, today, reason)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        failure = process(turn, path)
        measured = _read(path) if not failure else None
    seconds = round(time.monotonic() - began, 2)
    if measured is None:
        return Record(turn.key, today, Status.FAILED, failure, wall_seconds=seconds)
    return Record(turn.key, today, Status.MEASURED, measured=measured, wall_seconds=seconds)


class Fresh:
    """Runs a contestant in a new interpreter."""

    def __init__(self, where: Here) -> None:
        self.where = where

    def __call__(self, turn: Turn, path: Path) -> str:
        """Run, and say what went wrong; empty when nothing did."""
        child = subprocess.Popen(
            [*_CHILD, *_words(turn, path)],
            cwd=ROOT,
            env=_environment(self.where),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = child.communicate(timeout=MOST_SECONDS[self.where.scale])
        except subprocess.TimeoutExpired:
            return f"took longer than {MOST_SECONDS[self.where.scale]} seconds"
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
        return _failure(child.returncode, errors)

    def close(self) -> None:
        """Nothing is left."""


class Forked:
    """Runs a contestant in a fork of an interpreter that has only imported what all use; see `child.fork_for_each`."""

    def __init__(self, where: Here) -> None:
        self.where = where
        self._nursery: subprocess.Popen[str] | None = None

    def __call__(self, turn: Turn, path: Path) -> str:
        """Run, and say what went wrong; empty when nothing did."""
        nursery = self._nursery = self._nursery or self._start()
        assert nursery.stdin is not None
        nursery.stdin.write(" ".join(_words(turn, path)) + "\n")
        nursery.stdin.flush()
        child = int(self._next_line(nursery))
        too_long = threading.Timer(MOST_SECONDS[self.where.scale], os.kill, (child, signal.SIGKILL))
        too_long.start()
        try:
            status = int(self._next_line(nursery))
        finally:
            # a timer that has begun to kill is waited for, so that it never meets another process of that number
            too_long.cancel()
            too_long.join()
        if status == -signal.SIGKILL:
            return f"took longer than {MOST_SECONDS[self.where.scale]} seconds, or was killed"
        return _failure(status, Path(f"{path}.errors").read_text())

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*_CHILD, "--fork"],
            cwd=ROOT,
            env=_environment(self.where),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _next_line(self, nursery: subprocess.Popen[str]) -> str:
        assert nursery.stdout is not None
        line = nursery.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks contestants ended with status {nursery.wait()}")
        return line

    def close(self) -> None:
        """End the process that forks."""
        if self._nursery is not None:
            self._nursery.communicate()


def _words(turn: Turn, path: Path) -> list[str]:
    return [turn.contest.name, turn.contestant.name, turn.key.scale, str(path)]


def _failure(status: int, errors: str) -> str:
    if status == 0:
        return ""
    said = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {status}: " + " | ".join(said[-_TAIL:])[-600:]


def _environment(where: Here) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), before))), "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own, **({} if where.has_gpu else {"DS_ACCELERATOR": "cpu"})}


def _read(path: Path) -> Measured:
    read = json.loads(path.read_text())
    lists = {name: tuple(read[name]) for name in ("losses", "gradient_norms", "notes")}
    return replace(Measured(read["numbers"], result_loss=read["result_loss"]), **lists)
