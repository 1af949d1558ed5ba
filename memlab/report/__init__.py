"""Pictures and tables of records: pure functions, nothing here measures or changes anything.

- `text`: the plain-text receipt
- `html`: the same receipt with inline styles, for a saved notebook
- `image`: static PNG pictures, by matplotlib
- `figure`: the live twins of the pictures, by plotly

matplotlib and plotly are imported when a picture is asked for, never before.
"""

from __future__ import annotations

from memlab.report import figure, html, image, text

__all__ = ["figure", "html", "image", "text"]
