"""Traces of a target: tokens, and its distribution after each, to train drafts with."""
