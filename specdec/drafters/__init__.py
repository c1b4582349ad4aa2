"""Drafters: proposers of candidate tokens. The model drafter is imported where it is used."""

from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "MergedDrafter", "NgramDrafter", "TreeLimits"]
