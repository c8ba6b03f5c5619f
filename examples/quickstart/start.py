"""Start harness.py as a module: Python compiles a script anew at every start, and a module only once.

python -I -S start.py INSTRUCTION
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")

import harness

sys.exit(harness.main())
