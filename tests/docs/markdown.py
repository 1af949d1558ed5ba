"""Small pieces of Markdown, and docstrings turned into it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Known limitations):$")
_ENTRY = re.compile(r"^(\*{0,2}[\w.]+): (.*)$", re.DOTALL)
NOTE = "<!-- written by python -m tests.docs; change the code, not this page -->"


@dataclass(frozen=True)
class Section:
    """A part of a docstring.

    Args:
        title: "" for what stands before the first titled part.
        lines: of its text, without the indent.
    """

    title: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The part as one piece."""
        return "\n".join(self.lines).strip("\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A table; what would end a cell is escaped.

    Example:
        >>> print(table(("a", "b"), [("x|y", "1")]))
        | a | b |
        |---|---|
        | x\|y | 1 |
    """
    lines = [head, ["---"] * len(head), *rows]
    text = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    return "\n".join([text[0], text[1].replace(" ", ""), *text[2:]])


def code(text: str) -> str:
    """A piece of code within a line."""
    return f"`{text}`"


def anchor(heading: str) -> str:
    """What GitHub makes of a heading for links to it.

    Example:
        >>> anchor("`%%memfit --fp16`: what it does")
        'memfit---fp16-what-it-does'
    """
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower())
    return kept.replace(" ", "-")


def sections(docstring: str) -> tuple[Section, ...]:
    """The parts of a docstring in Google's style.

    Example:
        >>> [section.title for section in sections("Do it.\\n\\nArgs:\\n    n: how often.\\n\\nReturns:\\n    It.")]
        ['', 'Args', 'Returns']
    """
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in docstring.splitlines():
        if titled := _SECTION.match(line):
            found.append((titled[1], []))
        else:
            found[-1][1].append(line)
    return tuple(Section(title, tuple(textwrap.dedent("\n".join(lines)).splitlines())) for title, lines in found)


def documented(docstring: str) -> str:
    """A docstring as Markdown: prose, lists of arguments and errors, examples as code."""
    return "\n\n".join(filter(None, map(_section, sections(docstring))))


def _section(section: Section) -> str:
    if not section.title:
        return section.text
    if section.title.startswith("Example"):
        return f"{section.title}:\n\n```python\n{_plain_code(section.text)}\n```"
    if section.title in ("Args", "Attributes", "Raises"):
        return f"{section.title}:\n\n" + "\n".join(_entry(entry) for entry in entries(section))
    return f"{section.title}: {section.text}"


def _plain_code(text: str) -> str:
    head, marked, rest = text.partition(".. code-block:: python")
    return textwrap.dedent(rest).strip("\n") if marked and not head.strip() else text


def entries(section: Section) -> list[str]:
    """Its entries, each in one piece: an entry begins where a line is not indented."""
    found: list[str] = []
    for line in section.lines:
        if line and not line.startswith(" "):
            found.append(line)
        elif line.strip() and found:
            found[-1] += " " + line.strip()
    return found


def _entry(entry: str) -> str:
    named = _ENTRY.match(entry)
    return f"- `{named[1]}`: {named[2]}" if named else f"- {entry}"
