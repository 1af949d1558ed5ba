"""How far predictions per rank are off: models × engines × ranks, each predicted and then run on processes of this machine.

python -m tests.bench.rank_accuracy            run, and write tests/bench/results/accuracy/ranks/cpu.json
python -m tests.bench.rank_accuracy --show     show what was run last
python -m tests.bench.rank_accuracy --predict predict anew, beside what was measured last: after a change of prediction alone

Ranks are counted by the CPU ledger, over gloo. A peak is the middle one of a rank's steps: what a thread of gloo still
holds when the next tensor is made lifts some of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from memlab import predict_ranks
from tests.bench.__main__ import versions
from tests.bench.accuracy import Summary
from tests.scaleout.ranks import bert, gpt2, perceptron, run, small, workload_of

RESULTS = Path(__file__).parent / "results" / "accuracy" / "ranks"
ENGINES = (
    "ddp", "fsdp2", "fsdp2 --offload optimizer", "zero1", "zero2", "zero2 --offload optimizer", "zero3",
    "zero3 --offload optimizer",
)  # fmt: skip
WITHIN = (
    "ddp --bf16", "fsdp2 --checkpoint", "fsdp2 --bf16", "zero2 --checkpoint", "zero2 --bf16", "zero3 --checkpoint",
    "zero3 --bf16",
)  # fmt: skip
MODELS: tuple[Callable[[], Any], ...] = (gpt2, bert, perceptron, small)


@dataclass(frozen=True)
class Pair:
    """One model under one engine, predicted and measured.

    Args:
        model: name of the model.
        scale: engine and plan.
        ranks: number of processes.
        predicted_bytes: peak of a rank.
        measured_bytes: likewise.
        predicted_sent_bytes: what a rank sends in a step.
        measured_sent_bytes: likewise.
    """

    model: str
    scale: str
    ranks: int
    predicted_bytes: int
    measured_bytes: float
    predicted_sent_bytes: int
    measured_sent_bytes: float

    @property
    def error(self) -> float:
        """How far the predicted peak is off, as a share of the measured one; negative when too low."""
        return self.predicted_bytes / self.measured_bytes - 1


def cases() -> Iterator[tuple[Callable[[], Any], str, int]]:
    """What is run: every engine on two ranks, one model also on one, and what applies within a call on another."""
    yield from ((make, flags, 2) for make in MODELS for flags in ENGINES)
    yield from ((perceptron, flags, 1) for flags in ENGINES)
    yield from ((make, flags, 2) for make in (gpt2, bert) for flags in WITHIN)


def examine(make: Callable[[], Any], flags: str, ranks: int) -> Pair:
    """Predict, then run."""
    workload = workload_of(make)
    predicted = predict_ranks(workload, f"--scale {flags}", nproc=ranks)
    measured = run(workload, f"--scale {flags}", ranks)
    return Pair(
        workload.name, predicted.scale, ranks, predicted.peak_allocated_bytes, measured.peak_bytes, predicted.wire_bytes,
        measured.sent_bytes,
    )  # fmt: skip


def predicted_anew() -> Iterator[Pair]:
    """Pairs of the last run, with what is predicted now."""
    for (make, flags, ranks), pair in zip(cases(), _last(), strict=True):
        predicted = predict_ranks(workload_of(make), f"--scale {flags}", nproc=ranks)
        if (predicted.scale, ranks) != (pair.scale, pair.ranks):
            raise ValueError(f"{pair.scale} × {pair.ranks} was measured, not {predicted.scale} × {ranks}: run it anew")
        yield replace(pair, predicted_bytes=predicted.peak_allocated_bytes, predicted_sent_bytes=predicted.wire_bytes)


def _last() -> list[Pair]:
    return [Pair(**pair) for pair in json.loads((RESULTS / "cpu.json").read_text())["pairs"]]


def save(pairs: Sequence[Pair]) -> Path:
    """Write results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "cpu.json"
    results = {"device": "cpu, gloo", "versions": versions(), "pairs": [asdict(pair) for pair in pairs]}
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return path


def table(pairs: Sequence[Pair]) -> str:
    """The report, as Markdown."""
    lines = [["engine", "runs", "median", "95 %", "worst under", "worst over"], ["---", *["---:"] * 5]]
    by_engine = sorted(pairs, key=lambda pair: pair.scale.split()[1])
    groups = [(name, list(of)) for name, of in groupby(by_engine, key=lambda pair: pair.scale.split()[1])]
    for name, of_engine in [*groups, ("all", list(pairs))]:
        found = Summary.of([pair.error for pair in of_engine])
        shares = (found.median, found.percentile_95, found.under, found.over)
        lines.append([name, str(found.count), *(f"{share:.2%}" for share in shares)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Parse the command line, then run or show."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.rank_accuracy", description=__doc__)
    parser.add_argument("--show", action="store_true", help="show the results in the repository, run nothing")
    parser.add_argument("--predict", action="store_true", help="predict anew, and keep what was measured")
    options = parser.parse_args()
    if options.show:
        print(table(_last()))
        return
    found = predicted_anew() if options.predict else (examine(*case) for case in cases())
    pairs: list[Pair] = []
    for pair in found:
        pairs.append(pair)
        print(f"{pair.model} {pair.scale} × {pair.ranks}: {pair.error:+.2%}", flush=True)
        if not options.predict:
            save(pairs)
    save(pairs)
    print(f"\n{table(pairs)}")


if __name__ == "__main__":
    main()
