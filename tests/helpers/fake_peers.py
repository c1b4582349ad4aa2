"""Compared programs that need no model: the prompt tells them what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers import registry as peers
from bench.peers.registry import Peer

SOURCE = """
import sys, time
from bench.peers.program import run_program

def program(task, journal):
    journal.loaded({"threads": task.n_threads, "options": task.options})
    def decode(prompt, clock):
        word = prompt.text.split()[0]
        if word == "crash":
            raise RuntimeError("no kernel for\\nthis machine")
        if word == "vanish":
            print("bus error at 0x0", file=sys.stderr)
            raise SystemExit(3)
        if word == "eat":
            hoard = bytearray(600 << 20)
        if word == "sleep":
            time.sleep(60)
        clock.reach(1)
        for _ in range((task.n_tokens - 1) // STEP):
            time.sleep(0.001)
            if clock.is_up:
                break
            clock.reach(STEP)
        return {"token_ids": list(range(clock.n_tokens))}
    journal.decode(decode)

sys.exit(run_program(sys.argv[1:], program))
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace all peers by "slow" (one token at a time), "fast" (three) and "absent"."""
    for name, step in (("fake_slow", 1), ("fake_fast", 3)):
        (folder / f"{name}.py").write_text(SOURCE.replace("STEP", str(step)))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    made = {
        "slow": Peer("slow", "fake_slow", ("hf",), "one at a time"),
        "fast": Peer("fast", "fake_fast", ("hf", "gguf"), "three at a time", speculates=True),
        "absent": Peer("absent", "none", ("hf",), "", package="absent_7", install="pip install x"),
    }
    for name in list(peers.PEERS):
        if name not in ("specdec", "specdec-plain"):
            monkeypatch.delitem(peers.PEERS, name)
    for name, peer in made.items():
        monkeypatch.setitem(peers.PEERS, name, peer)


def install_as_specdec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the same peers, with "fast" as specdec and "slow" as plain decoding."""
    install(folder, monkeypatch)
    for name, module in (("specdec", "fake_fast"), ("specdec-plain", "fake_slow")):
        peer = Peer(name, module, ("hf",), "", speculates=name == "specdec")
        monkeypatch.setitem(peers.PEERS, name, peer)
