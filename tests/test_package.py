"""The wheel and the source distribution: what is in them, and the links of the package's description."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from cohort.cli import main
from cohort.shipped import folder
from tests import warm
from tests.conftest import ROOT

CACHES = {"__pycache__", ".pytest_cache", ".hypothesis"}
PAGES = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def files(name):
    """The files under a folder of the repository, as paths from its root; without what git ignores, where git is."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", name]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        return {path for path in listed if path and (ROOT / path).is_file()}
    paths = (path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not CACHES & set(path.parts)}


def built(builder):
    return {file.distribution_path for file in builder.recurse_included_files()}


@pytest.fixture(scope="module")
def wheel():
    return WheelBuilder(str(ROOT))


def test_the_wheel_holds_the_package_its_pages_and_its_examples(wheel):
    package = {path.removeprefix("src/") for path in files("src")}
    assert built(wheel) == package | {f"cohort/{path}" for path in files("docs") | files("examples")}


def test_the_source_distribution_holds_what_make_test_reads():
    inside = built(SdistBuilder(str(ROOT)))
    for name in ("src", "tests", "docs", "examples", "scripts", "benchmarks", ".ci"):
        assert files(name) <= inside
    assert {"Makefile", "constraints.txt", "README.md", "CONTRIBUTING.md", "LICENSE"} <= inside


def test_links_of_the_description_lead_into_the_repository(wheel):
    urls = wheel.metadata.core.urls
    repository = urls["Repository"]
    assert all(address.startswith(repository) for address in urls.values())
    links = re.findall(r"\]\(([^)]*)\)", wheel.metadata.core.readme)
    assert f"{repository}/blob/HEAD/docs/index.md" in links
    for link in links:
        if link.startswith(repository):
            kind, head, path = link.removeprefix(f"{repository}/").split("/", 2)
            assert (kind == "raw") == path.endswith((".png", ".svg"))
            assert head == "HEAD"
            assert (ROOT / path.partition("#")[0]).exists(), link
        else:
            assert link.startswith(("https://", "#")), link


def test_messages_name_pages_of_the_package_by_the_command_that_shows_them():
    """A path would lead nowhere where only a wheel is installed."""
    named, by_path = set(), re.compile(r"docs/[\w/]+\.md")
    for path in (path for kind in ("py", "toml") for path in (ROOT / "src").rglob(f"*.{kind}")):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"'cohort docs\s+([\w/-]+)'", text))
        if by_path.search(text) and path.suffix == ".py":
            tree = ast.parse(text)
            documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            strings = [
                node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            cited = [node.lineno for node in strings if id(node) not in documentation and by_path.search(node.value)]
            assert not cited, (path, cited)
            assert path.parent.name != "config", "`cohort config` prints the documentation of a setting"
    assert {"scale", "metrics", "diagnosis", "trl"} <= named <= PAGES


def test_docs_lists_pages_and_shows_one(capsys):
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^metrics +Metrics$", listed, flags=re.MULTILINE)
    assert {line.split()[0] for line in listed.split("\n\n")[0].splitlines()} == PAGES
    for name in ("metrics", "docs/metrics.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out == (folder("docs") / "metrics.md").read_text(encoding="utf-8")
    assert main(["docs", "metricz"]) == 2
    assert "no page 'metricz'; 'cohort docs' lists them; did you mean metrics?" in capsys.readouterr().err


def test_docs_renders_a_page_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("pydoc.pager", print)
    assert main(["docs", "plot"]) == 0
    assert "](" not in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_the_import_of_bitsandbytes_prints_nothing():
    """On processors with AVX512-BF16 it warned that it lacks a package, which nothing here uses."""
    warm.start_server()  # which imports cohort, then bitsandbytes
    assert "gemm_4bit" not in warm.address().with_suffix(".log").read_text()
