"""Fixtures of the tests of offload."""

from streaming import no_thread_is_left

__all__ = ["no_thread_is_left"]
