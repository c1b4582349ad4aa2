"""Selection of prompts that fit the context, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backends.contract.source import BackendOptions
from bench.options import UsageMistake
from bench.prompts.workloads import Prompt
from offload.errors import SpecdecError
from specdec.cli.libraries import quiet_libraries
from specdec.models.opened import open_model
from specdec.run_options import DEFAULT_CTX_SIZE
from specdec.text.prompts import PromptError, check_context_capacity, encode_prompt


class Context:
    """Context size of a model, and lengths of prompts in its tokens.

    Raises SpecdecError if specdec cannot run the model.
    """

    def __init__(self, model: Path, ctx_size: int | None) -> None:
        quiet_libraries()  # transformers warns about long prompts, too
        opened = open_model(model, BackendOptions())
        self._tokenizer = opened.tokenizer
        self.n_model = opened.source.max_context
        requested = DEFAULT_CTX_SIZE if ctx_size is None else ctx_size or self.n_model
        self.n_tokens = min(requested, self.n_model)

    def length(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt. Raises UsageMistake for an invalid one."""
        try:
            return len(encode_prompt(prompt.text, self._tokenizer))
        except PromptError as error:
            raise UsageMistake(f"--prompts, {prompt.name}: {error}") from None


def refuse_long(prompts: Sequence[Prompt], model: Path, ctx_size: int | None) -> None:
    """Raise UsageMistake for the first prompt that fills the context."""
    context = Context(model, ctx_size)
    for prompt in prompts:
        n_tokens = context.length(prompt)
        try:
            check_context_capacity(n_tokens, context.n_tokens, context.n_model)
        except PromptError as error:
            raise UsageMistake(f"--prompts, {prompt.name}: {error}") from None


def fitting(
    prompts: Sequence[Prompt], model: Path, ctx_size: int | None, n_new: int
) -> tuple[list[Prompt], int]:
    """Return (prompts that fit together with `n_new` tokens, how many do not).

    All of them if specdec cannot run the model: its row says why, and other programs may run it.

    Raises UsageMistake if none fits.
    """
    try:
        context = Context(model, ctx_size)
    except SpecdecError:
        return list(prompts), 0
    fit = [prompt for prompt in prompts if context.length(prompt) + n_new <= context.n_tokens]
    if not fit:
        longer = "a larger -c, " if context.n_tokens < context.n_model else ""
        raise UsageMistake(
            f"no prompt fits the context of {context.n_tokens} tokens with {n_new} more "
            f"(the model has {context.n_model}): give {longer}a smaller -n or other prompts"
        )
    return fit, len(prompts) - len(fit)
