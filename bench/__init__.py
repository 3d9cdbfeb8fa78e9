"""Measurements that a person runs; each module prints what it found and says how it measured it."""
