"""Metadata that depends on where the project is: its URLs, and a README whose links are absolute.

The address is SPECDEC_PROJECT_URL, or that of the git remote `origin`, such as
https://github.com/OWNER/specdec. Without either, the distribution has no URLs, and the links of its
README stay relative: fine for an installation, refused by `make release-check`.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_SSH = re.compile(r"^(?:ssh://)?git@([^:/]+)[:/]")


class CustomMetadataHook(MetadataHookInterface):
    """Set `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        url = project_url(Path(self.root))
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if url:
            text = with_absolute_links(text, url, f"v{metadata['version']}")
            metadata["urls"] = urls(url)
        else:
            metadata["urls"] = {}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def project_url(root: Path) -> str:
    """Return the project's address on the web, or "" where it has none."""
    url = os.environ.get("SPECDEC_PROJECT_URL") or _origin(root)
    url = _SSH.sub(r"https://\1/", url).rstrip("/").removesuffix(".git")
    return url if url.startswith("https://") else ""


def _origin(root: Path) -> str:
    if not (root / ".git").exists():  # a file in a worktree
        return ""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    # "https://user:token@host/..." is how some tools clone: no secret goes into the metadata.
    return re.sub(r"^https://[^@/]*@", "https://", done.stdout.strip())


def urls(url: str) -> dict[str, str]:
    """Return the project's URLs as PyPI shows them."""
    return {
        "Homepage": url,
        "Documentation": f"{url}/tree/main/docs",
        "Source": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
        "Security": f"{url}/security/advisories/new",
    }


def with_absolute_links(text: str, url: str, revision: str) -> str:
    """Return Markdown whose links to files of the repository lead to it, at a revision."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({url}/{kind}/{revision}/{match[3]})"

    return _LINK.sub(absolute, text)
