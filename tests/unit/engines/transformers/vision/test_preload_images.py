"""Models with eyes in interpreters of their own: prepared for forks, and without Pillow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engines.seeing_model import write_seeing_model
from tests.unit.engines.transformers.test_preload import run

pytestmark = pytest.mark.lane("long")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("eyes"), tiny_model)


def test_a_fork_sees_with_the_processor_that_was_prepared(folder: Path) -> None:
    run(
        folder,
        """
        from tests.unit.engines.transformers.vision.pictures import ONE
        def answer():
            running = harness.Harness(spec)
            prompt = running.engine.encode_media(ONE, (), {}, False)
            ids = running.generate(prompt.ids, media=prompt.inputs, max_tokens=8)
            known = preload._prepared
            own = known is None or running.engine._media._processor is not known.processor
            running.close()
            return ids, running.info.serves, own
        afresh = forked(answer)
        engines.prepare_engine(spec)
        prepared = forked(answer)
        assert prepared[:2] == afresh[:2] and "images" in prepared[1]
        assert (afresh[2], prepared[2]) == (True, False)
        """,
    )


def test_without_pillow_texts_are_served(folder: Path) -> None:
    run(
        folder,
        """
        sys.modules["PIL"] = None
        from servekit.engines.media import media_warnings
        told = []
        media_warnings.log.warning = lambda event, **why: told.append(why["reason"])
        running = harness.Harness(spec)
        assert "images" not in running.info.serves
        assert len(running.generate([5, 6, 7], max_tokens=3, ignore_eos=True)) == 3
        assert "PIL" in told[0], told
        running.close()
        """,
    )
