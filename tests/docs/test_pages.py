"""The committed pages are what the program writes, and say everything there is to say."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

import memlab
from memlab.errors import RefusalError
from memlab.jupyter.flags import CELL_FLAGS, WORDS
from memlab.plan import FIELDS, Plan, plan_flags
from memlab.techniques import TECHNIQUES
from tests.docs import api, cheat_sheet, flags, front, guide, markdown, pages

COMMITTED = {path: path.read_text(encoding="utf-8") for path in pages.written()}
_AS_AN_EXAMPLE = {"N": "2", "budget:SIZE": "budget:1GiB", "every:N": "every:2"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_the_committed_page_is_what_the_program_writes(path: Path) -> None:
    assert pages.written()[path] == COMMITTED[path], "run python -m tests.docs"


def test_the_front_pages_are_short() -> None:
    assert len(COMMITTED[pages.README].encode()) <= 10_000
    assert (pages.ROOT / "ARCHITECTURE.md").stat().st_size <= 8_000


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(markdown).failed == 0


@pytest.mark.parametrize("kind", TECHNIQUES, ids=lambda kind: kind.__name__)
def test_a_technique_describes_settings_that_a_plan_can_have(kind: type) -> None:
    assert kind.descriptions
    for each in kind.descriptions:
        assert all((each.saves, each.costs, each.exactness, each.gives_nothing))
        flag, *value = each.flags.split("|")[0].split()
        plan = Plan.parse(" ".join([flag, *(_AS_AN_EXAMPLE.get(word, word) for word in value)]))
        assert kind.field in plan.changes()


def test_the_cheat_sheet_has_every_setting_once() -> None:
    sheet = cheat_sheet.page()
    said = [each for kind in TECHNIQUES for each in kind.descriptions]
    assert len(said) >= 19
    for each in said:
        assert sheet.count(f"| {markdown.code(each.flags).replace('|', chr(92) + '|')} |") == 1
    assert {kind.field for kind in TECHNIQUES} == {spec.name for spec in FIELDS}


def test_every_flag_and_word_has_its_place() -> None:
    page = flags.page()
    assert all(f"`{flag}" in page for flag in plan_flags())
    assert all(f"| `{flag.usage}` | ".replace("|", chr(92) + "|", 0) in page.replace("\\|", "|") for flag in CELL_FLAGS)
    assert all(f"`%memfit {word.usage}`" in page.replace("\\|", "|") for word in WORDS)


def test_every_public_name_is_explained_with_its_arguments() -> None:
    page = api.page()
    for name in memlab.__all__:
        assert f"### `memlab.{name}`" in page
    # wrappers that only import are shown as what they call
    assert "launch(\n    train: Callable[..., Any]," in page
    assert "- `hang_seconds`: how long all ranks may be silent before the run is given up." in page
    for result in api.RESULTS:
        assert f"### {api.title_of(result)}" in page
    assert "[`Ablation`](#memlabrecordsablationablation)" in page
    assert "#### `Session.switch`" in page
    assert "#### `Session.hand_over`" not in page
    assert "#### `Plan.parse`" in page
    assert "#### `Plan.parse_known`" not in page
    assert " object at 0x" not in page
    assert "<function" not in page


def test_completion_offers_the_public_names_alone() -> None:
    assert dir(memlab) == sorted(memlab.__all__)


def test_every_public_member_says_what_it_is() -> None:
    silent = [
        f"{public.__name__}.{member}"
        for public in (*api.RESULTS, *(getattr(memlab, name) for name in memlab.__all__))
        for member, found in vars(public).items()
        if not member.startswith("_") and (isinstance(found, property) or callable(found)) and not found.__doc__
    ]
    assert not silent


def test_a_docstring_becomes_prose_lists_and_code() -> None:
    written = markdown.documented(RefusalError.__doc__.replace("\n    ", "\n"))
    assert written.startswith("A technique that does not apply here.\n\nArgs:\n\n- `technique`: name of the technique")


def test_badges_take_their_address_from_one_place() -> None:
    project = '[project]\nname = "memlab"\n'
    assert "not published yet" in front.published(project)
    written = front.published(f'{project}[project.urls]\nRepository = "https://github.com/someone/memlab.git"\n')
    assert "https://mybinder.org/v2/gh/someone/memlab/HEAD?urlpath=lab/tree/notebooks/00_make_it_fit.ipynb" in written
    assert "colab.research.google.com/github/someone/memlab/blob/HEAD/notebooks/00_make_it_fit.ipynb" in written
    with pytest.raises(ValueError, match=r"expected https://github\.com/OWNER/NAME"):
        front.published(f'{project}[project.urls]\nRepository = "https://example.org/memlab"\n')
    assert (pages.ROOT / front.FIRST_NOTEBOOK).exists()


def test_guesses_are_read_from_what_a_run_without_guesses_leaves() -> None:
    said = "peak of a step: 1.00 GiB · no guess was made: put your number in place of ..."
    cells = [{"outputs": [{"data": {"text/plain": [said]}}, {"text": ["loss 3.1\n"]}]}, {"cell_type": "markdown"}]
    assert list(guide.guesses_in(json.loads(json.dumps({"cells": cells})))) == [("peak of a step", "1.00 GiB")]
