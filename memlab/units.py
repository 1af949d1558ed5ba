"""Bytes, durations and percentages: parsing and printing.

Sizes are printed in binary units (1 GiB = 2**30 bytes). GB, MB and KB are read as powers of 1000, as standards have it;
a lone G, M or K as binary, as the tools of the command line have it.
"""

from __future__ import annotations

import re

from memlab.errors import PlanError

KIB = 2**10
MIB = 2**20
GIB = 2**30
SIZE_UNITS = {
    "b": 1,
    **{name: 1024**power for power, letter in enumerate("kmgt", 1) for name in (letter, f"{letter}ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str) -> int:
    """Read a size such as ``"8GiB"``, ``"512 MiB"`` or ``"24GB"``.

    Args:
        text: a number and its unit: B, KiB to TiB or K to T (powers of 1024), KB to TB (powers of 1000), in any letter case.

    Raises:
        PlanError: no unit, an unknown one, or not a positive number.

    Example:
        >>> parse_bytes("1.5GiB"), parse_bytes("2G"), parse_bytes("24 GB")
        (1610612736, 2147483648, 24000000000)
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in SIZE_UNITS:
        raise PlanError(f"size {text!r}: expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'")
    size = int(float(match.group(1)) * SIZE_UNITS[unit])
    if size <= 0:
        raise PlanError(f"size {text!r}: must be one byte or more")
    return size


def exact_size(size_bytes: int) -> str:
    """Write a size so that `parse_bytes` reads the very same: in the largest unit of which it is a whole number.

    Example:
        >>> exact_size(2 * 2**30), exact_size(parse_bytes("1.5GiB")), exact_size(1000)
        ('2GiB', '1536MiB', '1000B')
    """
    unit, name = next(
        each for each in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")) if size_bytes % each[0] == 0
    )
    return f"{size_bytes // unit}{name}"


def format_bytes(size_bytes: float) -> str:
    """Print a size with three significant digits or so.

    Example:
        >>> format_bytes(5_476_083_302)
        '5.10 GiB'
        >>> format_bytes(12_582_912)
        '12.0 MiB'
    """
    unit, name, digits = _printed_in(size_bytes)
    return f"{size_bytes / unit:.{digits}f} {name}"


def _printed_in(size_bytes: float) -> tuple[int, str, int]:
    """The unit of a size, its name, and the digits behind the point."""
    units = ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1))
    return next((each for each in units if abs(size_bytes) >= each[0]), (1, "B", 0))


def format_difference(change_bytes: int, of_bytes: int) -> str:
    """Print a difference of sizes with its sign, in the unit of what it is a part of, so that differences can be compared.

    Example:
        >>> format_difference(-1_000_000, 3 * 2**30), format_difference(0, 2**30)
        ('±0.00 GiB', '±0.00 GiB')
        >>> format_difference(-2 * 2**30, 8 * 2**30), format_difference(2**20, 80 * 2**20)
        ('−2.00 GiB', '+1.0 MiB')
    """
    unit, name, digits = _printed_in(of_bytes)
    size = f"{abs(change_bytes) / unit:.{digits}f}"
    sign = "±" if float(size) == 0 else "−" if change_bytes < 0 else "+"
    return f"{sign}{size} {name}"


def format_change(ratio: float) -> str:
    """Print a ratio to the first row as a signed percentage.

    Example:
        >>> format_change(0.45), format_change(1.0), format_change(2.1)
        ('−55 %', '±0 %', '+110 %')
    """
    percent = round((ratio - 1) * 100)
    if percent == 0:
        return "±0 %"
    return f"{'+' if percent > 0 else '−'}{abs(percent)} %"


def format_seconds(seconds: float) -> str:
    """Print a duration.

    Example:
        >>> format_seconds(0.0123), format_seconds(3.2), format_seconds(125)
        ('12.3 ms', '3.20 s', '2 min 5 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
