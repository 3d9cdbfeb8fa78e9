"""Draws one id per row of logits: the definition (`randomness`, `truncation`, `draw`), and a GPU's way of the same.

`reference.py` is plain PyTorch, which a CPU computes with; `on_device.py` launches the kernels.
"""
