"""What every process stands on: configuration, phases, servers, channels, errors, clock, logs and metrics. It knows nothing of tokens."""

__version__ = "0.1.0"
