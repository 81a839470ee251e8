"""Secrets in settings: found by the names they are given and by the forms of well-known keys, and not written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cohort.config.names import texts_of
from cohort.config.schema import Section

HIDDEN = "***"
"""What stands for a secret in a run folder."""
TEXTS = frozenset({"prompt_template", "system_prompt", "chat_template", "chat_template_kwargs", "regex", "json_schema"})
"""Settings that the model reads, or that constrain what it writes."""
_NAME = (
    r"(?:[a-z0-9]+[_-])*(?:api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|password|passwd|secret|credentials?"
    r"|authorization|bearer|(?:api|access|auth|bearer|hf|refresh|session|id)[_-]?token)"
)
_OPTION = re.compile(rf"(?i)--?{_NAME}")
_PATTERNS = [
    # A keyword argument of a reward, or an environment variable before a command: api_key="...", HF_TOKEN=...
    re.compile(rf"(?i)(?P<kept>\b{_NAME}\s*=\s*(?P<quote>[\"']))(?P<secret>.+?)(?=(?P=quote))"),
    re.compile(rf"(?i)(?P<kept>\b{_NAME}=)(?P<secret>[^\s\"'&,()]+)"),
    re.compile(rf"(?i)(?P<kept>--?{_NAME}[= ]\s*)(?P<secret>[^\s\"']+)"),  # an option of a command
    re.compile(r"(?i)(?P<kept>[?&](?:key|token|sig|signature|x-amz-[a-z-]+)=)(?P<secret>[^&\s\"'#]+)"),  # in a query
    re.compile(r"(?P<kept>[a-z][a-z0-9+.-]*://)(?P<secret>[^\s/@\"']+)(?=@)"),  # user and password of a URL
    re.compile(r"(?i)(?P<kept>\bbearer\s+)(?P<secret>[\w.~+/-]{8,}=*)"),
    re.compile(
        r"(?P<kept>)(?P<secret>\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[opsru]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
        r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+))"
    ),
]


def hide_secrets(value: Any) -> Any:
    """A setting's value with ``***`` in place of secrets: passwords and tokens in URLs, keyword arguments, options and
    variables whose names say that they are secret, and keys of well-known forms.

    >>> hide_secrets("judge.py:score(api_key='sk-abc', model='small')")
    "judge.py:score(api_key='***', model='small')"
    >>> hide_secrets(["https://me:word@host/rows.jsonl?token=abc&page=2", "mcp:npx server --api-key abc"])
    ['https://***@host/rows.jsonl?token=***&page=2', 'mcp:npx server --api-key ***']
    """
    if isinstance(value, str):
        for pattern in _PATTERNS:
            value = pattern.sub(lambda found: found["kept"] + HIDDEN, value)
        return value
    if isinstance(value, Mapping):
        return {
            key: item if key in TEXTS else HIDDEN if _is_secret(key) and item else hide_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        options = (None, *value)  # what is before each item: the option that it is the argument of
        return type(value)(
            HIDDEN if isinstance(option, str) and _OPTION.fullmatch(option) else hide_secrets(item)
            for option, item in zip(options, value, strict=False)
        )
    return value


def _is_secret(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(f"(?i){_NAME}", name) is not None


def hidden_settings(config: Section) -> list[str]:
    """The dotted names of settings whose secrets were not written."""
    hidden = [path for path, _, text in texts_of(config) if HIDDEN in text and hide_secrets(text) == text]
    return list(dict.fromkeys(hidden))
