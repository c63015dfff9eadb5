"""The facts of a Python environment, in JSON: run by its own interpreter, Python 3.8 or later.

    python -I environment_probe.py MODULE…

Only the standard library is imported, and no package of the environment.
"""

import json
import re
import sys
from importlib import metadata, util


def _is_there(module: str) -> bool:
    spec = util.find_spec(module)
    return spec is not None and spec.origin is not None


sys.stdout.write(
    json.dumps(
        {
            "version": list(sys.version_info[:3]),
            "prefix": sys.prefix,
            "folders": [path for path in sys.path if path.endswith("-packages")],
            "modules": [module for module in sys.argv[1:] if _is_there(module)],
            "packages": {
                re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
                for d in metadata.distributions()
                if d.metadata["Name"]
            },
        }
    )
)
