"""The maximum depth of a tree while a draft is on trial."""

from __future__ import annotations
