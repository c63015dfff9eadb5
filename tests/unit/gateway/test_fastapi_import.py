"""The import of fastapi in a gateway, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

LEAN = "from servekit.gateway.fastapi_import import import_fastapi; import_fastapi()\n"


def run(code: str) -> str:
    command = [sys.executable, "-c", f"{LEAN}{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_its_models_are_built_when_a_document_is_asked_for() -> None:
    code = "import fastapi, fastapi.openapi.models as models\n"
    code += "print(models.Schema.__pydantic_complete__)\napp = fastapi.FastAPI()\n"
    code += "app.get('/x')(lambda number: None)\nprint(list(app.openapi()['paths']))\n"
    code += "print(models.Schema(title='a').title)\n"
    assert run(code) == "False\n['/x']\na\n"


def test_models_of_others_are_built_at_once() -> None:
    code = "from pydantic import BaseModel\nclass Model(BaseModel): pass\n"
    code += "print(Model.__pydantic_complete__)\n"
    code += "class Later(BaseModel):\n    of: 'Other'\nclass Other(BaseModel): pass\n"
    code += "Later.model_rebuild(); print(Later.__pydantic_complete__)"
    assert run(code) == "True\nTrue\n"
