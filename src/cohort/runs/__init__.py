"""A run's folder: settings, metrics, completions, checkpoints."""

from cohort.runs.auto import resumes
from cohort.runs.checkpoints import Models, SavedState, check_saved, load_checkpoint, save_model, saved_identity
from cohort.runs.durable import write_atomically
from cohort.runs.folder import RunFolder, as_json, completion_columns, score_columns
from cohort.runs.generators import random_state, seeded, set_seed
from cohort.runs.reading import read_best, read_metrics, read_object, steps_of
from cohort.runs.rollouts import StoredRollout, Unstorable, load_rollout, save_rollout
from cohort.runs.tensors import fill
from cohort.runs.trust import check_code, check_files, check_secrets
