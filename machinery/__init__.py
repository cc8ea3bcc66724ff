"""What no experiment changes, one job a file."""

import os

# How long threads spin while they wait; OpenMP reads it as torch is imported. By default they spin
# so long that runs beside each other take several times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

os.environ.setdefault("TQDM_DELAY", "10")  # the libraries' bars, of what takes this many seconds

import utils  # noqa: E402  # imports torch

if not hasattr(utils, "TokenIds"):  # a user's, in the folder of a copied script
    raise ImportError(f"{utils.__file__} is imported in place of this repository's: rename it")
