#!/usr/bin/env bash
# The longer tier: real weights. Makes SmolLM2-135M, saves it for three batch sizes, proves the restore, and compares
# logits and greedy tokens with transformers. About ten minutes on two cores; downloads 93 MB.
#
#     bash scripts/long.sh [FOLDER]     FOLDER keeps the checkpoint and the archive for the next run
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh test

folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
[ -n "${1:-}" ] || trap 'rm -rf "$folder"' EXIT

[ -f "$folder/smollm2/model.safetensors" ] || python scripts/make_smollm2.py "$folder/smollm2"
graphpack save "$folder/smollm2" "$folder/archive" --replace --batch-sizes 1,2,4 --seq-lens 256
graphpack load "$folder/archive" --weights "$folder/smollm2" --verify
python scripts/check_real_weights.py "$folder/smollm2" "$folder/archive"
python scripts/bench_coldstart.py "$folder/smollm2" "$folder/archive" --runs 3
