"""The parts that pages have in common."""

from __future__ import annotations

import pytest

from tests.unit.gateway.ui.pages.test_transcribe import make_frame, make_model

WHISPER, OTHER = ("Whisper", "whisper"), ("Other", "other")


@pytest.mark.parametrize(
    ("found", "chosen", "values"),
    [
        ([WHISPER, OTHER], ["other"], ["(kept)"]),
        ([WHISPER, OTHER], [None, "", None], ["whisper", "other", "other"]),
        ([WHISPER], ["chat"], ["whisper"]),  # it is loaded, and does not transcribe
        ([], ["chat"], [None]),
        ([WHISPER], ["gone"], ["(kept)"]),
    ],
)
async def test_a_model_stays_chosen_unless_it_serves_other_tasks(
    found: list[tuple[str, str]], chosen: list[str | None], values: list[str | None]
) -> None:
    models = [make_model(name, "transcribe") for name in ("whisper", "other")]
    frame = make_frame(*models, make_model("chat", "generate"))
    updates = frame.update_choices(found, chosen)
    assert [one.get("value", "(kept)") for one in updates] == values
    assert all(one["choices"] == found for one in updates)
