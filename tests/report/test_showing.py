"""What `print` and a cell show of a record, whoever made it."""

from __future__ import annotations

import doctest

import pytest
import samples

from memlab.records import measurement
from memlab.records.ablation import Ablation, AblationRow
from memlab.report import ablation, html, showing, tables, text


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(measurement).failed == 0


def test_every_record_is_printed_as_its_report() -> None:
    comparison = samples.comparison()
    first = comparison.measurements[0]
    added = Ablation("gpt2", (AblationRow("", "as written", "the loop as it is", first),))
    found = samples.found()
    assert str(comparison) == text.table(tables.comparison(comparison))
    assert str(added) == text.table(ablation.table(added))
    assert str(found) == text.table(tables.found(found))
    assert str(first) == text.breakdown(first)
    assert (comparison._repr_html_(), added._repr_html_()) == (
        html.table(tables.comparison(comparison)),
        html.table(ablation.table(added)),
    )
    assert first._repr_html_() is None


def test_a_refused_prediction_is_printed_with_its_reason() -> None:
    predicted = samples.prediction("--checkpoint", 4.0, 100.0)
    assert str(predicted) == text.breakdown(predicted)
    assert str(samples.refused("--fp16", "precision: no")) == "--fp16: precision: no"


def test_what_no_report_shows_is_an_error() -> None:
    with pytest.raises(TypeError, match="int: no report shows it"):
        showing.text_of(1)
