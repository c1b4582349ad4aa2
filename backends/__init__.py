"""Models, tensors and KV caches behind one contract (`base.Backend`).

base          the contract
node_table    which rows tentative nodes occupy and who sees whom
kv_cache      a transformers Cache over growing blocks, with commit and rollback
masks         attention masks for prefixes, trees and sliding windows
hf_model      a transformers model on the meta device, matched to its checkpoint
layer_runner  a decoder layer whose weights arrive for the time of its forward
compute       how fast this machine multiplies
torch_cpu     the CPU backend
"""
