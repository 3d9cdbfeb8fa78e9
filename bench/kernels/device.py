"""Whether there is a GPU to check and to time kernels on: one line and exit code 3 where there isn't.

python -m bench.kernels.device
"""

from __future__ import annotations

import sys

import torch

NO_DEVICE = 3


def main() -> int:
    """Says what was found."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run on one", file=sys.stderr)
        return NO_DEVICE
    print(f"{torch.cuda.get_device_name()}, sm_{''.join(map(str, torch.cuda.get_device_capability()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
