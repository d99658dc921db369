"""Files of the project: workflows are pinned and restricted, versions and addresses agree, issue forms are valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import verl

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(name: str) -> Any:
    return yaml.safe_load(read(name))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_say_their_version(workflow: Path) -> None:
    uses = re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    assert uses
    for line in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read_unless_a_job_says_more(workflow: Path) -> None:
    tree = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert tree["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in tree["jobs"].values())


def test_one_action_has_one_commit() -> None:
    pins = {pin for path in WORKFLOWS for pin in re.findall(r"uses: (\S+)@(\w+)", path.read_text(encoding="utf-8"))}
    assert len({action for action, _ in pins}) == len(pins)


def test_a_release_is_built_signed_and_published_by_jobs_with_least_rights() -> None:
    jobs = load(".github/workflows/release.yml")["jobs"]
    rights = {
        name: {key for key, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in jobs.items()
    }
    assert rights == {"build": set(), "attest": {"id-token", "attestations"}, "publish": {"contents"}}
    for name in ("attest", "publish"):
        steps = jobs[name]["steps"]
        assert not any("checkout" in step.get("uses", "") or "pip" in step.get("run", "") for step in steps), name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_install_only_packages_with_hashes(workflow: Path) -> None:
    installs = re.findall(r"pip install (.*)", workflow.read_text(encoding="utf-8"))
    assert all(re.match(r"--(no-deps --)?require-hashes -r \S+$", line) for line in installs), (
        "a constraints file with hashes refuses packages that a command names without a version"
    )


def test_vulnerabilities_are_looked_for_every_week() -> None:
    tree = load(".github/workflows/weekly.yml")
    assert "schedule" in tree[True], "YAML reads the key `on` as true"
    assert "pip-audit" in read(".github/workflows/weekly.yml")


def test_versions_and_addresses_agree() -> None:
    project, citation = read("pyproject.toml"), load("CITATION.cff")
    assert f'\nversion = "{verl.__version__}"\n' in project
    assert str(citation["version"]) == verl.__version__
    (table,) = re.findall(r"^\[project\.urls\].*?\n(.*?)^\[", project, re.M | re.S)
    addresses = re.findall(r'= "(.*)"', table)
    assert len(addresses) == 3
    assert all(f"{address}/".startswith(f"{citation['url']}/") for address in addresses)
    assert 'license = "Apache-2.0"' in project
    assert citation["license"] == "Apache-2.0"


def test_issue_forms_ask_for_the_environment_and_have_unique_fields() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        if path.name == "config.yml":
            continue
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        names = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(set(names)) == len(names)
        assert all(field["attributes"].get("label") for field in form["body"] if field["type"] != "markdown")
    assert "`verl env`" in read(".github/ISSUE_TEMPLATE/bug_report.yml")


def test_dependabot_updates_actions_and_packages() -> None:
    tree = load(".github/dependabot.yml")
    assert {entry["package-ecosystem"] for entry in tree["updates"]} == {"github-actions", "pip"}


def test_the_contributing_page_lists_all_packages_that_use_torch_distributed() -> None:
    imports = re.compile(
        r"^ *(?:import torch\.distributed|from torch\.distributed|from torch import distributed)|"
        r"\btorch\.distributed\.\w+\(",
        re.MULTILINE,
    )
    files = [
        file.relative_to(ROOT / "verl") for file in (ROOT / "verl").rglob("*.py") if imports.search(file.read_text())
    ]
    [listed] = re.findall(r"^\| `torch.distributed` \| (.*) \|$", read("CONTRIBUTING.md"), re.MULTILINE)
    assert {file.parts[0] for file in files} == set(re.findall(r"\w+", listed)) - {"and"}
