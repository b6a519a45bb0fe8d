"""Kernels of the engine's device side, each beside a naive reference that says what it computes.

`paged_attention`, `kv_copy` and `sampling` hold Triton kernels and import Triton only where a kernel is launched or
compiled; `cpu` holds the native CPU kernel. Nothing here knows of requests, schedules or models: functions take tensors
and numbers, write where they are told, and never read device data on the host. `python -m cb_kernels.aot` compiles
every shipped Triton configuration for every target without a GPU and reports what the compiler made of it.
"""
