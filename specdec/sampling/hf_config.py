"""Convert transformers' GenerationConfig to SamplingParams.

Every attribute of a GenerationConfig is in exactly one class: translated, ignored (no effect on the
tokens), or refused. Unknown attributes are refused too: a new option of a future release must not
be dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.checks import ConfigError, FieldName

if TYPE_CHECKING:
    from transformers import GenerationConfig

# GenerationConfig name -> SamplingParams name, with unchanged values.
SAME_VALUE = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_length": "min_length",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words_ids",
    "sequence_bias": "sequence_bias",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "forced_bos_token_id": "forced_bos_token_id",
    "forced_eos_token_id": "forced_eos_token_id",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "remove_invalid_values": "remove_invalid_values",
    "renormalize_logits": "renormalize_logits",
    "eos_token_id": "eos_token_ids",
    "stop_strings": "stop",
    "max_new_tokens": "max_tokens",
    "num_beams": "num_beams",
    "num_return_sequences": "n",
}
OF_BEAMS = ("length_penalty", "early_stopping")  # ignored by `generate` without beams
WARPERS = ("top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
_GENERATE_TOP_K = 50  # `generate`'s default

# Unsupported attributes, with the values that mean "off" and the reason.
_REFUSED: dict[str, tuple[Any, str]] = {
    "guidance_scale": (1, "it needs a second, unconditional pass of the target"),
    "watermarking_config": (None, "its state follows one sequence, not a tree"),
    "num_beam_groups": (1, "group beam search moved out of transformers"),
    "diversity_penalty": (0.0, "it belongs to group beam search"),
    "penalty_alpha": (0, "contrastive search moved out of transformers"),
    "force_words_ids": (None, "constrained beam search moved out of transformers"),
    "constraints": (None, "constrained beam search moved out of transformers"),
    "dola_layers": (None, "DoLa moved out of transformers"),
    "encoder_repetition_penalty": (1.0, "there is no encoder"),
    "encoder_no_repeat_ngram_size": (0, "there is no encoder"),
    "token_healing": (False, "it rewrites the prompt"),
    "max_time": (None, "a time limit makes the output depend on the machine"),
    "assistant_ensemble_weight": (None, "it changes the target's distribution"),
}
# No influence on the target's tokens (caches, output format, drafting hints).
_IGNORED = frozenset(
    {
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "use_mtp",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "speculation_type",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "low_memory",
        "prefill_chunk_size",
        "transformers_version",
        "generation_kwargs",
    }
)
_SPECIAL = frozenset({"do_sample", "temperature", "max_length", *OF_BEAMS, *WARPERS})


def options_from(config: GenerationConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return SamplingParams' keywords for a configuration. Raises ConfigError for refused ones."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ConfigError(
            FieldName("generation_config"), f" is {config!r}, must be a GenerationConfig"
        )
    values = dict(config) if isinstance(config, Mapping) else config.to_dict()
    values = {k: v for k, v in values.items() if v is not None and not k.startswith("_")}
    _refuse(values)
    options = {ours: values[theirs] for theirs, ours in SAME_VALUE.items() if theirs in values}
    if "min_new_tokens" in values:
        options.pop("min_length", None)  # `generate` lets the new tokens take precedence
    if "max_length" in values and "max_new_tokens" not in values:
        options["max_length"] = values["max_length"]
    if values.get("num_beams", 1) > 1:
        options.update({name: values[name] for name in OF_BEAMS if name in values})
    if not values.get("do_sample", False):
        return {**options, "temperature": 0.0}
    options["temperature"] = values.get("temperature", 1.0)
    if options["temperature"] == 0:
        raise ConfigError(
            FieldName("temperature"),
            " is 0 with do_sample=True: set do_sample=False to be greedy",
        )
    options["top_k"] = values.get("top_k", _GENERATE_TOP_K)
    options.update({name: values[name] for name in WARPERS if name in values})
    return options


def _refuse(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _REFUSED:
            off_value, reason = _REFUSED[name]
            if value != off_value:
                raise ConfigError(f"{name}={value!r} is not supported: {reason}")
        elif name not in SAME_VALUE and name not in _SPECIAL and name not in _IGNORED:
            raise ConfigError(
                f"the generation configuration has an unknown option {name}={value!r}: remove it"
            )
