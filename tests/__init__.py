"""Set before numpy is loaded: see below."""

import os
import platform

# Triton's interpreter multiplies by numpy. OpenBLAS's kernels for AVX2 sum a row in another order by its place in the
# tile, which no GPU does; those for AVX do not.
if platform.machine() == "x86_64":
    os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")
