"""The quickstart's programs are scripts beside each other, not a package: put their folder on the path."""

import sys
from pathlib import Path

import torch

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
if str(QUICKSTART) not in sys.path:
    sys.path.insert(0, str(QUICKSTART))
torch.set_num_threads(1)  # these models are too small to share among threads
