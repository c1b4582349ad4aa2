"""The loop over rounds: propose, extend, accept, commit."""
