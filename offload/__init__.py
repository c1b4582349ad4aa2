"""Bytes, files and memory; no models.

errors     SpecdecError, the base of every error a user may see
units      parse_bytes, format_bytes
budget     MemoryBudget.reserve() -> Reservation; BudgetExceeded
memory     memory_limit (cgroup before machine), process_memory
cgroup     MemoryCgroup, run_in_cgroup: a budget that the kernel enforces
index      WeightIndex: where each tensor of a safetensors checkpoint lies
direct_io  AlignedBuffer, DirectFile: O_DIRECT reads that are checked
slots      SlotRing: the reusable buffers of the ring
streamer   WeightStreamer: layers in order, read ahead, wrapping around
plan       plan_residency: which tensors stay in memory, how many slots
profile    measure_storage: bandwidth of this machine, cached
"""
