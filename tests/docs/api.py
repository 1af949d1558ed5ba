"""`docs/api.md`: every public function and class, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import memlab
from memlab.errors import MemlabError
from tests.docs.markdown import NOTE, anchor, documented

_HEAD = """# Functions and classes

{note}

`import memlab` gives these names, and nothing else is public. The magics call the same functions: [flags](flags.md). Sizes are bytes where a name ends in
`_bytes`, and times seconds where it ends in `_seconds`; sizes given as text are binary, as in "8GiB"."""
_ELSEWHERE = re.compile(r", see `(memlab\.[\w.]+)`\.$")
_MOST_CHARACTERS = 90


def page() -> str:
    """The page."""
    groups = {"Functions": _functions(), "Classes": _classes(), "Errors": _errors()}
    to = links([name for names in groups.values() for name in names])
    contents = "\n".join(f"- {title}: {', '.join(to[name] for name in names)}" for title, names in groups.items())
    parts = ["\n\n".join((f"## {title}", *map(_entry, names))) for title, names in groups.items()]
    return "\n\n".join((_HEAD.format(note=NOTE), contents, *parts)) + "\n"


def _functions() -> list[str]:
    return [name for name in memlab.__all__ if inspect.isfunction(getattr(memlab, name))]


def _errors() -> list[str]:
    return [name for name in memlab.__all__ if _is_error(getattr(memlab, name))]


def _classes() -> list[str]:
    return [name for name in memlab.__all__ if name not in {*_functions(), *_errors()}]


def _is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, MemlabError)


def links(names: list[str]) -> dict[str, str]:
    """Links to the headings of names in this order; of two that differ in case only, the second is counted on."""
    seen: Counter[str] = Counter()
    found = {}
    for name in names:
        place = anchor(_title(name))
        found[name] = f"[`{name}`](#{place}{f'-{seen[place]}' if seen[place] else ''})"
        seen[place] += 1
    return found


def _title(name: str) -> str:
    return f"`memlab.{name}`"


def _entry(name: str) -> str:
    found = source_of(getattr(memlab, name))
    heading = f"### {_title(name)}"
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
    for name, member in vars(found).items():
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        is_kind = isinstance(plain, property) or inspect.isfunction(plain)
        if not name.startswith("_") and is_kind and _docstring(plain):
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
