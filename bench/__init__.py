"""Measurements, and the models to measure with; uses specdec like any other program.

workloads        prompt files
measure          one loaded model, prompt by prompt, plain and speculative
speedup          the whole comparison, each run a fresh process within the budget
peer_accelerate  the same checkpoint on transformers + accelerate
provenance       what was measured, where, with which versions
table            the report for people
demo             a grown target on this machine, in about two minutes
synth            grows a small model to any size
train_pair       trains the embedded pair
"""
