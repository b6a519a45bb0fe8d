"""How models write tool calls, one module per family of formats; `formats.py` has the table of them all."""
