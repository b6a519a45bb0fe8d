"""Choosing tokens from logits: stateless Gumbel noise (`noise`), the filters and the draw, each beside its reference.

`noise` needs torch only; the Triton kernels draw the same bits.
"""
