"""What no experiment changes, one job a file."""

import utils

if not hasattr(utils, "TokenIds"):  # a user's, in the folder of a copied script
    raise ImportError(f"{utils.__file__} is imported in place of this repository's: rename it")
