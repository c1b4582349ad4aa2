"""A cache without states for transformers' recurrent layers: they are kept elsewhere."""

from __future__ import annotations

import torch


class NoStates:
    """The part of transformers' Cache for recurrent layers, without states: a layer then computes
    as from the first token on, by the functions of functions.py."""

    def get_conv_state(self, *args: object, **kwargs: object) -> None:
        return None

    def get_recurrent_state(self, *args: object, **kwargs: object) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor:
        return conv_states

    def update_recurrent_state(self, *args: object, **kwargs: object) -> None:
        return None

    def has_previous_state(self, *args: object, **kwargs: object) -> bool:
        return False
