"""Effects of operators on storages: they make them, resize them, or neither."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class OperatorEffect(IntEnum):
    """Effects of an operator on storages, from its schema."""

    NONE = 0
    BIRTH = 1
    RESIZE = 2


_RESIZING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
# their schemas promise a view, but `torch.tensor(...)` shows its new storage only through this one
_BEARING_VIEWS = frozenset({"aten::lift_fresh"})
# their schemas promise a new tensor, but it shares its input's storage
_UNSAFE_VIEWS = frozenset({"aten::_unsafe_view"})


class _Effects(dict[Any, int]):
    def __missing__(self, operator: Any) -> int:
        effect = self[operator] = _learn_effect(getattr(operator, "_schema", None))
        return effect


# by operator, learnt when first looked up; for paths so hot that a call is too slow
EFFECTS = _Effects()


def effect_of(operator: Any) -> int:
    """Return what an operator can do to storages."""
    return EFFECTS[operator]


def _learn_effect(schema: Any) -> int:
    if schema is None or schema.name in _BEARING_VIEWS:
        return OperatorEffect.BIRTH
    if schema.name in _RESIZING or any(argument.is_out for argument in schema.arguments):
        return OperatorEffect.RESIZE
    if schema.name in _UNSAFE_VIEWS:
        return OperatorEffect.NONE
    return (
        OperatorEffect.BIRTH if any(returned.alias_info is None for returned in schema.returns) else OperatorEffect.NONE
    )
