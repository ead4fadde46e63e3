"""F21: the kernels against plain NumPy, with bounds checks, between guard pages, over rings that wrap and at edge sizes.

python -m tools.trust.kernels [--size commit|nightly] [--seed N]
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """Numba reads its switch for bounds checks when it is imported: the trials have a process of their own.

    NumPy's products are so small that its threads would only wait for one another.
    """
    command = [sys.executable, "-W", "error", "-m", "tools.trust.kernel_trials", *sys.argv[1:]]
    switches = {"NUMBA_BOUNDSCHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, env={**os.environ, **switches}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
