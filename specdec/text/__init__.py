"""Tokens from text and messages, and text from tokens."""
