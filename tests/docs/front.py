"""Parts of the README that are written: where it can be opened without installing, and how long a beginning takes."""

from __future__ import annotations

import tomllib
from typing import Any
from urllib.parse import urlsplit

FIRST_NOTEBOOK = "notebooks/00_make_it_fit.ipynb"
_UNPUBLISHED = """*Binder and Colab:* this copy is not published yet. Once it is, its address goes into one place, `Repository` under `[project.urls]` in
[pyproject.toml](pyproject.toml), and `python -m tests.docs` writes the badges here. What Binder builds is under [binder/](binder)."""
_PUBLISHED = """[![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/{place}/HEAD?urlpath=lab/tree/{notebook})
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{place}/blob/HEAD/{notebook})
On Colab, first run `%pip install -q "memlab[lab] @ git+https://github.com/{place}"` in a cell of its own."""


def published(pyproject: str) -> str:
    """Badges, or what is to be done for them.

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


def first_plot(measured: dict[str, Any]) -> str:
    """How long it takes from a clone to a live plot."""
    return (
        f"From `git clone` to the first live plot: {_time(measured['whole_seconds'])}, of which the first command's environment "
        f"({measured['environment_mib']:,} MiB, no package kept from before) and the start of JupyterLab take "
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
