"""The facts that an interpreter tells of its environment, in a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from servekit.config.engines import environments

PROBE = Path(environments.__file__).with_name("environment_probe.py")


def probe(*modules: str, python: str = sys.executable) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-I", str(PROBE), *modules], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_this_environment_is_told_as_it_is() -> None:
    found = probe("json", "pydantic", "nobodys_module")
    assert found["version"] == list(sys.version_info[:3])
    assert found["prefix"] == sys.prefix
    assert any(path.endswith("site-packages") for path in found["folders"])
    assert set(found["modules"]) == {"json", "pydantic"}
    assert Path(found["modules"]["json"]).name == "__init__.py"


def test_packages_have_normal_names_and_their_versions() -> None:
    found = probe()["packages"]
    assert found["pydantic-core"].count(".") >= 1
    assert all(name == name.lower() and "_" not in name and "." not in name for name in found)
    assert "servekit" in found
