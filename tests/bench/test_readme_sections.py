"""Sections of pages that programs write."""

from __future__ import annotations

import doctest

import pytest

from tests.bench import readme
from tests.bench.readme import section_of, with_section


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(readme).failed == 0


def test_a_section_is_replaced_between_its_marks_and_nothing_else() -> None:
    text = "before\n<!-- one -->\nold\n<!-- /one -->\nafter\n<!-- two -->\nold\n<!-- /two -->\n"
    written = with_section(text, "one", "new \\1")
    assert written == text.replace("old", "new \\1", 1)
    assert (section_of(written, "one"), section_of(written, "two")) == ("new \\1", "old")


def test_a_page_without_the_markers_says_what_to_put_back() -> None:
    with pytest.raises(ValueError, match="found no lines <!-- one --> and <!-- /one -->"):
        with_section("no place", "one", "new")
