"""Every family of transformers that generates text and can be tried: exact, or refused and why.

Names are transformers' model types (docs/models.md has the table).
"""

from __future__ import annotations

DENSE = """
    apertus arcee biogpt bitnet bloom codegen cohere ctrl diffllama doge ernie4_5 falcon
    gemma glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite helium
    hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 llama ministral3 nanochat
    nemotron olmo olmo2 opt persimmon phi phi3 phi4_multimodal qwen2 qwen3 seed_oss smollm3
    stablelm starcoder2 xglm
""".split()
"""Every layer attends to the whole context."""
WINDOWS = """
    cohere2 cwm exaone4 gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
    granite_swa ministral mistral moshi olmo3 vaultgemma
""".split()
"""Some layers attend to the last tokens alone."""
WRAPPERS = """
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl exaone4_5 fuyu gemma3 gemma4
    gemma4_unified glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite_docling
    hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lighton_ocr llama4 llava
    llava_next llava_next_video llava_onevision minimax_m3_vl mistral3 mistral_large4
    moss_transcribe_diarize muse_glimmer ovis2 pp_chart2table qianfan_ocr qwen2_5_vl
    qwen2_vl qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
""".split()
"""Language models in wrappers for images or sound; dense ones and mixtures."""
MIXTURES = """
    afmoe beam cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe gpt_oss
    granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 kolibri1 laguna
    llama4_text mellum mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe
    solar_open
""".split()
"""Mixtures of experts, some with windows or chunks."""
LATENT = """
    axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa
    hy_v4 minicpm3 minimax_m3_vl_text mistral4 youtu
""".split()
"""Latent or sparse attention, most of them mixtures."""
HYBRIDS = """
    bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm2_vl
    lfm3 lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7 nemotron_h olmo_hybrid qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
""".split()
"""Recurrent layers beside attention: Gated DeltaNet, KDA, Mamba, short convolutions."""
EXACT = [*DENSE, *WINDOWS, *WRAPPERS, *MIXTURES, *LATENT, *HYBRIDS]

_ONE_LIST = "layers are not one list in its decoder"
_NO_KV = "keeps no keys and values"
_OWN_EXPERTS = "computes experts in code of its own"
_ENCODER = "is an encoder"
REFUSED = {
    **dict.fromkeys("bert camembert electra ernie roberta xlm-roberta".split(), _ENCODER),
    **dict.fromkeys("falcon_mamba mamba mamba2 openai-gpt rwkv xlm".split(), _NO_KV),
    **dict.fromkeys(
        "cpmant git hrm_text marian mbart modernbert-decoder whisper".split(), _ONE_LIST
    ),
    **dict.fromkeys("jetmoe longcat_flash step3p7".split(), _OWN_EXPERTS),
    "aria_text": "not known with tensors of its own per expert",
    "deepseek_v4": "compressed_sparse_attention",
    "gpt_neo": "takes a row's place for its position",
    "inkling_text": "hybrid_sliding",
    "inkling_mm_model": "hybrid_sliding",
    "minimax": "lightning attention",
    "mpt": "takes a row's place for its position",
    "paligemma": "attention looks ahead",
    "recurrent_gemma": "keeps a state that cannot be rolled back",
    "trocr": "takes a row's place for its position",
    "unlimited_ocr": "reference_sliding_attention",
    "zaya": "recurrent state of a kind of its own",
}
"""Model type -> part of the one line that says why."""
