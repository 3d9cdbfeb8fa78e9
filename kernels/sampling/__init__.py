"""Draws one id per row of logits: the definition (`randomness`, `truncation`, `draw`), and two faster ways of the same.

`reference.py` is plain PyTorch; `host.py` is numpy, for engines that do without PyTorch; `on_device.py` launches the
kernels of a GPU.
"""
