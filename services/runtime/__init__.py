"""What every process stands on, whatever its service: from configuration to the drain; knows nothing of tokens."""

import os

__version__ = "0.1.0"

# gRPC reads it when it is first imported. Its own INFO lines, such as a peer's orderly goodbye, are in no log's form.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
