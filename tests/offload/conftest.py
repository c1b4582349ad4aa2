"""Fixtures of the offload tests."""

from paging import small_huge_pages
from streaming import no_thread_is_left

__all__ = ["no_thread_is_left", "small_huge_pages"]
