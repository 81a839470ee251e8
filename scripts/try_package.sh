#!/usr/bin/env bash
# Build the wheel and the source distribution; install the wheel into a new environment and use it from another folder;
# run some of the tests of the unpacked source distribution. `make package` runs it.
#
# bash scripts/try_package.sh PYTHON CONSTRAINTS
set -euo pipefail
python=$(realpath -s "$1") constraints=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { echo "--- $*"; "$@" > "$work/output" 2>&1 || { tail -n 40 "$work/output"; echo "failed: $*"; exit 1; }; }

step "$python" -m hatchling build -t sdist -d "$work/dist"
mkdir "$work/source" "$work/elsewhere"
tar xzf "$work"/dist/*.tar.gz -C "$work/source" --strip-components=1
cd "$work/source"
step "$python" -m hatchling build -t wheel -d "$work/dist"
step "$python" -m venv "$work/venv"
step "$work/venv/bin/python" -m pip install --disable-pip-version-check -c "$constraints" "$work"/dist/*.whl

cd "$work/elsewhere"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cohort=$work/venv/bin/cohort
step "$cohort" --help
step "$cohort" docs metrics
step "$cohort" config
step "$cohort" objective dapo
step "$cohort" generate cohort:demo "3478+5869" --chat
cat > my.toml << 'END'
model.path = "cohort:demo"
data.train = "cohort:addition"
data.format = "chat"
data.prompt_column = "question"
reward.functions = ["gsm8k"]
rollout.prompts_per_step = 4
rollout.max_completion_length = 64
run.max_steps = 2
run.output_dir = "run"
END
step "$cohort" doctor my.toml
step "$cohort" train my.toml
step "$cohort" eval run --data.eval cohort:addition --data.eval_rows 8
step "$cohort" report run
step "$cohort" new
step "$cohort" new gsm8k

cd "$work/source"
export PYTHONPATH=$work/source/src # the dependencies of the clone's environment
step "$python" -m pytest -q -p no:cacheprovider tests/config tests/test_cli.py tests/test_package.py
ls -sh "$work/dist"
