#!/usr/bin/env bash
# The longer tier, by what it tries:
#
#     bash scripts/long.sh [FOLDER]     real weights: makes SmolLM2-135M, saves it for three batch sizes, proves the
#                                       restore, and compares logits, greedy tokens and what generate gives with
#                                       transformers. About a quarter of an hour on two cores; downloads 93 MB. FOLDER
#                                       keeps the checkpoint and the archive for the next run.
#     bash scripts/long.sh soak         kills, failing calls, power cuts and storms of processes, in larger numbers than
#                                       the tests have. About twenty minutes; --short tries a little of each.
#     bash scripts/long.sh fuzz         five million inputs for what reads bytes from outside. Most of an hour on two
#                                       cores; docs/benchmarks/fuzzing.md has a result.
#     bash scripts/long.sh bits         turns every bit of the golden archive's objects, where the tests turn one of each
#                                       byte. About three minutes on two cores.
#     bash scripts/long.sh mutants      150 mutants of what decides about an archive, of which the tests have to notice
#                                       80 %. About ten minutes; docs/benchmarks/mutation-2026-11-30.md has more.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh test

if [ "${1:-}" = soak ]; then
    exec python scripts/soak.py "${@:2}"
fi
if [ "${1:-}" = fuzz ]; then
    exec python scripts/fuzz.py all --inputs 5000000 --processes 2
fi
if [ "${1:-}" = bits ]; then
    exec pytest -n 2 tests/matrix/test_damage.py --every-bit
fi
if [ "${1:-}" = mutants ]; then
    exec python scripts/mutate.py "$(mktemp -d)/mutants.jsonl" --sample 150
fi

folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
[ -n "${1:-}" ] || trap 'rm -rf "$folder"' EXIT

[ -f "$folder/smollm2/model.safetensors" ] || python scripts/make_smollm2.py "$folder/smollm2"
graphpack save "$folder/smollm2" "$folder/archive" --replace --batch-sizes 1,2,4 --seq-lens 256
graphpack load "$folder/archive" --weights "$folder/smollm2" --verify
printf 'archive_dir: archive\nmodels: {smollm2: {path: smollm2, batch_sizes: [1, 2, 4]}}\n' >"$folder/graphpack.yaml"
time graphpack prewarm "$folder/graphpack.yaml" | grep "up to date"
graphpack load --config "$folder/graphpack.yaml"
python scripts/check_real_weights.py "$folder/smollm2" "$folder/archive"
python scripts/check_generate.py "$folder/smollm2" "$folder/archive" --begins " Paris"
python scripts/bench_coldstart.py "$folder/smollm2" "$folder/archive" --runs 3
