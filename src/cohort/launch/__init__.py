"""Starts the ranks of a run: on this machine, on several machines (torchrun's rendezvous), in a Ray cluster."""

from cohort.launch.job import Job, job_of
from cohort.launch.start import launch
