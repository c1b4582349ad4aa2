"""Why a loaded model cannot be used now."""

from __future__ import annotations

from offload.errors import SpecdecError


class ModelClosed(SpecdecError):
    """A model was asked for something after its end."""

    def __init__(self) -> None:
        super().__init__("the model is closed; load it again")


class ModelElsewhere(SpecdecError):
    """A forked process asked for something of its parent's model."""

    def __init__(self) -> None:
        super().__init__(
            "the model was loaded by another process, and its threads are not in this fork of it: "
            "load it here"
        )


class ModelBusy(SpecdecError):
    """A generation was asked for while another one computes."""

    def __init__(self) -> None:
        super().__init__(
            "an LLM runs one generation at a time: wait for the one that is running, "
            "or load the model once more"
        )
