"""Rows of a receipt, and what was predicted for them."""

from __future__ import annotations

from dataclasses import replace

from memlab.jupyter.history import History
from memlab.records import Measurement, Prediction


def _measured(tokens: int) -> Measurement:
    return Measurement("as written", "cpu", 100, None, 0, {}, (), (0.5,), 8, tokens)


def _predicted(tokens: int) -> Prediction:
    return Prediction("as written", "cpu", 100, None, 0, {}, (), 0.5, 8, tokens, (99, 101), (0.4, 0.6))


def _shown(history: History) -> Prediction | None:
    return history.require().prediction_of("as written")


def test_what_was_predicted_stays_beside_a_row_that_is_measured_again() -> None:
    history = History()
    history.add("title", [_measured(512)], ())
    history.keep_predictions([_predicted(512)])
    history.add("title", [_measured(512)], ())
    assert _shown(history) == _predicted(512)


def test_a_row_of_other_batches_does_not_keep_what_was_predicted_for_the_old_ones() -> None:
    history = History()
    history.add("title", [_measured(512)], ())
    history.keep_predictions([_predicted(512)])
    history.add("title", [_measured(264)], ())
    assert _shown(history) is None
    history.keep_predictions([_predicted(264)])
    assert _shown(history) == _predicted(264)


def test_going_back_to_the_plan_as_written_is_said_and_stays_in_front() -> None:
    history = History()
    rows = [
        replace(_measured(512), plan=plan, step_seconds=(seconds,) * 6)
        for plan, seconds in (("--fp16", 0.4), ("as written", 0.5))
    ]
    for row in rows:
        history.add("title", [row], ())
    assert [each.plan for each in history.require().measurements] == ["as written", "--fp16"]
    history.add("title", [replace(rows[1], step_seconds=(1.0,) * 6)], ("step 3: something",))
    assert history.require().events == (
        "step 3: something", "as written was timed again: −50 % samples/s; other rows are compared with the new times",
    )  # fmt: skip
    history.add("title", [replace(rows[1], step_seconds=(9.0,))], ())
    assert history.require().measurements[0].step_seconds == (1.0,) * 6
    assert history.require().events == ()
