"""`docs/api.md`: public functions and classes, what they return, and errors, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import memlab
from memlab import errors
from memlab.errors import MemlabError
from memlab.inferring.inference import Inference
from memlab.plan import Plan
from memlab.records import Measurement, Prediction, Profile
from memlab.records.ablation import Ablation
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.inference import BatchAdvice, InferenceRecord
from memlab.records.ranks import HowMany, PredictedRanks, RankPrediction
from memlab.records.run_record import RunRecord
from memlab.runtime.workload import Workload
from memlab.session import Session
from tests.docs.markdown import NOTE, anchor, documented

_HEAD = """# Functions and classes

{note}

`import memlab` gives the functions, `Plan`, `Workload` and three errors; results and the other errors are in the modules that their headings name. The
magics call the same functions: [flags](flags.md). Sizes are bytes where a name ends in `_bytes`, and times seconds where it ends in `_seconds`; sizes given as
text are binary, as in "8GiB"."""
_ELSEWHERE = re.compile(r", see `(memlab\.[\w.]+)`\.$")
_MOST_CHARACTERS = 90
# what functions return
RESULTS = (
    *(Comparison, Measurement, Prediction, FoundPlan, Ablation, Session, RunRecord),
    *(Inference, InferenceRecord, BatchAdvice, RankPrediction, PredictedRanks, HowMany),
)
# the rest of them is for memlab's own use
_SHOWN = {
    Session: ("plan", "steps", "switch", "undo"),
    Plan: ("parse", "label", "is_exact", "changes", "contains", "with_setting"),
    Workload: ("model", "device", "describe", "find", "from_trainer"),
}


def page() -> str:
    """Return the page."""
    groups = {"Functions": _functions(), "Classes": _classes(), "Results": RESULTS, "Errors": _errors()}
    contents = "\n".join(f"- {title}: {', '.join(map(link, found))}" for title, found in groups.items())
    parts = ["\n\n".join((f"## {title}", *map(_entry, found))) for title, found in groups.items()]
    return "\n\n".join((_HEAD.format(note=NOTE), contents, *parts)) + "\n"


def _public() -> Iterator[Any]:
    return (getattr(memlab, name) for name in memlab.__all__)


def _functions() -> list[Any]:
    return [found for found in _public() if inspect.isfunction(found)]


def _errors() -> list[type]:
    return [found for found in vars(errors).values() if _is_error(found)]


def _classes() -> list[type]:
    return [found for found in _public() if inspect.isclass(found) and not _is_error(found)]


def _is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, MemlabError)


def link(found: Any) -> str:
    """Return a link to the heading of a function or class."""
    return f"[`{found.__name__}`](#{anchor(title_of(found))})"


def title_of(found: Any) -> str:
    """Return the name to import something by."""
    module = "memlab" if found.__name__ in memlab.__all__ else found.__module__
    return f"`{module}.{found.__name__}`"


def _entry(found: Any) -> str:
    heading, name, found = f"### {title_of(found)}", found.__name__, source_of(found)
    if _is_error(found):
        bases = ", ".join(f"`{base.__name__}`" for base in found.__bases__)
        return f"{heading}\n\n{documented(_docstring(found))}\n\nA {bases}."
    members = "\n\n".join(_member(name, member, each) for member, each in public_members(found))
    text = f"{heading}\n\n```python\n{name}{_signature(found)}\n```\n\n{documented(_docstring(found))}"
    return f"{text}\n\n{members}" if members else text


def source_of(found: Any) -> Any:
    """What a name stands for: a wrapper that only imports says where it looks."""
    elsewhere = _ELSEWHERE.search(_docstring(found))
    if not elsewhere:
        return found
    module, _, name = elsewhere[1].rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_members(found: Any) -> Iterator[tuple[str, Any]]:
    """Methods and properties of a class that say what they do, in the order in which they are written."""
    if not inspect.isclass(found):
        return
    inherited = vars(Profile) if issubclass(found, Profile) else {}
    for name, member in {**inherited, **vars(found)}.items():
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        is_kind = isinstance(plain, property) or inspect.isfunction(plain)
        is_shown = name in _SHOWN.get(found, (name,)) and not name.startswith("_")
        if is_shown and is_kind and _docstring(plain):
            yield name, plain


def _member(of: str, name: str, member: Any) -> str:
    is_value = isinstance(member, property)
    shown = f"{of}.{name}" if is_value else f"{of}.{name}{_signature(member)}"
    return f"#### `{of}.{name}`\n\n```python\n{shown}\n```\n\n{documented(_docstring(member))}"


def _docstring(found: Any) -> str:
    own = found.__doc__ if inspect.isclass(found) else inspect.getdoc(found)
    return inspect.cleandoc(own or "")


def _signature(found: Callable[..., Any]) -> str:
    """Arguments as they are written, and what comes back."""
    signature = inspect.signature(found)
    given = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    arguments = []
    for before, each in zip([None, *given], given, strict=False):
        if each.kind is each.KEYWORD_ONLY and (before is None or before.kind is each.POSITIONAL_OR_KEYWORD):
            arguments.append("*")
        arguments.append(_argument(each))
    in_line = f"({', '.join(arguments)})"
    text = in_line if len(in_line) <= _MOST_CHARACTERS else "(\n    " + ",\n    ".join(arguments) + ",\n)"
    returned = signature.return_annotation
    has_value = not inspect.isclass(found) and returned not in (signature.empty, None, "None")
    return f"{text} -> {returned}" if has_value else text


def _argument(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    default = parameter.default
    if default is parameter.empty:
        return f"{stars}{parameter.name}{typed}"
    said = f"{type(default).__name__}.{default.name}" if isinstance(default, Enum) else repr(default)
    if inspect.isfunction(default) or " object at " in said or said.startswith("<"):
        said = "..."
    return f"{parameter.name}{typed} = {said}"
