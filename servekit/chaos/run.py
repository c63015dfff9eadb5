"""The run of all experiments, one after the other, on one instance."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from servekit.chaos import client_experiments, machine_experiments, process_experiments
from servekit.chaos.baseline_answers import BaselineAnswer, learn_answers, make_prompt
from servekit.chaos.client import Question
from servekit.chaos.result import ExperimentContext, ExperimentResult
from servekit.chaos.target import Target, describe_lacking
from servekit.errors import ConfigError, ServekitError

Experiment = Callable[[ExperimentContext], Awaitable[ExperimentResult]]

LAST = "supervisor-killed"
EXPERIMENTS: dict[str, Experiment] = {
    **process_experiments.EXPERIMENTS,
    **client_experiments.EXPERIMENTS,
    **machine_experiments.EXPERIMENTS,
}
#: Timeout for the instance to recover before the next experiment.
_RECOVER_WITHIN_S = 60.0
_QUESTIONS = 8
#: Desired duration of an answer, so that faults hit it midway; within the token counts below.
_ANSWER_S = 1.5
_FEWEST, _MOST = 16, 200


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of the operator."""

    seconds: float = 5.0
    only: Sequence[str] = ()
    streams: int = 8
    wholes: int = 4
    memory_bytes: int = 0
    kill_supervisor: bool = False

    def experiments(self) -> dict[str, Experiment]:
        """Return the experiments to run, in order. Raises ConfigError for an unknown name."""
        for name in self.only:
            if name not in EXPERIMENTS:
                known = ", ".join(EXPERIMENTS)
                raise ConfigError(f"there is no experiment {name!r}; there are: {known}")
        wanted = self.only or [name for name in EXPERIMENTS if name != LAST]
        if self.kill_supervisor and LAST not in wanted:
            wanted = [*wanted, LAST]
        if LAST in wanted and not self.kill_supervisor:
            raise ConfigError(f"{LAST} ends the instance; add --kill-supervisor")
        return {name: EXPERIMENTS[name] for name in sorted(wanted, key=list(EXPERIMENTS).index)}


async def run_experiments(target: Target, options: RunOptions) -> AsyncIterator[ExperimentResult]:
    """Yield a finding per experiment. Raises ServekitError if the instance is not healthy."""
    experiments = options.experiments()
    known = await known_answers(target)
    scene = ExperimentContext(
        target,
        known,
        options.seconds,
        options.streams,
        options.wholes,
        memory_bytes=options.memory_bytes,
    )
    for name, experiment in experiments.items():
        if await target.until_whole(_RECOVER_WITHIN_S) is None:
            raise ServekitError(f"{await _not_whole(target)}; {name} was not started")
        yield await experiment(scene)


async def known_answers(target: Target, count: int = _QUESTIONS) -> list[BaselineAnswer]:
    """Return questions whose baseline answers take about a second or two."""
    if await target.until_whole(_RECOVER_WITHIN_S) is None:
        raise ServekitError(await _not_whole(target))
    first = await learn_answers(target.client, [Question(target.name, make_prompt(0), _FEWEST)])
    prompt_tokens = sum(usage.prompt_tokens for usage in first[0].answer.usages[:1])
    token_s = max(1e-6, first[0].answer.took_s / _FEWEST)
    info = (await target.model()).info
    # Prompts differ in length: an eighth more than the first must fit as well.
    longest = _MOST if info is None else info.max_context - prompt_tokens * 9 // 8
    tokens = max(_FEWEST, min(_MOST, longest, int(_ANSWER_S / token_s)))
    sizes = [max(_FEWEST, tokens * (count + number) // (2 * count)) for number in range(count)]
    questions = [Question(target.name, make_prompt(n + 1), size) for n, size in enumerate(sizes)]
    return await learn_answers(target.client, questions)


async def _not_whole(target: Target) -> str:
    why = describe_lacking(await target.read_status()) or "/readyz is not 200"
    return f"the instance was not fully ready within {_RECOVER_WITHIN_S:g} s ({why})"
