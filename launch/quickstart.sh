#!/usr/bin/env bash
# The main job, small: staged-context checkpoint -> warm-up -> RL -> evaluation, on a local Ray.
#
#   bash launch/quickstart.sh [key=value ...]
#
# seed=N goes to every phase; output=DIR is the folder of the whole run (default: a new folder
# under runs/); stage.KEY=V and sft.KEY=V go to those phases; any other key=value goes to train.
# With the same output=DIR and seed a second time, phases that are complete are not repeated, and
# stage and train go on where they stopped.
set -euo pipefail

output= seed=0
stage=() sft=() train=()
for argument in "$@"; do
    case "$argument" in
        output=*) output="${argument#*=}" ;;
        seed=*) seed="${argument#*=}" ;;
        stage.*=*) stage+=("${argument#stage.}") ;;
        sft.*=*) sft+=("${argument#sft.}") ;;
        *=*) train+=("$argument") ;;
        *)
            echo "quickstart: expected key=value, got '$argument'" >&2
            exit 2
            ;;
    esac
done
[[ -z "$output" || "$output" == /* ]] || output="$PWD/$output"

active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
output="${output:-$ROOT/runs/quickstart-$(date +%Y%m%d-%H%M%S)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

times=
phase() { # name, command ...
    local name="$1" start=$SECONDS code=0
    shift
    echo "== $name"
    "$@" || code=$?
    times+="$name $((SECONDS - start)) s, "
    if ((code)); then
        echo "quickstart: $name failed (exit code $code); times: ${times%, }" >&2
        activation >&2
        exit "$code"
    fi
}

is_done() { # name, settings given to it; true if its result is there already
    local folder="$output/$1" made
    [[ -f "$folder/stage.json" ]] || return 1
    made="$(sed -n 's/^seed: //p' "$folder/config.yaml" 2>/dev/null)" || made=unknown
    if [[ "$made" != "$seed" ]]; then
        echo "quickstart: $folder was made with seed=$made, not seed=$seed; choose another output" >&2
        exit 2
    fi
    echo "== $1: complete in $folder, not repeated${2:+; without effect: $2}"
}

activation() { # the lines to copy above name a command that only the environment has
    [[ -n "$active" ]] || echo "quickstart: before those commands: . $ROOT/.venv/bin/activate"
}

begin=$SECONDS
# An array that may be empty is an unset variable to bash before 4.4.
if ! is_done stage "${stage[*]-}"; then
    phase stage farhorizon stage quickstart output="$output/stage" \
        seed="$seed" ${stage[@]+"${stage[@]}"}
fi
if ! is_done sft "${sft[*]-}"; then
    phase sft farhorizon sft quickstart policy="$output/stage" output="$output/sft" \
        seed="$seed" ${sft[@]+"${sft[@]}"}
fi
phase train farhorizon train quickstart policy="$output/sft" output="$output/train" \
    seed="$seed" ${train[@]+"${train[@]}"}
activation
echo "quickstart: ${times}total $((SECONDS - begin)) s without installation"
