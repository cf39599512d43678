#!/usr/bin/env bash
# The main job, small: staged-context checkpoint -> warm-up -> RL -> evaluation, on a local Ray.
#
#   bash launch/quickstart.sh [key=value ...]
#
# seed=N goes to every phase; output=DIR is the folder of the whole run (default: a new folder
# under runs/); stage.KEY=V and sft.KEY=V go to those phases; any other key=value goes to train.
# With the same output=DIR a second time, phases that are complete are not repeated, and stage and
# train go on where they stopped.
set -euo pipefail

output=
all=() stage=() sft=() train=()
for argument in "$@"; do
    case "$argument" in
        output=*) output="${argument#*=}" ;;
        seed=*) all+=("$argument") ;;
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
        exit "$code"
    fi
}

begin=$SECONDS
if [[ ! -f "$output/stage/stage.json" ]]; then
    phase stage farhorizon stage quickstart output="$output/stage" "${all[@]}" "${stage[@]}"
fi
if [[ ! -f "$output/sft/stage.json" ]]; then
    phase sft farhorizon sft quickstart policy="$output/stage" output="$output/sft" \
        "${all[@]}" "${sft[@]}"
fi
phase train farhorizon train quickstart policy="$output/sft" output="$output/train" \
    "${all[@]}" "${train[@]}"
echo "quickstart: ${times}total $((SECONDS - begin)) s without installation"
