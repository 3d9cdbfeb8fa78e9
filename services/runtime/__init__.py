"""What every process stands on, whatever its service: from configuration to the drain; knows nothing of tokens."""

__version__ = "0.1.0"
