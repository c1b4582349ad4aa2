"""Untrusted grammars are compiled in a subprocess."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llguidance")

from specdec.checks import ConfigError
from specdec.grammar.constraint import Constraint
from specdec.grammar.trial import check_cost


def test_the_working_directory_lends_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may have downloaded files, one of which would be run."""
    (tmp_path / "json.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    check_cost(Constraint("json_schema", '{"title": "a folder of downloads"}'))
    with pytest.raises(ConfigError, match="Invalid type: objectx"):
        check_cost(Constraint("json_schema", '{"type": "objectx"}'))
    assert not (tmp_path / "ran").exists()
