"""Ranking of several drafts for a target."""
