"""What the line of a cell says about rescue."""

from __future__ import annotations

import pytest

from memlab.jupyter.parser import cell_options
from memlab.plan import FIELDS


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", set()),
        ("--keep precision", {"precision"}),
        ("--keep=loss,chunk-loss", {"loss"}),
        ("--keep accumulate,checkpoint,optim,offload", {"accumulation", "checkpointing", "optimizer", "offload"}),
        ("--keep optimizer --accumulate 2 --keep precision", {"optimizer", "precision"}),
        ("--keep 'precision, loss'", {"precision", "loss"}),
        ("--keep adam8bit,bf16", {"optimizer", "precision"}),
        (f"--keep {','.join(field.name for field in FIELDS)}", {field.name for field in FIELDS}),
        (f"--keep {','.join(field.flag.removeprefix('--') for field in FIELDS)}", {field.name for field in FIELDS}),
    ],
)
def test_what_must_stay(line: str, fields: set[str]) -> None:
    assert cell_options(line).keep == fields


def test_the_flags_of_a_plan_are_read_beside_it() -> None:
    options = cell_options("--keep precision --accumulate 2")

    assert options.plan is not None
    assert options.plan.label == "--accumulate 2"
    assert cell_options("--keep precision").plan is None


def test_rescue_is_on_unless_it_is_declined() -> None:
    assert cell_options("").rescue
    assert cell_options("--keep loss").rescue
    assert not cell_options("--no-rescue").rescue
