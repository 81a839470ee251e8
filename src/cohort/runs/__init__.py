"""A run's folder: settings, metrics, completions, checkpoints."""

from cohort.runs.auto import Beginning, Resume, find_run
from cohort.runs.changes import describe as describe_changes
from cohort.runs.changes import fact_changes, refuse
from cohort.runs.checkpoints import Models, SavedState, load_checkpoint, saved_identity
from cohort.runs.code import code_hash, named_code_hash
from cohort.runs.durable import write_atomically
from cohort.runs.facts import entries, machine, take_threads, versions
from cohort.runs.folder import RunFolder
from cohort.runs.generators import random_state, seeded, set_seed
from cohort.runs.lines import as_json
from cohort.runs.models import check_saved, save_model
from cohort.runs.reading import damage_named, read_best, read_metrics, read_object, steps_of
from cohort.runs.rollouts import StoredRollout, Unstorable, load_rollout, save_rollout
from cohort.runs.saving import save_merged
from cohort.runs.starts import (
    CONTINUED_BY,
    Start,
    how_to_continue,
    last_start,
    with_overrides_of_start,
    with_whole_names,
)
from cohort.runs.tables import completion_columns, score_columns
from cohort.runs.tensors import fill
from cohort.runs.trust import MODEL_CODE, check_code, check_files, check_run_settings
