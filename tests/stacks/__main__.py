"""Run every stack under every setting and write ``docs/stacks.md``."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch

from tests.stacks.running import SETTINGS, Outcome, Verdict, outcomes, shell
from tests.stacks.several import ALL_STACKS

PAGE = Path(__file__).parents[2] / "docs" / "stacks.md"
_HEAD = """# Tested loops

Each loop runs in a `%%memfit` cell under each setting, and is compared with the same loop without memlab: losses and
weights. "same" without a number means bit-equal; a number is the largest difference, relative to the largest value of its
tensor, at most 1e-5. The last setting is lossy: there the difference of a tensor as a whole counts (norm over norm), at most 0.2.
A refused setting changes nothing. Written by `python -m tests.stacks`.

"""


def main() -> None:
    """Run them all, and say each as it ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = ["| loop | " + " | ".join(f"`{flags}`" if flags else "no flags" for flags in SETTINGS) + " |"]
    rows.append("|---" * (len(SETTINGS) + 1) + "|")
    reasons: dict[str, list[str]] = {}
    besides: list[str] = []
    with shell() as opened:
        for name, stack in ALL_STACKS.items():
            missing = [package for package in stack.packages if importlib.util.find_spec(package) is None]
            if missing:
                rows.append(f"| {name} |" + f" not run: {', '.join(missing)} is missing |" * len(SETTINGS))
                continue
            found = outcomes(opened, stack)
            rows.append(f"| {name} | " + " | ".join(_cell(outcome) for outcome in found.values()) + " |")
            print(rows[-1], flush=True)
            for flags, beside in stack.beside.items():
                besides.append(
                    f"{name} under `{flags}` has `{beside}` as well, and is held against accumulation written by hand."
                )
            for flags, outcome in found.items():
                if outcome.verdict is Verdict.REFUSED:
                    reasons.setdefault(outcome.detail, []).append(f"{name} under `{flags}`")
    why = "\n".join(f"- {', '.join(where)}: {reason}" for reason, where in reasons.items())
    PAGE.write_text(_HEAD + "\n".join([*rows, "", *besides]) + f"\n\n## Why settings were refused\n\n{why}\n")


def _cell(outcome: Outcome) -> str:
    if outcome.verdict is Verdict.SAME:
        return "same" if outcome.detail == "0" else f"same ({outcome.detail})"
    return str(outcome.verdict)


if __name__ == "__main__":
    main()
