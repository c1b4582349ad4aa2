"""A whole beam search on any backend."""

from __future__ import annotations

from backends.contract.backend import Backend
from specdec.decoding.beams import BeamDecoder, Hypothesis
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler


def search(
    target: Backend, prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = ()
) -> list[tuple[Hypothesis, float]]:
    """The n best hypotheses with their scores, the best one first."""
    target.rollback(0)
    sampler = Sampler(
        params, n_tokens=target.vocab_size, eos_token_ids=eos, prompt_length=len(prompt)
    )
    decoder = BeamDecoder(target, sampler, prompt, params.token_limit(len(prompt)))
    decoder.start()
    while not decoder.is_over:
        decoder.step()
    return decoder.results(params.n)
