"""A whole beam search on any backend."""

from __future__ import annotations

from collections.abc import Iterator

from alone import own
from generating import speculation_of

from backends.contract.backend import Backend
from specdec.config import SpecConfig
from specdec.engine.scheduler import Batch, PrefillChunk
from specdec.engine.sequences.beam_sequence import BeamSequence, Hypothesis
from specdec.engine.sequences.request import Request
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.sampling.token_limit import TokenLimit


def search(
    target: Backend, prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = ()
) -> list[tuple[Hypothesis, float]]:
    """Return the n best hypotheses with their scores, the best one first."""
    *_, beams = steps(target, prompt, params, eos, params.token_limit(len(prompt)))
    return beams.results(params.n)


def steps(
    target: Backend, prompt: list[int], params: SamplingParams, eos: tuple[int, ...], limit: int
) -> Iterator[BeamSequence]:
    """Yield the search behind its first tokens, and behind each step."""
    own(target).rollback(0)
    sampler = Sampler(
        params, n_tokens=target.vocab_size, eos_token_ids=eos, prompt_length=len(prompt)
    )
    request = Request(prompt, params, SpecConfig())
    beams = BeamSequence(request, sampler, TokenLimit(limit, None), lambda: None)
    speculation = speculation_of(target)
    beams.attach(own(target))
    prefill = Batch(prefill=[PrefillChunk(beams, beams.prefill_chunk(len(prompt)))])
    beams.end_prefill(speculation.forward([], prefill).prefill[0])
    check(beams)
    yield beams
    while not beams.is_finished:
        batch = Batch(decode=[beams])
        trees = speculation.propose(batch)
        check(beams)
        beams.accept(trees[0][1], speculation.forward(trees, batch).trees[0])
        check(beams)
        yield beams


def check(beams: BeamSequence) -> None:
    if beams.request.error is not None:
        raise beams.request.error
