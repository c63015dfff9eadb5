"""A call of a library that is run in steps, in a thread that waits between them."""

from __future__ import annotations

import threading

import pytest

from servekit.engines.media.stepped_call import SteppedCall


class Work:
    """A call of three steps, which notes how far it is."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.done: list[str] = []
        self.threads: set[int] = set()
        self.error = error
        self.call = SteppedCall(self.run)

    def run(self) -> None:
        try:
            for step in ("one", "two"):
                self.done.append(step)
                self.threads.add(threading.get_ident())
                self.call.pause()
            if self.error is not None:
                raise self.error
            self.done.append("three")
        except Exception:  # a library that handles all errors
            self.done.append("handled")
            raise
        finally:
            self.done.append("end")


def test_each_resume_runs_one_step() -> None:
    work = Work()
    assert work.done == [], "it has not begun"
    work.call.resume()
    assert work.done == ["one"] and not work.call.done
    work.call.resume()
    assert work.done == ["one", "two"] and not work.call.done
    work.call.resume()
    assert work.done == ["one", "two", "three", "end"]
    assert work.call.done
    assert len(work.threads) == 1 and threading.get_ident() not in work.threads


def test_an_error_is_the_callers_once() -> None:
    work = Work(ValueError("odd"))
    work.call.resume()
    work.call.resume()
    with pytest.raises(ValueError, match="odd"):
        work.call.resume()
    assert work.call.done and work.call._error is None
    assert work.done[-2:] == ["handled", "end"]


def test_a_call_that_is_given_up_cleans_up_and_cannot_be_held_up() -> None:
    work = Work()
    work.call.resume()
    work.call.abandon()
    assert work.call.done
    assert work.done == ["one", "end"], "no handler of errors sees it"
    work.call.abandon()


def test_a_call_that_has_not_begun_or_is_done_is_given_up_at_once() -> None:
    work = Work()
    work.call.abandon()
    assert work.done == [] and work.call._thread is None
    whole = Work()
    for _ in range(3):
        whole.call.resume()
    whole.call.abandon()
    assert whole.done[-1] == "end"
