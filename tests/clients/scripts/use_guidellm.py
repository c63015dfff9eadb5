"""guidellm: a short benchmark with prompts of its own making."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import KEY, MODEL, TOKENIZER, URL, check


def benchmark() -> None:
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY}"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=4"),
            *("--output", f"kind=json,path={report}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        assert done.returncode == 0, (said or ["it says nothing"])[-1]
        [one] = json.loads(report.read_text())["benchmarks"]
        totals = one["metrics"]["request_totals"]
        assert totals["successful"] >= 3 and not totals["errored"], totals


check("benchmark", benchmark)
