"""How torch rounds the factors of fp32 products: to TF32 or bf16, or not at all.

torch has two interfaces for it: ``set_float32_matmul_precision`` and ``allow_tf32``, and since 2.9 ``fp32_precision`` of each
backend. A loop may use either, or both; then the first raises when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], None]]  # reads, writes
_EXACT = "ieee"


def _attribute(path: str) -> _Setting:
    backend, _, name = path.rpartition(".")
    owner = attrgetter(backend)
    return (
        lambda: getattr(owner(torch.backends), name),
        lambda value: setattr(owner(torch.backends), name, value),
    )


# those of the first interface set those of the second as well
_FIRST: dict[str, tuple[_Setting, Any]] = {
    "matmul": ((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision), "highest"),
    "cudnn": (_attribute("cudnn.allow_tf32"), False),
}
_SECOND = {
    place: _attribute(f"{place}.fp32_precision")
    for place in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.conv", "mkldnn.rnn")
}


class Fp32Products:
    """The settings at one moment, to be put back.

    Example:
        >>> before = Fp32Products()
        >>> torch.set_float32_matmul_precision("high")
        >>> before.restore()
        >>> torch.get_float32_matmul_precision()
        'highest'
    """

    def __init__(self) -> None:
        self._first = {name: value for name, (setting, _) in _FIRST.items() if (value := _read(setting)) is not None}
        self._second = {name: value for name, setting in _SECOND.items() if (value := _read(setting)) is not None}

    def restore(self) -> None:
        """Put back what has changed."""
        for name, value in self._first.items():
            read, write = _FIRST[name][0]
            if _read((read, write)) != value:
                write(value)
        for name, value in self._second.items():
            read, write = _SECOND[name]
            if read() != value:
                write(value)

    def make_exact(self) -> None:
        """Round no factors, until these settings are put back."""
        for name in self._first:
            (read, write), exact = _FIRST[name]
            if read() != exact:
                write(exact)
        for name, value in self._second.items():
            if value not in (_EXACT, "none") and _SECOND[name][0]() == value:
                _SECOND[name][1](_EXACT)


def _read(setting: _Setting) -> Any:
    """A setting's value; None where this torch lacks it, or a loop has used both interfaces."""
    with suppress(AttributeError, RuntimeError):
        return setting[0]()
    return None


def rounds_factors() -> bool:
    """Return whether factors of matrix products on a GPU may be rounded to TF32."""
    new = _read(_SECOND["cuda.matmul"])
    return new == "tf32" if new is not None else torch.get_float32_matmul_precision() != "highest"


@contextmanager
def exact_products() -> Iterator[None]:
    """Round no factors of fp32 products.

    Rounding makes last digits, which differ between batches of different sizes, into differences a thousand times as large.
    """
    before = Fp32Products()
    before.make_exact()
    try:
        yield
    finally:
        before.restore()
