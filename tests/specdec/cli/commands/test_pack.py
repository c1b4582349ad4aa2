"""`specdec pack` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packed_models import save_packable

from specdec.cli.app import main


def test_a_packed_copy_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    capsys.readouterr()
    assert main(["pack", "-m", str(plain), "-o", str(tmp_path / "packed")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "21 tensors packed, 9 others as they were; every weight compared" in out
    argv = ["pack", "-m", str(plain), "-o", str(tmp_path / "again"), "--no-verify", "--json"]
    assert main(argv) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["path"] == str(tmp_path / "again")
    assert actual["n_packed"] == 21
    assert not actual["is_verified"]
