"""What a release is built with is pinned, and asks for no more rights than it needs."""

from __future__ import annotations

import ast
import re

import pytest
import yaml

from tests.docs.pages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(path):
    text = path.read_text()
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v[\d.]+", comment), f"{action}: which version is it?"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_have_only_the_rights_that_they_name(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert "permissions" in job
        assert job["permissions"].get("contents") in (None, "read")
    assert "secrets." not in path.read_text()
    assert "pull_request_target" not in path.read_text()


def test_the_tools_of_the_tests_are_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert {"torch", "ruff", "mypy", "mkdocs", "nbconvert", "jupytext"} <= names


def test_new_versions_are_looked_for():
    config = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    assert {update["package-ecosystem"] for update in config["updates"]} == {"pip", "github-actions"}


def test_the_security_page_says_how_to_report():
    text = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in text
    assert "yaml.safe_load" in text


def _called(path):
    """The dotted names of all that a module calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_no_data_is_executed():
    """As the page promises."""
    forbidden = {"eval", "exec", "yaml.load", "pickle.load", "pickle.loads", "torch.load", "os.system", "marshal.loads"}
    for path in (ROOT / "fusedops").rglob("*.py"):
        assert not forbidden & {*_called(path)}, path.name
        assert "shell=True" not in path.read_text(), path.name
