"""Causal attention of a ragged batch over K/V kept in blocks: decode, prefill chunks and mixes in one call.

`reference.reference_attention` defines the result; `launch.paged_attention` computes it with Triton.
"""
