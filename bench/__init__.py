"""Measurements, and the models to measure with; uses specdec like any other program.

workloads        prompt files
measure          one loaded model, prompt by prompt, plain and speculative
speedup          the whole comparison, each run a fresh process within the budget
peers            which programs can be compared
peer_program     the task that each is given, the journal that each keeps
peer_*           the programs: accelerate, llama, airllm, specdec
limited          one process within limits of memory, storage and time
interpreters     environments of their own that programs may run in
peer_runs        a program's processes; compare takes them in turns
agreement        whether the records of two such comparisons agree
prompt_lengths   prompts that do not fit the context, found beforehand
sweep            budgets x storage speeds x tree sizes
report_page      results of all these as one page; report_* its data, tables and plots
provenance       what was measured, where, with which versions
table            speedup's report for people
demo             a grown target on this machine, in about two minutes
stand_in         what a grown model would need, before it is written
synth            grows a small model to any size
train_pair       trains the embedded pair
"""
