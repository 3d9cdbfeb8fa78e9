"""The one error of loading a model: it names what is not supported, or not there."""

from __future__ import annotations


class UnsupportedModelError(Exception):
    """This model can't be served; the message names the file or the key and what would be accepted."""
