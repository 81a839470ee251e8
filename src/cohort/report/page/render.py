"""The HTML file: template, styles, scripts and data in one, with a policy that forbids everything else.

Text from a run is data. The template escapes it; data for scripts is JSON without any character that HTML reads; the
Content-Security-Policy lets only the scripts and styles run whose hashes it names, and allows no network.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cohort.report.page.blocks import plain_json

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uplot-1.6.32.min.js", "base.js", "charts.js", "tokens.js", "microscope.js", "main.js")
STYLES = ("uplot-1.6.32.min.css", "page.css")
GENERATOR = "Cohort report"
"""Marks the pages that ``cohort report`` may overwrite."""
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def render(template: str, content: Mapping[str, Any], data: Mapping[str, Any], blocks: Sequence[str] = ()) -> str:
    """The page.

    Args:
        template: "report.html" or "compare.html".
        content: what the template shows in words and tables.
        data: what the scripts draw.
        blocks: packed groups of completions.
    """
    script, style = _assets(SCRIPTS), _assets(STYLES)
    allowed = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page = _environment().get_template(template)
    return page.render(
        content,
        generator=GENERATOR,
        policy=policy,
        script=Markup(script),
        style=Markup(style),
        data=script_json(data),
        blocks=[Markup(block) for block in blocks],
    )


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: no ``</script>`` or comment in it can end the element."""
    text = re.sub(f"[<>&]|{CONTROL.pattern}", lambda found: f"\\u{ord(found[0]):04x}", plain_json(value))
    return Markup(text)


def visible(value: Any) -> Any:
    """Text with control characters, direction marks among them, as their names: they would act on the page."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return CONTROL.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value)
    return "\N{EN DASH}" if value is None else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _assets(names: tuple[str, ...]) -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
