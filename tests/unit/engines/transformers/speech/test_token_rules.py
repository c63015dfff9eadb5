"""The rules of what a Whisper model writes next: the library's, for windows of any state."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from transformers.generation import logits_process

from servekit.engines.transformers.speech.token_rules import TokenRules, find_other_settings

SIZE, END, UNMARKED = 60, 30, 39
processors: Any = logits_process
library: Any = transformers  # it tells no types of these
CONFIG = library.GenerationConfig(
    eos_token_id=END,
    no_timestamps_token_id=UNMARKED,
    max_initial_timestamp_index=6,
    suppress_tokens=[3, 4, 33],
    begin_suppress_tokens=[5, END],
    return_timestamps=True,
)
PROMPT = [31, 32]


def apply_library(scores: torch.Tensor, written: list[int], timed: bool) -> torch.Tensor:
    """Return the scores of one window, [1, vocabulary], by the library's processors."""
    ids, begin = torch.tensor([PROMPT + written]), len(PROMPT)
    chain = [
        processors.SuppressTokensAtBeginLogitsProcessor(CONFIG.begin_suppress_tokens, begin),
        processors.SuppressTokensLogitsProcessor(CONFIG.suppress_tokens),
    ]
    if timed:
        chain.append(processors.WhisperTimeStampLogitsProcessor(CONFIG, begin))
    for process in chain:
        scores = process(ids, scores)
    return scores


def test_all_windows_have_the_librarys_scores() -> None:
    rules, choice = TokenRules(CONFIG, SIZE, torch.device("cpu")), random.Random(3)
    torch.manual_seed(3)
    texts, times = [*range(20)], [*range(UNMARKED + 1, SIZE)]
    for _ in range(60):
        windows = [
            ([choice.choice(choice.choice((texts, times))) for _ in range(length)], timed)
            for length in (0, 1, 2, 3, 7)
            for timed in (False, True)
        ]
        logits = 3 * torch.randn(len(windows), SIZE)
        bounds = torch.tensor([rules.bound(*window) for window in windows]).T
        found = rules.apply(logits, bounds, timed=True)
        due = [apply_library(row[None], *one) for row, one in zip(logits, windows, strict=True)]
        assert torch.equal(found, torch.cat(due))
        plain = [index for index, (_, timed) in enumerate(windows) if not timed]
        assert torch.equal(rules.apply(logits[plain], bounds[:, plain], timed=False), found[plain])


def test_settings_that_change_nothing_are_no_others() -> None:
    assert find_other_settings(CONFIG) == []
    make = library.GenerationConfig
    assert find_other_settings(make(eos_token_id=END, num_beams=1, top_p=1.0)) == []
    assert find_other_settings(make(eos_token_id=END, num_beams=4)) == ["num_beams"]
    assert find_other_settings(make(no_speech_threshold=0.6)) == ["no_speech_threshold"]
