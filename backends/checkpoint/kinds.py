"""Kinds of checkpoint folders, recognised by their files: causal language models, and others that
look like one. Neither torch nor transformers is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from backends.checkpoint.json_file import json_fault
from backends.contract.backend import UnsupportedModel
from offload.formats.lfs import refuse_pointer
from offload.formats.tensors import CheckpointError

_ENCODERS = frozenset(
    "albert bert bert-generation big_bird camembert data2vec-text deberta deberta-v2 distilbert "
    "electra ernie eurobert megatron-bert mobilebert modernbert mpnet neobert nomic_bert rembert "
    "roberta roberta-prelayernorm roformer roc_bert xlm-roberta xlm-roberta-xl xmod".split()
)
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|LMHeadModel|WithLMHead|ForConditionalGeneration)$")
"""Suffixes of transformers' class names whose output is next-token logits."""
_DRAFT_HEAD = re.compile(r"eagle|medusa|hydra|speculator|dflash|draft|mtp", re.IGNORECASE)
_HEADS = {
    "Classification": "a classifier, which gives labels",
    "RewardModel": "a reward model, which gives scores",
    "QuestionAnswering": "a model for extracting answers, which gives positions",
    "MaskedLM": "a masked language model, which fills gaps",
    "Embedding": "an embedding model, which gives vectors",
    "Retrieval": "an embedding model, which gives vectors",
}
"""Description of a model by a part of its class name."""
_LOOKS_AHEAD = re.compile(r"Bidirec|BiModel$|BiFor[A-Z]")
"""Class names of language models whose causal mask was removed: NVIDIA's and LLM2Vec's."""
_SCORE_HEAD = re.compile(
    r"(score|classifier|classification_head|qa_outputs|reward_head|regression_layer)\."
)
_LANGUAGE_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
_IMAGE_TOKENS_ONLY = "vision"
"""Value of Gemma 3 and 4 for attention that is bidirectional within an image, but not in text."""
_REMEDY = "specdec runs causal language models, name one that generates text"


def other_kind(directory: Path) -> str | None:
    """Return what a folder contains, if it is no causal language model: "a classifier ...".

    None for a language model, and if unknown: opening it then raises an error.
    """
    pipeline = read_object(directory / "model_index.json").get("_class_name")
    if pipeline is not None:
        return f"a diffusers pipeline ({pipeline!s:.60}), which makes images, video or sound"
    if _is_adapter(directory):
        base = read_object(directory / "adapter_config.json").get("base_model_name_or_path")
        return f"an adapter (PEFT) of {base!s:.80}, to be merged into that model first"
    config = read_raw(directory)
    return _by_config(config) or _by_modules(directory)


def refuse_other_kinds(directory: Path) -> None:
    """Raise UnsupportedModel for a folder without a causal language model, CheckpointError for a
    config.json that is only a Git LFS pointer or no JSON object."""
    path = directory / "config.json"
    refuse_pointer(path)
    fault = json_fault(path)
    if fault is not None:
        raise CheckpointError(f"{path} {fault}: fix it, or download the checkpoint again")
    kind = other_kind(directory)
    if kind is not None:
        raise UnsupportedModel(f"{directory} is {kind}: {_REMEDY}")


def refuse_score_head(directory: Path, names: Iterable[str]) -> None:
    """Raise UnsupportedModel for weights with a head for scores or labels instead of tokens.

    names: names of the checkpoint's tensors. A config does not always name its class.
    """
    known = list(names)
    head = next((name for name in known if _SCORE_HEAD.match(name)), None)
    if head is not None and not any(map(_LANGUAGE_HEAD.search, known)):
        raise UnsupportedModel(
            f"{directory} ends in {head}, which gives scores or labels: {_REMEDY}"
        )


def read_raw(directory: Path) -> dict[str, Any]:
    """Return the JSON object of config.json; empty if there is none."""
    return read_object(directory / "config.json")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is none."""
    value = _read_json(path)
    return value if isinstance(value, dict) else {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def config_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config, and the part of it that describes the language model."""
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]


def _is_adapter(directory: Path) -> bool:
    """Return whether a folder has an adapter and no weights of a model."""
    if not (directory / "adapter_config.json").is_file():
        return False
    weights = [path.name for path in directory.glob("*.safetensors")]
    return all(name.startswith("adapter") for name in weights)


def _by_config(config: Mapping[str, Any]) -> str | None:
    kind = config.get("model_type")
    if kind is None and "_diffusers_version" in config:
        return f"a part of a diffusers pipeline ({config.get('_class_name')!s:.60})"
    if isinstance(kind, str) and kind in _ENCODERS:
        return f"an encoder ({kind}), which gives no next token"
    is_assistant = isinstance(kind, str) and kind.endswith("_assistant")
    if is_assistant or "speculators_model_type" in config or "draft_vocab_size" in config:
        return "a draft head, which runs only beside its target"
    if config.get("is_encoder_decoder") is True:
        return f"an encoder-decoder ({kind!s:.60})"
    return _by_architectures(config.get("architectures")) or _by_attention(config)


def _by_architectures(architectures: Any) -> str | None:
    """architectures: class names that the weights were saved from."""
    listed = [architectures] if isinstance(architectures, str) else architectures
    if not isinstance(listed, list):
        return None
    names = [name for name in listed if isinstance(name, str)]
    if not names:
        return None
    name = names[0][:60]
    if any(map(_LOOKS_AHEAD.search, names)):
        return f"a model whose attention looks ahead ({name})"
    if any(_CAUSAL_HEAD.search(name) and not _DRAFT_HEAD.search(name) for name in names):
        return None
    if any(map(_DRAFT_HEAD.search, names)):
        return f"a draft head ({name}), which runs only beside its target"
    kinds = (kind for part, kind in _HEADS.items() if part in name)
    kind = next(kinds, "a model without a head that gives the next token")
    return f"{kind} ({name})"


def _by_attention(config: Mapping[str, Any]) -> str | None:
    for part in config_parts(config):
        ahead = part.get("use_bidirectional_attention")
        if part.get("is_causal") is False:
            return "a model whose attention looks ahead (is_causal is false)"
        if ahead and ahead != _IMAGE_TOKENS_ONLY:
            shown = json.dumps(ahead)[:40]
            return f"a model whose attention looks ahead (use_bidirectional_attention is {shown})"
    return None


def _by_modules(directory: Path) -> str | None:
    """Recognise embedding and reranking models by sentence-transformers' list of modules."""
    modules = _read_json(directory / "modules.json")
    if isinstance(modules, list) and modules:
        types = [str(module.get("type")) for module in modules if isinstance(module, dict)]
        is_ranking = any("cross_encoder" in name or "Score" in name for name in types)
        kind = "a reranker, which gives scores" if is_ranking else "an embedding model"
        return f"{kind} (sentence-transformers' modules.json)"
    # Some copies lack that list.
    for pattern in ("*_Pooling/config.json", "config_sentence_transformers.json"):
        if any(path.is_file() for path in directory.glob(pattern)):
            return f"an embedding model (sentence-transformers' {pattern.removeprefix('*_')})"
    return None
