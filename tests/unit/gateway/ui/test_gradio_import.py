"""The import of gradio in a gateway, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import ast, inspect
from servekit.gateway.ui.gradio_import import import_gradio
find_file = inspect.getfile
del ast.get_source_segment  # stubs are made of what it returns
import_gradio()
import gradio
assert inspect.getfile is find_file
assert inspect.getfile(gradio.Textbox).endswith("textbox.py")
print([str(event) for event in gradio.Textbox.EVENTS][:2])
"""


def test_no_stub_is_written_and_components_have_their_events() -> None:
    command = [sys.executable, "-c", CODE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "['change', 'input']\n"), run.stderr
