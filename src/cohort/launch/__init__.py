"""Starts the ranks of a run: on this machine, on several machines (torchrun's rendezvous), in a Ray cluster."""

from cohort.launch.job import Job, check_settings, job_of, settings_of
from cohort.launch.start import launch
