"""`docs/flags.md`: every flag of `%%memfit` and every word of `%memfit`, from the tables they are read from."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.jupyter.config import MemLab
from memlab.jupyter.flags import CELL_FLAGS, PREDICT_FLAGS, WORDS, Flag
from memlab.plan import FIELDS, PlanField
from memlab.techniques import TECHNIQUES
from tests.docs.markdown import NOTE, anchor, code, table

_HEAD = """# Flags

{note}

All flags and words of `%%memfit` and `%memfit`; `%%memfit?` and `%memfit?` show the same texts. For an overview see the
[cheat sheet](cheatsheet.md), for Python [functions and classes](api.md)."""
_PLAN = """## Techniques

These flags together are a *plan*; their order does not matter. `%%memfit` and `%memfit` accept them, and so do `memlab.fit`, `measure`, `compare`
and `predict`, as text. Everything else stays as the loop has it. Flags that exclude each other are refused with the reason."""
_CELL = """## Flags of the cell

`%%memfit` also accepts these. They apply to the cell and are not part of the plan."""
_WORDS = """## Words of the line

`%memfit` alone shows the plan in force and what it needs. The first word selects an action; flags of techniques without a word change the plan now."""
_PREDICT = """## Flags of words

These words change nothing on the live model, or put everything back. They accept flags of techniques, and also:"""
_CONFIG = """## Defaults

`%config MemLab` shows the defaults, `%config MemLab.NAME = VALUE` changes one for this notebook."""


def page() -> str:
    """The page."""
    techniques = [_technique(field) for field in FIELDS]
    contents = "\n".join(f"- [{_title(field)}](#{anchor(_title(field))})" for field in FIELDS)
    parts = [
        *(_HEAD.format(note=NOTE), _PLAN, contents, *techniques),
        *(_CELL, _flags(CELL_FLAGS)),
        *(_WORDS, table(("line", "what it does"), ((code(f"%memfit {word.usage}"), word.help) for word in WORDS))),
        *(_PREDICT, *(f"### `%memfit {word}`\n\n{_flags(known)}" for word, known in PREDICT_FLAGS.items())),
        *(_CONFIG, _config()),
    ]
    return "\n\n".join(parts) + "\n"


def _title(field: PlanField) -> str:
    return f"{field.title}: `{field.flag}`"


def _technique(field: PlanField) -> str:
    shorthands = "".join(
        f"\n- `{flag}` is short for `{field.flag} {value}`" for flag, value in field.shorthands.items()
    )
    bare = f"\n- without a value it is `{field.flag} {field.bare}`" if field.bare else ""
    said = [each for kind in TECHNIQUES if kind.field == field.name for each in kind.descriptions]
    rows = ((code(each.flags), each.saves, each.costs, each.exactness, each.gives_nothing) for each in said)
    return "\n\n".join(
        (
            f"### {_title(field)}",
            f"`{field.flag} {field.metavar}`: {field.help}.",
            f"- as a field of a `Plan`: `{field.name}`, by default `{field.choices[0]}`{shorthands}{bare}",
            table(("setting", "frees", "costs", "exactness", "saves nothing where"), rows),
        )
    )


def _flags(flags: Sequence[Flag]) -> str:
    return table(("flag", "what it does"), ((code(flag.usage), flag.help) for flag in flags))


def _config() -> str:
    traits = MemLab.class_own_traits(config=True)
    rows = ((code(name), code(repr(trait.default_value)), trait.help) for name, trait in sorted(traits.items()))
    return table(("name", "by default", "what it does"), rows)
