"""Analysis of a model by name: its headers are read, its weights are not."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Unpack

from backends.contract.source import CACHE_TYPES, BackendOptions
from backends.shapes.shape import ModelShape
from offload.units import parse_bytes
from specdec.analysis.report import DECODE, PHASES, PREFILL, VERIFY, Analysis
from specdec.analysis.roofline import free_tokens, pass_bound, place
from specdec.checks import ConfigError, FieldName, check, check_type, refuse_unknown
from specdec.devices.file import find_device
from specdec.devices.spec import DeviceSpec, complete, this_machine, with_memory
from specdec.devices.this_machine import ThisMachine
from specdec.models.names import resolve_headers
from specdec.models.opened import is_gguf
from specdec.planning.keywords import LoadKeywords
from specdec.run_options import RunOptions

DEFAULT_VERIFIED = 16
"""Default number of tokens of the verify pass."""


def analyze(
    model: str | Path,
    *,
    phase: str | None = None,
    n_tokens: int | None = None,
    on: str | None = None,
    **options: Unpack[LoadKeywords],
) -> Analysis:
    """Return the roofline of a model on this machine or on a device.

    Args:
        phase: "decode" (one token), "verify" (n_tokens of a tree, with logits for all of them)
            or "prefill" (a prompt); all three when None.
        n_tokens: size of the pass, for verify (16 by default) and prefill (the whole context).
        on: a name of `specdec.devices.spec.PRESETS` or a profile's path; this machine when None.
        options: options of `specdec.load`: ctx_size, memory_budget (replaces the device's memory),
            threads, cache_type_k, cache_type_v.

    Raises:
        SpecdecError: the model, the device or an option makes no sense; one line.
    """
    check_type("on", on, str, type(None))
    _check(phase, n_tokens)
    refuse_unknown(options, RunOptions, "analyze()")
    run = RunOptions(model, **options)
    measurements = this_machine() if on is None else find_device(on)
    path = resolve_headers(model)
    shape = read_shape(path, run.backend)
    context = run.context_of(shape.max_context)
    if n_tokens is not None and n_tokens > context:
        raise ConfigError(
            FieldName("n_tokens"),
            f" is {n_tokens}, more than the context of {context} tokens: raise ",
            FieldName("ctx_size"),
        )
    machine = ThisMachine(path, shape.number_formats, run.backend.n_threads)
    device = complete(measurements, machine)
    if run.memory_budget != "auto":
        device = with_memory(device, parse_bytes(run.memory_budget))
    return _analyze(str(model), shape, device, context, (phase,) if phase else PHASES, n_tokens)


def read_shape(path: Path, options: BackendOptions) -> ModelShape:
    """Read the shape of a checkpoint directory or GGUF file; import only its format's libraries."""
    if is_gguf(path):
        from backends.gguf.hparams import refuse_cache_type
        from backends.shapes.gguf import gguf_shape

        refuse_cache_type(options.cache_type_k, options.cache_type_v)
        default = CACHE_TYPES[0]
        return gguf_shape(path, options.cache_type_k or default, options.cache_type_v or default)
    import backends.hf  # noqa: F401  # first: it bounds how long torch's threads spin
    from backends.attention.stored_rows import kv_formats
    from backends.shapes.hf import hf_shape

    return hf_shape(path, kv_formats(options.cache_type_k, options.cache_type_v))


def _check(phase: str | None, n_tokens: int | None) -> None:
    if phase not in (None, *PHASES):
        raise ConfigError(FieldName("phase"), f" is {phase!r}, must be one of {', '.join(PHASES)}")
    check("n_tokens", n_tokens, int, 1)
    if phase == DECODE and n_tokens not in (None, 1):
        raise ConfigError(
            FieldName("n_tokens"),
            f" is {n_tokens}, but decode passes have 1 token: use ",
            FieldName("phase"),
            " verify",
        )


def _analyze(
    name: str,
    shape: ModelShape,
    device: DeviceSpec,
    context: int,
    phases: tuple[str, ...],
    n_tokens: int | None,
) -> Analysis:
    placement = place(shape, context, device)
    verified = min(n_tokens or DEFAULT_VERIFIED, context)
    # Without a phase, -n applies to the verify pass, and the prompt is the whole context.
    n_prompt = (n_tokens if phases == (PREFILL,) else None) or context
    sizes = {
        DECODE: (1, context, 1),
        VERIFY: (verified, context, verified),
        PREFILL: (n_prompt, n_prompt, 1),
    }
    bounds = {
        name: pass_bound(shape, device, placement, n, length, n_logits)
        for name, (n, length, n_logits) in sizes.items()
    }
    return Analysis(
        name=name,
        model=shape,
        device=device,
        context=context,
        placement=placement,
        decode=bounds[DECODE],
        phases=tuple((name, bounds[name]) for name in phases),
        free_tokens=free_tokens(shape, device, placement, context),
    )
