"""Starts the ranks of a run: on this machine, on several machines (torchrun's rendezvous), in a Ray cluster."""

from cohort.launch.job import Job, check_not_nested, job_of, settings_of


def launch(job: Job) -> int:
    """Start a job's ranks on this machine or, with ``--ray``, in a Ray cluster, and wait for their end. With
    ``--dry-run``, print what would be started, and start nothing.

    Returns:
        The exit code: 0; that of the rank that failed first; 75 if the run was stopped with a checkpoint; 1 if a signal
        ended a rank; 128 + N if signal N came to the launcher and the run had nothing to stop yet.

    Raises:
        ConfigError: the ranks cannot be started as asked.
    """
    check_not_nested()
    if job.flags.dry_run:
        print(job.describe())
        return 0
    if job.flags.ray:
        from cohort.launch.ray_cluster import start_in_ray

        return start_in_ray(job)
    from cohort.launch.processes import start_processes

    return start_processes(job)
