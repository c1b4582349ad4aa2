"""Files in the home folder, for a user without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.process.disk_cache import cache_folder
from offload.process.home import NoHome


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_number: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(NoHome, match="set HOME"):
        cache_folder()
    monkeypatch.setenv("HOME", "/there")
    assert cache_folder() == Path("/there/.cache/specdec")
