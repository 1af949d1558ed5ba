"""The status bar of a panel: the one part of it that runs in the page (`status.mjs`)."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from memlab.extras import require
from memlab.report.live_parts import NEUTRAL_INK

_INK = ", ".join(str(int(NEUTRAL_INK[at : at + 2], 16)) for at in (1, 3, 5))
_FAREWELL = (
    "This panel is no longer connected: its kernel was restarted or has closed the panel. Run the "
    "cell again, or %memfit panel, for a new one."
)
# no grey reads well on a white and on a dark page: where the page's own colour is known, figures take that
_STYLE = f"""
.memlab-panel .js-plotly-plot [style*="fill: rgb({_INK})"] {{ fill: var(--jp-ui-font-color1, var(--vscode-foreground, rgb({_INK}))) !important; }}
.memlab-status {{ font-size: 13px; font-variant-numeric: tabular-nums; line-height: 1.5; position: relative; }}
.memlab-status .memlab-world {{ opacity: .75; }}
.memlab-status .memlab-errors {{ white-space: pre-line; }}
.memlab-status .memlab-errors, .memlab-panel .memlab-stale {{ border-left: 3px solid #D55E00; padding: 2px 8px; margin: 4px 0; font-size: 13px; }}
.memlab-status .memlab-spoken {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }}
.memlab-panel .widget-checkbox label {{ display: flex; align-items: center; }}
.memlab-panel .widget-checkbox input[type=checkbox] {{ margin-top: 0; margin-bottom: 0; }}
.memlab-panel, .memlab-panel .widget-box {{ overflow: visible; }}
.memlab-panel .memlab-controls + .widget-box > * {{ flex: 1 1 auto; min-width: 0; }}
.memlab-panel :is(select, input, button):focus-visible, .memlab-panel [role=slider]:focus-visible {{ outline: 2px solid #1F83C4 !important; outline-offset: 1px; }}
.memlab-panel.memlab-gone .memlab-controls {{ opacity: .4; pointer-events: none; }}
.memlab-panel.memlab-gone::before, .memlab-panel.memlab-gone .jupyter-widgets-disconnected::before {{ content: none; }}
"""


@cache
def status_class() -> type[Any]:
    """The class of status bars; made when it is first needed, since it derives from an optional package.

    Raises:
        MissingExtraError: anywidget is not installed.
    """
    require("ipywidgets")
    anywidget = require("anywidget")
    import traitlets

    class StatusBar(anywidget.AnyWidget):  # type: ignore[name-defined,misc] # anywidget is met at run time
        """A line of text that screen readers follow, a notice when the kernel is gone, and the clipboard."""

        _esm = files("memlab.jupyter").joinpath("status.mjs").read_text(encoding="utf-8")
        _css = _STYLE
        line = traitlets.Unicode("").tag(sync=True)
        world = traitlets.Unicode("").tag(sync=True)
        errors = traitlets.Unicode("").tag(sync=True)
        said = traitlets.Unicode("").tag(sync=True)
        copied = traitlets.Unicode("").tag(sync=True)
        names = traitlets.Dict().tag(sync=True)
        farewell = traitlets.Unicode(_FAREWELL).tag(sync=True)

    return StatusBar
