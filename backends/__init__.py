"""Models, tensors and KV caches behind one contract (`base.Backend`).

base          the contract
source        a model before its weights, as the planner sees it
node_table    which rows tentative nodes occupy and who sees whom
kv_cache      a transformers Cache over growing blocks, with commit and rollback
masks         attention masks for prefixes, trees and sliding windows
hf_model      a transformers model on the meta device, matched to its checkpoint
layer_runner  a decoder layer whose weights arrive for the time of its forward
compute       how fast this machine multiplies
torch_cpu     the torch CPU backend
hf_source     Hugging Face checkpoints as a ModelSource

gguf_hparams, gguf_model   a GGUF model as its header describes it
llama_lib, llama_batch     llama.cpp's C interface
llama_tree, llama_memory   trees as sequences of one KV cache
llama_graph, llama_stream  the layers of a graph, and the pager that brings them
llama_context              what a backend asks of llama.cpp
llama_passes, llama_cpp    the llama.cpp backend
ggml_compute  how fast llama.cpp multiplies
gguf_source   GGUF models as a ModelSource
"""
