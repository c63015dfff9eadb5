"""lm-evaluation-harness: a multiple-choice task of a few items, from data beside it."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from report import KEY, MODEL, TOKENIZER, URL, check

ITEMS = [
    {"question": "The capital of France is", "choices": ["Paris", "Lima", "Oslo"], "answer": 0},
    {"question": "Two and two is", "choices": ["nine", "four", "one"], "answer": 1},
    {"question": "Snow is", "choices": ["black", "hot", "white"], "answer": 2},
    {"question": "A cat is an", "choices": ["animal", "hour", "idea"], "answer": 0},
]
TASK = """\
task: few
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def evaluate(**more: object) -> list[float]:
    """Return the log-likelihoods of all choices, in their order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "few.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
        (folder / "few.yaml").write_text(TASK.format(data=folder / "few.jsonl"))
        known = {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": TOKENIZER}
        known |= {"tokenizer_backend": "huggingface", "num_concurrent": 1, "max_retries": 1}
        known |= {"header": {"Authorization": f"Bearer {KEY}"}}
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=known | more,
            tasks=["few"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
    samples = sorted(result["samples"]["few"], key=lambda sample: sample["doc_id"])
    found = [float(value) for sample in samples for value, _ in sample["filtered_resps"]]
    assert len(found) == sum(len(item["choices"]) for item in ITEMS), found
    assert all(math.isfinite(value) and value < 0 for value in found), found
    return found


def token_ids() -> None:
    evaluate(tokenized_requests=True)


def text() -> None:
    """The same prompts as text have the same log-likelihoods as their token ids."""
    by_text, by_ids = evaluate(tokenized_requests=False), evaluate(tokenized_requests=True)
    pairs = zip(by_text, by_ids, strict=True)
    assert all(math.isclose(*pair, abs_tol=0.05) for pair in pairs), (by_text, by_ids)


check("multiple_choice_token_ids", token_ids)
check("multiple_choice_text", text)
