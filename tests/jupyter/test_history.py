"""Rows of a receipt, and what was predicted for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from memlab.jupyter.history import History
from memlab.records import Measurement, Prediction, prediction_of


def _measured(tokens: int) -> Measurement:
    return Measurement("as written", "cpu", 100, None, 0, {}, (), (0.5,), 8, tokens)


def _predicted(tokens: int) -> Prediction:
    return Prediction("as written", "cpu", 100, None, 0, {}, (), 0.5, 8, tokens, (99, 101), (0.4, 0.6))


def _shown(history: History) -> Prediction | None:
    return prediction_of("as written", history.require().predictions)


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


def test_a_cell_that_measures_nothing_leaves_the_title_of_the_one_before() -> None:
    history = History()
    history.add("memfit · Linear · batch 8 × 2 · 4 steps", [_measured(512)], ("step 3: something",))
    before = history.receipt()
    history.add("memfit · Linear · 0 steps", [], ())
    assert history.receipt() == before


def test_rows_of_another_optimizer_are_compared_with_nothing() -> None:
    linear = torch.nn.Linear(2, 1)
    lbfgs, adam = torch.optim.LBFGS(linear.parameters()), torch.optim.Adam(linear.parameters())
    history = History()
    history.trained_by([lbfgs])
    history.add("LBFGS", [_measured(512)], ())
    history.keep_predictions([_predicted(512)])
    history.trained_by([])
    assert history.require().title == "LBFGS"
    history.trained_by([adam])
    history.add("Adam", [replace(_measured(512), plan="--fp16")], ())
    assert [each.plan for each in history.require().measurements] == ["--fp16"]
    history.trained_by([torch.optim.Adam(linear.parameters())])
    history.add("Adam", [_measured(512)], ())
    assert len(history.require().measurements) == 2
    assert history.require().predictions == ()
