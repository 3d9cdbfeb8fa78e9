"""The real processes under SIGKILL and SIGSTOP, with callers who compare every byte: `make chaos`."""
