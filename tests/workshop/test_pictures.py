"""Figures of the notebooks: with an alternative text, and readable on a dark page."""

from __future__ import annotations

import io
from base64 import b64decode
from typing import Any

import pytest

from memlab.workshop import picture


def test_a_figure_is_shown_once_with_its_words_and_without_a_background(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib")
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    display = pytest.importorskip("IPython.display", reason="needs IPython")
    shown: list[Any] = []
    monkeypatch.setattr(display, "display", lambda data, **about: shown.append((data, about)))
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(3, 2))
    axes.set_xlabel("steps <of the loop>")
    picture(figure, "The loss falls in <10 steps.")
    assert not pyplot.fignum_exists(figure.number)
    [(data, about)] = shown
    assert about["metadata"] == {"image/png": {"alt": "The loss falls in <10 steps."}}
    assert '<img alt="The loss falls in &lt;10 steps."' in data["text/html"]
    pixels = image.open(io.BytesIO(b64decode(data["image/png"]))).convert("RGBA")
    assert pixels.getpixel((0, 0))[3] == 0
    inks = {colour[:3] for _, colour in pixels.getcolors() if colour[3] == 255}
    assert inks == {(0x7A, 0x7A, 0x7A)}  # axes and words alike
