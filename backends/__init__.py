"""Models, tensors and KV caches behind one contract (`base.Backend`).

base          the contract
shared_source the target as its own draft
mending       repairs after an operation that broke off, the same for every backend
source        a model before its weights, as the planner sees it
node_table    which rows tentative nodes occupy and who sees whom
kv_cache      a transformers Cache over growing blocks, with commit and rollback
torch_prefix  its rows as tensors of a file
masks         attention masks for prefixes, trees and sliding windows; what needs none
attention     attention over segments of the keys, merged
raw_config    the figures of a config.json, read with distrust
hf_config     what a config says: whether the model can run, its context, its KV cache
layer_count   do config and checkpoint agree on the layers?
hf_model      a transformers model on the meta device, matched to its checkpoint
activations   memory of a forward beside weights and KV cache
layer_runner  a decoder layer whose weights arrive for the time of its forward
compute, compute_profile   how fast this machine multiplies
torch_weights where the torch backend's weights come from: what differs between devices
torch_cpu     weights on the CPU
device_weights, cuda_engine   weights on a GPU; all that is CUDA's own
model_forward, torch_backend   the torch backend
static_pass   a draft's levels as passes of fixed shapes, which a GPU can record
hf_source     Hugging Face checkpoints as a ModelSource

gguf_hparams, gguf_model   a GGUF model as its header describes it
llama_lib, llama_log, llama_batch   llama.cpp's C interface
llama_tree, llama_memory   trees as sequences of one KV cache
llama_graph, llama_stream  the layers of a graph, and the pager that brings them
llama_prefix               its cells as one tensor of a file
llama_context              what a backend asks of llama.cpp
llama_passes, llama_cpp    the llama.cpp backend
ggml_compute  how fast llama.cpp multiplies
gguf_source   GGUF models as a ModelSource
library_errors   what a library raised, as part of one line of ours
"""
