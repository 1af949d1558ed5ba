"""What ends the command with one line."""

from __future__ import annotations


class EmulationError(Exception):
    """The emulated GPU cannot be had as asked; the text says what to do."""
