"""Every error memlab raises on purpose, in one tree.

MemlabError
├── PlanError          a flag, a value or a combination of flags (also a ValueError)
├── BuildError         a model that cannot be built from what was given (also a ValueError)
├── WorkloadError      no model, several models, an optimizer that fits none of them
├── RefusalError       a technique that cannot be applied to this model, with the nearest thing that works
├── MissingExtraError  an optional package that is not installed (also an ImportError)
├── SessionError       a session used after its end, or from inside a step
├── TraceError         a step that cannot be predicted: which operator, and what to do instead
├── ScaleError         training in many processes: what cannot be sent, which rank failed and how
└── BudgetError        a budget that no plan fits: how far off it is, and which GPU would do

Each message says what was given, what is allowed and what to do. The magics print it as one
line; the Python API raises it.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMES = 3  # of many, that a line shows
_MOST_CHARACTERS = 120  # of a foreign error's text


class MemlabError(Exception):
    """Base of every error raised by memlab.

    Attributes:
        is_late: whether training already differs from the loop as written, so that going on under another plan would
            hide it.
        in_loop: whether it was raised where the user's loop met memlab (a model call, an optimizer step), and not by a
            call to memlab that stands in the user's code.
    """

    is_late = False
    in_loop = False


class PlanError(MemlabError, ValueError):
    """A plan that cannot be parsed, or whose parts exclude each other."""


class BuildError(MemlabError, ValueError):
    """A model that cannot be built as asked."""


class WorkloadError(MemlabError):
    """Live objects that could not be found, or that do not belong together."""


class RefusalError(MemlabError):
    """A technique that does not apply here.

    Args:
        technique: name of the technique, as in the plan's field.
        reason: why it cannot be applied to this workload.
        instead: the nearest thing that works.
        is_late: see `MemlabError`.
        in_loop: likewise.
    """

    def __init__(
        self, technique: str, reason: str, instead: str = "", *, is_late: bool = False, in_loop: bool = False
    ) -> None:
        self.technique = technique
        self.reason = reason
        self.instead = instead
        self.is_late, self.in_loop = is_late, in_loop
        super().__init__(f"{technique}: {reason}" + (f"; {instead}" if instead else ""))


class MissingExtraError(MemlabError, ImportError):
    """An optional package that a requested feature needs."""


class ScaleError(MemlabError):
    """Training in many processes that cannot begin, or that failed there; this process is as it was."""


class SessionError(MemlabError):
    """A session that is used in a way that it does not support."""


class TraceError(MemlabError):
    """A training step that cannot be predicted without running it.

    Args:
        message: what stands in the way, and what to do instead.
        operator: the operator whose result depends on values; empty when it is something else.
    """

    def __init__(self, message: str, operator: str = "") -> None:
        self.operator = operator
        super().__init__(message)


class BudgetError(MemlabError):
    """A budget that no plan fits."""


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text, cut between two words after about 120 characters.

    Example:
        >>> first_line(ValueError("not a number"))
        'ValueError: not a number'
        >>> first_line(ValueError("much " * 30))[-11:]
        'much much …'
        >>> first_line(AssertionError())
        'AssertionError'
    """
    text = (str(error).splitlines() or [""])[0]
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS].rpartition(' ')[0] or text[:_MOST_CHARACTERS]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def listed(names: Sequence[str]) -> str:
    """Return names as a line shows them: up to three, and how many more there are.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
