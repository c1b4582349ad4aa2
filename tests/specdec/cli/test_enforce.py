"""What `--enforce` starts, and what it is called."""

from __future__ import annotations

import pytest

from offload.units import GIB
from specdec.cli.enforce import run_enforced


@pytest.mark.parametrize(
    ("module", "argv", "name"),
    [
        ("specdec", ["run", "-m", "pair:target"], "specdec run"),
        ("bench.decode.measure", ["spec.json", "result.json"], "bench.decode.measure"),
    ],
)
def test_the_command_is_named_and_not_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, module: str, argv: list[str], name: str
) -> None:
    def run(command: list[str], limit_bytes: int, *_: object, **named: str) -> int:
        assert (command[1:], limit_bytes) == (["-m", module, *argv], GIB)
        assert named == {"name": name}
        return 137

    monkeypatch.setattr("offload.process.cgroup.run_in_cgroup", run)
    assert run_enforced(module, argv, "1GiB") == 137
