"""Texts, drafts and machines without models, in virtual time, for the policy to decode in."""
