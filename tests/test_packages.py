"""What is published: the recipe for conda, the workflows, and the version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import memlab

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def _lowest(line: str) -> tuple[str, str]:
    found = re.fullmatch(r"([\w-]+) ?>=([\d.]+)", line)
    assert found is not None, line
    return {"pytorch": "torch"}.get(found[1], found[1]), found[2]


def test_the_recipe_asks_for_what_the_project_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / ".ci/conda/recipe.yaml").read_text())
    run = dict(_lowest(line) for line in recipe["requirements"]["run"] if not line.startswith("python "))
    assert run == dict(map(_lowest, PROJECT["dependencies"]))
    listed = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    extras = dict(map(_lowest, listed))
    for name, lowest in map(_lowest, recipe["requirements"]["run_constraints"]):
        assert extras[name] == lowest, name
    assert recipe["build"]["python"]["entry_points"] == [f"memlab = {PROJECT['scripts']['memlab']}"]


def test_rattler_accepts_the_recipe() -> None:
    rattler_build: Any = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    recipe = rattler_build.Stage0Recipe.from_file(str(ROOT / ".ci/conda/recipe.yaml"))
    (rendered,) = recipe.render(rattler_build.VariantConfig({"python_min": ["3.11"]}))
    assert rendered.recipe.package.name == "memlab"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_scripts_that_are_there(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {word for run in runs for word in run.split() if word.startswith(".ci/")}
    assert called
    for script in called:
        assert (ROOT / script).stat().st_mode & 0o111, script
    # publishing needs no stored password
    assert "secrets." not in path.read_text()


def test_pythons_that_are_tested_begin_with_the_lowest() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    tested = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={tested[0]}"
    classified = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)]
    assert classified == tested


def test_every_extra_is_tried_with_its_lowest_and_newest_versions() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]
    assert {*matrix["extra"]} == {"none", *PROJECT["optional-dependencies"]}
    script = (ROOT / ".ci/versions").read_text()
    rows = (ROOT / "docs/versions.md").read_text().splitlines()
    for extra in matrix["extra"]:
        assert re.search(rf"^  {extra}\) ", script, re.MULTILINE), extra
        for which in matrix["versions"]:
            assert any(row.startswith(f"| {extra} | {which} |") for row in rows), (extra, which)


def test_the_version_is_that_of_the_package() -> None:
    assert re.match(r"\d+\.\d+", memlab.__version__)
    assert "version" not in PROJECT  # tags say it
