"""Mixtures of experts: what their tokens are routed to, and what a cache of experts has of it."""
