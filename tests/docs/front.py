"""Generated parts of the README and of `docs/measured.md`: badges, the table of techniques, how long a first start takes."""

from __future__ import annotations

import tomllib
from typing import Any
from urllib.parse import urlsplit

from memlab.techniques.base import Reduces
from tests.docs.cheat_sheet import kinds_that
from tests.docs.markdown import code, table

FIRST_NOTEBOOK = "notebooks/00_make_it_fit.ipynb"
_UNPUBLISHED = """*Binder and Colab:* not published yet. Once `Repository` under `[project.urls]` in [pyproject.toml](pyproject.toml) names the repository,
`python -m tests.docs` writes their badges here."""
_PUBLISHED = """[![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/{place}/HEAD?urlpath=lab/tree/{notebook})
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{place}/blob/HEAD/{notebook})
On Colab, first run `%pip install -q "memlab[lab] @ git+https://github.com/{place}"` in a cell of its own."""


def published(pyproject: str) -> str:
    """Return the badges, or how to get them.

    Args:
        pyproject: text of `pyproject.toml`.

    Raises:
        ValueError: the address is none of a repository on GitHub, which Binder and Colab take.
    """
    address = tomllib.loads(pyproject)["project"].get("urls", {}).get("Repository", "")
    if not address:
        return _UNPUBLISHED
    parts = urlsplit(address)
    place = parts.path.strip("/").removesuffix(".git")
    if parts.netloc != "github.com" or place.count("/") != 1:
        raise ValueError(f"pyproject.toml: Repository is {address!r}; expected https://github.com/OWNER/NAME")
    return _PUBLISHED.format(place=place, notebook=FIRST_NOTEBOOK)


def techniques() -> str:
    """Return one row per technique: its first setting, what that frees, and how exact the result is."""
    said = [kind.descriptions[0] for group in Reduces if group is not Reduces.OTHER for kind in kinds_that(group)]
    return table(("flag", "frees", "result"), ((code(each.flags), each.saves, each.exactness) for each in said))


def first_plot(measured: dict[str, Any]) -> str:
    """Return how long it takes from a clone to a live plot."""
    return (
        f"From `git clone` to the first live plot: {_time(measured['whole_seconds'])}, of which installing "
        f"({measured['environment_mib']:,} MiB, no package from a cache) and the start of JupyterLab take "
        f"{_time(measured['install_and_start_seconds'])}. On {measured['machine']}, {measured['date']}, by "
        "`python -m tests.bench.first_plot`."
    )


def binder(measured: dict[str, Any]) -> str:
    """What Binder's steps came to here."""
    return (
        f"Its steps, repeated in a clean environment by `python -m tests.bench.binder` (on {measured['machine']}, {measured['date']}): "
        f"{_time(measured['install_seconds'])} for the packages, {_time(measured['post_build_seconds'])} for `postBuild`, "
        f"{measured['environment_mib']:,} MiB on the disk; then {_time(measured['start_seconds'])} until JupyterLab answers. Docker and "
        "the conda packages that Binder puts below were not part of it."
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
