"""A run's folder: settings, metrics, completions, checkpoints."""

from cohort.runs.auto import resumes
from cohort.runs.checkpoints import Models, SavedState, load_checkpoint, saved_identity
from cohort.runs.durable import write_atomically
from cohort.runs.folder import RunFolder
from cohort.runs.generators import random_state, seeded, set_seed
from cohort.runs.lines import as_json
from cohort.runs.models import check_saved, save_model
from cohort.runs.rollouts import StoredRollout, Unstorable, load_rollout, save_rollout
from cohort.runs.tables import completion_columns, score_columns
from cohort.runs.tensors import fill
