"""Which predictions are shown, in which order, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from memlab.records import Fit, Prediction
from memlab.report.ranking import best_of_each_verdict, counts, pareto_front, rank, refusals, shown, verdict_words
from memlab.units import GIB

SPACE = samples.plan_space()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60))
def test_nothing_beats_the_front_and_it_beats_all_others(pairs: list[tuple[int, int]]) -> None:
    given_plans = [samples.prediction(f"--accumulate {n}", size, speed) for n, (size, speed) in enumerate(pairs, 1)]
    front = pareto_front(given_plans)
    assert [p.needed_bytes for p in front] == sorted({p.needed_bytes for p in front})
    assert [p.samples_per_second for p in front] == sorted({p.samples_per_second for p in front})
    for each in given_plans:
        assert any(
            f.needed_bytes <= each.needed_bytes and f.samples_per_second >= each.samples_per_second for f in front
        )


def test_of_equal_plans_the_one_with_fewer_flags_is_on_the_front() -> None:
    plans = [samples.prediction(plan, 2, 1) for plan in ("--fp16 --chunk-loss", "--fp16")]
    assert [p.plan for p in pareto_front(plans)] == ["--fp16"]


def test_without_a_time_the_smallest_is_the_front() -> None:
    plans = [replace(samples.prediction(f"--accumulate {n}", 4 / n, 1), step_seconds=float("nan")) for n in (1, 2, 4)]
    assert [p.plan for p in pareto_front(plans)] == ["--accumulate 4"]
    assert rank(plans) is not None


def test_with_a_budget_what_fits_comes_first_by_speed() -> None:
    ranking = rank(SPACE, 4 * GIB)
    assert ranking is not None
    assert ranking.first.plan == "as written"
    verdicts = [each.verdict(4 * GIB) for each in ranking.others]
    fits = [verdict.fit for verdict in verdicts]
    assert fits == sorted(fits, key=[Fit.YES, Fit.UNCERTAIN, Fit.NO].index)
    speeds = [p.samples_per_second for p, v in zip(ranking.others, verdicts, strict=True) if v.fit is Fit.YES]
    assert speeds == sorted(speeds, reverse=True)
    short = [v.spare_bytes for v in verdicts if v.fit is Fit.NO]
    assert short == sorted(short, reverse=True)


def test_without_a_budget_the_front_comes_first() -> None:
    ranking = rank(SPACE)
    assert ranking is not None
    on_front = [each.plan in ranking.front for each in ranking.others]
    assert on_front == sorted(on_front, reverse=True)
    assert best_of_each_verdict(ranking) == ()


def test_hundreds_of_plans_become_a_page() -> None:
    ranking = rank(SPACE, 4 * GIB)
    assert ranking is not None
    rows = shown(ranking)
    assert rows[0].plan == "as written"
    assert len(rows) <= 16
    assert set(best_of_each_verdict(ranking)) <= {row.plan for row in rows}
    assert shown(ranking, every=True) == ranking.every
    assert len(ranking.every) == 300


def test_a_short_list_is_shown_whole() -> None:
    ranking = rank(SPACE[:20], 4 * GIB)
    assert ranking is not None
    assert shown(ranking) == ranking.every


def test_refusals_are_told_once_per_reason() -> None:
    assert [len(plans) for plans in refusals(SPACE).values()] == [72, 60]
    assert rank([p for p in SPACE if p.refused]) is None


@pytest.mark.parametrize(
    ("budget_gib", "said"),
    [
        (2.0, "does not fit, 1.00 GiB too much"),
        (2.99, "uncertain, 10.2 MiB too much ± 30.7 MiB"),
        (3.01, "uncertain, 10.2 MiB to spare ± 30.7 MiB"),
        (4.0, "fits, 1.00 GiB to spare"),
    ],
)
def test_verdicts(budget_gib: float, said: str) -> None:
    assert verdict_words(samples.prediction("--fp16", 3.0, 1.0), int(budget_gib * GIB)) == said


def test_what_a_budget_must_hold_is_the_reserved_peak() -> None:
    plan: Prediction = replace(
        samples.prediction("--fp16", 3.0, 1.0), peak_reserved_bytes=4 * GIB, interval_bytes=(4 * GIB, 4 * GIB)
    )
    assert verdict_words(plan, int(3.5 * GIB)) == "does not fit, 512.0 MiB too much"
    assert counts([plan], int(3.5 * GIB)) == "1 plan: 1 do not fit"
