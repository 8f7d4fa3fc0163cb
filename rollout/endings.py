"""Where a completion ends, and what it is then."""

from rhotrain.rollout.burst import Drawn
from rhotrain.rollout.completion import Completion, FinishReason
from rhotrain.rollout.job import Job
from rhotrain.rollout.scheduler import Scheduler, Sequence


def extend(sequence: Sequence, drawn: Drawn, scheduler: Scheduler) -> None:
    """Append what a sequence drew in a burst."""
    scheduler.settle(sequence, drawn.token_ids)
    sequence.logprobs += drawn.logprobs
    sequence.kept_mass += drawn.kept_mass
    if drawn.kept_ids is not None:
        sequence.kept_ids += drawn.kept_ids


def ended(sequence: Sequence, job: Job, stop_string: str | None) -> Completion | None:
    """The completion that the newest token ends: by a stop id, a stop string or its number; None when it goes on."""
    if sequence.tokens[-1] in job.plan.stop_ids:
        return _completion(sequence, job, "stop", stop_reason=sequence.tokens[-1])
    if stop_string is not None:
        return _completion(sequence, job, "stop", stop_reason=stop_string)
    return _completion(sequence, job, "length") if sequence.left == 0 else None


def failed(sequence: Sequence, job: Job) -> Completion:
    """The completion of a sequence whose next logits were NaN or infinite."""
    message = (
        f"the logits of token {sequence.drawn} of sample {sequence.sample} are NaN or infinite "
        f"(policy_version {job.policy_version}); look at the weights and the last gradient norm"
    )
    return _completion(sequence, job, "error", error=message)


def _completion(
    sequence: Sequence,
    job: Job,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    error: str | None = None,
) -> Completion:
    return Completion(
        token_ids=tuple(sequence.tokens[sequence.group.prompt_len :]),
        logprobs=tuple(sequence.logprobs),
        kept_mass=tuple(sequence.kept_mass),
        finish_reason=reason,
        policy_version=job.policy_version,
        sample=sequence.sample,
        stop_reason=stop_reason,
        kept_ids=tuple(sequence.kept_ids) if job.plan.records_sets else None,
        error=error,
    )
