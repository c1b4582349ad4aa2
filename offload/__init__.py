"""Bytes, files and memory; no models. In the order in which a run uses them:

errors     SpecdecError, the base of every error a user may see
units      parse_bytes, format_bytes
memory     memory_limit (cgroup before machine), process_memory
budget     MemoryBudget.reserve() -> Reservation; BudgetExceeded
interruptible
           Worker, CallThread, call_aside: threads and long calls that Ctrl-C can end
signals    handling: what is called for a signal within a block
launch     tied_argv: programs that do not outlive this process; enter.py is what starts them
cgroup, cgroup_files
           MemoryCgroup, run_in_cgroup: a budget that the kernel enforces
header     read_header: one safetensors header, read with distrust
index      WeightIndex: where each tensor of a checkpoint lies
gguf_header, gguf_metadata, gguf_index
           GgufFile, GgufIndex: the same for GGUF files and split ones
direct_io  AlignedBuffer, DirectFile: O_DIRECT reads that are checked
layout     make_layout: tensors coalesced into aligned reads
plan       plan_residency: which tensors stay in memory, how many slots
reading    load_resident, ReaderThreads: pieces of files into buffers
bell       Bell: wakes a waiting thread up
slots      SlotRing: the reusable buffers of the ring, and who may touch them
walk       LayerWalk: which read belongs to which layer, whatever fills the ring
file_supply  FileSupply: readers of files that fill it
lending    LayerLender: layers lent in with-blocks, whatever cuts them short
streamer   WeightStreamer: layers in order, read ahead, wrapping around
address_space, spans, paging_plan, paged_memory, pager
           Pager: the same for a file that somebody else has mapped, by moving pages
mapped_file  safetensors files that are written and read in place, whole or not at all
fingerprint  which model this is, told by its tensors
tiers      TierPlan: which tensors are on a device, pinned in host memory, or in storage
copying    CopyEngine: copies to a device beside its computations, ordered by events
host_tier  HostTier: layers in pinned memory, for a device to copy from
device_loading, device_supply, device_streamer
           DeviceStreamer: layers in order on a device, copied ahead, wrapping around
throttle   ReadLimit: slower storage, by a limit of the kernel
profile    measure_storage: bandwidth of this machine, remembered
ring_model simulate_passes: how long a streamed pass takes
"""
