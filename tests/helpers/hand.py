"""`Hand`: uses a panel as its page does, by messages, and reads what the page is given to show."""

from __future__ import annotations

from typing import Any

from memlab.jupyter.panel import Panel
from memlab.plan import FIELDS


class Hand:
    """Somebody before a panel."""

    def __init__(self, panel: Panel) -> None:
        self._widget = panel.widget

    def send(self, kind: str, **content: Any) -> None:
        """Send a message, as ipywidgets hands it over."""
        self._widget._handle_custom_msg({"kind": kind, **content}, [])

    def flip(self, field: str, *, on: bool = True) -> None:
        """Click on a setting's box."""
        self.send("flip", field=field, on=on)

    def choose(self, field: str, text: str) -> None:
        """Choose which setting the box stands for."""
        self.send("choose", field=field, text=text)

    def press(self, button: str) -> None:
        """Press a button, which must not be greyed out."""
        assert self.can_press(button), button
        self.send("press", button=button)

    def can_press(self, button: str) -> bool:
        """Whether a button is not greyed out."""
        return button not in self.shown["off"]

    @property
    def shown(self) -> dict[str, Any]:
        """All that the page shows beside the figure and the table."""
        return dict(self._widget.controls)

    def setting(self, field: str) -> dict[str, Any]:
        """What the page shows of one setting."""
        names = [spec.name for spec in FIELDS]
        return dict(self.shown["settings"][names.index(field)])

    def choices(self, field: str) -> list[str]:
        """What can be chosen for a setting."""
        return [value for _, value in self.setting(field)["choices"]]
