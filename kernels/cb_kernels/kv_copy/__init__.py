"""Moving K and V: new tokens into their slots, whole blocks between pools, and copies on write.

`reference` defines the results with plain indexing; `launch` computes them with Triton.
"""
