"""``cohort launch``: check, then start or describe."""

from __future__ import annotations

from cohort.launch.job import Job, check_not_nested


def launch(job: Job, *, ray: bool = False, dry_run: bool = False) -> int:
    """Start a job's ranks and wait for their end.

    Args:
        job: what to start.
        ray: start them in a Ray cluster instead of on this machine.
        dry_run: print what would be started, and start nothing.

    Returns:
        The exit code: 0; that of the rank that failed first; 75 if the run was stopped with a checkpoint; 1 if a signal
        ended a rank; 128 + N if signal N came to the launcher and the run had nothing to stop yet.

    Raises:
        ConfigError: the ranks cannot be started as asked.
    """
    check_not_nested()
    if dry_run:
        print(job.describe(ray=ray))
        return 0
    if ray:
        from cohort.launch.ray_cluster import start_in_ray

        return start_in_ray(job)
    from cohort.launch.processes import start_processes

    return start_processes(job)
