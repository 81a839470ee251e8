"""A run's folder: settings, metrics, completions, checkpoints."""

from cohort.runs.checkpoints import Models, SavedState, check_saved, load_checkpoint, save_checkpoint, save_model
from cohort.runs.folder import RunFolder, as_json, write_atomically
from cohort.runs.random_state import seeded, set_seed
from cohort.runs.tables import completion_columns, score_columns
