"""The process that `--enforce` starts, and the message when the kernel kills it."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.process.limited import OOM_KILLED, Limits, Outcome
from offload.units import GIB, MIB
from specdec.cli.enforce import run_enforced


@pytest.mark.parametrize(
    ("module", "argv", "name"),
    [
        ("specdec", ["run", "-m", "pair:target"], "specdec run"),
        ("bench.decode.measure", ["spec.json", "result.json"], "bench.decode.measure"),
    ],
)
@pytest.mark.parametrize("code", [137, 3])
def test_what_was_killed_is_named_and_not_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    argv: list[str],
    name: str,
    code: int,
) -> None:
    def run(command: list[str], limits: Limits, env: dict[str, str]) -> Outcome:
        assert (command[1:], limits) == (["-m", module, *argv], Limits(GIB))
        return Outcome(OOM_KILLED, code, 1.0, GIB, GIB, 1)

    monkeypatch.setattr("specdec.cli.enforce.run_limited", run)
    assert run_enforced(module, argv, "1GiB") == code
    victim = name if code == 137 else f"a process started by {name}"
    assert capsys.readouterr().err == (
        f"{victim} was killed by the kernel: it needed more memory than the limit of "
        "1.00 GiB; raise the limit\n"
    )


def test_a_module_that_takes_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "greedy_module.py").write_text("import sys; x = bytearray(int(sys.argv[1]) << 20)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_enforced("greedy_module", ["20"], "100MiB") == 0
    assert capfd.readouterr().err == ""
    assert run_enforced("greedy_module", ["300"], "100MiB") == 137
    assert capfd.readouterr().err.startswith("greedy_module was killed by the kernel: it needed")
