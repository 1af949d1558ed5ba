"""Mechanisms that techniques bring along: the table of them, and who has them."""

from __future__ import annotations

import inspect
import re

from memlab.runtime import mechanisms
from memlab.runtime.mechanisms import AsWritten, Bringing, LoopChecks, Visiting, brought
from memlab.techniques import TECHNIQUES

KINDS = {
    name
    for name, each in vars(mechanisms).items()
    if inspect.isclass(each) and each.__module__ == mechanisms.__name__ and each not in (AsWritten, Bringing)
}


def test_the_table_has_them_all() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", mechanisms.__doc__ or "", re.MULTILINE)) == KINDS


def test_each_is_of_some_technique() -> None:
    assert TECHNIQUES  # all are imported

    def below(kind: type) -> set[type]:
        return {kind, *(one for each in kind.__subclasses__() for one in below(each))}

    unused = {
        name
        for name in KINDS
        if not any(each.__module__.startswith("memlab.techniques.") for each in below(getattr(mechanisms, name)))
    }
    assert unused == set()


def test_they_are_found_by_their_class_and_in_order() -> None:
    class Two:
        def __init__(self) -> None:
            self.visiting, self.checks = Visiting(), LoopChecks()

        def brings(self) -> tuple[object, ...]:
            return (self.visiting, None, self.checks)

    first, second = Two(), Two()
    assert brought([first, second], Visiting) == [first.visiting, second.visiting]
    assert brought([second], LoopChecks) == [second.checks]
