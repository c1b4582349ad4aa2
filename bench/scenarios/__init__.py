"""Simulated sequences, drafts and machines in virtual time, for tests of the policy."""
