"""The hook of mkdocs.yml: generated pages, recipes in the navigation, links out of docs/ and from names.

The pages in docs/ are also read in a repository view and on a terminal, so they have plain links, and this makes what
only the site needs.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import docs_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that lie outside docs/."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
SKIPPED = r"<(a|pre|h[1-6])\b.*?</\1>"
METRIC = re.compile(r"[a-z_]+(/[A-Za-z_0-9.@]+)+")
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
REPOSITORY = next((URLS[name] for name in ("Repository", "Source", "Homepage") if name in URLS), "")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put folders of the navigation in place: recipes by glob, the Python reference by its modules."""
    recipes = sorted(path.name for path in (ROOT / "docs" / "recipes").glob("*.md"))
    folders = {
        "recipes/": [f"recipes/{name}" for name in sorted(recipes, key=lambda name: (name != "index.md", name))],
        "reference/python/": [f"reference/python/{module}.md" for module in docs_reference.ROOMS],
    }
    config.nav = [item for item in _filled(config.nav, folders) if next(iter(item.values()))]
    if REPOSITORY:  # not as repo_url, of which the theme would ask the network for stars
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": REPOSITORY, "name": "Repository"}]
    return config


def _filled(nav: Any, folders: dict[str, list[str]]) -> Any:
    if isinstance(nav, list):
        return [_filled(item, folders) for item in nav]
    if isinstance(nav, dict):
        return {title: _filled(item, folders) for title, item in nav.items()}
    return folders.get(nav, nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and those from outside of docs/."""
    for name, text in docs_reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for name, source in INCLUDED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files outside of docs/ to their page or to the repository."""
    name = page.file.src_uri
    folder = ROOT / INCLUDED[name] if name in INCLUDED else ROOT / "docs" / name
    included = {source: page_name for page_name, source in INCLUDED.items()} | {"README.md": "index.md"}

    def resolved(match: re.Match[str]) -> str:
        words, (target, _, anchor) = match[1], match[2].partition("#")
        path = (folder.parent / target).resolve()
        if not target or "://" in target or not path.exists() or not path.is_relative_to(ROOT):
            return match[0]  # the strict build names a link that leads nowhere
        inside = path.relative_to(ROOT).as_posix()
        inside = f"docs/{included[inside]}" if inside in included else inside
        if inside.startswith("docs/"):
            if words == path.name:  # a site has titles where a folder has names of files
                words = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            there = get_relative_url(inside.removeprefix("docs/"), name)
            return f"[{words}]({there}{'#' * bool(anchor)}{anchor})"
        return f"[{words}]({REPOSITORY}/blob/HEAD/{inside})" if REPOSITORY else words

    return LINK.sub(resolved, markdown)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Give metrics anchors, and link settings, commands and metrics that the text names to the reference."""
    if page.file.src_uri == "metrics.md":
        html = re.sub(r"<td>(<code>.*?</code>)</td>|<td>((?:<code>.*?</code>(?:, )?)+)</td>", _with_anchors, html)
    targets = _targets()

    def linked(match: re.Match[str]) -> str:
        words = match[2]
        target = targets.get(words.partition(" = ")[0]) if words else None  # also `rollout.lag = 1`
        if words and target is None and words.startswith("cohort "):
            target = targets.get(" ".join(words.split()[:2]))
        if target is None or target.partition("#")[0] == page.file.src_uri.replace(".md", ".html"):
            return match[0]
        return f'<a href="{get_relative_url(target, page.url)}"><code>{words}</code></a>'

    html = re.sub(r"<td>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.DOTALL)  # as code hosts do
    html = re.sub(rf"{SKIPPED}|<code>([^<]+)</code>", linked, html, flags=re.DOTALL)
    return re.sub(r"(?<=<code>)[\w.]+(?:/[\w.@*]+)+(?=</code>)", lambda name: name[0].replace("/", "/<wbr>"), html)


def _with_anchors(match: re.Match[str]) -> str:
    keys = re.findall("<code>(.*?)</code>", match[0])
    anchors = "".join(f'<a id="{key}"></a>' for key in keys if METRIC.fullmatch(key) or re.fullmatch("[a-z_]+", key))
    return match[0].replace("<td>", f"<td>{anchors}", 1)


def _targets() -> dict[str, str]:
    """Names that are links: settings, commands and metrics, with the page and anchor of each."""
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = {key for row in re.findall(r"^\| (`.*?`) \|", metrics, re.MULTILINE) for key in re.findall("`(.*?)`", row)}
    settings = docs_reference.SETTINGS.replace(".md", ".html")
    commands = docs_reference.COMMANDS.replace(".md", ".html")
    return (
        {key: f"metrics.html#{key}" for key in keys if METRIC.fullmatch(key)}
        | {name: f"{settings}#{name}" for name in docs_reference.setting_names()}
        | {f"cohort {name}": f"{commands}#cohort-{name}" for name in docs_reference.command_names()}
    )
