"""The loop over rounds, and what it is made of: propose, extend, accept, commit."""
