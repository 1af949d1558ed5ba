"""The code of a loop that runs is read, and its variables are left as they are."""

from __future__ import annotations

import gc
import sys
import weakref

import torch

from memlab.runtime.loop_reading import functions_of_loop, made_one_graph


class _Value:
    pass


def test_nothing_is_kept_of_what_the_loop_drops() -> None:
    value = _Value()
    there = weakref.ref(value)
    names = [name for function in functions_of_loop(sys._getframe()) for name, _ in function.values()]
    assert "there" in names
    gc.disable()
    try:
        del value
        assert there() is None
    finally:
        gc.enable()


def test_what_the_user_has_of_locals_stays() -> None:
    value = _Value()
    held = locals()
    assert any(function.names.get("value") is value for function in functions_of_loop(sys._getframe()))
    assert held["value"] is value


_MODEL = torch.nn.Linear(2, 2)


class _Loop:
    def __init__(self) -> None:
        self.asked = 0
        self.loss = torch.compile(_loss, backend="eager", fullgraph=True)
        self.other = torch.compile(_loss, backend="eager")

    @property
    def counted(self) -> int:
        self.asked += 1
        return self.asked

    def train(self, run: bool) -> str:
        if run:
            return str(self.loss(self.counted))
        return made_one_graph(sys._getframe(), _MODEL, calls_it=False)

    def train_in_parts(self, run: bool) -> str:
        return str(self.other(0)) if run else made_one_graph(sys._getframe(), _MODEL, calls_it=False)


def _loss(value: int) -> int:
    return value


def test_an_attribute_that_is_compiled_as_one_graph_and_no_property_is_asked() -> None:
    torch.compile(_loss, backend="eager")(1)
    loop = _Loop()
    assert (loop.train(False), loop.asked) == ("loss", 0)
    assert loop.train_in_parts(False) == ""
