"""A cell that runs elsewhere."""

from __future__ import annotations

import threading
import traceback

import pytest
from torch import nn

from memlab.errors import ScaleError
from memlab.scaleout.cell_code import CellCode


def test_what_a_cell_assigns_and_fills_comes_home() -> None:
    seen: list[int] = []
    text = "for i in range(3):\n    seen.append(i)\ndef double(x):\n    return 2 * x\nwith open_it() as handle:\n    total = double(i)\n"
    brought = CellCode(text, {"seen": seen, "open_it": threading.Lock})
    done = brought()
    assert {name: value for name, value in done.assigned.items() if name != "double"} == {
        "handle": True,
        "i": 2,
        "total": 4,
    }
    assert done.assigned["double"](4) == 8
    assert done.contained == {"seen": [0, 1, 2]}


def test_what_cannot_come_home_is_named() -> None:
    text = "import threading\nlock = threading.Lock()\nnet = make()\nkept = 1"
    done = CellCode(text, {"make": lambda: nn.Linear(1, 1)})()
    assert done.left["lock"].startswith("cannot pickle")
    assert done.left["net"] == "models and optimizers other than those that were sent stay on the ranks"
    assert done.assigned["kept"] == 1


def test_names_inside_functions_are_their_own() -> None:
    done = CellCode("def f():\n    inner = 1\n    return inner\nx = [y for y in range(2)]", {})()
    assert done.assigned.keys() == {"f", "x"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("get_ipython().system('ls')", r"^the cell uses ! or %, which ranks do not know"),
        ("async def f():\n    await g()", r"^the cell awaits, which ranks cannot"),
    ],
)
def test_what_ranks_cannot_do_is_refused(text: str, said: str) -> None:
    with pytest.raises(ScaleError, match=said):
        CellCode(text, {})


def test_an_error_shows_the_line_of_the_cell() -> None:
    with pytest.raises(ValueError, match="here") as caught:
        CellCode("x = 1\nraise ValueError('here')", {})()
    assert "raise ValueError('here')" in "".join(traceback.format_exception(caught.value))
