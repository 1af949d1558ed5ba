"""Rounding of the factors of fp32 products by torch: to TF32 or bf16, or not at all.

torch has two interfaces for it: ``set_float32_matmul_precision`` and ``allow_tf32``, and since 2.9 ``fp32_precision`` of each
backend. A loop may use either, or both; then the first raises when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    get: Callable[[], Any]
    write: Callable[[Any], None]
    exact: Any  # rounds nothing

    def read(self) -> Any:
        """Return its value; None where this torch lacks it, or a loop has used both interfaces."""
        with suppress(AttributeError, RuntimeError):
            return self.get()
        return None


def _attribute(backend: str, name: str, exact: Any) -> _Setting:
    owner = attrgetter(backend)
    return _Setting(
        lambda: getattr(owner(torch.backends), name), lambda value: setattr(owner(torch.backends), name, value), exact
    )


_NEWER = {
    backend: _attribute(backend, "fp32_precision", "ieee")
    for backend in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.conv", "mkldnn.rnn")
}
# those of the first interface, which set the others as well, come first
_SETTINGS = (
    _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    _attribute("cudnn", "allow_tf32", False),
    *_NEWER.values(),
)


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
        self.values = [(setting, value) for setting in _SETTINGS if (value := setting.read()) is not None]

    def restore(self) -> None:
        """Put back what has changed."""
        for setting, value in self.values:
            if setting.read() != value:
                setting.write(value)


def rounds_factors() -> bool:
    """Return whether factors of matrix products on a GPU may be rounded to TF32."""
    newer = _NEWER["cuda.matmul"].read()
    return newer == "tf32" if newer is not None else torch.get_float32_matmul_precision() != "highest"


@contextmanager
def exact_products() -> Iterator[None]:
    """Round no factors of fp32 products.

    Rounding makes last digits, which differ between batches of different sizes, into differences a thousand times as large.
    """
    before = Fp32Products()
    try:
        for setting, value in before.values:
            if value not in (setting.exact, "none"):
                setting.write(setting.exact)
        yield
    finally:
        before.restore()
