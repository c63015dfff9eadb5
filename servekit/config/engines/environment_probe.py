"""The facts of a Python environment, in JSON: run by its own interpreter, Python 3.8 or later.

    python -I environment_probe.py MODULE…

Only the standard library is imported, and no package of the environment.
"""

import json
import re
import sys
from importlib import metadata, util


def _find_origin(module: str) -> "str | None":
    spec = util.find_spec(module)
    return spec.origin if spec is not None else None


sys.stdout.write(
    json.dumps(
        {
            "version": list(sys.version_info[:3]),
            "prefix": sys.prefix,
            "folders": [path for path in sys.path if path.endswith("-packages")],
            "modules": {
                module: origin for module in sys.argv[1:] if (origin := _find_origin(module))
            },
            "packages": {
                re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
                for d in metadata.distributions()
                if d.metadata["Name"]
            },
        }
    )
)
